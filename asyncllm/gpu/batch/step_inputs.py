"""StepInputs: a step's rows and tokens, as the model and attention read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowArrays:
    """R rows of a step on the host.

    Attributes:
        req_indices: ``[R]`` int64, request index of each row.
        starts: ``[R]`` int64, position of each row's first token.
        query_start_loc: ``[R + 1]`` int64, index of each row's first token, and T at the end.
        seq_lens: ``[R]`` int32, length of each sequence, this step's tokens included.
    """

    req_indices: np.ndarray
    starts: np.ndarray
    query_start_loc: np.ndarray
    seq_lens: np.ndarray


@dataclass(frozen=True, slots=True)
class KVGroupInputs:
    """The part of a step that belongs to one KV group.

    Attributes:
        slot_mapping: ``[T]`` int64, KV slot of each token; slot 0, in the null block, for padding.
        block_table: ``[N, W]`` int32 by request index, on the step's device. Entries beyond a
            sequence are undefined, entries before the group's window are the null block.
        host_table: the same block table on the host.
        block_size: tokens per KV block.
        table_changes: ``[C]`` int64, indices into the flattened block table, and ``[C]`` int32,
            their new entries; ``fill_decode_inputs`` writes these to the table. An index that
            occurs twice has the same entry both times; padding is an index of the dummy row. None
            if the host writes the table.
    """

    slot_mapping: Tensor
    block_table: Tensor
    host_table: np.ndarray
    block_size: int
    table_changes: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step's rows, flattened to T tokens; R rows, decodes first; N request indices.

    In a captured step only the device has the values: ``host`` is None, and ``max_len`` is an upper
    bound of the lengths. Padded rows use request index N, which no request has: what they write to
    a table goes to entry N, which no other row reads.

    Attributes:
        num_decodes: leading rows of one token each, padded ones included.
        token_ids: ``[T]`` int64.
        positions: ``[T]`` int64, position of each token in its sequence; 0 for padding.
        req_indices: ``[R]`` int64; -1 for a padded row.
        seq_lens: ``[R]`` int32, as in RowArrays; 0 in a padded row.
        query_start_loc: ``[R + 1]`` int64, as in RowArrays.
        prefill_start_loc: ``[R - num_decodes + 1]`` int32, like ``query_start_loc`` for the rows
            after the decodes, counted from their first token.
        groups: the inputs of each KV group.
        max_num_seqs: N.
        max_len: the largest of ``seq_lens``; in a captured step an upper bound.
        num_logits: number of leading entries of ``output_indices`` whose logits are computed.
        num_greedy: number of the next entries of ``output_indices``, which need only the token of
            the largest logit.
        output_indices: ``[E]`` int64, indices of the tokens whose hidden states are returned
            (vLLM's ``logits_indices``, and tokens of prompt log-probabilities); None for all.
        host: the rows on the host; None in a captured step.
        has_balanced_splits: whether decode attention splits the keys among programs in proportion
            to the rows' lengths, because these differ much.
        previous_tokens: ``[R]`` int64, the input token of each decode row; -1 if only
            ``last_sampled_tokens`` has it.
        last_sampled_tokens: ``[N + 1]`` int64, by request index.
    """

    num_decodes: int
    token_ids: Tensor
    positions: Tensor
    req_indices: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    prefill_start_loc: Tensor
    groups: Sequence[KVGroupInputs]
    max_num_seqs: int
    max_len: int
    num_logits: int
    num_greedy: int = 0
    output_indices: Tensor | None = None
    host: RowArrays | None = None
    has_balanced_splits: bool = False
    previous_tokens: Tensor | None = None
    last_sampled_tokens: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def num_rows(self) -> int:
        return int(self.req_indices.shape[0])

    def nonnegative_req_indices(self) -> Tensor:
        """``[R]`` int64: each row's request index, N for a padded row."""
        return torch.where(self.req_indices < 0, self.max_num_seqs, self.req_indices)

    def row_block_tables(self, group: int) -> Tensor:
        """``[R, W]`` int32: each row's block table in a KV group, wide enough for ``max_len``."""
        own = self.groups[group]
        table = own.block_table[:, : -(-self.max_len // own.block_size)]
        return table.index_select(0, self.nonnegative_req_indices())
