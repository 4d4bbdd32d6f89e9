"""The smoke stage of the GPU benchmarks: processes, bisection, and its probes on the CPU."""

from __future__ import annotations

import dataclasses
import inspect
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from asyncllm import EngineConfig
from asyncllm.checkpoint.model_config import ModelConfig
from asyncllm.gpu.graph.capturer import CudaGraphCapturer
from asyncllm.gpu.graph.cuda_graphs import EagerCapturer, GraphKey
from asyncllm.gpu.ops.triton.launcher import is_observed
from asyncllm.outputs import Logprob, TokenLogprobs
from benchmarks.common import Report
from benchmarks.gpu import children, smoke, smoke_probes
from benchmarks.gpu.checkpoint import write_checkpoint
from benchmarks.gpu.children import ProbeError, ProbeProcess
from benchmarks.gpu.probe import count_nodes, nodes_of_dump
from benchmarks.gpu.smoke import Task
from benchmarks.gpu.smoke_kernels import checks_of
from benchmarks.gpu.smoke_models import MODELS
from benchmarks.gpu.stage import Deadline, Stage
from tests.cuda_captures import Captures, Illegal
from tests.gpu_stand_ins import TINY, figures, make_stage
from tests.static_runner import LateStream, make_decoder, make_runner, replay_of

DEVICE = torch.device("cpu", 0)
LENGTHS = {"a": 5, "b": 20, "c": 5, "d": 20}

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


def test_what_there_is_no_time_for_is_skipped() -> None:
    now = [0.0]
    stage = Stage(Report("test"), Deadline(25.0, lambda: now[0]))

    class Slow(Runner):
        def run(self, name: str, seconds: float, options: Mapping[str, Any] | None = None) -> Any:
            now[0] += 6.0
            return super().run(name, seconds, options)

    runner = Slow({"a": []})
    tasks = [Task("engine: a", "engine", 8, {"model": "a"}, bisected=True)]
    tasks += [Task("waiting", "wake_up", 15), Task("graphs", "graphs", 15)]
    smoke.run_tasks(stage, runner, tasks)
    assert [name for name, _ in runner.asked] == ["a", "wake_up", "graphs"]
    assert stage.skipped == [f"engine: a, {way}" for way in smoke.WAYS]


@pytest.mark.parametrize("most", [60.0, 0.0])
def test_probes_are_first_run_side_by_side(most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at once, in as many processes as there are cores to spare, and none without time."""
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    monkeypatch.setattr(smoke, "COMPILE_SECONDS", most)
    together, made = threading.Barrier(2, timeout=20), list[Runner]()

    class Slow(Runner):
        def run(self, name: str, seconds: float, options: Mapping[str, Any] | None = None) -> Any:
            together.wait()
            return super().run(name, seconds, options)

    def make(left: Callable[[], float]) -> Runner:
        assert left() <= most
        made.append(Slow({"c": []}))
        return made[-1]

    tasks = [Task(name, "engine", seconds, {"model": name}) for name, seconds in LENGTHS.items()]
    stage = make_stage()
    smoke.compile_kernels(stage, tasks, make)
    asked = [[name for name, _ in runner.asked] for runner in made]
    assert len(asked) == 2
    assert all(runner.closed for runner in made)
    if most:
        # The longest begin, and what fails is no failure of the stage.
        assert {names[0] for names in asked} == {"b", "d"}
        assert {names[1] for names in asked} == {"a", "c"}
    assert figures(stage) == {"probes that ran to their end": 3.0 if most else 0.0}
    assert stage.failed == []


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


@pytest.mark.parametrize(
    ("probe", "through_jit"), [("engine", False), ("engine", True), ("bfloat16", True)]
)
def test_launches_go_through_the_jit(
    probe: str, through_jit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the engine that is held against the reference, and of none after it."""
    observed = []
    run_requests = smoke_probes.run_requests

    async def run(model: Path, requests: Any, settings: dict[str, Any]) -> Any:
        observed.append(is_observed())
        return await run_requests(model, requests, settings)

    monkeypatch.setattr(smoke_probes, "run_requests", run)
    options = {"model": "dense"} if probe == "engine" else {}
    smoke_probes.PROBES[probe](**options, device="cpu", through_jit=through_jit)
    assert observed == [False, through_jit]
    assert not is_observed()


@pytest.mark.slow
def test_equal_batches_on_the_cpu() -> None:
    ((_, value, *_),) = smoke_probes.graphs(device="cpu", sizes=(1, 3))
    assert value == 2.0


def completion(tokens: list[int], *, gap: float | None = None) -> Any:
    """With ``gap``, token 99 is the second most likely everywhere, by so much."""
    if gap is None:
        return SimpleNamespace(token_ids=tokens, logprobs=None)
    tops = [(Logprob(token, -1.0, 1), Logprob(99, -1.0 - gap, 2)) for token in tokens]
    return SimpleNamespace(token_ids=tokens, logprobs=[TokenLogprobs(top[0], top) for top in tops])


def test_tokens_are_compared_but_for_ties() -> None:
    compare, tens = smoke_probes.compare, list(range(10))
    assert compare([completion(tens)] * 2, [completion(tens)] * 2) == 20
    late = [*tens[:9], 99]
    assert compare([completion(late)], [completion(tens, gap=1e-4)]) == 9
    for expected in (completion(tens, gap=1e-2), completion(tens)):
        with pytest.raises(AssertionError, match="request 0, token 9: 99 instead of 9"):
            compare([completion(late)], [expected])
    with pytest.raises(AssertionError, match="only 2 of 10 tokens"):
        compare([completion([0, 1, *[99] * 8])], [completion(tens, gap=1e-4)])
    with pytest.raises(AssertionError, match="another length"):
        compare([completion(tens[:4])], [completion(tens)])


def coarse(logprobs: list[float], first_other: int | None = None, gap: float = 0.0) -> Any:
    """Tokens 0, 1, …, whose log-probabilities are these; from ``first_other`` on they are 99,
    which is the second most likely, by ``gap``."""
    found = []
    for token, logprob in enumerate(logprobs):
        top = (Logprob(token, logprob, 1), Logprob(99, logprob - gap, 2))
        is_other = first_other is not None and token >= first_other
        found.append(TokenLogprobs(top[is_other], top))
    return SimpleNamespace(logprobs=found)


def test_tokens_of_bfloat16_are_compared_up_to_near_ties() -> None:
    compare, ones = smoke_probes.compare_rounded, [-1.0] * 20
    assert compare([coarse([-1.09] * 20)], [coarse(ones)]) == 20
    with pytest.raises(AssertionError, match=r"request 1, token 3: log-probability off by 0\.11"):
        compare([coarse(ones), coarse([*ones[:3], -1.11])], [coarse(ones), coarse(ones[:4])])
    with pytest.raises(AssertionError, match="request 0, token 0: log-probability off by nan"):
        compare([coarse([float("nan")] * 20)], [coarse(ones)])
    # A request with another token ends there, whether it was near or not.
    others = [coarse(ones, 15)] * 2
    assert compare(others, [coarse(ones, gap=0.09)] * 2) == 30
    with pytest.raises(AssertionError, match="2 of 32 tokens are others"):
        compare(others, [coarse(ones, gap=0.11)] * 2)
    # One of 20 is 5 %.
    assert compare([coarse(ones, 19)], [coarse(ones, gap=0.11)]) == 19
    with pytest.raises(AssertionError, match="only 10 of 20 tokens"):
        compare([coarse(ones, 10)], [coarse(ones)])


class Replaying(CudaGraphCapturer):
    """What it has captured can be repeated without CUDA."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None] | None:
        return None if super().capture(run) is None else run


def test_a_failed_capture_is_tried_out(monkeypatch: pytest.MonkeyPatch) -> None:
    captures = Captures("aten::_local_scalar_dense")
    captures.install(monkeypatch)
    smoke_probes.check_failed_capture(Replaying(DEVICE), DEVICE)
    captures.check_clean()


def test_a_process_that_stays_in_capture_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    captures = Captures("aten::_local_scalar_dense")
    captures.install(monkeypatch)
    monkeypatch.setattr(CudaGraphCapturer, "_end_pool_recording", lambda self: None)
    with pytest.raises(AssertionError, match="nothing can be captured any more"):
        smoke_probes.check_failed_capture(CudaGraphCapturer(DEVICE), DEVICE)


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


def test_nodes_are_counted_once() -> None:
    text = """digraph dot {
        "graph_1_node_0"[style="solid" shape="rectangle" label="0 KERNEL"];
        "graph_1_node_1"[style="solid" shape="rectangle" label="1 MEMCPY"];
        "graph_1_node_0" -> "graph_1_node_1";
    }"""
    assert nodes_of_dump(text) == 2
    with pytest.raises(ValueError, match="begins 'digraph"):
        nodes_of_dump("digraph dot { a -> b }")
