"""LanguageModel: protocol of the models that a runner can run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from asyncllm.gpu.batch.step_inputs import StepInputs
from asyncllm.gpu.kv_cache import KVCache
from asyncllm.gpu.models.layers import AttentionKind
from asyncllm.gpu.ops.base import Attention
from asyncllm.gpu.state_cache import StateSpec

EMPTY_TOKEN_TENSOR = torch.empty(0, dtype=torch.int64, device="cpu")


class StepOutput(NamedTuple):
    """Output of a step's forward pass.

    Attributes:
        logits: ``[num_logits, vocab_size]`` in the model's dtype.
        hidden: ``[E, H]``, hidden states of the E tokens in ``StepInputs.output_indices``, after
            the final norm.
        tokens: ``[num_greedy]`` int64, tokens of the largest logits; see ``ArgmaxLinear``.
    """

    logits: Tensor
    hidden: Tensor
    tokens: Tensor = EMPTY_TOKEN_TENSOR


class LanguageModel(Protocol):
    """Protocol of a model that turns token ids into hidden states and logits, on a KV cache.

    Attributes:
        model: the model's configuration.
        ops: the op set, which also has the runner's sampling op.
        attention: the Attention of each attention kind.
        embedding: the token embedding; its dtype and device are the model's.
        states: recurrent states of a sequence, see ``KVCache.states``; () without recurrent layers.
    """

    model: Any
    ops: Any
    attention: Mapping[AttentionKind, Attention]
    embedding: Any
    states: Sequence[StateSpec]

    @property
    def argmax_function(self) -> Callable[[Tensor], Tensor] | None:
        """Function ``[S, H] -> [S]`` int64 that finds the tokens of the largest logits.

        The function does not write the logits, see ``ArgmaxLinear``. None if the model has no such
        function.
        """
        ...

    def set_max_positions(self, count: int) -> None:
        """Prepare the model for positions 0 to ``count - 1``; called before the first step."""
        ...

    def with_few_layers(self) -> LanguageModel:
        """Make a copy with few layers for the memory profile, or return the model itself."""
        ...

    def forward(self, step: StepInputs, cache: KVCache) -> StepOutput:
        """Run a step, and write its KV.

        Padded rows of the result are undefined. While a CUDA graph is captured, or a Recorder is
        active, the method reads no tensor's values on the host.

        Raises:
            UnrecordableError: while a Recorder is active, for an op that is not native.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """``[S, H] -> [S, vocab_size]`` in the model's dtype."""
        ...
