"""The smoke stage: whether everything works at all, each probe for itself, and where it does not,
which way of running steps does."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from benchmarks.gpu.children import ProbeError, ProbeProcess
from benchmarks.gpu.goals import Goal
from benchmarks.gpu.smoke_models import MODELS
from benchmarks.gpu.stage import Stage

MODULE = "benchmarks.gpu.smoke_probes"
ALL_RIGHT = Goal("at most", 0.0)

RESERVE = 10.0
"""Seconds that a probe is not begun without."""

WAYS: dict[str, dict[str, Any]] = {
    "graphs off": {"cuda_graphs": "off"},
    "one step at a time": {"async_scheduling": False},
    "plain attention": {"attention_backend": "torch"},
}
"""Ways to run an engine's steps, each without one of the things that may be at fault."""


@dataclass(frozen=True, slots=True)
class Task:
    """A probe of ``smoke_probes`` with its options.

    Attributes:
        seconds: after which it counts as hung; kernels are compiled in it.
        bisected: it opens an engine, and takes settings.
    """

    name: str
    probe: str
    seconds: float
    options: Mapping[str, Any] = field(default_factory=dict)
    bisected: bool = False


def tasks() -> list[Task]:
    """What everything rests on first."""
    found = [Task("the KV cache's measure", "memory_pool", 15)]
    found += [
        Task(f"kernels: {name}", "kernel", 25, {"name": name})
        for name in (
            "attention", "windows", "sinks", "experts", "sampler", "step state", "norms",
            "activation", "rotation and cache write", "soft caps", "float32", "heads of 512",
            "gated delta, convolution and gated norm", "a decoder of two KV groups",
        )
    ]  # fmt: skip
    found.append(Task("a capture that fails", "failed_capture", 15))
    found += [
        Task(f"engine: {model}", "engine", 45, {"model": model}, bisected=True) for model in MODELS
    ]
    staged = {"model": "dense", "requests": "staged"}
    found += [
        Task("engine: penalties, rules, logprobs", "engine", 45, staged, bisected=True),
        Task("graphs against eager steps", "graphs", 60),
        Task("nodes of a graph", "nodes", 45),
        Task("waiting for an event", "wake_up", 15),
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


def run(stage: Stage) -> None:
    """On the current CUDA device, in processes of their own: a probe that crashes, hangs or loses
    the device fails alone."""
    probes = ProbeProcess(MODULE, stage.deadline.left)
    try:
        run_tasks(stage, probes, tasks())
    finally:
        probes.close()


def run_tasks(stage: Stage, probes: Runner, wanted: Sequence[Task]) -> None:
    """Each of the tasks, as far as there is time."""
    stage.report.section("right, each for itself")
    ran = wrong = 0
    for task in wanted:
        before = len(stage.failed)
        done = stage.attempt(task.name, RESERVE, _measure(stage, probes, task))
        ran += done or len(stage.failed) > before
        if len(stage.failed) > before:
            wrong += 1
            if task.bisected:
                _bisect(stage, probes, task)
    value = float(wrong) if ran else None
    stage.scores.add("probes that failed", value, "", ALL_RIGHT, f"{ran} were run")


def _measure(stage: Stage, probes: Runner, task: Task) -> Callable[[], None]:
    def measure() -> None:
        figures = probes.run(task.probe, task.seconds, task.options)
        stage.report.add(task.name, 1.0, "", "right")
        for name, value, unit, note in figures:
            stage.report.add(f"  {name}", value, unit, note)

    return measure


def _bisect(stage: Stage, probes: Runner, task: Task) -> None:
    """Says which ways of running steps are right where the default is not."""
    for way, settings in WAYS.items():
        name = f"  {task.name}, {way}"
        if stage.deadline.left() < RESERVE:
            stage.skipped.append(name.strip())
            continue
        options = {**task.options, "settings": settings}
        try:
            probes.run(task.probe, task.seconds, options)
        except ProbeError as error:
            stage.report.add(name, 0.0, "", f"wrong as well: {error}")
        else:
            stage.report.add(name, 1.0, "", "right")
