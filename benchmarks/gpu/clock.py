"""CudaClock: everything that only CUDA can tell: times, memory, how busy the GPU is."""

from __future__ import annotations

import gc
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.autograd import DeviceType

from asyncllm.errors import EngineError
from asyncllm.gpu.ops.triton.toolchain import check_triton

SLEEP_CYCLES = 400_000
"""Of a kernel that is waited for."""

COPY_BYTES = 2 << 30
"""Of each of the two buffers between which copy bandwidth is measured."""

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of device memory.

    Attributes:
        allocated: in torch's tensors.
        reserved: held by torch's allocator.
        used: taken on the whole device, by whomever.
    """

    allocated: int
    reserved: int
    used: int


@dataclass(frozen=True, slots=True, order=True)
class DeviceSpan:
    """A kernel or a copy on the device; seconds of one clock."""

    start: float
    end: float
    name: str


class Clock(Protocol):
    """What the stages ask of a device; a test's stand-in measures on the CPU."""

    def median(self, calls: Sequence[Call], *, graph: bool = True) -> float:
        """Seconds of one call, the median of repeated passes over all of ``calls``."""
        ...

    def copy_bandwidth(self) -> float:
        """Bytes/s of a large copy on the device, read and written bytes both counted."""
        ...

    def memory(self) -> DeviceMemory: ...

    def release(self) -> None:
        """Gives back what torch's allocator holds for later, so that it cannot be missing to
        an engine that takes a share of the free memory."""
        ...

    def utilization(self) -> float | None:
        """Share of the last moments, a sixth of a second to a second, in which a kernel ran,
        0 to 1; None where the driver does not say."""
        ...

    def trace(self, work: Call) -> list[DeviceSpan]:
        """What runs on the device during ``work()``, queued by any thread, in order of time;
        nothing where it cannot be traced."""
        ...

    def wake_up(self) -> tuple[float, float]:
        """Seconds from a launch until the host knows that a kernel of some tenths of a
        millisecond has ended: waiting for an event that blocks, and for one that spins."""
        ...


class CudaClock:
    """The clock of the current CUDA device."""

    def __init__(self) -> None:
        self._bandwidth: float | None = None

    def median(self, calls: Sequence[Call], *, graph: bool = True) -> float:
        """With ``graph``, the calls are captured, so that a launch costs little; each is
        called once before, which compiles what it needs. Events time each pass."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls:
                call()
        torch.cuda.current_stream().wait_stream(stream)
        if not graph:
            return self._median_of_passes(lambda: [call() for call in calls]) / len(calls)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            for call in calls:
                call()
        return self._median_of_passes(captured.replay) / len(calls)

    def _median_of_passes(self, work: Call, *, passes: int = 20, at_most: float = 1.0) -> float:
        """Seconds of one ``work()``; fewer passes where they take more than ``at_most``
        seconds together, but five."""
        for _ in range(2):
            work()
        torch.cuda.synchronize()
        began = time.perf_counter()
        times = []
        for number in range(passes):
            if number >= 5 and time.perf_counter() - began > at_most:
                break
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            work()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        return statistics.median(times)

    def copy_bandwidth(self) -> float:
        if self._bandwidth is None:
            source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
            source.random_()
            target = torch.empty_like(source)
            seconds = self._median_of_passes(lambda: target.copy_(source))
            self._bandwidth = 2 * COPY_BYTES / seconds
            del source, target
            torch.cuda.empty_cache()
        return self._bandwidth

    def memory(self) -> DeviceMemory:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return DeviceMemory(
            torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), total - free
        )

    def release(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()

    def utilization(self) -> float | None:
        try:
            return torch.cuda.utilization() / 100
        except Exception:
            # NVML's errors have no base that can be named without NVML; all of them mean that
            # the driver does not say.
            return None

    def trace(self, work: Call) -> list[DeviceSpan]:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            work()
        return device_spans(trace.events() or ())

    def wake_up(self) -> tuple[float, float]:
        stream = torch.cuda.Stream()

        def wait(*, blocking: bool) -> float:
            began = time.perf_counter()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(SLEEP_CYCLES)
                event = torch.cuda.Event(blocking=blocking)
                event.record()
            event.synchronize()
            return time.perf_counter() - began

        wait(blocking=True)
        # In turns: clocks change.
        pairs = [(wait(blocking=True), wait(blocking=False)) for _ in range(100)]
        blocking, spinning = (statistics.median(times) for times in zip(*pairs, strict=True))
        return blocking, spinning


def device_spans(events: Iterable[Any]) -> list[DeviceSpan]:
    """Everything in a trace of torch's profiler that ran on the GPU, in order of time."""
    found = [
        DeviceSpan(event.time_range.start / 1e6, event.time_range.end / 1e6, event.name)
        for event in events
        if event.device_type == DeviceType.CUDA
        # A range that a program marks spans the gaps between its kernels.
        and not getattr(event, "is_user_annotation", False)
    ]
    return sorted(found)


def covered_share(spans: Sequence[DeviceSpan]) -> float | None:
    """Share of the time from the first start to the last end that some span covers; None
    where there is no such time."""
    ordered = sorted((span.start, span.end) for span in spans)
    if not ordered or max(end for _, end in ordered) <= ordered[0][0]:
        return None
    covered, reached = 0.0, ordered[0][0]
    for start, end in ordered:
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered / (reached - ordered[0][0])


def missing() -> str | None:
    """Why the benchmarks cannot run here, in a line; None if they can."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return f"needs an NVIDIA GPU, and torch {torch.__version__} finds none"
    capability = torch.cuda.get_device_capability()
    if capability < (8, 0):
        name = torch.cuda.get_device_name()
        return f"needs compute capability 8.0, and {name} has {capability[0]}.{capability[1]}"
    try:
        check_triton()
    except EngineError as error:
        return str(error).splitlines()[0]
    return None


def usable() -> bool:
    """Whether the device still answers after an error."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def conditions() -> dict[str, str]:
    """What a figure of this device has to be quoted with."""
    import triton

    major, minor = torch.cuda.get_device_capability()
    properties = torch.cuda.get_device_properties(0)
    facts = {
        "gpu": torch.cuda.get_device_name(),
        "capability": f"{major}.{minor}",
        "multiprocessors": str(properties.multi_processor_count),
        "gpu_memory": f"{properties.total_memory / 2**30:.0f} GiB",
        "cuda": str(torch.version.cuda),
        "triton": triton.__version__,
    }
    return facts | parse_smi(_ask_smi())


_SMI_FIELDS = {
    "driver": "driver_version",
    "sm_clock": "clocks.sm",
    "memory_clock": "clocks.mem",
    "power_limit": "power.limit",
}


def _ask_smi() -> str:
    """A line of nvidia-smi's values, empty if there is none. It only reads."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    query = f"--query-gpu={','.join(_SMI_FIELDS.values())}"
    try:
        done = subprocess.run(
            [program, query, "--format=csv,noheader"], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def parse_smi(text: str) -> dict[str, str]:
    """Driver and clocks from nvidia-smi's line for the first GPU; "unknown" for what it does
    not say."""
    values = [value.strip() for value in (text.splitlines() or [""])[0].split(",")]
    if len(values) != len(_SMI_FIELDS):
        values = [""] * len(_SMI_FIELDS)
    return {
        name: value if value and not value.startswith("[") else "unknown"
        for name, value in zip(_SMI_FIELDS, values, strict=True)
    }
