"""Kernel variants to compile: defaults and more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from asyncllm.checkpoint.experts_config import ActivationConfig, RoutingConfig
from asyncllm.checkpoint.linear_attention_config import LinearAttentionConfig
from asyncllm.gpu.batch.sampling_inputs import RowsToSample
from asyncllm.gpu.ops.base import AttentionShape
from asyncllm.gpu.ops.experts import ExpertsWeights
from asyncllm.gpu.ops.gated_delta import DecayParameters
from asyncllm.gpu.ops.linear_weights import LinearWeights
from asyncllm.gpu.ops.routing import RouterWeights
from asyncllm.gpu.ops.torch_ops import TorchLinear
from asyncllm.gpu.ops.triton import (
    activation,
    causal_conv,
    decode_attention,
    decode_inputs,
    experts,
    gated_delta,
    norm,
    prefill_attention,
    rope_cache,
    routing,
    sampling,
    tuning,
)
from asyncllm.gpu.ops.triton.state_rows import TritonStateRows
from tests.step_inputs import captured, draw_scalars
from tests.triton.launches import Launch, recording
from tests.triton.paged import attend_decodes, attend_prefills

Run = Callable[[int], object]

CAPABILITIES = (80, 86, 89, 90, 100)

SHARED_MEMORY = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227}
"""KiB per program."""


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def floats(*shape: int) -> Tensor:
    return empty(*shape, dtype=torch.float32)


def ints(*shape: int) -> Tensor:
    return empty(*shape, dtype=torch.int32)


def longs(*shape: int) -> Tensor:
    return empty(*shape, dtype=torch.int64)


@dataclass(frozen=True)
class Variant:
    """One kernel on one architecture.

    Attributes:
        run: launches kernels for a compute capability, ``kernel`` among them.
        rare: compiled when asked for, on every architecture.
    """

    name: str
    capability: int
    kernel: str
    run: Run
    rare: bool = False

    def __str__(self) -> str:
        return f"{self.name}-sm{self.capability}"

    def launch(self) -> Launch:
        with recording() as launches:
            self.run(self.capability)
        found = [launch for launch in launches if launch.kernel.fn.__name__ == self.kernel]
        assert len(found) == 1, f"{self.kernel} was launched {len(found)} times"
        return found[0]


def attention(
    kind: str, group: int, head_dim: int, block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16, **options: Any,
) -> Run:  # fmt: skip
    """Of 8 key/value heads; decodes are split in four."""

    def run(capability: int) -> None:
        decode = kind == "decode"
        merged = empty(64 if decode else 4096, 8 * (group + 2), head_dim, dtype=dtype)
        cache = empty(2, 1000, block_size, 8, head_dim, dtype=dtype)
        given = merged[:, : 8 * group], cache, ints(256, 256)
        tiles = tuning.decode_tiles if decode else tuning.prefill_tiles
        sizes = {"scale": 0.1, "tiles": tiles(capability, head_dim, dtype.itemsize)}
        if decode:
            options.setdefault("splits", 4)
            attend_decodes(decode_attention, *given, ints(64), ints(64), **sizes, **options)
        else:
            rows = longs(64), ints(64), ints(65)
            attend_prefills(prefill_attention, *given, *rows, **sizes, **options)

    return run


decode, prefill = partial(attention, "decode"), partial(attention, "prefill")


def rope(heads: int, head_dim: int, *, norms: bool, tables: int = 1, values: bool = False) -> Run:
    weights = (empty(head_dim), empty(head_dim)) if norms else (None, None)
    op = rope_cache.TritonRopeAndCache(
        AttentionShape(heads, 8, head_dim, 0.1), *weights, 1e-6, empty(head_dim) if values else None
    )
    rotary = empty(4096, *([tables] * (tables > 1)), head_dim), longs(64)
    cache = empty(2, 1000, 16, 8, head_dim)
    return lambda _: op(empty(64, (heads + 16) * head_dim), rotary, cache, longs(64))


def rope_of_queries(capability: int) -> None:
    op = rope_cache.TritonRope(AttentionShape(8, 2, 512, 1.0), floats(512), 1e-6)
    op(empty(64, 8 * 512), (empty(4096, 512), longs(64)))


def norm_add(weight: Tensor, *scales: float) -> Run:
    op = norm.TritonRMSNorm(weight, 1e-6, *scales)
    return lambda _: op.add_and_norm(empty(64, len(weight)), empty(64, len(weight)))


def of_experts(tokens: int, dtype: torch.dtype, **options: Any) -> Run:
    """Qwen3-30B-A3B's experts, or with a limit and biases gpt-oss-20b's; any option has their
    sizes."""
    count, top_k, width, inner = (32, 4, 2880, 2880) if options else (128, 8, 2048, 768)

    def layer(rows: int, columns: int) -> LinearWeights:
        bias = empty(count * rows, dtype=dtype) if options else None
        return LinearWeights(empty(count * rows, columns, dtype=dtype), bias)

    weights = ExpertsWeights(count, layer(2 * inner, width), layer(width, inner))
    x, gate = empty(tokens, width, dtype=dtype), empty(tokens, 1, dtype=dtype)
    op = experts.TritonExperts(weights, ActivationConfig(**options))
    return lambda _: op(x, ints(tokens, top_k), floats(tokens, top_k), x, gate)


def of_routing(capability: int) -> None:
    """Qwen3-Next's, with all that others have beside."""
    config = RoutingConfig(512, 10, "sigmoid", renormalise=True)
    rows = LinearWeights(empty(512, 2048))
    weights = RouterWeights(rows, floats(512), floats(512))
    routing.TritonRouting(config, weights, TorchLinear(rows))(empty(64, 2048))


def sample(vocab_size: int, dtype: torch.dtype) -> Run:
    scalars = draw_scalars(longs(256), floats(256), ints(256), floats(256), floats(256))
    rows, out = RowsToSample(longs(64), longs(64), longs(256)), longs(64)
    return lambda _: sampling.sample(empty(64, vocab_size, dtype=dtype), scalars, rows, out)


MIXED = TritonStateRows(longs(64), longs(4096), longs(65), True)
"""Of which some have one token."""
DECODES = TritonStateRows(longs(64), longs(64), longs(64), False)


def of_gated_delta(dtype: torch.dtype, rows: TritonStateRows = MIXED) -> Run:
    """Qwen3-Next's layers: 16 key heads and 32 value heads of 128."""
    shape = LinearAttentionConfig((True,), 16, 32, 128, 128, 4)
    op = gated_delta.TritonGatedDelta(shape, DecayParameters(floats(32), floats(32)))
    tokens = rows.positions.shape[0]
    given = empty(tokens, shape.conv_channels, dtype=dtype), empty(tokens, 64, dtype=dtype)
    return lambda _: op(*given, floats(257, 32, 128, 128), rows)


def of_causal_conv(capability: int) -> None:
    conv = causal_conv.TritonCausalConv(floats(8192, 4))
    conv(empty(4096, 12_288)[:, :8192], empty(257, 3, 8192), MIXED)


def of_gated_norm(capability: int) -> None:
    norm.TritonGatedNorm(empty(128), 1e-6)(empty(64, 4096), empty(64, 12_288)[:, 8192:])


def of_decode_inputs(capability: int) -> None:
    step = captured(
        ints(257, 256), longs(64), longs(64), ints(64), 16, previous_tokens=longs(64),
        table_changes=(longs(256), ints(256)), token_ids=longs(64), slot_mapping=longs(64),
        last_sampled_tokens=longs(257),
    )  # fmt: skip
    decode_inputs.fill_decode_inputs(step, *step.groups)


RARE: dict[str, Any] = {"softcap": 50.0, "window": 4096}


def variants() -> list[Variant]:
    """The common shapes on every architecture, the rare ones on one or two."""
    half, single = torch.float16, torch.float32
    found: list[Variant] = []

    def add(name: str, kernel: str, run: Run, *where: int, rare: bool = False) -> None:
        found.extend(
            Variant(name, sm, f"{kernel}_kernel", run, rare) for sm in where or CAPABILITIES
        )

    def both(
        name: str, group: int, dim: int, *where: int, rare: bool = False, **options: Any
    ) -> None:
        add(f"decode-{name}", "decode", decode(group, dim, **options), *where, rare=rare)
        add(f"prefill-{name}", "prefill", prefill(group, dim, **options), *where, rare=rare)

    for dim in (64, 128, 256):
        both(f"head{dim}", 4, dim, *CAPABILITIES)
        add(f"merge-head{dim}", "merge", decode(4, dim), 80, 90, 100)
    for dim in (80, 96):
        both(f"head{dim}", 8, dim, 80, 90)
    add("decode-one-split", "decode", decode(2, 128, splits=1), 89, 90)
    shared: dict[str, Any] = {"splits": 1, "extra_splits": 132}
    add("decode-shares", "decode", decode(4, 128, **shared), 80, 89, 90)
    add("merge-shares", "merge", decode(4, 128, **shared), 80, 89, 90)
    add("prefill-splits-head128", "prefill", prefill(4, 128, splits=8), 80, 89, 90)
    add("prefill-splits-rare", "prefill", prefill(2, 256, splits=8, **RARE), 80)
    add("decode-group24", "decode", decode(24, 128), 90)
    both("pages256", 8, 128, 80, 90, block_size=256)
    add("prefill-group7", "prefill", prefill(7, 128), 89, 90)
    add("prefill-group1", "prefill", prefill(1, 128, dtype=half), 90)
    both("cap-window", 2, 256, 80, 89, 90, **RARE)
    add("prefill-window", "prefill", prefill(4, 128, window=4096), 80, 90)
    sinks: dict[str, Any] = {"sinks": floats(64), "window": 128}
    both("sinks", 8, 64, 80, 90, **sinks)
    both("float32", 4, 128, 90, dtype=single)
    both("head512", 8, 512)
    add("merge-head512", "merge", decode(8, 512), 80, 90, rare=True)
    add("decode-shares-head512", "decode", decode(8, 512, **shared), 80, 89, 90, rare=True)
    sunk: dict[str, Any] = {"sinks": floats(64), **RARE}
    add("decode-rare-head512", "decode", decode(5, 512, **sunk), 80, 89, 90, rare=True)
    for name, group, options in (("splits", 16, {}), ("rare", 5, sunk)):
        launches = prefill(group, 512, splits=8, **options)
        add(f"prefill-{name}-head512", "prefill", launches, 80, 89, 90, 100, rare=True)
    add("decode-head320", "decode", decode(8, 320, dtype=half), 80, 89, 90, rare=True)
    launches = prefill(8, 320, dtype=half)
    add("prefill-head320", "prefill", launches, 80, 89, 90, 100, rare=True)
    both("head512-float32", 8, 512, 89, rare=True, dtype=single)
    launches = rope(16, 512, norms=True, values=True)
    add("rope-head512", "rope_cache", launches, 80, 90, rare=True)
    add("rope-norm", "rope_cache", rope(32, 128, norms=True), 80, 90, 100)
    add("rope-head80", "rope_cache", rope(32, 80, norms=False), 90)
    for name, tokens in (("few", 16), ("many", 1024)):
        for kernel in ("gate_up", "down"):
            where = CAPABILITIES if kernel == "gate_up" else (80, 90)
            launches = of_experts(tokens, torch.bfloat16)
            add(f"experts-{name}-{kernel[:4]}", kernel, launches, *where)
    for kernel in ("sort_pairs", "tile_ends", "sum_experts"):
        add(f"experts-{kernel}", kernel, of_experts(16, torch.bfloat16), 90)
    add("experts-routing", "routing", of_routing, 90)
    clamped = of_experts(1024, half, limit=7.0)
    add("experts-clamped", "gate_up", clamped, 80, 90)
    add("experts-biased", "down", clamped, 90)
    add("experts-gelu", "gate_up", of_experts(1024, half, gelu=True), 90)
    add("experts-float32", "gate_up", of_experts(1024, single), 90)
    add("norm-add-1024", "norm", norm_add(empty(1024)), 90)
    add("norm-add-4096", "norm", norm_add(empty(4096)), 80, 100)
    plain = norm.TritonRMSNorm(empty(16384), 1e-6)
    add("norm-16384", "norm", lambda _: plain(empty(64, 16384)), 90)
    halves = empty(64, 2 * 9728)
    add("silu-mul", "gated_mul", lambda _: activation.silu_mul(halves), 80, 90, 100)
    add("gelu-mul", "gated_mul", lambda _: activation.gelu_mul(halves), 90)
    add("softcap", "softcap", lambda _: activation.softcap(empty(64, 256_000), 30.0), 90)
    add("norm-scaled", "norm", norm_add(floats(2560), 0.22), 90)
    add("rope-scaled", "rope_cache", rope(32, 128, norms=True, tables=2), 90)
    delta = of_gated_delta(torch.bfloat16)
    add("delta-chunk", "delta_chunk", delta, 80, 90, 100)
    add("delta-token", "delta_token", delta, 90, 100)
    alone = of_gated_delta(torch.bfloat16, DECODES)
    add("delta-decode", "delta_token", alone, 80, 90)
    add("delta-float32", "delta_token", of_gated_delta(single), 90)
    for kernel in ("conv_token", "conv_chunk", "conv_state"):
        add(kernel, kernel, of_causal_conv, 90)
    add("gated-norm", "gated_norm", of_gated_norm, 90)
    gate = empty(64, 9216)[:, 5120:]
    add("sigmoid-mul", "gated_mul", lambda _: activation.sigmoid_mul(empty(64, 4096), gate), 90)
    add("norm-sum-scaled", "norm", norm_add(floats(2560), 1.0, 0.7), 90)
    add("rope-values", "rope_cache", rope(32, 256, norms=True, values=True), 90)
    add("rope-queries", "rope_cache", rope_of_queries, 90)
    add("step-state", "decode_inputs", of_decode_inputs, 80, 90, 100)
    for dtype, name in ((torch.bfloat16, "bf16"), (single, "fp32")):
        where = (80, 90, 100) if dtype == single else (90,)
        add(f"sample-chunks-{name}", "chunk_statistics", sample(151_936, dtype), *where)
        add(f"sample-choose-{name}", "sample_tokens", sample(151_936, dtype), *where)
    return found
