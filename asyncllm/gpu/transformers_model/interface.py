"""Functions that transformers' modules call instead of their own attention, masks and experts.

Each function passes its call on to the handler in an attribute of the calling module, so that it
depends on no engine.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

ENGINE_NAME = "asyncllm"
"""Name of the engine's attention and experts in transformers' tables. No mask function has this
name, so the attention gets no masks."""

PROBE_NAME = "asyncllm_probe"
"""Name, in transformers' tables, of the attention and mask functions that probe a model."""

HANDLER_ATTRIBUTE = "asyncllm_handler"
"""Attribute of a module that holds its handler."""


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Computes a module's attention: ``[1, heads, T, size]`` to ``[1, T, heads, size]``."""
    handler = module.__dict__[HANDLER_ATTRIBUTE]
    return handler.attend(module, query, key, value, attention_mask, scaling, options), None


def run_experts(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Computes a module's experts, ``[T, H] -> [T, H]``."""
    return module.__dict__[HANDLER_ATTRIBUTE].experts(
        module, hidden_states, top_k_index, top_k_weights
    )


class ProbedMask:
    """The mask that a layer gets while it is probed; wraps transformers' mask function.

    Slicing it returns the mask itself: the probe checks the numbers of queries and keys on the
    attention call instead.

    Attributes:
        function: takes indices of batch, head, query and key; returns whether the query sees the
            key.
    """

    def __init__(self, function: Any) -> None:
        self.function = function

    def __getitem__(self, part: Any) -> ProbedMask:
        return self


def probe_mask(**arguments: Any) -> ProbedMask:
    return ProbedMask(arguments["mask_function"])


def register_implementations() -> None:
    """Registers the names in transformers' tables, which are global; repeating it is harmless."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ENGINE_NAME, attend)
    ALL_ATTENTION_FUNCTIONS.register(PROBE_NAME, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(PROBE_NAME, probe_mask)
    ALL_EXPERTS_FUNCTIONS.register(ENGINE_NAME, run_experts)


def set_handler(module: nn.Module, handler: Any) -> None:
    module.__dict__[HANDLER_ATTRIBUTE] = handler
