"""Functions that transformers' modules call instead of their own attention, masks and experts.

transformers' global tables have one function per name, so each function serves all engines of the
process: it passes its call on to a handler, which is an attribute of the calling module.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

ENGINE_IMPLEMENTATION_NAME = "asyncllm"
"""Name of the engine's attention and experts in transformers' tables. No mask function has this
name, so the attention gets no masks."""

PROBE_IMPLEMENTATION_NAME = "asyncllm_probe"
"""Name, in transformers' tables, of the attention and mask functions that probe a model."""

CALL_HANDLER_ATTRIBUTE = "asyncllm_handler"
"""Name of the attribute in which a module stores the handler of its calls."""


def experts_implementation(device: torch.device) -> str:
    """Name of the experts implementation that transformers' modules call.

    On a CPU it is the engine's own implementation; elsewhere it is transformers' grouped matrix
    product, which reads no values on the host.
    """
    return ENGINE_IMPLEMENTATION_NAME if device.type == "cpu" else "grouped_mm"


def attend(module: nn.Module, *tensors: Any, **options: Any) -> tuple[Tensor, None]:
    """Compute a module's attention: ``[1, heads, T, size]`` to ``[1, T, heads, size]``."""
    return module.__dict__[CALL_HANDLER_ATTRIBUTE].attend(module, *tensors, **options), None


def run_experts(module: nn.Module, *tensors: Tensor) -> Tensor:
    """Compute a module's experts, ``[T, H] -> [T, H]``."""
    return module.__dict__[CALL_HANDLER_ATTRIBUTE].experts(module, *tensors)


class ProbeAttentionMask:
    """Attention mask during a probe: keeps only transformers' mask function.

    A slice of the mask is the mask itself: the probe checks the numbers of queries and keys on the
    attention call instead.

    Attributes:
        function: transformers' ``mask_function``: takes indices of batch, head, query and key, and
            returns whether the query sees the key.
    """

    def __init__(self, *, mask_function: Any, **unused: Any) -> None:
        self.function = mask_function

    def __getitem__(self, part: Any) -> ProbeAttentionMask:
        return self


def register_transformers_functions() -> None:
    """Register the engine's and the probe's functions in transformers' global tables; may be
    called repeatedly."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ENGINE_IMPLEMENTATION_NAME, attend)
    ALL_ATTENTION_FUNCTIONS.register(PROBE_IMPLEMENTATION_NAME, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(PROBE_IMPLEMENTATION_NAME, ProbeAttentionMask)
    ALL_EXPERTS_FUNCTIONS.register(ENGINE_IMPLEMENTATION_NAME, run_experts)


def set_call_handler(module: nn.Module, handler: Any) -> None:
    """Set the object that ``attend`` or ``run_experts`` calls for a module."""
    module.__dict__[CALL_HANDLER_ATTRIBUTE] = handler
