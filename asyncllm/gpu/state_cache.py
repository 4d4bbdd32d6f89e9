"""StateCache: the recurrent states of all layers, a slot per request index."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asyncllm.errors import EngineError


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One state of one layer, such as the last inputs of a short convolution or the matrix of a
    gated delta rule.

    Attributes:
        shape: of a sequence's state.
        dtype: it is kept in; None is the model's.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Of a slot, in a model of ``dtype``."""
        return math.prod(self.shape) * (self.dtype or dtype).itemsize


def slot_bytes(specs: Sequence[StateSpec], dtype: torch.dtype) -> int:
    """Bytes of a sequence's states in all layers."""
    return sum(spec.num_bytes(dtype) for spec in specs)


class StateCache:
    """Recurrent states in slots: slot i is of request index i, the last one of padded rows, which
    write it and whose results no row reads.

    A state says what all tokens before a position come to, so a slot is worth nothing to another
    request, and is cleared by the row that starts at position 0.

    On a CPU the operating system zeroes it page by page as it is first touched.

    Attributes:
        tensors: per spec ``[num_slots + 1, *shape]``.

    Raises:
        EngineError: there is no memory for it.
    """

    def __init__(
        self,
        specs: Sequence[StateSpec],
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.specs = tuple(specs)
        self.num_slots = num_slots
        try:
            self.tensors = [
                _zeros((num_slots + 1, *spec.shape), spec.dtype or dtype, device) for spec in specs
            ]
        except (MemoryError, ValueError, torch.OutOfMemoryError) as error:
            per_slot = slot_bytes(specs, dtype)
            raise EngineError(
                f"recurrent states of {num_slots + 1} slots of {per_slot} bytes, "
                f"{(num_slots + 1) * per_slot} bytes, cannot be allocated: lower max_num_seqs"
            ) from error

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)
