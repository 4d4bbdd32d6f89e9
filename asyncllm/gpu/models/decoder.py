"""The decoder: one implementation of the dense transformer for every architecture.

Written once against the op set. What distinguishes the architectures is in ModelConfig and
the table in ``architectures``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from asyncllm.checkpoint.model_config import ModelConfig
from asyncllm.gpu.batch.decode_inputs import DecodeInputs
from asyncllm.gpu.batch.step_inputs import ModelInputs
from asyncllm.gpu.kv_cache import KVCache
from asyncllm.gpu.models.rope import RopeTable
from asyncllm.gpu.ops.base import (
    Attention,
    AttentionShape,
    Linear,
    OpSet,
    RMSNorm,
    RopeAndCache,
)


@dataclass(slots=True)
class DecoderLayer:
    """The ops of one layer. ``window`` is the number of positions a token sees, or None."""

    input_norm: RMSNorm
    qkv: Linear
    rope_and_cache: RopeAndCache
    o: Linear
    post_norm: RMSNorm
    gate_up: Linear
    down: Linear
    window: int | None


def attention_shape(model: ModelConfig) -> AttentionShape:
    return AttentionShape(model.num_heads, model.num_kv_heads, model.head_dim, model.head_dim**-0.5)


def attention_windows(model: ModelConfig) -> tuple[int | None, ...]:
    """Per layer the number of positions that a token sees, or None."""
    sliding = model.sliding_layers or (False,) * model.num_layers
    return tuple(model.sliding_window if slides else None for slides in sliding)


class Decoder:
    """Token ids to logits, on a KV cache.

    Args:
        model: shapes.
        ops: backend of everything but attention.
        attention: backend of attention.
        weights: ``(name, tensor)`` in the order of ``architectures.parameters``. Each is
            taken over as it comes, so that a packing backend never holds two copies of more
            than one of them.
    """

    def __init__(
        self,
        model: ModelConfig,
        ops: OpSet,
        attention: Attention,
        weights: Iterable[tuple[str, Tensor]],
    ) -> None:
        self.model = model
        self.ops = ops
        self.attention = attention
        self.rope: RopeTable | None = None
        builder = _Builder(model, ops, weights)
        self.embedding = builder.take("embed.weight")
        self.layers = [builder.layer(index) for index in range(model.num_layers)]
        self.norm = ops.rms_norm(builder.take("norm.weight"), model.rms_norm_eps)
        self.lm_head = builder.lm_head(self.embedding)
        builder.finish()
        self.windows = {layer.window for layer in self.layers}

    def set_max_positions(self, count: int) -> None:
        """Makes the rotary table for positions 0 to ``count - 1``."""
        weight = self.embedding
        self.rope = RopeTable(
            self.model.rope, self.model.head_dim, count, weight.dtype, weight.device
        )

    def forward(self, inputs: Sequence[ModelInputs], cache: KVCache) -> Tensor:
        """Runs a step, whose inputs are given per KV group, and writes its KV.

        Returns:
            Logits ``[S, vocab_size]`` in the model's dtype, at ``inputs.logits_indices``.
        """
        plans = [{w: self.attention.plan(each, w) for w in self.windows} for each in inputs]
        return self._run(inputs, plans, cache, inputs[0].logits_indices)

    def decode(self, inputs: Sequence[DecodeInputs], cache: KVCache) -> Tensor:
        """Runs a decode step on buffers that stay where they are; reads nothing on the host.

        Returns:
            Logits ``[B, vocab_size]`` in the model's dtype; undefined for padded rows.
        """
        plans = [{w: self.attention.plan_decode(each, w) for w in self.windows} for each in inputs]
        return self._run(inputs, plans, cache, None)

    def _run(
        self,
        inputs: Sequence[ModelInputs] | Sequence[DecodeInputs],
        plans: Sequence[dict[int | None, Any]],
        cache: KVCache,
        logits_indices: Tensor | None,
    ) -> Tensor:
        if self.rope is None:
            raise RuntimeError("set_max_positions has to come first")
        rotary = self.ops.rotary(self.rope.table, inputs[0].positions)
        residual = F.embedding(inputs[0].token_ids, self.embedding)
        normed = self.layers[0].input_norm(residual)
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            store, group = cache.layers[index], cache.group_of[index]
            q, k, v = layer.rope_and_cache(
                layer.qkv(normed), rotary, store, inputs[group].slot_mapping
            )
            mixed = self.attention(q, k, v, store, plans[group][layer.window])
            if index == last and logits_indices is not None:
                # Past the last KV write only the rows that are sampled matter.
                if not len(logits_indices):
                    return residual.new_empty((0, self.model.vocab_size))
                mixed = mixed[logits_indices]
                residual = residual[logits_indices]
            normed, residual = layer.post_norm.add(layer.o(mixed), residual)
            mlp = layer.down(self.ops.silu_mul(layer.gate_up(normed)))
            norm = self.norm if index == last else self.layers[index + 1].input_norm
            normed, residual = norm.add(mlp, residual)
        return self.lm_head(normed)


class _Builder:
    """Takes the weights one after the other and makes ops of them."""

    def __init__(
        self, model: ModelConfig, ops: OpSet, weights: Iterable[tuple[str, Tensor]]
    ) -> None:
        self.model = model
        self.ops = ops
        self.weights = iter(weights)

    def take(self, name: str) -> Tensor:
        found, tensor = next(self.weights)
        if found != name:
            raise RuntimeError(f"weights out of order: {found} where {name} is due")
        return tensor

    def finish(self) -> None:
        """Runs the weights to their end, which closes the files they come from."""
        for name, _ in self.weights:
            raise RuntimeError(f"weights left over: {name}")

    def linear(self, name: str, bias: bool) -> Linear:
        weight = self.take(f"{name}.weight")
        return self.ops.linear(weight, self.take(f"{name}.bias") if bias else None)

    def layer(self, index: int) -> DecoderLayer:
        model, ops, name = self.model, self.ops, f"layers.{index}."
        eps = model.rms_norm_eps
        input_norm = ops.rms_norm(self.take(f"{name}input_norm.weight"), eps)
        qkv = self.linear(f"{name}qkv", model.attention_bias)
        q_norm = self.take(f"{name}q_norm.weight") if model.qk_norm else None
        k_norm = self.take(f"{name}k_norm.weight") if model.qk_norm else None
        return DecoderLayer(
            input_norm=input_norm,
            qkv=qkv,
            rope_and_cache=ops.rope_and_cache(attention_shape(model), q_norm, k_norm, eps),
            o=self.linear(f"{name}o", model.output_bias),
            post_norm=ops.rms_norm(self.take(f"{name}post_norm.weight"), eps),
            gate_up=self.linear(f"{name}gate_up", model.mlp_bias),
            down=self.linear(f"{name}down", model.mlp_bias),
            window=attention_windows(model)[index],
        )

    def lm_head(self, embedding: Tensor) -> Linear:
        if self.model.tie_word_embeddings:
            return self.ops.tied_linear(embedding)
        return self.linear("lm_head", False)
