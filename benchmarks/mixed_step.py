"""What a mixed step costs the host of a GPU: 64 decodes and a prompt of 256 tokens.

The layers of Qwen3-0.6B, Qwen3.5-9B, Qwen3-30B-A3B or Qwen3.5-35B-A3B, Triton kernels compiled for
compute capability 9.0 and launched through Triton's own launch path on a CUDA driver that does
nothing: as the program that an engine runs, and op by op, as larger steps are. Matrix products only
make their output: what torch takes to call cuBLAS is not in it, nor are CUDA's own times of a
launch and of a copy. torch's part of the products is measured apart, on matrices of one element.
Widths are small, for nothing is computed, and large tensors would cost what a CPU's allocator takes
for them. All times are CPU times of the one thread that works.

python -m benchmarks.mixed_step [--family NAME] [--quick] [--json FILE]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncllm.checkpoint.experts_config import ExpertsConfig, RoutingConfig
from asyncllm.checkpoint.linear_attention_config import LinearAttentionConfig
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
from asyncllm.gpu.state_cache import StateCache
from benchmarks.common import Report, cpu_time_of, options
from benchmarks.stub_cuda import stub_cuda

DECODES, PROMPT, BLOCKS = 64, 256, 64
CPU, DTYPE = torch.device("cpu"), torch.bfloat16
LIMIT = 0.0015
"""Seconds, of 28 layers of Qwen3."""


def linear_attention(num_layers: int) -> dict[str, Any]:
    """Three layers of a gated delta rule to one of attention, in small."""
    layers = tuple(index % 4 != 3 for index in range(num_layers))
    return {
        "gated_attention": True,
        "norm_offset": 1.0,
        "wide_norms": True,
        "linear_attention": LinearAttentionConfig(layers, 16, 32, 16, 16, 4),
    }


def experts(num_layers: int, num_experts: int, shared_size: int = 0) -> dict[str, Any]:
    """Eight a token, and with a size a shared one that has a gate."""
    routing = RoutingConfig(num_experts, 8, renormalise=True)
    sizes = {"shared_size": shared_size, "shared_gate": bool(shared_size)}
    return {"experts": ExpertsConfig((True,) * num_layers, routing, 32, **sizes)}


FAMILIES: dict[str, tuple[int, Callable[[int], dict[str, Any]]]] = {
    "qwen3": (28, lambda _: {}),
    "qwen3.5": (32, linear_attention),
    "qwen3-moe": (48, lambda count: experts(count, 128)),
    "qwen3.5-moe": (40, lambda count: linear_attention(count) | experts(count, 256, 32)),
}
"""Layers, and what so many of them have that Qwen3's do not."""


class NullLinear:
    """Makes the output, and computes nothing."""

    def __init__(self, weights: LinearWeights) -> None:
        self.size = weights.values.shape[0]

    def __call__(self, x: Tensor) -> Tensor:
        return x.new_empty((x.shape[0], self.size))


class NullProducts(TritonOps):
    """Attributes: num_products: layers of a step, the output head among them."""

    num_products = 0

    def make_linear(self, weights: LinearWeights) -> NullLinear:
        self.num_products += 1
        return NullLinear(weights)


def make_runner(family: str = "qwen3", num_layers: int | None = None) -> DecodeRunner:
    """For an H200."""
    layers, fields = FAMILIES[family]
    num_layers = num_layers or layers
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
        **fields(num_layers),
    )
    attention = {
        kind: TritonAttention(kind.shape, DTYPE, CPU, capability=90, num_sms=132)
        for kind in attention_kinds(model)
    }
    weights = (
        (each.name, torch.zeros(each.shape, dtype=getattr(torch, each.dtype or "bfloat16")))
        for each in parameters(model)
    )
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
    states = StateCache(decoder.states, info.max_num_seqs, DTYPE, CPU) if decoder.states else None
    cache = KVCache(groups, BLOCKS, DTYPE, CPU, states)
    return DecodeRunner(decoder, cache, info, EagerCapturer(), ())


def mixed_step(runner: DecodeRunner, inputs: InputBatch, prompt: int = PROMPT) -> None:
    """From a batch to its last launch."""
    rows = DECODES + 1
    batch = StepBatch(
        step=0,
        req_indices=list(range(rows)),
        starts=[1000] * DECODES + [0],
        counts=[1] * DECODES + [prompt],
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


def measure(report: Report, family: str, rounds: int) -> None:
    runner = make_runner(family)
    ops = runner.decoder.ops
    assert isinstance(ops, NullProducts)
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
        for number in range(rounds):
            # Steps of other sizes than the one before, as under traffic.
            step = partial(mixed_step, runner, inputs, PROMPT - number % 2)
            whole.append(cpu_time_of(step))
            with op_by_op(runner):
                direct.append(cpu_time_of(step))
                with through_the_jit():
                    wrapped.append(cpu_time_of(step))
            multiplied.append(cpu_time_of(lambda: products(ops.num_products)))
        report.add_times("a step, as a program", whole, "ms")
        report.add_times("a step, op by op, launched directly", direct, "ms")
        report.add_times("a step, op by op, each launch through the JIT", wrapped, "ms")
        report.add_times("torch's part of the products, not in these", multiplied, "ms")
    if family == "qwen3":
        met = float(np.median(whole)) <= LIMIT
        report.add("goal", LIMIT, "ms", "met" if met else "NOT met")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--family", choices=FAMILIES, default="qwen3", help="whose layers")
    arguments = parser.parse_args()
    report, layers = Report("the host's share of a mixed step"), FAMILIES[arguments.family][0]
    report.section(
        f"{DECODES} decodes and {PROMPT} prompt tokens, {layers} layers of {arguments.family}"
    )
    measure(report, arguments.family, 20 if arguments.quick else 200)
    report.write(arguments.json)


if __name__ == "__main__":
    main()
