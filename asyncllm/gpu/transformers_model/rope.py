"""LongRope: one choice of frequencies for a model that has two sets of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True, slots=True)
class LongRope:
    """Rotary embedding with short and long factors (LongRoPE, Ding et al., 2024).

    transformers takes the long ones in every step whose longest sequence is beyond the context of
    the first training, so that results would depend on company, and change within a sequence. Here
    the longest sequence that the engine takes decides, once.

    Attributes:
        module: transformers'.
        layer_type: of layers that have parameters of their own; None for all.
        original: context of the first training in tokens.
    """

    module: Any
    layer_type: str | None
    original: int
    config: Any

    @classmethod
    def all_of(cls, modules: nn.Module, config: Any) -> list[LongRope]:
        """Those of a model, with what they would do in every step switched off."""
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

    def choose(self, max_positions: int) -> None:
        """Sets the frequencies for sequences of at most so many tokens."""
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        prefix = "" if self.layer_type is None else f"{self.layer_type}_"
        buffer = getattr(self.module, f"{prefix}inv_freq")
        # The function looks only at whether a length is beyond the first training's.
        length = self.original + (1 if max_positions > self.original else 0)
        options = {} if self.layer_type is None else {"layer_type": self.layer_type}
        chosen, _ = ROPE_INIT_FUNCTIONS["longrope"](
            self.config, buffer.device, seq_len=length, **options
        )
        buffer.copy_(chosen)
