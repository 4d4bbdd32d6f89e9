"""Measurements: percentiles, event-loop lag and a description of the machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Self

from asyncllm import __version__

_TICK_SECONDS = 0.001


def percentile(values: Sequence[float], fraction: float) -> float | None:
    """Percentile ``fraction`` (0 to 1) of ``values`` by nearest rank; None for no values."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(int(fraction * len(ordered)), len(ordered) - 1)]


class LagMeter:
    """Meter of the running event loop's lag: a task asks to be woken every millisecond, and records
    how late it wakes. An ``async with`` block shorter than a millisecond waits at its end for the
    first record.

        async with LagMeter() as meter:
            ...
        percentile(meter.lags, 0.99)
    """

    def __init__(self) -> None:
        self.lags: list[float] = []
        self._is_leaving = False
        self._task: asyncio.Task[None]

    async def _tick(self) -> None:
        while not (self._is_leaving and self.lags):
            due = time.perf_counter() + _TICK_SECONDS
            await asyncio.sleep(_TICK_SECONDS)
            self.lags.append(max(time.perf_counter() - due, 0.0))

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._tick())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._is_leaving = True
        await self._task


def machine_info(device: str = "cpu") -> dict[str, str]:
    """Facts about the machine, by name: processor or GPU, system, versions."""
    info = {
        "processor": _processor_name(),
        "cores": str(_num_cores()),
        "load": f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "asyncllm": __version__,
    }
    if device != "cpu":
        import torch

        if torch.cuda.is_available():
            info["gpu"] = torch.cuda.get_device_name(0 if device in ("auto", "cuda") else device)
    return info


def format_machine_info(info: dict[str, str]) -> str:
    """Format the result of ``machine_info`` in one line."""
    gpu = f"{info['gpu']}, " if "gpu" in info else ""
    return (
        f"{gpu}{info['processor']}, {info['cores']} cores (load {info['load']}), "
        f"{info['system']}, Python {info['python']}, torch {info['torch']}, "
        f"asyncllm {info['asyncllm']}"
    )


def _num_cores() -> int | None:
    """Number of cores that this process may use; all cores if the system does not say."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _processor_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
