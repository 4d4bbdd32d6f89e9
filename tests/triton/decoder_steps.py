"""A small decoder run step by step on either backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncllm.checkpoint.families import SANDWICH_NORM_TENSOR_NAMES
from asyncllm.checkpoint.layer_config import LayerConfig, PerLayerInputConfig
from asyncllm.checkpoint.linear_attention_config import LinearAttentionConfig
from asyncllm.checkpoint.model_config import ModelConfig, RopeConfig
from asyncllm.core.kv_cache_spec import KVCacheSpec
from asyncllm.gpu.batch.step_inputs import KVGroupInputs, StepInputs
from asyncllm.gpu.kv_cache import KVCache
from asyncllm.gpu.models.attention_kinds import attention_kinds, kv_plan
from asyncllm.gpu.models.decoder import Decoder
from asyncllm.gpu.models.dense import build_decoder
from asyncllm.gpu.ops.base import BlockLayout
from asyncllm.gpu.ops.triton.attention import TritonAttention
from asyncllm.gpu.ops.triton.op_set import TritonOps
from asyncllm.gpu.weights import dummy_weights
from tests.dummy_runner import MODEL
from tests.static_runner import CPU, make_decoder
from tests.step_inputs import planned

BLOCK_SIZE = 16

STEPS = [
    ((0, 33), (0, 5), (0, 39)),
    ((33, 1), (5, 1), (39, 10)),
    ((34, 1), (6, 1), (49, 1)),
]
"""Per step and row: tokens in the cache before it, and tokens of the step."""


def small_model() -> ModelConfig:
    """Qwen3's shape in small: QK-norm, grouped heads, a sliding window in one layer."""
    return replace(
        MODEL, architecture="Qwen3ForCausalLM", vocab_size=300, hidden_size=96,
        intermediate_size=160, num_heads=6, head_dim=32, max_position_embeddings=128,
        rms_norm_eps=1e-6, rope=RopeConfig(theta=10_000.0), qk_norm=True, sliding_window=24,
        sliding_layers=(False, True),
    )  # fmt: skip


def wide_fields(num_kv_heads: int) -> dict[str, Any]:
    """Gemma 4's layers in small: full ones with heads of 512, whose RoPE turns a quarter, and half
    as many key/value heads; a norm of values; last layers that read another's KV."""
    sliding = LayerConfig(num_kv_heads, 32, 160)
    full = LayerConfig(num_kv_heads // 2, 512, 160, value_is_key=True)
    shared = (replace(sliding, kv_layer=0), replace(full, kv_layer=1, value_is_key=False))
    return {
        "num_layers": 4,
        "layers": (sliding, full, *shared),
        "sliding_layers": (True, False) * 2,
        "layer_ropes": (RopeConfig(), RopeConfig(1e6, "proportional", rotated_fraction=0.25)) * 2,
        "layer_input": PerLayerInputConfig(8, 300),
        "names": SANDWICH_NORM_TENSOR_NAMES,
        "activation": "gelu_tanh",
        "value_norm": True,
        "float32_norm_weights": True,
        "layer_scalar": True,
        "attention_scale": 1.0,
        "logits_softcap": 30.0,
    }


def hybrid_fields(*linear: bool) -> dict[str, Any]:
    """Qwen3.5's layers in small: a gated delta rule where ``linear`` says so, else attention whose
    output has a gate."""
    return {
        "num_layers": len(linear),
        "num_heads": 2,
        "num_kv_heads": 1,
        "sliding_layers": (),
        "sliding_window": None,
        "gated_attention": True,
        "norm_offset": 1.0,
        "float32_norm_weights": True,
        "linear_attention": LinearAttentionConfig(linear, 1, 2, 8, 12, 4),
    }


class BlocksFirst(TritonAttention):
    """With a layout of its own: K and V of a block lie side by side."""

    def block_layout(self, block_size: int) -> BlockLayout:
        shape = (2, block_size, self.shape.num_kv_heads, self.shape.head_dim)
        return BlockLayout(shape, order=(1, 0, 2, 3, 4))


def triton_decoder(
    model: ModelConfig, dtype: torch.dtype, max_len: int = 128, *,
    device: torch.device = CPU, capability: int | None = 80, num_sms: int | None = 16,
    made: type[TritonAttention] = TritonAttention,
) -> Decoder:  # fmt: skip
    """With random weights, which every device has alike."""
    attention = {
        kind: made(kind.shape, dtype, device, capability=capability, num_sms=num_sms)
        for kind in attention_kinds(model)
    }
    weights = ((name, tensor.to(device)) for name, tensor in dummy_weights(model, dtype, CPU))
    decoder = build_decoder(model, TritonOps(), attention, weights)
    decoder.set_max_positions(max_len)
    return decoder


def run_steps(
    backend: str,
    dtype: torch.dtype,
    device: torch.device,
    capability: int | None = None,
    made: type[TritonAttention] = TritonAttention,
) -> list[Tensor]:
    """Logits of each step's rows at their last token, on the CPU."""
    model, sms = small_model(), 16 if capability else None
    if backend == "triton":
        decoder = triton_decoder(
            model, dtype, device=device, capability=capability, num_sms=sms, made=made
        )
    else:
        weights = dummy_weights(model, dtype, CPU)
        there = ((name, tensor.to(device)) for name, tensor in weights)
        decoder = make_decoder(model, there, dtype)
    groups = kv_plan(model).kv_groups(decoder.attention, BLOCK_SIZE)
    cache = KVCache(groups, 56, dtype, device)
    if not any(each.needs_zeroed_blocks for each in decoder.attention.values()):
        cache.tensor.fill_(torch.nan)
    random = np.random.default_rng(0)
    blocks = random.permutation(55)[:48].reshape(2, 3, 8).astype(np.int32) + 1
    tables = [(group.spec, table) for group, table in zip(groups, blocks, strict=True)]
    tokens = random.integers(0, model.vocab_size, (3, 128))
    with torch.inference_mode():
        return [
            decoder.forward(_inputs(step, tables, tokens, device), cache).logits.float().cpu()
            for step in STEPS
        ]


def _inputs(
    step: tuple[tuple[int, int], ...],
    tables: Sequence[tuple[KVCacheSpec, np.ndarray]],
    tokens: np.ndarray,
    device: torch.device,
) -> StepInputs:
    """With the null block before the windows."""
    starts, counts = np.array(step).T
    rows = np.repeat(np.arange(len(step)), counts)
    positions = np.concatenate([np.arange(start, start + count) for start, count in step])

    def there(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device)

    groups = []
    for spec, blocks in tables:
        own = blocks
        if spec.window is not None:
            first_seen = np.maximum(starts - spec.window + 1, 0) // BLOCK_SIZE
            own = np.where(np.arange(blocks.shape[1]) < first_seen[:, None], 0, blocks)
        slots = own[rows, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE
        slots += positions % BLOCK_SIZE
        groups.append(KVGroupInputs(there(slots), there(own), own, BLOCK_SIZE))
    found = planned(
        groups[0].host_table, np.arange(len(step)), starts, counts, BLOCK_SIZE, device,
        tokens=there(tokens[rows, positions]), positions=there(positions),
        output_indices=there(np.cumsum(counts) - 1),
    )  # fmt: skip
    return replace(found, groups=groups)
