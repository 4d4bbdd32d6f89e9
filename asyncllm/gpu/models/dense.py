"""build_decoder: the dense decoder of Llama, Mistral and Qwen from a configuration and weights."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from asyncllm.checkpoint.model_config import ModelConfig
from asyncllm.core.kv_cache_spec import KVCacheSpec
from asyncllm.gpu.kv_cache import KVGroup
from asyncllm.gpu.models.architectures import parameters
from asyncllm.gpu.models.decoder import Decoder
from asyncllm.gpu.models.layers import AttentionKind, AttentionMixer, DecoderLayer, GatedMLP
from asyncllm.gpu.ops.base import (
    Attention,
    AttentionShape,
    Embedding,
    Linear,
    RMSNorm,
    block_layout,
)
from asyncllm.gpu.ops.linear_weights import LinearWeights
from asyncllm.gpu.ops.quantise import Conversion
from asyncllm.gpu.ops.torch_ops import TorchOps


def attention_shape(model: ModelConfig) -> AttentionShape:
    """The attention geometry of every layer."""
    return AttentionShape(model.num_heads, model.num_kv_heads, model.head_dim, model.head_dim**-0.5)


def attention_kind(model: ModelConfig, layer: int) -> AttentionKind:
    """The kind of one layer's attention, in one KV group with all others: layers with a window
    keep the KV of all tokens, and mask it."""
    slides = bool(model.sliding_layers) and model.sliding_layers[layer]
    return AttentionKind(attention_shape(model), model.sliding_window if slides else None)


def attention_kinds(model: ModelConfig) -> tuple[AttentionKind, ...]:
    """The kinds of attention that the layers have, each once."""
    return tuple(dict.fromkeys(attention_kind(model, i) for i in range(model.num_layers)))


def kv_groups(
    model: ModelConfig, attention: Mapping[AttentionKind, Attention], block_size: int
) -> list[KVGroup]:
    """The KV groups, in the block layout that their attention chooses.

    Raises:
        ValueError: kinds of attention in one group whose layouts differ.
    """
    layouts = {block_layout(each, kind.shape, block_size) for kind, each in attention.items()}
    if len(layouts) > 1:
        raise ValueError(f"all layers share KV blocks: expected one layout, not {layouts}")
    return [KVGroup(KVCacheSpec(tuple(range(model.num_layers)), block_size), layouts.pop())]


def build_decoder(
    model: ModelConfig,
    ops: TorchOps,
    attention: Mapping[AttentionKind, Attention],
    weights: Iterable[tuple[str, Tensor | LinearWeights]],
    convert: Conversion | None = None,
    dtype: torch.dtype | None = None,
) -> Decoder:
    """Builds the decoder that ``architectures.parameters`` describes.

    Args:
        attention: of each of ``attention_kinds``.
        weights: ``(name, tensor)`` in the order of ``architectures.parameters``, or a linear
            layer's weights in a form that ``ops`` takes. Each is taken over as it comes, so that
            a packing backend never holds two copies of more than one of them.
        convert: what becomes of the weights of every linear layer, the output head included,
            before ``ops`` takes them: a quantisation.
        dtype: of the model, where the embedding does not say it because it is packed.
    """
    builder = _Builder(model, ops, attention, weights, convert)
    embedding, lm_head = builder.embedding(dtype)
    layers = [builder.layer(index) for index in range(model.num_layers)]
    norm = builder.norm("norm")
    lm_head = lm_head or builder.linear("lm_head")
    builder.finish()
    ropes = [(model.rope, model.head_dim)]
    return Decoder(model, ops, attention, ropes, embedding, layers, norm, lm_head)


class _Builder:
    """Takes the weights one after the other and makes ops of them."""

    def __init__(
        self,
        model: ModelConfig,
        ops: TorchOps,
        attention: Mapping[AttentionKind, Attention],
        weights: Iterable[tuple[str, Tensor | LinearWeights]],
        convert: Conversion | None,
    ) -> None:
        self.model, self.ops, self.attention, self.convert = model, ops, attention, convert
        self.weights = iter(weights)
        self.due = deque(parameter.name for parameter in parameters(model))

    def take_weights(self, name: str) -> Tensor | LinearWeights:
        found, weights = next(self.weights)
        if not found == name == self.due.popleft():
            raise RuntimeError(f"weights out of order: {found} where {name} is due")
        return weights

    def take(self, name: str) -> Tensor:
        weights = self.take_weights(name)
        assert isinstance(weights, Tensor)
        return weights

    def take_if_due(self, name: str) -> Tensor | None:
        return self.take(name) if self.due[0] == name else None

    def finish(self) -> None:
        """Runs the weights to their end, which closes the files they come from."""
        for name, _ in self.weights:
            raise RuntimeError(f"weights left over: {name}")

    def embedding(self, dtype: torch.dtype | None) -> tuple[Embedding, Linear | None]:
        """The embedding, and the output head where that is tied to it."""
        if not self.model.tie_word_embeddings:
            return self.ops.embedding(self.take("embed.weight")), None
        weights = self.take_weights("embed.weight")
        if isinstance(weights, Tensor):
            dtype, weights = weights.dtype, LinearWeights(weights)
        assert dtype is not None
        return self.ops.tied_embedding(self._converted(weights, "lm_head"), dtype)

    def norm(self, name: str) -> RMSNorm:
        return self.ops.rms_norm(self.take(f"{name}.weight"), self.model.rms_norm_eps)

    def linear(self, name: str) -> Linear:
        weights = self.take_weights(f"{name}.weight")
        rest: dict[str, Any] = {}
        while self.due and self.due[0].startswith(f"{name}."):
            due = self.due[0]
            rest[due.removeprefix(f"{name}.")] = self.take(due)
        if isinstance(weights, Tensor):
            weights = LinearWeights(weights, **rest)
        else:
            weights = replace(weights, **rest)
        return self.ops.linear(self._converted(weights, name))

    def _converted(self, weights: LinearWeights, name: str) -> LinearWeights:
        if self.convert is None:
            return weights
        return (self.convert.head if name == "lm_head" else self.convert.linear)(weights)

    def layer(self, index: int) -> DecoderLayer:
        name, ops, kind = f"layers.{index}", self.ops, attention_kind(self.model, index)
        return DecoderLayer(
            kind=kind,
            input_norm=self.norm(f"{name}.input_norm"),
            mixer=AttentionMixer(
                qkv=self.linear(f"{name}.qkv"),
                rope_and_cache=ops.rope_and_cache(
                    kind.shape,
                    self.take_if_due(f"{name}.q_norm.weight"),
                    self.take_if_due(f"{name}.k_norm.weight"),
                    self.model.rms_norm_eps,
                ),
                attention=self.attention[kind],
                o=self.linear(f"{name}.o"),
                attention_index=list(self.attention).index(kind),
                rope_index=0,
                kv_index=index,
            ),
            post_norm=self.norm(f"{name}.post_norm"),
            mlp=GatedMLP(self.linear(f"{name}.gate_up"), ops.silu_mul, self.linear(f"{name}.down")),
        )
