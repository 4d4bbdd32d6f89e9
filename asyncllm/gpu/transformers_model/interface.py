"""The functions that transformers' modules call in place of their own attention, masks and
experts: each passes its call on to an object that hangs on the calling module, so that they know
no engine."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

NAME = "asyncllm"
"""Of attention that gets no masks, and of experts."""

PROBE_NAME = "asyncllm_probe"
"""Of attention whose calls and masks are looked at."""

HANDLER = "asyncllm_handler"
"""Attribute of a module: the object that its calls go to."""


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of a module over ``[1, heads, T, size]``; returns ``[1, T, heads, size]``."""
    handler = module.__dict__[HANDLER]
    return handler.attend(module, query, key, value, attention_mask, scaling, options), None


def run_experts(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Experts of a module, ``[T, H] -> [T, H]``."""
    return module.__dict__[HANDLER].experts(module, hidden_states, top_k_index, top_k_weights)


class ProbedMask:
    """The mask that a layer gets under PROBE_NAME: its function, to be asked. A part of it is
    itself, because of what a layer does with a part only the number of queries and keys matters.

    Attributes:
        function: of batch, head, query and key.
    """

    def __init__(self, function: Any) -> None:
        self.function = function

    def __getitem__(self, part: Any) -> ProbedMask:
        return self


def probe_mask(**arguments: Any) -> ProbedMask:
    return ProbedMask(arguments["mask_function"])


def register() -> None:
    """Makes the names known to transformers, whose tables are the process's; again is harmless."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
    ALL_ATTENTION_FUNCTIONS.register(PROBE_NAME, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(PROBE_NAME, probe_mask)
    experts_functions().register(NAME, run_experts)


def experts_functions() -> Any:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    return ALL_EXPERTS_FUNCTIONS


def set_handler(module: nn.Module, handler: Any) -> None:
    module.__dict__[HANDLER] = handler
