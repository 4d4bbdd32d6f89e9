"""Functions that transformers' modules call instead of their own attention, masks and experts.

Each passes its call on to a handler, an attribute of the calling module, so that the functions
depend on no engine.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

ENGINE_NAME = "asyncllm"
"""Name of the engine's attention and experts in transformers' tables; the attention gets no
masks."""

PROBE_NAME = "asyncllm_probe"
"""Name of the attention under which calls and masks are probed."""

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
    """Attention of a module, ``[1, heads, T, size]`` to ``[1, T, heads, size]``."""
    handler = module.__dict__[HANDLER_ATTRIBUTE]
    return handler.attend(module, query, key, value, attention_mask, scaling, options), None


def run_experts(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Experts of a module, ``[T, H] -> [T, H]``."""
    return module.__dict__[HANDLER_ATTRIBUTE].experts(
        module, hidden_states, top_k_index, top_k_weights
    )


class ProbedMask:
    """The mask that a layer gets under PROBE_NAME, which wraps transformers' mask function.

    A slice of it is the mask itself: only the numbers of queries and keys are checked.

    Attributes:
        function: mask by batch, head, query and key.
    """

    def __init__(self, function: Any) -> None:
        self.function = function

    def __getitem__(self, part: Any) -> ProbedMask:
        return self


def probe_mask(**arguments: Any) -> ProbedMask:
    return ProbedMask(arguments["mask_function"])


def register() -> None:
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
