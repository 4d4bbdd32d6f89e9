"""output_head: what becomes of hidden states, by a class's own code."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn


class _Given(nn.Module):
    """Stands before an output head, and returns the hidden states that are given to the whole. A
    number that the head finds on its base model, as a multiplier, is that one's."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.__dict__["base"] = base

    @property
    def decoder(self) -> _Given:
        """Stands for a part of the base model that a head calls."""
        return self

    def forward(self, *unused: Any, inputs_embeds: Tensor | None = None, **options: Any) -> _Output:
        assert inputs_embeds is not None
        return _Output(inputs_embeds)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["base"], name)


class _Output:
    """Output of a base model, without all that is optional in it."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


def output_head(modules: Any, base: str) -> Any:
    """The whole model, without the layers: soft caps and scales of logits are its own code.

    Args:
        base: name of the part that ends with the last norm.
    """
    head = copy.copy(modules)
    head._modules = dict(modules._modules) | {base: _Given(getattr(modules, base))}
    return head


def logits_of(head: Any, hidden: Tensor) -> Tensor:
    """``[S, H] -> [S, vocab_size]``."""
    return head(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits[0]
