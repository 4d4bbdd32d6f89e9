"""LanguageModel: what a runner asks of a model, the engine's own decoder or another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from asyncllm.gpu.batch.decode_inputs import DecodeInputs
from asyncllm.gpu.batch.step_inputs import ModelInputs
from asyncllm.gpu.kv_cache import KVCache
from asyncllm.gpu.models.layers import AttentionKind
from asyncllm.gpu.ops.base import Attention
from asyncllm.gpu.state_cache import StateSpec


class Residence(Protocol):
    """Dtype and device of a model."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...


class LanguageModel(Protocol):
    """Token ids to hidden states to logits, on a KV cache."""

    @property
    def model(self) -> Any:
        """Its configuration."""
        ...

    @property
    def ops(self) -> Any:
        """The op set, which samples as well."""
        ...

    @property
    def attention(self) -> Mapping[AttentionKind, Attention]:
        """Of each kind that layers have."""
        ...

    @property
    def embedding(self) -> Residence: ...

    @property
    def states(self) -> Sequence[StateSpec]:
        """Recurrent states of a sequence, as in ``KVCache.states``; () without."""
        ...

    @property
    def argmax(self) -> Callable[[Tensor], Tensor] | None:
        """``[S, H] -> [S]`` int64: the tokens that greedy rows sample from ``logits(hidden)``,
        which are not written; see ``ArgmaxLinear``. None where they have to be."""
        ...

    @property
    def needs_zeroed_blocks(self) -> bool:
        """Whether KV blocks have to be cleared for a new owner, as ``Attention`` says."""
        ...

    def set_max_positions(self, count: int) -> None:
        """Prepares for positions 0 to ``count - 1``; called before the first step."""
        ...

    def with_few_layers(self) -> LanguageModel:
        """A model whose steps take as much memory, and perhaps less time."""
        ...

    def forward(self, inputs: Sequence[ModelInputs], cache: KVCache) -> Tensor:
        """Runs a step, whose inputs are given per KV group, and writes its KV.

        Returns:
            Hidden states ``[S, H]`` behind the final norm, at ``inputs.logits_indices``.
        """
        ...

    def decode(self, inputs: Sequence[DecodeInputs], cache: KVCache) -> Tensor:
        """Runs a decode step on buffers that stay where they are; reads nothing on the host.

        Returns:
            Hidden states ``[B, H]`` behind the final norm; undefined for padded rows.
        """
        ...

    def record(self, inputs: Sequence[ModelInputs], cache: KVCache) -> Tensor:
        """Runs a step while a Recorder takes it down: nothing is computed.

        Args:
            inputs: the recorder's stand-ins, and arrays that are read when the program runs.

        Returns:
            The stand-in of the hidden states ``[E, H]``, at ``inputs.logits_indices``.

        Raises:
            Unrecordable: for what no native op does.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """``[S, H] -> [S, vocab_size]`` in the model's dtype."""
        ...
