"""Kernel variants that are compiled for GPUs that are not there: every default, and more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asyncllm.checkpoint.experts_config import ActivationConfig, RoutingConfig
from asyncllm.checkpoint.linear_attention_config import LinearAttentionConfig
from asyncllm.gpu.ops.base import AttentionShape
from asyncllm.gpu.ops.experts import ExpertsWeights
from asyncllm.gpu.ops.gated_delta import DeltaBiases
from asyncllm.gpu.ops.linear_weights import LinearWeights
from asyncllm.gpu.ops.routing import RouterWeights
from asyncllm.gpu.ops.torch_ops import TorchLinear
from asyncllm.gpu.ops.triton import (
    activation,
    causal_conv,
    decode_attention,
    decode_inputs,
    expert_pairs,
    experts,
    gated_delta,
    gated_norm,
    merge_attention,
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
        launches: makes the launches; ``kernel`` picks one of them.
        rare: compiled when asked for, on every architecture.
    """

    name: str
    capability: int
    kernel: str
    launches: Callable[[int], list[Launch]]
    rare: bool = False

    def __str__(self) -> str:
        return f"{self.name}-sm{self.capability}"

    def launch(self) -> Launch:
        found = [x for x in self.launches(self.capability) if x.kernel.fn.__name__ == self.kernel]
        assert len(found) == 1, f"{self.kernel} was launched {len(found)} times"
        return found[0]


def decode(
    group: int,
    head_dim: int,
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    splits: int = 4,
    **options: Any,
) -> Callable[[int], list[Launch]]:
    def launches(capability: int) -> list[Launch]:
        merged = empty(64, 8 * (group + 2), head_dim, dtype=dtype)
        cache = empty(2, 1000, block_size, 8, head_dim, dtype=dtype)
        with recording(decode_attention) as found, recording(merge_attention) as merges:
            attend_decodes(
                decode_attention,
                merged[:, : 8 * group],
                cache,
                ints(256, 256),
                ints(64),
                ints(64),
                scale=0.1,
                tiles=tuning.decode_tiles(capability, head_dim, dtype.itemsize),
                splits=splits,
                **options,
            )
        return found + merges

    return launches


def prefill(
    group: int,
    head_dim: int,
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> Callable[[int], list[Launch]]:
    def launches(capability: int) -> list[Launch]:
        merged = empty(4096, 8 * (group + 2), head_dim, dtype=dtype)
        cache = empty(2, 1000, block_size, 8, head_dim, dtype=dtype)
        with recording(prefill_attention) as found, recording(merge_attention) as merges:
            attend_prefills(
                prefill_attention,
                merged[:, : 8 * group],
                cache,
                ints(256, 256),
                longs(64),
                ints(64),
                ints(65),
                scale=0.1,
                tiles=tuning.prefill_tiles(capability, head_dim, dtype.itemsize),
                **options,
            )
        return found + merges

    return launches


def rope(
    heads: int, head_dim: int, *, norms: bool, tables: int = 1, values: bool = False
) -> Callable[[int], list[Launch]]:
    def launches(capability: int) -> list[Launch]:
        weights = (empty(head_dim), empty(head_dim)) if norms else (None, None)
        v_norm = empty(head_dim) if values else None
        shape = AttentionShape(heads, 8, head_dim, 0.1)
        with recording(rope_cache) as found:
            rope_cache.TritonRopeAndCache(shape, *weights, 1e-6, v_norm)(
                empty(64, (heads + 16) * head_dim),
                (empty(4096, *([tables] * (tables > 1)), head_dim), longs(64)),
                empty(2, 1000, 16, 8, head_dim),
                longs(64),
            )
        return found

    return launches


def rms_norm(width: int, *, add: bool) -> Callable[[int], list[Launch]]:
    def launches(capability: int) -> list[Launch]:
        with recording(norm) as found:
            op = norm.TritonRMSNorm(empty(width), 1e-6)
            if add:
                op.add(empty(64, width), empty(64, width))
            else:
                op(empty(64, width))
        return found

    return launches


def silu_mul(capability: int) -> list[Launch]:
    with recording(activation) as found:
        activation.silu_mul(empty(64, 2 * 9728))
    return found


def gelu_mul(capability: int) -> list[Launch]:
    with recording(activation) as found:
        activation.gelu_mul(empty(64, 2 * 9728))
    return found


def rope_of_queries(capability: int) -> list[Launch]:
    with recording(rope_cache) as found:
        rope_cache.TritonRope(AttentionShape(8, 2, 512, 1.0), floats(512), 1e-6)(
            empty(64, 8 * 512), (empty(4096, 512), longs(64))
        )
    return found


def sum_scaled_norm(capability: int) -> list[Launch]:
    with recording(norm) as found:
        norm.TritonRMSNorm(floats(2560), 1e-6, scale=0.7).add(empty(64, 2560), empty(64, 2560))
    return found


def softcap(capability: int) -> list[Launch]:
    with recording(activation) as found:
        activation.softcap(empty(64, 256_000), 30.0)
    return found


def scaled_norm(capability: int) -> list[Launch]:
    """With a weight in float32."""
    with recording(norm) as found:
        norm.TritonRMSNorm(floats(2560), 1e-6, 0.22).add(empty(64, 2560), empty(64, 2560))
    return found


def experts_launches(tokens: int, dtype: torch.dtype, **options: Any) -> Callable[..., Any]:
    """Qwen3-30B-A3B's experts, or with a limit and biases gpt-oss-20b's; any option has their
    sizes."""

    def launches(capability: int) -> list[Launch]:
        count, top_k, width, inner = (32, 4, 2880, 2880) if options else (128, 8, 2048, 768)
        biases = [
            empty(count * rows, dtype=dtype) if options else None for rows in (2 * inner, width)
        ]
        weights = ExpertsWeights(
            count,
            LinearWeights(empty(count * 2 * inner, width, dtype=dtype), biases[0]),
            LinearWeights(empty(count * width, inner, dtype=dtype), biases[1]),
        )
        with recording(experts, expert_pairs) as found:
            experts.TritonExperts(weights, ActivationConfig(**options))(
                empty(tokens, width, dtype=dtype), ints(tokens, top_k), floats(tokens, top_k),
                empty(tokens, width, dtype=dtype), empty(tokens, 1, dtype=dtype),
            )  # fmt: skip
        return found

    return launches


def routing_launches(capability: int) -> list[Launch]:
    """Qwen3-Next's, with all that others have beside."""
    config = RoutingConfig(512, 10, "sigmoid", renormalise=True)
    rows = LinearWeights(empty(512, 2048))
    with recording(routing) as found:
        weights = RouterWeights(rows, floats(512), floats(512))
        routing.TritonRouting(config, weights, TorchLinear(rows))(empty(64, 2048))
    return found


def sample(vocab_size: int, dtype: torch.dtype) -> Callable[[int], list[Launch]]:
    def launches(capability: int) -> list[Launch]:
        with recording(sampling) as found:
            sampling.sample(
                empty(64, vocab_size, dtype=dtype),
                draw_scalars(longs(256), floats(256), ints(256), floats(256), floats(256)),
                longs(64),
                longs(64),
                longs(256),
                longs(64),
            )
        return found

    return launches


def mixed_rows() -> TritonStateRows:
    """Of which some have one token."""
    return TritonStateRows(longs(64), longs(4096), longs(65), True)


def gated_delta_launches(
    dtype: torch.dtype, *, mixed: bool = True
) -> Callable[[int], list[Launch]]:
    """Qwen3-Next's layers: 16 key heads and 32 value heads of 128."""
    shape = LinearAttentionConfig((True,), 16, 32, 128, 128, 4)
    rows = mixed_rows() if mixed else TritonStateRows(longs(64), longs(64), longs(64), False)

    def launches(capability: int) -> list[Launch]:
        tokens = rows.positions.shape[0]
        with recording(gated_delta) as found:
            gated_delta.TritonGatedDelta(shape, DeltaBiases(floats(32), floats(32)))(
                empty(tokens, shape.conv_size, dtype=dtype),
                empty(tokens, 64, dtype=dtype),
                floats(257, 32, 128, 128),
                rows,
            )
        return found

    return launches


def causal_conv_launches(capability: int) -> list[Launch]:
    with recording(causal_conv) as found:
        conv = causal_conv.TritonCausalConv(floats(8192, 4))
        conv(empty(4096, 12_288)[:, :8192], empty(257, 3, 8192), mixed_rows())
    return found


def gated_norm_launches(capability: int) -> list[Launch]:
    with recording(gated_norm) as found:
        gated_norm.TritonGatedNorm(empty(128), 1e-6)(empty(64, 4096), empty(64, 12_288)[:, 8192:])
    return found


def sigmoid_mul(capability: int) -> list[Launch]:
    with recording(activation) as found:
        activation.sigmoid_mul(empty(64, 4096), empty(64, 9216)[:, 5120:])
    return found


def decode_inputs_launches(capability: int) -> list[Launch]:
    with recording(decode_inputs) as found:
        step = captured(
            ints(257, 256),
            longs(64),
            longs(64),
            ints(64),
            16,
            previous_tokens=longs(64),
            table_changes=(longs(256), ints(256)),
            token_ids=longs(64),
            slot_mapping=longs(64),
            last_sampled_tokens=longs(257),
        )
        decode_inputs.decode_inputs(step, *step.groups)
    return found


RARE: dict[str, Any] = {"softcap": 50.0, "window": 4096}


def variants() -> list[Variant]:
    """The common shapes on every architecture, the rare ones on one or two."""
    half, single = torch.float16, torch.float32
    found: list[Variant] = []

    def add(
        name: str,
        kernel: str,
        launches: Callable[..., list[Launch]],
        *where: int,
        rare: bool = False,
    ) -> None:
        found.extend(Variant(name, sm, kernel, launches, rare) for sm in where or CAPABILITIES)

    for dim in (64, 128, 256):
        add(f"decode-head{dim}", "decode_kernel", decode(4, dim), *CAPABILITIES)
        add(f"prefill-head{dim}", "prefill_kernel", prefill(4, dim), *CAPABILITIES)
        add(f"merge-head{dim}", "merge_kernel", decode(4, dim), 80, 90, 100)
    for dim in (80, 96):
        add(f"decode-head{dim}", "decode_kernel", decode(8, dim), 80, 90)
        add(f"prefill-head{dim}", "prefill_kernel", prefill(8, dim), 80, 90)
    add("decode-one-split", "decode_kernel", decode(2, 128, splits=1), 89, 90)
    shared: dict[str, Any] = {"splits": 1, "extra_splits": 132}
    add("decode-shares", "decode_kernel", decode(4, 128, **shared), 80, 89, 90)
    add("merge-shares", "merge_kernel", decode(4, 128, **shared), 80, 89, 90)
    add("prefill-splits-head128", "prefill_kernel", prefill(4, 128, splits=8), 80, 89, 90)
    add("prefill-splits-rare", "prefill_kernel", prefill(2, 256, splits=8, **RARE), 80)
    add("decode-group24", "decode_kernel", decode(24, 128), 90)
    add("decode-pages256", "decode_kernel", decode(8, 128, 256), 80, 90)
    add("prefill-pages256", "prefill_kernel", prefill(8, 128, 256), 80, 90)
    add("prefill-group7", "prefill_kernel", prefill(7, 128), 89, 90)
    add("prefill-group1", "prefill_kernel", prefill(1, 128, dtype=half), 90)
    add("decode-cap-window", "decode_kernel", decode(2, 256, **RARE), 80, 89, 90)
    add("prefill-cap-window", "prefill_kernel", prefill(2, 256, **RARE), 80, 89, 90)
    add("prefill-window", "prefill_kernel", prefill(4, 128, window=4096), 80, 90)
    sinks: dict[str, Any] = {"sinks": floats(64), "window": 128}
    add("decode-sinks", "decode_kernel", decode(8, 64, **sinks), 80, 90)
    add("prefill-sinks", "prefill_kernel", prefill(8, 64, **sinks), 80, 90)
    add("decode-float32", "decode_kernel", decode(4, 128, dtype=single), 90)
    add("prefill-float32", "prefill_kernel", prefill(4, 128, dtype=single), 90)
    add("decode-head512", "decode_kernel", decode(8, 512))
    add("prefill-head512", "prefill_kernel", prefill(8, 512))
    add("merge-head512", "merge_kernel", decode(8, 512), 80, 90, rare=True)
    add("decode-shares-head512", "decode_kernel", decode(8, 512, **shared), 80, 89, 90, rare=True)
    sunk: dict[str, Any] = {"sinks": floats(64), **RARE}
    add("decode-rare-head512", "decode_kernel", decode(5, 512, **sunk), 80, 89, 90, rare=True)
    for name, group, options in (("splits", 16, {}), ("rare", 5, sunk)):
        launches = prefill(group, 512, splits=8, **options)
        add(f"prefill-{name}-head512", "prefill_kernel", launches, 80, 89, 90, 100, rare=True)
    add("decode-head320", "decode_kernel", decode(8, 320, dtype=half), 80, 89, 90, rare=True)
    launches = prefill(8, 320, dtype=half)
    add("prefill-head320", "prefill_kernel", launches, 80, 89, 90, 100, rare=True)
    add("decode-head512-float32", "decode_kernel", decode(8, 512, dtype=single), 89, rare=True)
    add("prefill-head512-float32", "prefill_kernel", prefill(8, 512, dtype=single), 89, rare=True)
    launches = rope(16, 512, norms=True, values=True)
    add("rope-head512", "rope_cache_kernel", launches, 80, 90, rare=True)
    add("rope-norm", "rope_cache_kernel", rope(32, 128, norms=True), 80, 90, 100)
    add("rope-head80", "rope_cache_kernel", rope(32, 80, norms=False), 90)
    for name, tokens in (("few", 16), ("many", 1024)):
        for kernel in ("gate_up_kernel", "down_kernel"):
            where = CAPABILITIES if kernel == "gate_up_kernel" else (80, 90)
            add(
                f"experts-{name}-{kernel[:4]}",
                kernel,
                experts_launches(tokens, torch.bfloat16),
                *where,
            )
    for kernel in ("sort_kernel", "tiles_kernel", "sum_kernel"):
        launches = experts_launches(16, torch.bfloat16)
        add(f"experts-{kernel.removesuffix('_kernel')}", kernel, launches, 90)
    add("experts-routing", "routing_kernel", routing_launches, 90)
    clamped = experts_launches(1024, half, limit=7.0)
    add("experts-clamped", "gate_up_kernel", clamped, 80, 90)
    add("experts-biased", "down_kernel", clamped, 90)
    add("experts-gelu", "gate_up_kernel", experts_launches(1024, half, gelu=True), 90)
    add("experts-float32", "gate_up_kernel", experts_launches(1024, single), 90)
    add("norm-add-1024", "norm_kernel", rms_norm(1024, add=True), 90)
    add("norm-add-4096", "norm_kernel", rms_norm(4096, add=True), 80, 100)
    add("norm-16384", "norm_kernel", rms_norm(16384, add=False), 90)
    add("silu-mul", "gated_mul_kernel", silu_mul, 80, 90, 100)
    add("gelu-mul", "gated_mul_kernel", gelu_mul, 90)
    add("softcap", "softcap_kernel", softcap, 90)
    add("norm-scaled", "norm_kernel", scaled_norm, 90)
    add("rope-scaled", "rope_cache_kernel", rope(32, 128, norms=True, tables=2), 90)
    delta = gated_delta_launches(torch.bfloat16)
    add("delta-chunk", "delta_chunk_kernel", delta, 80, 90, 100)
    add("delta-token", "delta_token_kernel", delta, 90, 100)
    alone = gated_delta_launches(torch.bfloat16, mixed=False)
    add("delta-decode", "delta_token_kernel", alone, 80, 90)
    add("delta-float32", "delta_token_kernel", gated_delta_launches(single), 90)
    for kernel in ("conv_token_kernel", "conv_chunk_kernel", "conv_state_kernel"):
        add(kernel.removesuffix("_kernel"), kernel, causal_conv_launches, 90)
    add("gated-norm", "gated_norm_kernel", gated_norm_launches, 90)
    add("sigmoid-mul", "sigmoid_mul_kernel", sigmoid_mul, 90)
    add("norm-sum-scaled", "norm_kernel", sum_scaled_norm, 90)
    add("rope-values", "rope_cache_kernel", rope(32, 256, norms=True, values=True), 90)
    add("rope-queries", "rope_cache_kernel", rope_of_queries, 90)
    add("step-state", "decode_inputs_kernel", decode_inputs_launches, 80, 90, 100)
    for dtype, name in ((torch.bfloat16, "bf16"), (single, "fp32")):
        where = (80, 90, 100) if dtype == single else (90,)
        add(f"sample-chunks-{name}", "chunk_kernel", sample(151_936, dtype), *where)
        add(f"sample-choose-{name}", "choose_kernel", sample(151_936, dtype), *where)
    return found
