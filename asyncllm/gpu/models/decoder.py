"""Decoder: token ids to hidden states to logits, through a list of layers on a KV cache."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from asyncllm.checkpoint.model_config import ModelConfig
from asyncllm.gpu.batch.decode_inputs import DecodeInputs
from asyncllm.gpu.batch.step_inputs import ModelInputs
from asyncllm.gpu.kv_cache import KVCache
from asyncllm.gpu.models.layer_inputs import LayerInputs
from asyncllm.gpu.models.layers import AttentionKind, Layer, StepContext
from asyncllm.gpu.models.rope import RopeSpec, rope_table
from asyncllm.gpu.ops.base import ArgmaxLinear, Attention, Embedding, Linear, RMSNorm
from asyncllm.gpu.ops.recorder import Unrecordable
from asyncllm.gpu.ops.torch_ops import TorchOps
from asyncllm.gpu.state_cache import StateSpec


@dataclass(eq=False)
class Decoder:
    """A decoder-only transformer: embedding, layers, final norm and output head.

    Attributes:
        attention: of each kind that layers have, in the order of their indices.
        ropes: of each RoPE table, by index.
        embedding: its dtype and device are the model's.
        states: what its recurrent layers keep of a sequence.
        layer_inputs: what layers take beside the hidden states.
        rope_tables: see ``set_max_positions``.
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
    layer_inputs: LayerInputs | None = None
    rope_tables: Sequence[Tensor] | None = field(default=None, init=False)

    @property
    def needs_zeroed_blocks(self) -> bool:
        """Whether KV blocks have to be cleared for a new owner, as ``Attention`` says."""
        return any(attention.needs_zeroed_blocks for attention in self.attention.values())

    def set_max_positions(self, count: int) -> None:
        """Makes the RoPE tables for positions 0 to ``count - 1``."""
        dtype, device = self.embedding.dtype, self.embedding.device
        self.rope_tables = [rope_table(*rope, count, dtype, device) for rope in self.ropes]

    def with_few_layers(self) -> Decoder:
        """A copy whose steps take as much memory, in a fraction of the time. Layers have the same
        shapes and run one after the other: the first of each kind, the second and the last have
        the peak of all of them."""
        layers = self.layers
        kinds = [layer.kind for layer in layers]
        kept = {kinds.index(kind) for kind in kinds} | {min(1, len(layers) - 1)}
        few = copy.copy(self)
        few.layers = [layers[index] for index in sorted(kept | {len(layers) - 1})]
        return few

    def forward(self, inputs: Sequence[ModelInputs], cache: KVCache) -> Tensor:
        """See ``LanguageModel.forward``."""
        plans = [
            attention.plan(inputs[kind.kv_group], kind.window)
            for kind, attention in self.attention.items()
        ]
        return self._run(inputs, plans, cache, inputs[0].logits_indices)

    def decode(self, inputs: Sequence[DecodeInputs], cache: KVCache) -> Tensor:
        """See ``LanguageModel.decode``."""
        plans = [
            attention.plan_decode(inputs[kind.kv_group], kind.window)
            for kind, attention in self.attention.items()
        ]
        return self._run(inputs, plans, cache, None)

    def record(self, inputs: Sequence[ModelInputs], cache: KVCache) -> Tensor:
        """See ``LanguageModel.record``."""
        plans: list[Any] = []
        for kind, attention in self.attention.items():
            plan = getattr(attention, "plan_recorded", None)
            if plan is None:
                raise Unrecordable(f"attention {attention.name!r} has no native kernel")
            plans.append(plan(inputs[kind.kv_group], kind.window))
        return self._run(inputs, plans, cache, inputs[0].logits_indices)

    def logits(self, hidden: Tensor) -> Tensor:
        """``[S, H] -> [S, vocab_size]`` in the model's dtype."""
        logits = self.lm_head(hidden)
        cap = self.logits_softcap
        return logits if cap is None else self.ops.softcap(logits, cap)

    @property
    def argmax(self) -> Callable[[Tensor], Tensor] | None:
        """The head's own, see ``LanguageModel``; None where logits are capped, which makes equal
        what the head tells apart."""
        if self.logits_softcap is not None or not isinstance(self.lm_head, ArgmaxLinear):
            return None
        return self.lm_head.argmax

    def _run(
        self,
        inputs: Sequence[ModelInputs] | Sequence[DecodeInputs],
        plans: Sequence[Any],
        cache: KVCache,
        rows: Tensor | None,
    ) -> Tensor:
        if self.rope_tables is None:
            raise RuntimeError("set_max_positions has to come first")
        positions = inputs[0].positions
        step = StepContext(
            positions=positions,
            slot_mappings=[inputs[kind.kv_group].slot_mapping for kind in self.attention],
            plans=plans,
            rotary=[self.ops.rotary(table, positions) for table in self.rope_tables],
            kv=cache.layers,
        )
        if self.states:
            assert cache.states is not None
            step.states = cache.states.tensors
            step.state_rows = self.ops.state_rows(inputs[0])
        x, residual = self.embedding(inputs[0].token_ids), None
        if self.layer_inputs is not None:
            step.inputs = self.layer_inputs(inputs[0].token_ids, x)
        for layer in self.layers:
            if layer is self.layers[-1]:
                # Past the last KV write only the rows that are sampled matter.
                step.rows = rows
            x, residual = layer(x, residual, step)
        assert residual is not None
        return self.norm.add(x, residual)[0]
