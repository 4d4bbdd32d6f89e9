"""build_decoder: builds the engine's own decoder from a configuration and weights."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from asyncllm.checkpoint.experts_config import ExpertsConfig
from asyncllm.checkpoint.model_config import ModelConfig
from asyncllm.gpu.models.attention_kinds import (
    LayerAttention,
    attention_by_layer,
    attention_shape,
    rope_specs,
)
from asyncllm.gpu.models.decoder import Decoder
from asyncllm.gpu.models.experts import ExpertsBesideMLP, build_experts, build_experts_beside_mlp
from asyncllm.gpu.models.layers import (
    AttentionKind,
    AttentionMixer,
    DecoderLayer,
    Layer,
    Mixer,
    OutputGate,
    PostNormBlock,
)
from asyncllm.gpu.models.linear_attention import (
    build_linear_attention,
    linear_attention_state_specs,
)
from asyncllm.gpu.models.parameter import Parameter
from asyncllm.gpu.models.per_layer_embeddings import (
    build_per_layer_embeddings,
    wrap_with_per_layer_embedding,
)
from asyncllm.gpu.models.rope import RopeSpec, rotary_order
from asyncllm.gpu.models.weight_scope import ParameterSource, WeightScope, module_row_counts
from asyncllm.gpu.ops.base import Attention, AttentionShape, Embedding, Linear, RMSNorm
from asyncllm.gpu.ops.linear_weights import LinearWeights
from asyncllm.gpu.ops.quantise import WeightQuantisers
from asyncllm.gpu.ops.torch_ops import TorchOps
from asyncllm.gpu.state_cache import StateSpec


def build_decoder(
    model: ModelConfig,
    ops: TorchOps,
    attention: Mapping[AttentionKind, Attention],
    weights: Iterable[tuple[str, Tensor | LinearWeights]],
    quantisers: WeightQuantisers | None = None,
    dtype: torch.dtype | None = None,
) -> Decoder:
    """Build the decoder that ``model`` describes.

    Args:
        attention: the Attention of each of ``attention_kinds``.
        weights: ``(name, weights)`` in the order of ``architectures.parameters``; the weights of a
            linear layer are a tensor or LinearWeights in a form that ``ops`` accepts. Each layer
            is made as its weights arrive, so that at most one layer's weights are in memory twice,
            as read and packed.
        quantisers: functions that quantise every linear layer's weights, and the output head's,
            before ``ops`` gets them; None for no quantisation.
        dtype: dtype of the model; needed only if the embedding arrives as LinearWeights, which have
            no model dtype.
    """
    remaining, by_layer = iter(weights), attention_by_layer(model, attention)

    def next_weights(parameter: Parameter) -> Tensor | LinearWeights:
        name, values = next(remaining)
        if name != parameter.name:
            raise RuntimeError(f"weights out of order: {name} where {parameter.name} is due")
        return values

    builder = DecoderBuilder(model, ops, by_layer, next_weights, quantisers, dtype)
    ropes = list(dict.fromkeys(rope_specs(model)))
    decoder = builder.decoder(range(model.num_layers), attention, ropes)
    # Reading to the end closes the files.
    for name, _ in remaining:
        raise RuntimeError(f"weights left over: {name}")
    return decoder


class DecoderBuilder:
    """Builds a decoder part by part, in the order of its weights.

    Args:
        attention_by_layer: LayerAttention of each attention layer, by layer index.
        source: function that returns the weights of a parameter; called in the order of the
            parameters.
        quantisers, dtype: see ``build_decoder``.

    Attributes:
        pending_scale: ``layer_scalar`` of the layer built last; the scale of the norm built next.
    """

    def __init__(
        self,
        model: ModelConfig,
        ops: TorchOps,
        attention_by_layer: Mapping[int, LayerAttention],
        source: ParameterSource,
        quantisers: WeightQuantisers | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.model, self.ops, self.dtype = model, ops, dtype
        self.attention_by_layer = attention_by_layer
        self.scope = self.head_scope = WeightScope(model, ops, source)
        if quantisers is not None:
            self.scope = replace(self.scope, quantise=quantisers.linear)
            self.head_scope = replace(self.scope, quantise=quantisers.output_head)
        rotary_dim = model.rotary_dim or model.head_dim
        self.head_row_order = rotary_order(
            model.head_dim, rotary_dim, interleaved=model.interleaved_rope
        )
        self.kv_source_layers = {layer.kv_layer for layer in model.layers}
        self.states: list[StateSpec] = []
        self.pending_scale = 1.0

    def decoder(
        self,
        layers: Iterable[int],
        attention: Mapping[AttentionKind, Attention],
        ropes: Sequence[RopeSpec],
    ) -> Decoder:
        """Build the decoder with these layers."""
        model, ops, hidden = self.model, self.ops, self.model.hidden_size
        embedding, lm_head = self.embedding()
        inputs = build_per_layer_embeddings(self.scope)
        built_layers = [self.layer(index) for index in layers]
        norm = self.final_norm()
        if lm_head is None:
            lm_head = self.head_scope.linear("lm_head", (("lm_head", model.vocab_size),), hidden)
        return Decoder(
            model, ops, attention, ropes, embedding, built_layers, norm, lm_head,
            logits_softcap=model.logits_softcap, states=self.states, per_layer_embeddings=inputs,
        )  # fmt: skip

    def embedding(self) -> tuple[Embedding, Linear | None]:
        """Build the embedding, and the output head if the two are tied."""
        model, ops, head, dtype = self.model, self.ops, self.head_scope, self.dtype
        rows, tied = (("model.embed_tokens", model.vocab_size),), model.tie_word_embeddings
        width = model.hidden_size
        weights = head.source(
            head.parameter("embed", rows, width, is_linear=tied, is_embedding=not tied)
        )
        if isinstance(weights, Tensor):
            dtype = weights.dtype
        assert dtype is not None
        multiplier = model.embedding_multiplier
        if model.rounds_embedding_multiplier:
            multiplier = torch.tensor(multiplier, dtype=dtype).item()
        if tied:
            return ops.tied_embedding(head.quantise_if_configured(weights), dtype, multiplier)
        if isinstance(weights, LinearWeights):
            return ops.packed_embedding(weights, dtype, multiplier), None
        return ops.embedding(weights, multiplier), None

    def layer(self, index: int) -> Layer:
        model, names = self.model, self.model.names
        scope = self.scope.child(f"layers.{index}.", f"model.layers.{index}.")
        input_norm = scope.residual_norm("input_norm", names.input_norm, self.pending_scale)
        mixer = self.mixer(scope, index)
        if names.mixer_norm is not None:
            mixer = PostNormBlock(mixer, scope.norm("mixer_norm", names.mixer_norm))
        post_norm = scope.residual_norm("post_norm", names.post_norm)
        mlp, beside = self.mlp(scope, index)
        layer: Layer = DecoderLayer(
            self.layer_kind(index), input_norm, mixer, post_norm, mlp, beside
        )
        if model.layer_input is not None:
            layer = wrap_with_per_layer_embedding(scope, model.layer_input.size, layer, index)
        if model.layer_scalar:
            self.pending_scale = scope.tensor("scalar", "layer_scalar", 1, suffix="").item()
        return layer

    def layer_kind(self, index: int) -> Hashable:
        """Key that is equal for layers whose ops have the same shapes."""
        model, attention = self.model, self.attention_by_layer.get(index)
        kind = "linear attention" if attention is None else attention.kind
        sizes = (model.layer(index), index in self.kv_source_layers) if model.layers else ()
        extra = (*sizes, "experts") if self.experts_config_of(index) else sizes
        return (kind, *extra) if extra else kind

    def experts_config_of(self, index: int) -> ExpertsConfig | None:
        experts = self.model.experts
        return experts if experts is not None and experts.layers[index] else None

    def mixer(self, scope: WeightScope, index: int) -> Mixer:
        linear = self.model.linear_attention
        if linear is not None and linear.layers[index]:
            first = len(self.states)
            self.states += linear_attention_state_specs(linear)
            return build_linear_attention(scope.child("", "linear_attn."), linear, first)
        return self.attention(scope.child("", "self_attn."), index)

    def attention(self, scope: WeightScope, index: int) -> AttentionMixer:
        model, shape = self.model, attention_shape(self.model, index)
        sizes, layer_attention = model.layer(index), self.attention_by_layer[index]
        queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        names, gates = model.names.qkv, queries * model.gated_attention
        order = self.qkv_row_order(shape)
        reads_shared_kv, v_norm = sizes.kv_layer is not None, None
        if sizes.value_is_key:
            # If values equal keys, stack the rows of the key projection twice: this costs less than
            # a branch in every kernel.
            names = (*names[:2], names[1])
        rows = module_row_counts(names, (queries + gates, keys, keys))
        if reads_shared_kv:
            rows, order = ((names[0], queries),), None if order is None else order[:queries]
        qkv = scope.linear("qkv", rows, model.hidden_size, model.attention_bias, order)
        q_norm = self.qk_norm_weight(scope, "q_norm", shape, queries)
        if reads_shared_kv:
            rope = self.ops.rope(shape, q_norm, model.rms_norm_eps)
        else:
            k_norm = self.qk_norm_weight(scope, "k_norm", shape, keys)
            if model.value_norm:
                assert q_norm is not None
                v_norm = torch.ones_like(q_norm)
            rope = self.ops.rope_and_cache(shape, q_norm, k_norm, model.rms_norm_eps, v_norm)
        return AttentionMixer(
            qkv=qkv,
            rope_and_cache=rope,
            attention=layer_attention.attention,
            o=scope.linear("o", (("o_proj", model.hidden_size),), queries, model.output_bias),
            attention_index=layer_attention.attention_index,
            rope_index=layer_attention.rope_index,
            kv_index=layer_attention.kv_index,
            sinks=(scope.float32_vector("sinks", model.num_heads),) if model.sinks else (),
            gate=OutputGate(queries + 2 * keys, self.ops.sigmoid_mul) if gates else None,
            shares_kv=index in self.kv_source_layers,
            reads_shared_kv=reads_shared_kv,
        )

    def qkv_row_order(self, shape: AttentionShape) -> Tensor | None:
        """Order in which the ops expect the rows of q, k and v; None for the checkpoint's own
        order.

        Rows of each q or k head are in ``rotary_order``. Output gates, which a checkpoint stores
        after each head of q, come last.
        """
        dim, heads, kv_heads = shape.head_dim, shape.num_heads, shape.num_kv_heads
        gated = self.model.gated_attention
        if self.head_row_order is None and not gated:
            return None
        rotated = torch.arange(dim) if self.head_row_order is None else self.head_row_order
        queries = (torch.arange(heads) * dim * (1 + gated)).unsqueeze(1)
        keys = (heads * (1 + gated) + torch.arange(kv_heads).unsqueeze(1)) * dim
        parts = [queries + rotated, keys + rotated, keys + kv_heads * dim + torch.arange(dim)]
        if gated:
            parts.append(queries + dim + torch.arange(dim))
        return torch.cat([part.flatten() for part in parts])

    def qk_norm_weight(
        self, scope: WeightScope, name: str, shape: AttentionShape, width: int
    ) -> Tensor | None:
        """Weight of a query or key norm, in the row order of a head; None without such norms.

        Args:
            width: size of all heads together.
        """
        model = self.model
        if not model.qk_norm:
            return None
        width = width if model.norms_span_all_heads else shape.head_dim
        weight = scope.norm_weight(name, name, width)
        if self.head_row_order is None:
            return weight
        return weight.view(-1, len(self.head_row_order))[
            :, self.head_row_order.to(weight.device)
        ].flatten()

    def mlp(
        self, scope: WeightScope, index: int
    ) -> tuple[Callable[[Tensor], Tensor], ExpertsBesideMLP | None]:
        """Build a layer's MLP, its experts, or an MLP with experts in parallel."""
        names, experts = self.model.names, self.experts_config_of(index)
        size = self.model.layer(index).intermediate_size
        if experts is not None and experts.parallel_to_mlp:
            return build_experts_beside_mlp(scope, experts, size)
        if experts is not None:
            mlp = build_experts(scope, experts)
        else:
            mlp = scope.child("", f"{names.mlp}.").gated_mlp(size)
        if names.mlp_norm is None:
            return mlp, None
        return PostNormBlock(mlp, scope.norm("mlp_norm", names.mlp_norm)), None

    def final_norm(self) -> RMSNorm:
        """Build the final norm, with its weight divided by ``logits_divisor``."""
        model, weight = self.model, self.scope.norm_weight("norm", "model.norm")
        if model.logits_divisor != 1.0:
            weight = weight / model.logits_divisor
        eps, multiplier = model.rms_norm_eps, model.residual_multiplier
        return self.ops.rms_norm(weight, eps, multiplier, self.pending_scale)
