"""GrammarMasks: the packed bit masks of a step's rows, on the host and on the device."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

NO_MASK_SLOT = -1

_WORD_BITS = 32


def num_mask_words(vocab_size: int) -> int:
    """Number of 32-bit words of a mask."""
    return -(-vocab_size // _WORD_BITS)


class GrammarMasks:
    """Masks of a step's rows, stored without gaps, so that only masks in use are copied.

    Attributes:
        slots: ``[N]`` int64, index in ``words`` of each row's mask; NO_MASK_SLOT for a row without
            one.
        words: ``[N, ceil(vocab_size / 32)]`` int32. Token t is allowed if bit ``t % 32`` of word
            ``t // 32`` is set.
    """

    def __init__(
        self, max_num_seqs: int, vocab_size: int, device: torch.device, *, pinned: bool = False
    ) -> None:
        shape = (max_num_seqs, num_mask_words(vocab_size))
        self.slots = torch.full(
            (max_num_seqs,), NO_MASK_SLOT, dtype=torch.int64, device=device, pin_memory=pinned
        )
        self.words = torch.zeros(shape, dtype=torch.int32, device=device, pin_memory=pinned)

    def set_masks(self, masks: Mapping[int, bytes]) -> dict[int, Exception]:
        """Writes a step's masks into this object, which has to be in host memory.

        Args:
            masks: packed mask by sampled row.

        Returns:
            Errors by row, for masks of a wrong length; such a row gets no mask.
        """
        slots, words = self.slots.numpy(), self.words.numpy()
        slots[:] = NO_MASK_SLOT
        errors: dict[int, Exception] = {}
        count = 0
        for row, mask in masks.items():
            try:
                words[count] = view_mask_words(mask, words.shape[1])
            except ValueError as error:
                errors[row] = error
                continue
            slots[row] = count
            count += 1
        return errors

    def copy_from(self, host_masks: GrammarMasks) -> None:
        """Queues the copy of a step's masks from the host."""
        self.slots.copy_(host_masks.slots, non_blocking=True)
        count = int(host_masks.slots.max()) + 1
        self.words[:count].copy_(host_masks.words[:count], non_blocking=True)


def view_mask_words(packed_mask: bytes, expected_words: int) -> np.ndarray:
    """Views a packed mask as ``[expected_words]`` int32.

    Raises:
        ValueError: the mask has another length.
    """
    if len(packed_mask) != 4 * expected_words:
        raise ValueError(
            f"a mask of tokens has {len(packed_mask)} bytes; expected {4 * expected_words}, "
            "a bit per token"
        )
    return np.frombuffer(packed_mask, dtype="<i4")


def mask_logits(logits: Tensor, slots: Tensor, words: Tensor) -> None:
    """Sets logits to minus infinity where a row's mask forbids the token.

    Args:
        logits: ``[S, vocab_size]``.
        slots: ``[S]``, see GrammarMasks.
    """
    allowed = unpack_bits(words.index_select(0, slots.clamp(min=0)), logits.shape[1])
    allowed |= (slots < 0).unsqueeze(1)
    logits.masked_fill_(allowed.logical_not_(), -torch.inf)


def unpack_bits(words: Tensor, count: int) -> Tensor:
    """Unpacks the first ``count`` bits of each row of ``words``: ``[R, count]`` bool.

    Args:
        words: ``[R, W]`` int32.
    """
    shifts = torch.arange(_WORD_BITS, dtype=torch.int32, device=words.device)
    bits = words.unsqueeze(-1) >> shifts
    bits &= 1
    return bits.view(len(words), -1)[:, :count] != 0
