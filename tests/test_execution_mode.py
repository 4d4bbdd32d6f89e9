"""Engines in the GPU execution mode, simulated on the CPU."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch

from asyncllm import LLM, AsyncLLMEngine
from asyncllm.config import EngineConfig
from asyncllm.errors import InvalidRequestError
from asyncllm.gpu import calibration, execution_mode
from asyncllm.gpu.build import build_model_runner
from asyncllm.gpu.execution_mode import (
    execution_mode_for,
    graph_batch_sizes,
)
from asyncllm.gpu.graph.cuda_graphs import GraphKey, StepPart
from asyncllm.gpu.graph.streams import DeviceStream
from asyncllm.gpu.model_runner import ModelRunner
from asyncllm.gpu.ops import registry
from asyncllm.gpu.ops.torch_ops import TorchOps
from tests.ahead_on_cpu import PROMPTS, AheadOnCPU
from tests.dummy_runner import MODEL
from tests.slow import slow_but
from tests.static_runner import CPU, replay_of


@pytest.fixture(autouse=True)
def _plain_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN's packed weights cannot be traced, nor can native ops."""
    monkeypatch.setattr(registry, "OneDNNOps", TorchOps)


def dummy_config(**fields: Any) -> EngineConfig:
    return EngineConfig(load_format="dummy", device="cpu", attention_backend="torch", **fields)


@pytest.fixture(scope="module")
def expected() -> list[str]:
    messages = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    with LLM(num_threads=1, dtype="float32") as llm:
        found = llm.chat(messages, temperature=0.0, max_tokens=24, progress=False)
        return [completion.text for completion in found]


async def answers(engine: AsyncLLMEngine) -> list[str]:
    async def ask(prompt: str) -> str:
        message = [{"role": "user", "content": prompt}]
        return (await engine.chat(message, temperature=0.0, max_tokens=24).result()).text

    async with engine:
        return list(await asyncio.gather(*(ask(prompt) for prompt in PROMPTS)))


FIELDS = [
    {"cuda_graphs": "auto"},
    {"cudagraph_capture_sizes": (2, 4)},
    {"cuda_graphs": "off"},
    {"cuda_graphs": "decode", "async_scheduling": False},
    {
        "cudagraph_capture_sizes": (2,),
        "enable_prefix_caching": False,
        "max_num_batched_tokens": 16,
    },
]


@pytest.mark.asyncio(loop_factories=["asyncio"])
@pytest.mark.parametrize("fields", slow_but(FIELDS, FIELDS[0], FIELDS[-1]), ids=str)
async def test_the_packaged_model_answers_the_same(expected, fields):
    ahead = AheadOnCPU()
    assert await answers(ahead.engine(**fields)) == expected
    depth = 1 if fields.get("async_scheduling") is False else 2
    assert ahead.stream.most == depth
    kernels = [said for said in ahead.said if said[2] == "kernels"]
    # A step of the smallest bucket and one of the largest, sampling alone, and two mixed steps.
    steps = 4 if fields.get("cudagraph_capture_sizes") == (2,) else 5
    assert kernels == [(done, steps, "kernels") for done in range(steps + 1)]
    graphs = [said for said in ahead.said if said[2] == "graphs"]
    assert ahead.said[len(ahead.said) - len(graphs) :] == graphs
    if fields.get("cuda_graphs") == "off":
        assert not graphs
        assert not ahead.capturer.traces
    else:
        count = len(fields.get("cudagraph_capture_sizes", (1, 2, 4, 8)))
        mixed = fields.get("cuda_graphs") != "decode" and "max_num_batched_tokens" not in fields
        tokens = 6 if mixed else 0  # up to the budget of 256
        said = [(done, count + tokens, "graphs") for done in range(count + tokens + 1)]
        assert graphs == said
        # All of them at start, and none while it answered. A body is cut in each layer but one.
        assert len(ahead.capturer.traces) == count + tokens * ahead.num_layers


def test_limits_that_are_chosen_by_measurement(monkeypatch):
    timed: list[int] = []

    def time_prefill(runner: ModelRunner, count: int) -> float:
        assert timed_prefill(runner, count) > 0
        timed.append(count)
        return count * 1e-3

    timed_prefill = calibration.time_prefill
    monkeypatch.setattr(calibration, "time_prefill", time_prefill)

    def info(**fields: Any) -> Any:
        ahead = AheadOnCPU()
        config = dummy_config(**fields)
        runner = build_model_runner(config, MODEL, None, ahead.mode(config))
        assert runner.graphs is not None
        return runner.info, runner.graphs.buckets

    found, buckets = info()
    # What takes 50 ms, of at most 256 tokens: less than the lowest.
    assert timed == [1, 8, 8, 32, 32]
    assert (found.max_num_seqs, found.max_num_batched_tokens, found.pipeline_depth) == (8, 64, 2)
    assert buckets == (1, 2, 4, 8)
    found, buckets = info(max_num_seqs=3, max_num_batched_tokens=99, async_scheduling=False)
    assert (found.max_num_seqs, found.max_num_batched_tokens, found.pipeline_depth) == (3, 99, 1)
    assert len(timed) == 5
    assert buckets == (1, 2, 3)
    assert info(cuda_graphs="off")[1] == ()


@pytest.mark.parametrize(
    ("graphs", "buckets", "tokens"),
    [("auto", (8, 4, 2, 1), (96, 64, 32)), ("decode", (8, 4, 2, 1), ()), ("off", (), ())],
)
def test_captures_before_first_step(graphs, buckets, tokens):
    config = dummy_config(cuda_graphs=graphs, max_num_batched_tokens=100)
    runner = build_model_runner(config, MODEL, None, AheadOnCPU().mode(config))
    segments = replay_of(runner).piecewise
    made = runner.graphs.capture_stats + (segments.graphs.capture_stats if segments else [])
    assert [record.key for record in made] == [
        *(GraphKey(bucket) for bucket in buckets),
        *(GraphKey(count, StepPart.ALL_BUT_LAST_LAYER) for count in tokens),
    ]


def test_a_cpu_is_in_step():
    mode = execution_mode_for(EngineConfig(), CPU)
    assert not mode.stream.is_async
    assert mode.make_capturer is None
    assert (mode.max_num_seqs, mode.pipeline_depth) == (64, 1)


def test_mode_of_a_gpu(monkeypatch):
    monkeypatch.setattr(execution_mode, "CudaStream", lambda device: DeviceStream())
    mode = execution_mode_for(EngineConfig(), torch.device("cuda", 0))
    assert (mode.step_timeout, mode.shares_memory) == (60.0, True)
    mode = execution_mode_for(EngineConfig(), CPU)
    assert (mode.step_timeout, mode.shares_memory) == (600.0, False)

    config = dummy_config(max_model_len=64, max_num_seqs=3)
    limits = {"step_timeout": 7.0, "shares_memory": True}
    runner = build_model_runner(config, MODEL, None, replace(AheadOnCPU().mode(config), **limits))
    size = runner.info.kv_groups[0].block_size
    assert runner.info.step_timeout == 7.0
    # Each of the three sequences once; without an application beside it, twice.
    assert runner.info.num_blocks == 1 + 3 * -(-64 // size)
    alone = build_model_runner(config, MODEL, None, AheadOnCPU().mode(config))
    assert alone.info.num_blocks == 1 + 6 * -(-64 // size)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            {"cuda_graphs": "off", "cudagraph_capture_sizes": (1,)},
            'expected None with cuda_graphs="off"',
        ),
        ({"cudagraph_capture_sizes": (1, 9)}, "expected sizes up to max_num_seqs=8"),
    ],
)
def test_capture_sizes_that_are_refused(fields, says):
    config = EngineConfig(**fields)
    with pytest.raises(InvalidRequestError, match=says) as caught:
        graph_batch_sizes(config, AheadOnCPU().mode(config), 8)
    assert caught.value.param == "cudagraph_capture_sizes"
