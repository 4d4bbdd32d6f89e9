"""The smoke stage: whether everything works at all, each probe for itself, and where it does not,
which way of running steps does."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from benchmarks.gpu.children import ProbeError, ProbeProcess
from benchmarks.gpu.goals import Goal
from benchmarks.gpu.smoke_models import MODELS
from benchmarks.gpu.stage import Deadline, Stage

MODULE = "benchmarks.gpu.smoke_probes"
ALL_RIGHT = Goal("at most", 0.0)

RESERVE = 10.0
"""Seconds that a probe is not begun without."""

COMPILE_SECONDS = 150.0
"""At most, and half of the time that there is, for the first run of all probes side by side."""

MAX_PROCESSES = 8
"""Side by side; each takes about half a GiB of the device for its CUDA context."""

WAYS: dict[str, dict[str, Any]] = {
    "graphs off": {"settings": {"cuda_graphs": "off"}},
    "mixed steps without graphs": {"settings": {"cuda_graphs": "decode"}},
    "one step at a time": {"settings": {"async_scheduling": False}},
    "plain attention": {"settings": {"attention_backend": "torch"}},
}
"""Ways to run an engine's steps, each without one of the things that may be at fault, as options of
a probe."""


@dataclass(frozen=True, slots=True)
class Task:
    """A probe of ``smoke_probes`` with its options.

    Attributes:
        seconds: after which it counts as hung; its kernels were compiled before.
        bisected: it opens an engine, and takes the options of ``WAYS``.
    """

    name: str
    probe: str
    seconds: float
    options: Mapping[str, Any] = field(default_factory=dict)
    bisected: bool = False


def tasks() -> list[Task]:
    """What everything rests on first, and before a second engine what no other probe tells."""
    found = [
        Task("the KV cache's measure", "memory_pool", 15),
        Task("waiting for an event", "wake_up", 15),
    ]
    found += [
        Task(f"kernels: {name}", "kernel", 25, {"name": name})
        for name in (
            "attention", "windows", "sinks", "experts", "sampler", "step state", "norms",
            "activation", "rotation and cache write", "soft caps", "float32", "heads of 512",
            "gated delta, convolution and gated norm", "a decoder of two KV groups",
        )
    ]  # fmt: skip
    first, *others = (
        Task(f"engine: {model}", "engine", 45, {"model": model}, bisected=True) for model in MODELS
    )
    staged = {"model": "dense", "requests": "staged"}
    found += [
        first,
        Task("engine: dense in bfloat16", "bfloat16", 45, bisected=True),
        Task("graphs against eager steps", "graphs", 60),
        Task("nodes of a graph", "nodes", 45),
        Task("a capture that fails", "failed_capture", 15),
        *others,
        Task("engine: penalties, rules, logprobs", "engine", 45, staged, bisected=True),
    ]
    libraries = {"flash_attn_3": "flash_attn_interface", "flash_attn": "flash_attn"}
    found += [
        Task(f"attention_backend={name!r}", "flash_attention", 45, {"name": name})
        for name, module in libraries.items()
        if importlib.util.find_spec(module) is not None
    ]
    return found


class Runner(Protocol):
    """What runs a probe; see ``ProbeProcess``."""

    def run(self, name: str, seconds: float, options: Mapping[str, Any] | None = None) -> Any: ...

    def close(self) -> None: ...


def run(stage: Stage) -> None:
    """On the current CUDA device, in processes of their own: a probe that crashes, hangs or loses
    the device fails alone."""
    wanted = tasks()
    compile_kernels(stage, wanted, lambda left: ProbeProcess(MODULE, left))
    with contextlib.closing(ProbeProcess(MODULE, stage.deadline.left)) as probes:
        run_tasks(stage, probes, wanted)


def compile_kernels(
    stage: Stage, wanted: Sequence[Task], make: Callable[[Callable[[], float]], Runner]
) -> None:
    """Runs all probes side by side and looks at no result. Triton compiles a kernel on one core,
    for seconds, and keeps it in its cache folder: a probe that is run again is not late for it.

    Args:
        make: a runner, from the seconds that there are for its probes.
    """
    stage.report.section("compiling")
    began, deadline = time.monotonic(), Deadline(min(COMPILE_SECONDS, stage.deadline.left() / 2))
    waiting = deque(sorted(wanted, key=lambda task: task.seconds, reverse=True))

    def work(_: int) -> int:
        done = 0
        with contextlib.closing(make(deadline.left)) as probes:
            while deadline.left() > 0:
                try:
                    task = waiting.popleft()
                except IndexError:
                    break
                with contextlib.suppress(ProbeError):
                    probes.run(task.probe, COMPILE_SECONDS, task.options)
                    done += 1
        return done

    processes = max(1, min(MAX_PROCESSES, (os.cpu_count() or 1) - 1))
    with ThreadPoolExecutor(processes) as pool:
        done = sum(pool.map(work, range(processes)))
    note = f"of {len(wanted)} probes in {processes} processes, {time.monotonic() - began:.0f} s"
    stage.report.add("probes that ran to their end", float(done), "", note)


def run_tasks(stage: Stage, probes: Runner, wanted: Sequence[Task]) -> None:
    """Each of the tasks, as far as there is time, and then those that failed in other ways."""
    stage.report.section("right, each for itself")
    ran, wrong = 0, list[Task]()
    for task in wanted:
        before = len(stage.failed)
        done = stage.attempt(task.name, RESERVE, _measure(stage, probes, task))
        ran += done or len(stage.failed) > before
        if len(stage.failed) > before:
            wrong.append(task)
    value = float(len(wrong)) if ran else None
    stage.scores.add("probes that failed", value, "", ALL_RIGHT, f"{ran} were run")
    for task in wrong:
        if task.bisected:
            _bisect(stage, probes, task)


def _measure(stage: Stage, probes: Runner, task: Task) -> Callable[[], None]:
    def measure() -> None:
        figures = probes.run(task.probe, task.seconds, task.options)
        stage.report.add(task.name, 1.0, "", "right")
        for name, value, unit, note in figures:
            stage.report.add(f"  {name}", value, unit, note)

    return measure


def _bisect(stage: Stage, probes: Runner, task: Task) -> None:
    """Says which ways of running steps are right where the default is not."""
    for way, options in WAYS.items():
        name = f"  {task.name}, {way}"
        if stage.deadline.left() < RESERVE:
            stage.skipped.append(name.strip())
            continue
        try:
            probes.run(task.probe, task.seconds, {**task.options, **options})
        except ProbeError as error:
            stage.report.add(name, 0.0, "", f"wrong as well: {error}")
        else:
            stage.report.add(name, 1.0, "", "right")
