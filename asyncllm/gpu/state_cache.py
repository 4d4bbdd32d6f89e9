"""StateCache: the recurrent states of all layers, a slot per request index."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncllm.errors import EngineError
from asyncllm.gpu.h2d import lazy_zeros


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One recurrent state of one layer.

    Examples are the last inputs of a short convolution, and the matrix of a gated delta rule.

    Attributes:
        shape: shape of one sequence's state.
        dtype: dtype of the stored state; None is the model's.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None


def slot_bytes(specs: Sequence[StateSpec], dtype: torch.dtype) -> int:
    """Bytes of a sequence's states in all layers, in a model of ``dtype``."""
    return sum(math.prod(spec.shape) * (spec.dtype or dtype).itemsize for spec in specs)


class StateCache:
    """Recurrent states of running requests, and snapshots of cached prefixes, in slots.

    Slot i belongs to request index i. Padded rows write slot ``num_slots``, which nothing else
    reads. Slot ``num_slots + i`` is snapshot i, counted from 1.

    A state summarises all tokens before a position. A row that starts at position 0 clears the
    state that another request left in its slot. Before a row continues a cached prefix, the
    prefix's snapshot is copied to the row's slot.

    On a CPU the operating system zeroes the memory page by page as it is first touched.

    Args:
        num_slots: slots of running requests.
        num_snapshots: slots of snapshots.

    Attributes:
        tensors: one per spec, ``[num_slots + 1 + num_snapshots, *shape]``.

    Raises:
        EngineError: too little memory for the states.
    """

    def __init__(
        self,
        specs: Sequence[StateSpec],
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
        num_snapshots: int = 0,
    ) -> None:
        self.specs = tuple(specs)
        self.num_slots, self.num_snapshots = num_slots, num_snapshots
        count = num_slots + 1 + num_snapshots
        try:
            self.tensors = [
                lazy_zeros((count, *spec.shape), spec.dtype or dtype, device) for spec in specs
            ]
        except (MemoryError, ValueError, torch.OutOfMemoryError) as error:
            per_slot = slot_bytes(specs, dtype)
            raise EngineError(
                f"recurrent states of {count} slots of {per_slot} bytes, {count * per_slot} bytes, "
                "cannot be allocated: lower max_num_seqs or num_state_snapshots"
            ) from error
        alike: dict[torch.dtype, list[Tensor]] = {}
        for tensor in self.tensors:
            alike.setdefault(tensor.dtype, []).append(tensor)
        self._tensors_by_dtype = list(alike.values())

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def load_snapshots(self, slot_snapshot_pairs: Sequence[tuple[int, int]]) -> None:
        """Copies snapshots to requests' slots, for pairs ``(request index, snapshot)``.

        Call it before the step in which the requests continue from the snapshots.
        """
        self._copy_slots([(slot, self.num_slots + i) for slot, i in slot_snapshot_pairs])

    def save_snapshots(self, slot_snapshot_pairs: Sequence[tuple[int, int]]) -> None:
        """Copies requests' slots to snapshots, for pairs ``(request index, snapshot)``.

        Call it after the step that computed the states and before the next one.
        """
        self._copy_slots([(self.num_slots + i, slot) for slot, i in slot_snapshot_pairs])

    def _copy_slots(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies slots by pairs ``(target, source)``; no slot is both target and source.

        The states of all layers that have the same dtype are copied in one call. On a GPU, such a
        call launches one or a few kernels instead of one per layer.
        """
        copy = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
        for tensors in self._tensors_by_dtype:
            to = [tensor[slot] for slot, _ in pairs for tensor in tensors]
            copy(to, [tensor[slot] for _, slot in pairs for tensor in tensors])
