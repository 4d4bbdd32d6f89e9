"""The smoke stage of the GPU benchmarks: processes, bisection, and its probes on the CPU."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from asyncllm import EngineConfig
from asyncllm.checkpoint.model_config import ModelConfig
from asyncllm.gpu.graph.capturer import CudaGraphCapturer
from asyncllm.gpu.graph.cuda_graphs import EagerCapturer, GraphKey
from benchmarks.gpu import children, smoke, smoke_probes
from benchmarks.gpu.checkpoint import write_checkpoint
from benchmarks.gpu.children import ProbeError, ProbeProcess
from benchmarks.gpu.probe import count_nodes
from benchmarks.gpu.smoke import Task
from benchmarks.gpu.smoke_kernels import checks_of
from benchmarks.gpu.smoke_models import MODELS
from tests.cuda_captures import Captures, Illegal
from tests.gpu_stand_ins import TINY, figures, make_stage
from tests.static_runner import LateStream, make_decoder, make_runner, replay_of

DEVICE = torch.device("cpu", 0)

STUBS = """
import os, sys, time

def add(a, b=1):
    print("noise on standard output")
    return [a + b, os.getpid()]

def fail():
    raise LookupError("no such kernel\\nand more")

def crash():
    print("a last word", file=sys.stderr)
    os._exit(3)

def hang():
    time.sleep(60)

PROBES = {each.__name__: each for each in (add, fail, crash, hang)}
"""


# --- processes --------------------------------------------------------------------------


def test_a_probe_that_ends_its_process_fails_alone(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(children, "START_SECONDS", 20.0)
    (tmp_path / "stub_probes.py").write_text(STUBS)
    left = [60.0]
    probes = ProbeProcess("stub_probes", lambda: left[0], paths=[tmp_path])
    pids = []
    for name, error in (
        ("fail", r"^LookupError: no such kernel$"),
        ("crash", r"^its process ended with exit status 3: a last word$"),
        ("hang", r"^did not come back in 0 s$"),
    ):
        total, pid = probes.run("add", 5.0, {"a": 2, "b": 40})
        assert total == 42
        pids.append(pid)
        left[0] = 0.3 if name == "hang" else 60.0
        with pytest.raises(ProbeError, match=error):
            probes.run(name, 5.0)
    left[0] = 60.0
    total, pid = probes.run("add", 5.0, {"a": 1})
    # What raised left its process as it was; the others have a new one.
    assert total == 2
    assert pids[0] == pids[1] != pids[2] != pid
    probes.close()
    probes.close()


# --- bisection --------------------------------------------------------------------------


class Runner:
    """Fails for the probes that are listed, but with the options that are listed beside."""

    def __init__(self, broken: Mapping[str, list[dict[str, Any]]]) -> None:
        self.broken = broken
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.closed = False

    def run(self, name: str, seconds: float, options: Mapping[str, Any] | None = None) -> Any:
        given = dict(options or {})
        key = given.pop("model", name)
        self.asked.append((key, given))
        if key in self.broken and given not in self.broken[key]:
            raise ProbeError("request 3, token 1: 7 instead of 9")
        return [("tokens compared", 8.0, "", "")]

    def close(self) -> None:
        self.closed = True


def test_what_fails_is_run_in_other_ways() -> None:
    tasks = [
        Task("pool", "memory_pool", 5),
        Task("engine: a", "engine", 5, {"model": "a"}, bisected=True),
        Task("engine: b", "engine", 5, {"model": "b"}, bisected=True),
        Task("waiting", "wake_up", 5),
    ]
    right = [{"settings": {"cuda_graphs": "decode"}}, {"through_jit": True}]
    runner, stage = Runner({"a": right, "wake_up": []}), make_stage()
    smoke.run_tasks(stage, runner, tasks)
    found = figures(stage)
    assert [found[name] for name in ("pool", "engine: b")] == [1.0, 1.0]
    assert {way: found[f"  engine: a, {way}"] for way in smoke.WAYS} == {
        "graphs off": 0.0,
        "mixed steps without graphs": 1.0,
        "launches through the JIT": 1.0,
        "one step at a time": 0.0,
        "plain attention": 0.0,
    }
    assert "engine: a" not in found
    assert [name for name, _ in stage.failed] == ["engine: a", "waiting"]
    assert found["probes that failed"] == 2.0
    # Every probe is run before any is run again, and not at all if it takes no options.
    assert [name for name, _ in runner.asked] == ["memory_pool", "a", "b", "wake_up", *["a"] * 5]
    assert stage.finish() == 1


def test_every_task_is_a_probe_that_there_is() -> None:
    tasks = smoke.tasks()
    assert {task.probe for task in tasks} <= set(smoke_probes.PROBES)
    kernels = [task.options["name"] for task in tasks if task.probe == "kernel"]
    assert sorted(kernels) == sorted(checks_of("cpu", 90))
    assert {"windows", "sinks", "experts"} <= set(kernels)
    models = {task.options["model"] for task in tasks if task.probe == "engine"}
    assert models == set(MODELS)
    settings = {field.name for field in dataclasses.fields(EngineConfig)}
    ways = list(smoke.WAYS.values())
    assert {name for way in ways for name in way.get("settings", {})} <= settings
    for probe in {task.probe for task in tasks if task.bisected}:
        taken = set(inspect.signature(smoke_probes.PROBES[probe]).parameters)
        assert {name for way in ways for name in way} <= taken


# --- probes -----------------------------------------------------------------------------

STAGED = pytest.param("dense", "staged", marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("model", "requests"),
    [
        ("sinks", "plain"),
        STAGED,
        *(
            pytest.param(name, "plain", marks=pytest.mark.slow)
            for name in MODELS
            if name != "sinks"
        ),
    ],
)
def test_an_engine_on_the_cpu_is_right(model: str, requests: str) -> None:
    """Native ops, one step ahead, against plain torch: the same probe as on a GPU."""
    ((name, value, *_),) = smoke_probes.engine(model, requests, device="cpu")
    assert name == "tokens compared"
    assert value is not None
    assert value > 100


def test_an_engine_in_bfloat16_on_the_cpu_is_right() -> None:
    ((_, value, *_),) = smoke_probes.bfloat16(device="cpu")
    assert value is not None
    assert value > 100
    # Weights of 4 bits are further from them than bfloat16.
    with pytest.raises(AssertionError, match=r"log-probability off by|are others"):
        smoke_probes.bfloat16(device="cpu", settings={"quantization": "int4"})


class Replaying(CudaGraphCapturer):
    """What it has captured can be repeated without CUDA."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None] | None:
        return None if super().capture(run) is None else run


def test_a_failed_capture_is_tried_out(monkeypatch: pytest.MonkeyPatch) -> None:
    captures = Captures("aten::_local_scalar_dense")
    captures.install(monkeypatch)
    smoke_probes.check_failed_capture(Replaying(DEVICE), DEVICE)
    captures.check_clean()


def test_nodes_of_a_captured_step_are_counted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    captures = Captures()
    captures.install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    model = ModelConfig.from_directory(write_checkpoint(tmp_path, TINY))
    runner = make_runner(make_decoder(model), capturer=EagerCapturer(), stream=LateStream())
    with torch.inference_mode(), Illegal("", captures.error) as expected:
        replay_of(runner).run_padding(GraphKey(2))
    assert count_nodes(runner, 2) == expected.ops > 10
    assert not captures.debugging
