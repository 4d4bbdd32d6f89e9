"""The smoke stage of the GPU benchmarks: its tasks, and its probes on the CPU."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from asyncllm import EngineConfig
from asyncllm.checkpoint.model_config import ModelConfig
from asyncllm.gpu.graph.cuda_graphs import GraphCapturer, GraphKey
from benchmarks.gpu import smoke, smoke_probes
from benchmarks.gpu.checkpoint import write_checkpoint
from benchmarks.gpu.probe import count_nodes
from benchmarks.gpu.smoke_kernels import checks_of
from benchmarks.gpu.smoke_models import MODELS
from tests.cuda_captures import Captures, Illegal
from tests.gpu_stand_ins import TINY
from tests.static_runner import LateStream, make_decoder, make_runner, replay_of


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


def test_nodes_of_a_captured_step_are_counted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    captures = Captures()
    captures.install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    model = ModelConfig.from_directory(write_checkpoint(tmp_path, TINY))
    runner = make_runner(make_decoder(model), capturer=GraphCapturer(), stream=LateStream())
    with torch.inference_mode(), Illegal("", captures.error) as expected:
        replay_of(runner).run_padded_rows(GraphKey(2))
    assert count_nodes(runner, 2) == expected.ops > 10
    assert not captures.debugging
