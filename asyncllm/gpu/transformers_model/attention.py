"""PagedAttention: the attention of one layer of transformers' modules, on the engine's KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asyncllm.gpu.models.layers import AttentionKind
from asyncllm.gpu.ops.base import Attention, AttentionShape
from asyncllm.gpu.ops.torch_rope import write_kv
from asyncllm.gpu.transformers_model.probe import AttentionCall, ProbeResult

if TYPE_CHECKING:
    from asyncllm.gpu.batch.state_rows import StateRows


@dataclass(slots=True)
class CurrentStep:
    """The running step's inputs for the layers of a model; empty between steps.

    Attributes:
        slot_mappings: per KV group ``[T]`` int64, KV slot of each token.
        plans: the step's attention plan per attention kind.
        kv: KV cache of each layer that has one.
        states: tensors of the StateCache.
        rows: the step's rows for recurrent modules; None for a model without them.
    """

    slot_mappings: Sequence[Tensor] = ()
    plans: dict[AttentionKind, Any] = field(default_factory=dict)
    kv: Sequence[Tensor] = ()
    states: Sequence[Tensor] = ()
    rows: StateRows | None = None

    def clear(self) -> None:
        self.slot_mappings, self.plans, self.kv = (), {}, ()
        self.states, self.rows = (), None


def attention_kinds(probe: ProbeResult, windows: Sequence[int | None]) -> list[AttentionKind]:
    """Attention kind of each probed call; the KV group is not set yet."""
    kinds = []
    for call, window in zip(probe.attention_calls, windows, strict=True):
        assert call.scale is not None
        # The smaller of key and value is padded to the size of the larger one.
        size = max(call.key_dim, call.value_dim)
        shape = AttentionShape(
            call.num_heads, call.num_key_heads, size, call.scale, call.softcap, call.has_sinks
        )
        kinds.append(AttentionKind(shape, window))
    return kinds


class PagedAttention:
    """Handler of one module's attention calls, on the engine's KV cache.

    Args:
        kv_index: index of the KV cache that the module reads.

    Attributes:
        writes_kv: whether the module writes keys and values of its own, and does not reuse another
            module's.
    """

    def __init__(
        self,
        step: CurrentStep,
        kind: AttentionKind,
        attention: Attention,
        call: AttentionCall,
        kv_index: int,
    ) -> None:
        self.step, self.kind = step, kind
        # Typed as Any, because a layer with sinks passes one more argument.
        self.attention: Any = attention
        self.kv_index, self.writes_kv = kv_index, call.kv_call is None
        size = kind.shape.head_dim
        self.key_padding, self.value_padding = size - call.key_dim, size - call.value_dim
        self.value_dim = call.value_dim

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **options: Any
    ) -> Tensor:
        step, kind = self.step, self.kind
        cache = step.kv[self.kv_index]
        if self.key_padding:
            query, key = F.pad(query, (0, self.key_padding)), F.pad(key, (0, self.key_padding))
        if self.value_padding:
            value = F.pad(value, (0, self.value_padding))
        if self.writes_kv:
            kv = torch.cat((key[0], value[0])).transpose(0, 1)
            write_kv(cache, step.slot_mappings[kind.kv_group], kv)
        q, k, v = (each[0].transpose(0, 1) for each in (query, key, value))
        sinks = (options["s_aux"],) if kind.shape.sinks else ()
        out = self.attention(q, k, v, cache, step.plans[kind], *sinks)
        out = out.view(1, -1, kind.shape.num_heads, kind.shape.head_dim)
        return out[..., : self.value_dim] if self.value_padding else out
