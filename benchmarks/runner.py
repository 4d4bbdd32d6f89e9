"""What a decode step costs the host in Python where the device runs ahead of it.

Scheduler and model runner as on a GPU, on a stream that drops its work and has every token at
once: CUDA's own calls (two copies, a replay, an event) are not in it. All times are CPU times of
the one thread that works.

python -m benchmarks.runner [--quick] [--json FILE]
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from asyncllm.checkpoint.model_config import ModelConfig, RopeConfig
from asyncllm.core.executor import ExecutorInfo
from asyncllm.core.scheduler import Scheduler
from asyncllm.gpu.graph.cuda_graphs import GraphCapturer
from asyncllm.gpu.graph.graph_replay import GraphPlan
from asyncllm.gpu.graph.streams import CudaStream
from asyncllm.gpu.kv_cache import KVCache
from asyncllm.gpu.model_runner import ModelRunner
from asyncllm.gpu.models.attention_kinds import attention_kinds, kv_plan
from asyncllm.gpu.models.dense import build_decoder
from asyncllm.gpu.ops.torch_attention import TorchAttention
from asyncllm.gpu.ops.torch_ops import TorchOps
from asyncllm.gpu.weights import dummy_weights
from benchmarks.common import Report, options
from benchmarks.scheduler import BLOCK_SIZE, RUNNING, make_request

NUM_BLOCKS = 20_000
MAX_LEN = 4096
TOKEN = 7


class NullStream(CudaStream):
    """Runs nothing and is never waited for; every token is there at once."""

    def __init__(self) -> None:
        pass

    def context(self) -> AbstractContextManager[object]:
        return nullcontext()

    def run(self, work: Callable[[], None]) -> None:
        pass

    def record_event(self) -> None:
        return None


def make_runner() -> ModelRunner:
    """Two steps in flight; the model is as small as models get, because it never runs."""
    model = ModelConfig(
        path=Path("none"),
        architecture="LlamaForCausalLM",
        vocab_size=64,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        max_position_embeddings=MAX_LEN,
        rms_norm_eps=1e-5,
        rope=RopeConfig(),
        tie_word_embeddings=True,
    )
    cpu, dtype = torch.device("cpu"), torch.float32
    attention = {kind: TorchAttention(kind.shape, dtype) for kind in attention_kinds(model)}
    decoder = build_decoder(model, TorchOps(), attention, dummy_weights(model, dtype, cpu))
    decoder.set_max_positions(MAX_LEN)
    groups = kv_plan(model).kv_groups(attention, BLOCK_SIZE)
    info = ExecutorInfo(
        vocab_size=50_000,
        num_blocks=NUM_BLOCKS,
        kv_groups=tuple(group.spec for group in groups),
        max_model_len=MAX_LEN,
        max_num_seqs=RUNNING,
        max_num_batched_tokens=8192,
        pipeline_depth=2,
    )
    cache = KVCache(groups, NUM_BLOCKS, dtype, cpu)
    graphs = GraphPlan(GraphCapturer(), ())
    runner = ModelRunner(decoder, cache, info, stream=NullStream(), graphs=graphs)
    for buffer in runner._require_runner().memory.host_buffers:
        buffer.tokens.fill_(TOKEN)
    return runner


def measure(report: Report, count: int) -> None:
    """``count`` decode steps of 256 requests, two in flight, whose sequences need a block
    every 16 tokens, each at another time."""
    runner = make_runner()
    scheduler = Scheduler(runner.info)
    rng = random.Random(0)
    for rank in range(RUNNING):
        scheduler.add(make_request(rank, 20 + rank % BLOCK_SIZE, rng))
    flying = []
    parts: dict[str, list[float]] = {"schedule": [], "launch": [], "collect": [], "update": []}
    total: list[float] = []
    for number in range(count + 20):
        marks = [time.thread_time()]
        step = scheduler.schedule()
        assert step is not None
        marks.append(time.thread_time())
        runner.launch(step.batch)
        marks.append(time.thread_time())
        flying.append(step)
        if len(flying) < 2:
            continue
        result = runner.collect()
        marks.append(time.thread_time())
        deque(scheduler.update(flying.pop(0), result), maxlen=0)
        marks.append(time.thread_time())
        if number < 20 or step.batch.num_decodes < RUNNING:
            continue
        for name, start, end in zip(parts, marks, marks[1:], strict=False):
            parts[name].append(end - start)
        total.append(marks[-1] - marks[0])
    for name, times in parts.items():
        report.add_times(f"{RUNNING} decoding: {name}", times, "ms")
    report.add_times(f"{RUNNING} decoding: all four", total, "ms")


def main() -> None:
    arguments = options(__doc__).parse_args()
    report = Report("the host's share of a decode step")
    report.section("two steps in flight")
    measure(report, 100 if arguments.quick else 1000)
    report.write(arguments.json)


if __name__ == "__main__":
    main()
