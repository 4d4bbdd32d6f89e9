"""Decoder: token ids to hidden states to logits, through a list of layers on a KV cache."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from asyncllm.checkpoint.model_config import ModelConfig
from asyncllm.gpu.batch.step_inputs import StepInputs
from asyncllm.gpu.kv_cache import KVCache
from asyncllm.gpu.models.language_model import EMPTY_TOKEN_TENSOR, StepOutput
from asyncllm.gpu.models.layers import AttentionKind, Layer, StepContext
from asyncllm.gpu.models.per_layer_embeddings import PerLayerEmbeddings
from asyncllm.gpu.models.rope import RopeSpec, rope_table
from asyncllm.gpu.ops.base import ArgmaxLinear, Attention, Embedding, Linear, RMSNorm
from asyncllm.gpu.ops.torch_ops import TorchOps
from asyncllm.gpu.state_cache import StateSpec


@dataclass(eq=False)
class Decoder:
    """A decoder-only transformer: embedding, layers, final norm and output head.

    Attributes:
        attention: the Attention of each kind, in the order of ``LayerAttention.attention_index``.
        ropes: spec of each RoPE table, in the order of ``LayerAttention.rope_index``.
        embedding: embedding of token ids; its dtype and device are the model's.
        states: specs of a sequence's recurrent states; () for a model without recurrent layers.
        per_layer_embeddings: op that makes per-layer embeddings; None if the model has none.
        rope_tables: RoPE tables on the device, made by ``set_max_positions``.
    """

    model: ModelConfig
    ops: TorchOps
    attention: Mapping[AttentionKind, Attention]
    ropes: Sequence[RopeSpec]
    embedding: Embedding
    layers: Sequence[Layer]
    norm: RMSNorm
    lm_head: Linear
    logits_softcap: float | None = None
    states: Sequence[StateSpec] = ()
    per_layer_embeddings: PerLayerEmbeddings | None = None
    rope_tables: Sequence[Tensor] | None = field(default=None, init=False)

    def set_max_positions(self, count: int) -> None:
        """Make the RoPE tables for positions 0 to ``count - 1``."""
        dtype, device = self.embedding.dtype, self.embedding.device
        self.rope_tables = [rope_table(*rope, count, dtype, device) for rope in self.ropes]

    def with_few_layers(self) -> Decoder:
        """Make a copy with few layers, whose steps reach the same peak memory in a fraction of the
        time.

        Layers of a kind have the same shapes and run one after the other. So the first layer of
        each kind, the second layer and the last layer together reach the peak of all layers.
        """
        layers = self.layers
        kinds = [layer.kind for layer in layers]
        indices = {kinds.index(kind) for kind in kinds} | {min(1, len(layers) - 1)}
        decoder = copy.copy(self)
        decoder.layers = [layers[index] for index in sorted(indices | {len(layers) - 1})]
        return decoder

    def forward(self, step: StepInputs, cache: KVCache) -> StepOutput:
        """See ``LanguageModel.forward``."""
        context = self.make_context(step, cache)
        return self.run_last_layer_and_head(
            *self.run_all_but_last_layer(step, context), step, context
        )

    def run_all_but_last_layer(
        self, step: StepInputs, context: StepContext
    ) -> tuple[Tensor, Tensor | None]:
        """Run the embedding and all layers but the last; return output and residual.

        All computations except attention and recurrences depend on the step's tokens alone, and not
        on how the tokens are divided into rows.
        """
        x, residual = self.embedding(step.token_ids), None
        if self.per_layer_embeddings is not None:
            context.per_layer_embeddings = self.per_layer_embeddings(step.token_ids, x)
        for layer in self.layers[:-1]:
            x, residual = layer(x, residual, context)
        return x, residual

    def run_last_layer_and_head(
        self, x: Tensor, residual: Tensor | None, step: StepInputs, context: StepContext
    ) -> StepOutput:
        """Run the last layer, the final norm and the output head.

        After the last layer's mixer, only the tokens in ``step.output_indices`` are computed.
        """
        context.output_tokens = step.output_indices
        x, residual = self.layers[-1](x, residual, context)
        hidden, first = self.norm.add_and_norm(x, residual)[0], step.num_logits
        tokens = EMPTY_TOKEN_TENSOR
        if step.num_greedy:
            assert self.argmax_function is not None
            tokens = self.argmax_function(hidden[first : first + step.num_greedy])
        return StepOutput(self.logits(hidden[:first]), hidden, tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits ``[S, vocab_size]`` of hidden states ``[S, H]``, in the model's dtype."""
        logits = self.lm_head(hidden)
        cap = self.logits_softcap
        return logits if cap is None else self.ops.softcap(logits, cap)

    @property
    def argmax_function(self) -> Callable[[Tensor], Tensor] | None:
        """See ``LanguageModel.argmax_function``; None if the output head has no ``argmax``.

        It is also None if logits are capped, because the cap may round different logits to equal
        numbers.
        """
        if self.logits_softcap is not None or not isinstance(self.lm_head, ArgmaxLinear):
            return None
        return self.lm_head.argmax

    def make_context(self, step: StepInputs, cache: KVCache) -> StepContext:
        """Make the StepContext that all layers read in a step."""
        states = cache.states.tensors if cache.states is not None and self.states else ()
        return StepContext(
            plans=[
                attention.plan(step, kind.window, kind.kv_group)
                for kind, attention in self.attention.items()
            ],
            states=states,
            state_rows=self.ops.state_rows(step) if self.states else None,
            **self.step_context_token_kwargs(step, cache),
        )

    def step_context_token_kwargs(self, step: StepInputs, cache: KVCache) -> dict[str, Any]:
        """Make the arguments of StepContext that depend on the step's tokens, not on its rows."""
        if self.rope_tables is None:
            raise RuntimeError("set_max_positions has to come first")
        positions, groups = step.positions, step.groups
        return {
            "positions": positions,
            "slot_mappings": [groups[kind.kv_group].slot_mapping for kind in self.attention],
            "rotary": [self.ops.rotary(table, positions) for table in self.rope_tables],
            "kv_caches": cache.layers,
        }
