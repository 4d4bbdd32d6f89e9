"""What a mixed step costs the host of a GPU: 64 decodes and a prompt of 256 tokens.

Qwen3's 28 layers, Triton kernels compiled for compute capability 9.0 and launched through Triton's
own launch path on a CUDA driver that does nothing: as the program that an engine runs, and op by
op, as larger steps are. Matrix products only make their output: what torch takes to call cuBLAS is
not in it, nor are CUDA's own times of a launch and of a copy. torch's part of the products is
measured apart, on matrices of one element. Widths are small, for nothing is computed, and large
tensors would cost what a CPU's allocator takes for them. All times are CPU times of the one thread
that works.

python -m benchmarks.mixed_step [--quick] [--json FILE]
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncllm.checkpoint.model_config import ModelConfig, RopeConfig
from asyncllm.core.batch import StepBatch
from asyncllm.core.executor import ExecutorInfo
from asyncllm.gpu.batch.input_batch import InputBatch
from asyncllm.gpu.graph.cuda_graphs import EagerCapturer
from asyncllm.gpu.graph.decode_runner import DecodeRunner
from asyncllm.gpu.kv_cache import KVCache
from asyncllm.gpu.models.architectures import parameters
from asyncllm.gpu.models.attention_kinds import attention_kinds, kv_groups
from asyncllm.gpu.models.dense import build_decoder
from asyncllm.gpu.ops.linear_weights import LinearWeights
from asyncllm.gpu.ops.triton.attention import TritonAttention
from asyncllm.gpu.ops.triton.launcher import BoundKernel
from asyncllm.gpu.ops.triton.op_set import TritonOps
from benchmarks.common import Report, cpu_time_of, options
from benchmarks.stub_cuda import stub_cuda

DECODES, PROMPT, BLOCKS = 64, 256, 64
CPU, DTYPE = torch.device("cpu"), torch.bfloat16
LIMIT = 0.0015
"""Seconds."""


class NullLinear:
    """Makes the output, and computes nothing."""

    def __init__(self, weights: LinearWeights) -> None:
        self.size = weights.values.shape[0]

    def __call__(self, x: Tensor) -> Tensor:
        return x.new_empty((x.shape[0], self.size))


class NullProducts(TritonOps):
    def make_linear(self, weights: LinearWeights) -> NullLinear:
        return NullLinear(weights)


def make_runner(num_layers: int = 28) -> DecodeRunner:
    """For an H200."""
    model = ModelConfig(
        path=Path("none"),
        architecture="Qwen3ForCausalLM",
        vocab_size=512,
        hidden_size=32,
        intermediate_size=32,
        num_layers=num_layers,
        num_heads=16,
        num_kv_heads=8,
        head_dim=16,
        max_position_embeddings=40_960,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=1e6),
        tie_word_embeddings=True,
        qk_norm=True,
    )
    attention = {
        kind: TritonAttention(kind.shape, DTYPE, CPU, capability=90, num_sms=132)
        for kind in attention_kinds(model)
    }
    weights = ((each.name, torch.empty(each.shape, dtype=DTYPE)) for each in parameters(model))
    decoder = build_decoder(model, NullProducts(), attention, weights)
    decoder.set_max_positions(4096)
    groups = kv_groups(model, attention, 16)
    info = ExecutorInfo(
        vocab_size=model.vocab_size,
        num_blocks=BLOCKS,
        kv_groups=tuple(group.spec for group in groups),
        max_model_len=4096,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        pipeline_depth=2,
    )
    return DecodeRunner(decoder, KVCache(groups, BLOCKS, DTYPE, CPU), info, EagerCapturer(), ())


def mixed_step(runner: DecodeRunner, inputs: InputBatch) -> None:
    """From a batch to its last launch."""
    rows = DECODES + 1
    batch = StepBatch(
        step=0,
        req_indices=list(range(rows)),
        starts=[1000] * DECODES + [0],
        counts=[1] * DECODES + [PROMPT],
        samples=[True] * rows,
        num_decodes=DECODES,
    )
    host = next(runner.host_buffers)
    indices = np.arange(rows)
    host.set_rows(indices, indices, indices)
    runner.run(host, rows, inputs.prepare(batch, CPU, runner.block_tables))


@contextmanager
def op_by_op(runner: DecodeRunner) -> Iterator[None]:
    """No step runs as a program."""
    programs, runner.mixed.programs = runner.mixed.programs, ()
    try:
        yield
    finally:
        runner.mixed.programs = programs


def products(count: int) -> None:
    """What torch does for so many products, on one element each."""
    one, out = torch.zeros((1, 1), dtype=DTYPE), torch.empty((1, 1), dtype=DTYPE)
    for _ in range(count):
        torch.mm(one, one, out=out)


@contextmanager
def through_the_jit() -> Iterator[None]:
    """Every launch takes the path of Triton's own wrapper."""
    launch = BoundKernel.__call__

    def wrapped(self: BoundKernel, grid: tuple[int, ...], *args: Any) -> None:
        self.launcher.kernel[grid](*args, **self.constants)

    BoundKernel.__call__ = wrapped
    try:
        yield
    finally:
        BoundKernel.__call__ = launch


def measure(report: Report, rounds: int, num_layers: int = 28) -> float:
    """Median seconds of a step, after ``num_layers``."""
    runner = make_runner(num_layers)
    inputs = InputBatch(DECODES + 1, 4096, runner.info.kv_groups)
    with stub_cuda() as stub, torch.inference_mode():
        for _ in range(2):
            mixed_step(runner, inputs)
            with op_by_op(runner):
                mixed_step(runner, inputs)
        before = stub.launches
        mixed_step(runner, inputs)
        report.add("kernels of ours", stub.launches - before, "launches")
        whole, direct, wrapped, multiplied = [], [], [], []
        for _ in range(rounds):
            whole.append(cpu_time_of(lambda: mixed_step(runner, inputs)))
            with op_by_op(runner):
                direct.append(cpu_time_of(lambda: mixed_step(runner, inputs)))
                with through_the_jit():
                    wrapped.append(cpu_time_of(lambda: mixed_step(runner, inputs)))
            multiplied.append(cpu_time_of(lambda: products(4 * num_layers)))
        report.add_times("a step, as a program", whole, "ms")
        report.add_times("a step, op by op, launched directly", direct, "ms")
        report.add_times("a step, op by op, each launch through the JIT", wrapped, "ms")
        report.add_times("torch's part of the products, not in these", multiplied, "ms")
    median = float(np.median(whole))
    report.add("goal", LIMIT, "ms", "met" if median <= LIMIT else "NOT met")
    return median


def main() -> None:
    arguments = options(__doc__).parse_args()
    report = Report("the host's share of a mixed step")
    report.section(f"{DECODES} decodes and {PROMPT} prompt tokens, 28 layers")
    measure(report, 20 if arguments.quick else 200)
    report.write(arguments.json)


if __name__ == "__main__":
    main()
