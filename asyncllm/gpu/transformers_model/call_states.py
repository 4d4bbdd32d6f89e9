"""CallStates: the cache that one call of a recurrent module gets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

StateKey = tuple[Literal["conv", "recurrent"], int]
"""Key of one state of a module: its kind, and transformers' ``state_idx``."""


class CallStates:
    """The cache of one call, with the interface of transformers' caches for linear attention.

    Updates change the states of the call's rows in place.

    Attributes:
        row_states: states ``[B, *shape]`` of the call's rows.
    """

    def __init__(self, row_states: Mapping[StateKey, Tensor]) -> None:
        self.row_states = row_states

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        return self.row_states["conv", state_idx]

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        return self.row_states["recurrent", state_idx]

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
    ) -> Tensor:
        """Returns the stored inputs followed by the new ones; stores the last of these.

        Args:
            conv_states: ``[B, C, n]``, the new inputs.

        Returns:
            ``[B, C, kernel + n]``.
        """
        held = self.row_states["conv", state_idx]
        whole = torch.cat((held, conv_states), dim=-1)
        held.copy_(whole[..., -held.shape[-1] :])
        return whole

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0
    ) -> Tensor:
        return self.row_states["recurrent", state_idx].copy_(recurrent_states)

    def is_recording_past(self, layer_idx: int) -> bool:
        return False
