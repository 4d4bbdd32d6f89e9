"""build_decoder: the dense decoder that a configuration describes, from its weights."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from asyncllm.checkpoint.experts_config import ExpertsConfig
from asyncllm.checkpoint.linear_attention_config import LinearAttentionConfig
from asyncllm.checkpoint.model_config import ModelConfig
from asyncllm.gpu.models.architectures import parameters
from asyncllm.gpu.models.attention_kinds import kv_indices, layer_groups, rope_specs
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
    OutputGate,
    SharedAttentionMixer,
)
from asyncllm.gpu.models.linear_attention import (
    GatedDeltaMixer,
    linear_attention_states,
    projection_rows,
)
from asyncllm.gpu.models.rope import rotary_order
from asyncllm.gpu.ops.base import Attention, AttentionShape, Embedding, Linear, RMSNorm
from asyncllm.gpu.ops.experts import ExpertsWeights
from asyncllm.gpu.ops.gated_delta import DeltaBiases
from asyncllm.gpu.ops.linear_weights import LinearWeights
from asyncllm.gpu.ops.quantise import Conversion
from asyncllm.gpu.ops.routing import RouterWeights
from asyncllm.gpu.ops.torch_ops import TorchOps
from asyncllm.gpu.state_cache import StateSpec


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
        model, ops, attention, builder.ropes, embedding, layers, norm, lm_head,
        logits_softcap=cap, states=builder.states, layer_inputs=inputs,
    )  # fmt: skip


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
        self.kinds, self.kv_indices = layer_groups(model)[0], kv_indices(model)
        self.lenders = {model.layer(layer).kv_layer for layer in range(model.num_layers)}
        self.states: list[StateSpec] = []

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

    def linear(self, name: str, order: Tensor | None = None) -> Linear:
        """A linear layer; see ``linear_weights``."""
        return self.ops.linear(self.linear_weights(name, order))

    def linear_weights(self, name: str, order: Tensor | None = None) -> LinearWeights:
        """Those of a linear layer, with its rows in ``order``; None is as they are."""
        weights = self.take_weights(f"{name}.weight")
        rest: dict[str, Any] = {}
        while self.due and self.due[0].startswith(f"{name}."):
            due = self.due[0]
            rest[due.removeprefix(f"{name}.")] = self.take(due)
        if isinstance(weights, Tensor):
            weights = LinearWeights(weights, **rest)
        else:
            weights = replace(weights, **rest)
        return self._converted(weights if order is None else _in_order(weights, order), name)

    def _converted(self, weights: LinearWeights, name: str) -> LinearWeights:
        if self.convert is None:
            return weights
        return (self.convert.head if name == "lm_head" else self.convert.linear)(weights)

    def qkv_order(self, shape: AttentionShape) -> Tensor | None:
        """The rows of q, k and v in the order in which the ops take them: those of a head of q and
        of k as they are rotated, and gates, which a file has behind each head of q, behind all."""
        dim, heads, kv_heads = shape.head_dim, shape.num_heads, shape.num_kv_heads
        gated = self.model.gated_attention
        if self.order is None and not gated:
            return None
        rotated = torch.arange(dim) if self.order is None else self.order
        queries = (torch.arange(heads) * dim * (1 + gated)).unsqueeze(1)
        keys = (heads * (1 + gated) + torch.arange(kv_heads).unsqueeze(1)) * dim
        parts = [queries + rotated, keys + rotated, keys + kv_heads * dim + torch.arange(dim)]
        if gated:
            parts.append(queries + dim + torch.arange(dim))
        return torch.cat([part.flatten() for part in parts])

    def head_norm(self, name: str) -> Tensor | None:
        """The weight of a norm of one head or of all, in the order in which they are rotated."""
        weight = self.norm_weight(name)
        if weight is None or self.order is None:
            return weight
        return weight.view(-1, len(self.order))[:, self.order.to(weight.device)].flatten()

    def mixer(self, index: int) -> Mixer:
        linear, name = self.model.linear_attention, f"layers.{index}"
        if linear is not None and linear.layers[index]:
            mixer: Mixer = self.linear_attention(name, linear)
        elif self.model.layer(index).kv_layer is None:
            mixer = self.attention_mixer(name, index)
        else:
            mixer = self.shared_mixer(name, index)
        norm = self.norm(f"{name}.mixer_norm")
        return mixer if norm is None else NormedMixer(mixer, norm)

    def attention_mixer(self, name: str, index: int) -> AttentionMixer:
        model, shape = self.model, self.kinds[index].shape
        qkv = self.linear(f"{name}.qkv", self.qkv_order(shape))
        q_norm, k_norm = self.head_norm(f"{name}.q_norm"), self.head_norm(f"{name}.k_norm")
        v_norm = None
        if model.value_norm:
            assert q_norm is not None
            v_norm = torch.ones_like(q_norm)
        norms = (q_norm, k_norm, model.rms_norm_eps, v_norm)
        gates = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        return AttentionMixer(
            qkv=qkv,
            rope_and_cache=self.ops.rope_and_cache(shape, *norms),
            gate=OutputGate(gates, self.ops.sigmoid_mul) if model.gated_attention else None,
            lends=index in self.lenders,
            **self.rest_of_mixer(name, index),
        )

    def shared_mixer(self, name: str, index: int) -> SharedAttentionMixer:
        shape = self.kinds[index].shape
        order = self.qkv_order(shape)
        queries = None if order is None else order[: shape.num_heads * shape.head_dim]
        q, norm = self.linear(f"{name}.qkv", queries), self.head_norm(f"{name}.q_norm")
        rope = self.ops.rope(shape, norm, self.model.rms_norm_eps)
        return SharedAttentionMixer(q=q, rope=rope, **self.rest_of_mixer(name, index))

    def rest_of_mixer(self, name: str, index: int) -> dict[str, Any]:
        """Parts of attention with or without keys of its own."""
        kind = self.kinds[index]
        return {
            "attention": self.attention[kind],
            "o": self.linear(f"{name}.o"),
            "attention_index": list(self.attention).index(kind),
            "rope_index": self.ropes.index(self.layer_ropes[index]),
            "kv_index": self.kv_indices[index],
            "sinks": (self.take(f"{name}.sinks"),) if self.model.sinks else (),
        }

    def linear_attention(self, name: str, config: LinearAttentionConfig) -> GatedDeltaMixer:
        ops, first = self.ops, len(self.states)
        self.states += linear_attention_states(config)
        rows, gate_rows = projection_rows(config) or (None, None)
        qkvz = self.linear(f"{name}.qkvz", rows)
        # As they are: the decay of a state is exponential in them.
        gates = LinearWeights(self.take(f"{name}.gates.weight"))
        gates = ops.linear(gates if gate_rows is None else _in_order(gates, gate_rows))
        conv = ops.causal_conv(self.take(f"{name}.conv.weight").squeeze(1))
        biases = DeltaBiases(*(self.take(f"{name}.{own}") for own in ("dt_bias", "A_log")))
        return GatedDeltaMixer(
            qkvz=qkvz,
            gates=gates,
            conv=conv,
            delta=ops.gated_delta(config, biases),
            norm=ops.gated_norm(self.take(f"{name}.gated_norm.weight"), self.model.rms_norm_eps),
            out=self.linear(f"{name}.out"),
            conv_size=config.conv_size,
            first_state=first,
        )

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
        name, model = f"layers.{index}", self.model
        kind = self.kinds.get(index, "linear attention")
        experts = model.experts if model.experts and model.experts.layers[index] else None
        sizes = (model.layer(index), index in self.lenders) if model.layers else ()
        apart = (*sizes, "experts") if experts else sizes
        input_norm = self.norm_before(f"{name}.input_norm", self.scalar)
        mixer, post_norm = self.mixer(index), self.norm_before(f"{name}.post_norm")
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


def _in_order(weights: LinearWeights, rows: Tensor) -> LinearWeights:
    """``weights`` with its rows in another order. Scales and zeros, where there are any, are those
    of a row."""
    parts = {name: getattr(weights, name) for name in ("values", "bias", "scales", "zeros")}
    rows = rows.to(weights.values.device)
    ordered = {name: part[rows] for name, part in parts.items() if part is not None}
    return replace(weights, **ordered)
