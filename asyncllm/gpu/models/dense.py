"""build_decoder: the dense decoder that a configuration describes, from its weights."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from asyncllm.checkpoint.experts_config import ExpertsConfig
from asyncllm.checkpoint.model_config import ModelConfig
from asyncllm.gpu.kv_cache import KVGroup
from asyncllm.gpu.kv_groups import (
    LayerCache,
    LayerGroup,
    group_layers,
    make_kv_groups,
    with_groups,
)
from asyncllm.gpu.models.architectures import parameters
from asyncllm.gpu.models.decoder import Decoder
from asyncllm.gpu.models.experts import ExpertsBeside, ExpertsMLP
from asyncllm.gpu.models.layer_inputs import InputLayer, LayerInputs
from asyncllm.gpu.models.layers import (
    AttentionKind,
    AttentionMixer,
    DecoderLayer,
    GatedMLP,
    Layer,
    Mixer,
    NormedMixer,
    NormedMLP,
    SharedAttentionMixer,
)
from asyncllm.gpu.models.rope import RopeSpec, rotary_order
from asyncllm.gpu.ops.base import (
    Attention,
    AttentionShape,
    Embedding,
    Linear,
    RMSNorm,
)
from asyncllm.gpu.ops.experts import ExpertsWeights
from asyncllm.gpu.ops.linear_weights import LinearWeights
from asyncllm.gpu.ops.quantise import Conversion
from asyncllm.gpu.ops.routing import RouterWeights
from asyncllm.gpu.ops.torch_ops import TorchOps


def attention_shape(model: ModelConfig, layer: int = 0) -> AttentionShape:
    """The attention geometry of a layer."""
    sizes = model.layer(layer)
    scale = sizes.head_dim**-0.5 if model.attention_scale is None else model.attention_scale
    return AttentionShape(
        model.num_heads,
        sizes.num_kv_heads,
        sizes.head_dim,
        scale,
        model.attention_softcap,
        model.sinks,
    )


def attention_kind(model: ModelConfig, layer: int) -> AttentionKind:
    """The kind of one layer's attention, without its KV group."""
    slides = bool(model.sliding_layers) and model.sliding_layers[layer]
    return AttentionKind(attention_shape(model, layer), model.sliding_window if slides else None)


def kv_indices(model: ModelConfig) -> list[int]:
    """Of each layer, the index of the cache that it attends to: one that attends to another's keys
    has none of its own."""
    indices: list[int] = []
    for layer in range(model.num_layers):
        source = model.layer(layer).kv_layer
        indices.append(max(indices, default=-1) + 1 if source is None else indices[source])
    return indices


def _layer_groups(model: ModelConfig) -> tuple[list[AttentionKind], list[LayerGroup]]:
    """The kind of each layer's attention, and the KV groups of the caches."""
    kinds = [attention_kind(model, layer) for layer in range(model.num_layers)]
    caches = [LayerCache.of(kinds[layer]) for layer in _writers(model)]
    groups = group_layers(caches, model.max_position_embeddings)
    return with_groups(kinds, kv_indices(model), groups), groups


def _writers(model: ModelConfig) -> list[int]:
    """The layers that have keys and values of their own."""
    return [layer for layer in range(model.num_layers) if model.layer(layer).kv_layer is None]


def attention_kinds(model: ModelConfig) -> tuple[AttentionKind, ...]:
    """The kinds of attention that the layers have, each once."""
    return tuple(dict.fromkeys(_layer_groups(model)[0]))


def kv_groups(
    model: ModelConfig, attention: Mapping[AttentionKind, Attention], block_size: int
) -> list[KVGroup]:
    """The KV groups, in the block layout that their attention chooses."""
    kinds, groups = _layer_groups(model)
    writers = [kinds[layer] for layer in _writers(model)]
    return make_kv_groups(groups, writers, attention, block_size)


def rope_specs(model: ModelConfig) -> tuple[RopeSpec, ...]:
    """The RoPE of each layer."""
    ropes = model.layer_ropes or (model.rope,) * model.num_layers
    sizes = (model.layer(layer).head_dim for layer in range(model.num_layers))
    return tuple(map(RopeSpec, ropes, sizes, (model.rotary_dim,) * model.num_layers))


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
    inputs = builder.layer_inputs()
    layers = [builder.layer(index) for index in range(model.num_layers)]
    norm = builder.last_norm()
    lm_head = lm_head or builder.linear("lm_head")
    builder.finish()
    cap = model.logits_softcap
    return Decoder(
        model, ops, attention, builder.ropes, embedding, layers, norm, lm_head, cap, inputs
    )


class _Builder:
    """Takes the weights one after the other and makes ops of them.

    Attributes:
        scalar: of the hidden states behind the last layer that was made: the norm that follows
            multiplies by it.
    """

    scalar = 1.0

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
        self.layer_ropes = rope_specs(model)
        self.ropes = list(dict.fromkeys(self.layer_ropes))
        self.order = rotary_order(
            model.head_dim,
            model.rotary_dim or model.head_dim,
            interleaved=model.interleaved_rope,
        )
        self.kinds, self.kv_indices = _layer_groups(model)[0], kv_indices(model)
        self.lenders = {model.layer(layer).kv_layer for layer in range(model.num_layers)}

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
            values = self.take("embed.weight")
            return self.ops.embedding(values, self._embedding_multiplier(values.dtype)), None
        weights = self.take_weights("embed.weight")
        if isinstance(weights, Tensor):
            dtype, weights = weights.dtype, LinearWeights(weights)
        assert dtype is not None
        multiplier = self._embedding_multiplier(dtype)
        return self.ops.tied_embedding(self._converted(weights, "lm_head"), dtype, multiplier)

    def _embedding_multiplier(self, dtype: torch.dtype) -> float:
        multiplier = self.model.embedding_multiplier
        if self.model.rounds_embedding_multiplier:
            multiplier = torch.tensor(multiplier, dtype=dtype).item()
        return multiplier

    def norm_weight(self, name: str) -> Tensor | None:
        """None where the model has no such norm."""
        weight = self.take_if_due(f"{name}.weight")
        offset = self.model.norm_offset
        return weight if weight is None or not offset else weight + offset

    def norm(self, name: str, scale: float = 1.0) -> RMSNorm | None:
        weight, model = self.norm_weight(name), self.model
        if weight is None:
            return None
        return self.ops.rms_norm(weight, model.rms_norm_eps, model.residual_multiplier, scale)

    def due_norm(self, name: str, factor: float = 1.0) -> RMSNorm:
        """A norm that the model has, of which the residual takes no part."""
        weight = self.norm_weight(name)
        assert weight is not None
        return self.ops.rms_norm(weight * factor, self.model.rms_norm_eps)

    def norm_before(self, name: str, scale: float = 1.0) -> RMSNorm:
        """The norm before a block, or what adds its input to the residual."""
        multiplier = self.model.residual_multiplier
        return self.norm(name, scale) or self.ops.residual_add(multiplier, scale)

    def last_norm(self) -> RMSNorm:
        """With the divisor of the logits, which are linear in what it returns."""
        weight, model = self.norm_weight("norm"), self.model
        assert weight is not None
        if model.logits_divisor != 1.0:
            weight = weight / model.logits_divisor
        eps, multiplier = model.rms_norm_eps, model.residual_multiplier
        return self.ops.rms_norm(weight, eps, multiplier, self.scalar)

    def linear(self, name: str, heads: int = 0) -> Linear:
        """A linear layer; see ``linear_weights``."""
        return self.ops.linear(self.linear_weights(name, heads))

    def linear_weights(self, name: str, heads: int = 0) -> LinearWeights:
        """Those of a linear layer, whose first rows are of so many heads that RoPE rotates."""
        weights = self.take_weights(f"{name}.weight")
        rest: dict[str, Any] = {}
        while self.due and self.due[0].startswith(f"{name}."):
            due = self.due[0]
            rest[due.removeprefix(f"{name}.")] = self.take(due)
        if isinstance(weights, Tensor):
            weights = LinearWeights(weights, **rest)
        else:
            weights = replace(weights, **rest)
        if heads and self.order is not None:
            weights = self._heads_in_rotary_order(weights, heads)
        return self._converted(weights, name)

    def _converted(self, weights: LinearWeights, name: str) -> LinearWeights:
        if self.convert is None:
            return weights
        return (self.convert.head if name == "lm_head" else self.convert.linear)(weights)

    def _heads_in_rotary_order(self, weights: LinearWeights, heads: int) -> LinearWeights:
        """Scales and zeros, where there are any, are those of a row."""
        parts = {name: getattr(weights, name) for name in ("values", "bias", "scales", "zeros")}
        ordered = {
            name: self.in_rotary_order(part, heads)
            for name, part in parts.items()
            if part is not None
        }
        return replace(weights, **ordered)

    def in_rotary_order(self, values: Tensor, heads: int) -> Tensor:
        """``values`` with the rows of its first heads in the order in which they are rotated."""
        if self.order is None:
            return values
        starts = torch.arange(heads).unsqueeze(1) * len(self.order)
        rows = torch.cat(
            (
                (starts + self.order).flatten(),
                torch.arange(len(starts) * len(self.order), len(values)),
            )
        )
        return values[rows.to(values.device)]

    def head_norm(self, name: str) -> Tensor | None:
        """The weight of a norm of one head or of all, in the order in which they are rotated."""
        weight = self.norm_weight(name)
        if weight is None:
            return None
        return self.in_rotary_order(weight, len(weight) // self.model.head_dim)

    def mixer(self, index: int, kind: AttentionKind) -> Mixer:
        own = self.model.layer(index).kv_layer is None
        mixer = self.attention_mixer(index, kind) if own else self.shared_mixer(index, kind)
        norm = self.norm(f"layers.{index}.mixer_norm")
        return mixer if norm is None else NormedMixer(mixer, norm)

    def attention_mixer(self, index: int, kind: AttentionKind) -> AttentionMixer:
        name, model, shape = f"layers.{index}", self.model, kind.shape
        qkv = self.linear(f"{name}.qkv", shape.num_heads + shape.num_kv_heads)
        q_norm, k_norm = self.head_norm(f"{name}.q_norm"), self.head_norm(f"{name}.k_norm")
        v_norm = None
        if model.value_norm:
            assert q_norm is not None
            v_norm = torch.ones_like(q_norm)
        norms = (q_norm, k_norm, model.rms_norm_eps, v_norm)
        return AttentionMixer(
            qkv=qkv,
            rope_and_cache=self.ops.rope_and_cache(shape, *norms),
            lends=index in self.lenders,
            **self.rest_of_mixer(index, kind),
        )

    def shared_mixer(self, index: int, kind: AttentionKind) -> SharedAttentionMixer:
        name, shape = f"layers.{index}", kind.shape
        q, norm = self.linear(f"{name}.qkv", shape.num_heads), self.head_norm(f"{name}.q_norm")
        rope = self.ops.rope(shape, norm, self.model.rms_norm_eps)
        return SharedAttentionMixer(q=q, rope=rope, **self.rest_of_mixer(index, kind))

    def rest_of_mixer(self, index: int, kind: AttentionKind) -> dict[str, Any]:
        """What attention has whether or not it has keys of its own."""
        name = f"layers.{index}"
        return {
            "attention": self.attention[kind],
            "o": self.linear(f"{name}.o"),
            "attention_index": list(self.attention).index(kind),
            "rope_index": self.ropes.index(self.layer_ropes[index]),
            "kv_index": self.kv_indices[index],
            "sinks": (self.take(f"{name}.sinks"),) if self.model.sinks else (),
        }

    def mlp(self, index: int) -> Callable[[Tensor], Tensor]:
        name, experts = f"layers.{index}", self.model.experts
        if experts is not None and experts.layers[index]:
            mlp = self.experts(name, experts)
        else:
            mlp = self.gated_mlp(name)
        norm = self.norm(f"{name}.mlp_norm")
        return mlp if norm is None else NormedMLP(mlp, norm)

    def mlp_and_experts(
        self, name: str, config: ExpertsConfig
    ) -> tuple[Callable[[Tensor], Tensor], ExpertsBeside]:
        """An MLP, and what is beside it."""
        experts = self.experts(name, config)
        router_norm = self.due_norm(f"{name}.router.norm", self.model.hidden_size**-0.5)
        norm, mixed_norm, mlp_norm = (
            self.due_norm(f"{name}.experts.{each}") for each in ("norm", "mixed_norm", "mlp_norm")
        )
        mlp = NormedMLP(self.gated_mlp(name), mlp_norm)
        whole = self.due_norm(f"{name}.mlp_norm")
        return mlp, ExpertsBeside(router_norm, norm, experts, mixed_norm, whole)

    def gated_mlp(self, name: str) -> GatedMLP:
        ops = self.ops
        activation = ops.gelu_mul if self.model.activation == "gelu_tanh" else ops.silu_mul
        return GatedMLP(self.linear(f"{name}.gate_up"), activation, self.linear(f"{name}.down"))

    def experts(self, name: str, config: ExpertsConfig) -> ExpertsMLP:
        ops, count = self.ops, config.routing.num_experts
        # As it is: rounded weights would choose other experts.
        rows = LinearWeights(
            self.take(f"{name}.router.weight"), self.take_if_due(f"{name}.router.bias")
        )
        correction = self.take_if_due(f"{name}.correction")
        weights = RouterWeights(rows, correction, self.take_if_due(f"{name}.expert_scale"))
        routing = ops.routing(config.routing, weights)
        parts = [self.linear_weights(f"{name}.experts.{part}") for part in ("gate_up", "down")]
        experts = ops.experts(
            ExpertsWeights(count, *parts), config.activation, config.routing.top_k
        )
        del parts
        mlp = ExpertsMLP(routing, experts)
        if config.shared_gate:
            mlp.gate = self.linear(f"{name}.shared.gate")
        if config.shared_size:
            mlp.shared = self.gated_mlp(f"{name}.shared")
        return mlp

    def layer_inputs(self) -> LayerInputs | None:
        """The factors of Gemma 4: the table's is the root of its size, the projection's that of the
        inverse of the hidden size, and that of their sum the root of 1/2. The second is the norm's
        to take: of x * c with eps it is the norm of x with eps / c ** 2."""
        inputs, model, ops = self.model.layer_input, self.model, self.ops
        if inputs is None:
            return None
        values = self.take("layer_inputs.table.weight")
        multiplier = torch.tensor(inputs.size**0.5, dtype=values.dtype).item() * 0.5**0.5
        projection = self.linear("layer_inputs.projection")
        weight = self.norm_weight("layer_inputs.norm")
        assert weight is not None
        norm = ops.rms_norm(weight * 0.5**0.5, model.rms_norm_eps * model.hidden_size)
        table, add = ops.embedding(values, multiplier), ops.residual_add()
        return LayerInputs(table, projection, norm, add, model.num_layers)

    def layer(self, index: int) -> Layer:
        name, kind, model = f"layers.{index}", self.kinds[index], self.model
        experts = model.experts if model.experts and model.experts.layers[index] else None
        sizes = (model.layer(index), index in self.lenders) if model.layers else ()
        apart = (*sizes, "experts") if experts else sizes
        input_norm = self.norm_before(f"{name}.input_norm", self.scalar)
        mixer, post_norm = self.mixer(index, kind), self.norm_before(f"{name}.post_norm")
        beside = None
        if experts is not None and experts.beside:
            mlp, beside = self.mlp_and_experts(name, experts)
        else:
            mlp = self.mlp(index)
        layer = DecoderLayer(
            (kind, *apart) if apart else kind, input_norm, mixer, post_norm, mlp, beside
        )
        whole = layer if model.layer_input is None else self.input_layer(index, layer)
        self.scalar = self.take(f"{name}.scalar").item() if model.layer_scalar else 1.0
        return whole

    def input_layer(self, index: int, layer: Layer) -> InputLayer:
        name, ops = f"layers.{index}.input", self.ops
        activation = ops.gelu_mul if self.model.activation == "gelu_tanh" else ops.silu_mul
        return InputLayer(
            layer,
            add=ops.residual_add(self.model.residual_multiplier),
            gate=self.linear(f"{name}.gate"),
            activation=activation,
            projection=self.linear(f"{name}.projection"),
            norm=self.due_norm(f"{name}.norm"),
            index=index,
        )
