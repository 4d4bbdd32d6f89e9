"""LongRope: chooses once between a model's short and long RoPE frequencies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True, slots=True)
class LongRope:
    """Rotary embedding with short and long factors (LongRoPE, Ding et al., 2024).

    transformers takes the long factors in every step whose longest sequence exceeds the original
    context. Results would then depend on other sequences, and change within a sequence. Here the
    engine's ``max_model_len`` decides, once for all steps.

    Attributes:
        module: transformers' rotary embedding.
        layer_type: type of the layers that use it; None for all layers.
        original_context: context in tokens before its extension to long sequences.
    """

    module: Any
    layer_type: str | None
    original_context: int
    config: Any

    @classmethod
    def find_all(cls, modules: nn.Module, config: Any) -> list[LongRope]:
        """Finds a model's long RoPEs, and turns off transformers' choice in every step."""
        found = []
        for module in modules.modules():
            rope: Any = module
            kinds: Any = getattr(rope, "rope_type", None)
            by_type: dict[Any, Any] = dict(kinds) if isinstance(kinds, Mapping) else {None: kinds}
            for layer_type, kind in list(by_type.items()):
                if kind != "longrope":
                    continue
                parameters = config.rope_parameters
                if layer_type is not None:
                    parameters = parameters[layer_type]
                original = parameters["original_max_position_embeddings"]
                found.append(cls(rope, layer_type, int(original), config))
                if layer_type is None:
                    rope.rope_type = "default"
                else:
                    by_type[layer_type] = "default"
                    rope.rope_type = by_type
        return found

    def choose_frequencies(self, max_positions: int) -> None:
        """Sets the frequencies for sequences of at most ``max_positions`` tokens."""
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        prefix = "" if self.layer_type is None else f"{self.layer_type}_"
        buffer = getattr(self.module, f"{prefix}inv_freq")
        # The function only checks whether the length exceeds the original context.
        length = self.original_context + (1 if max_positions > self.original_context else 0)
        options = {} if self.layer_type is None else {"layer_type": self.layer_type}
        chosen, _ = ROPE_INIT_FUNCTIONS["longrope"](
            self.config, buffer.device, seq_len=length, **options
        )
        buffer.copy_(chosen)
