"""output_head: the part of a model's own code that turns hidden states into logits."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn


class _PassThroughBase(nn.Module):
    """Substitute for the base model: returns the hidden states that are passed as input embeddings.

    Attributes that the head reads from it, such as a multiplier, are those of the base model.
    """

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.__dict__["base"] = base

    @property
    def decoder(self) -> _PassThroughBase:
        """Substitute for the base model's ``decoder``, which some heads call directly."""
        return self

    def forward(
        self, *unused: Any, inputs_embeds: Tensor | None = None, **options: Any
    ) -> _BaseOutput:
        assert inputs_embeds is not None
        return _BaseOutput(inputs_embeds)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["base"], name)


class _BaseOutput:
    """Output of a base model; optional fields are None."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


def output_head(modules: Any, base: str) -> Any:
    """A shallow copy of the model whose base model passes hidden states through.

    The model's own code for soft caps and scales of logits thus applies.

    Args:
        base: name of the submodule that ends with the last norm.
    """
    head = copy.copy(modules)
    head._modules = dict(modules._modules) | {base: _PassThroughBase(getattr(modules, base))}
    return head


def logits_of(head: Any, hidden: Tensor) -> Tensor:
    """Logits of hidden states, ``[S, H] -> [S, vocab_size]``."""
    return head(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits[0]
