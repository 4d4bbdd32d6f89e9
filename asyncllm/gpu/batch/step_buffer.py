"""StepBuffer: a step's inputs, which the host writes and the device reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from asyncllm.core.batch import StepBatch
from asyncllm.gpu.batch.input_batch import InputBatch
from asyncllm.gpu.batch.sampling_table import scalar_param_sections
from asyncllm.gpu.batch.sections import BufferSections, SectionTable
from asyncllm.gpu.batch.step_inputs import KVGroupInputs, RowArrays, StepInputs

LAST_DECODE_SECTION_NAME = "sampled_positions"
"""Name of the last section that a decode step on a device needs."""


class StepSizes(NamedTuple):
    """Sizes of a step, in the order of ``Size`` in ``native/src/interface.h``.

    Attributes:
        outputs: number of tokens whose hidden states are returned: first the last token of each
            sampled row, then the tokens of prompt log-probabilities.
        logits: number of sampled rows whose logits are computed; these rows come first.
        greedy: number of the other sampled rows, which need only the token of the largest
            logit.
    """

    rows: int
    tokens: int
    outputs: int
    logits: int
    greedy: int


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Sizes of the largest step.

    Attributes:
        table_rows: rows of the device's tables of sampling parameters and of blocks: one per
            request index and one for padding. 0 if a step reads these tables in the host's memory.
        padded_tokens: number of tokens to which shorter mixed steps are padded.
    """

    rows: int
    tokens: int
    num_groups: int
    table_rows: int = 0
    padded_tokens: int = 0

    def section_table(self) -> SectionTable:
        """Dtypes and sizes of the sections.

        A step copies a prefix of the sections: state changes and rows come first, tokens last.
        """
        table: dict[str, tuple[torch.dtype, int]] = {}
        rows, tokens = self.rows, self.tokens
        if self.table_rows:
            table |= scalar_param_sections(self.table_rows)
            for group in range(self.num_groups):
                table[f"changed_{group}"] = torch.int64, rows
                table[f"new_blocks_{group}"] = torch.int32, rows
        names = (
            "req_indices",
            "starts",
            "counts",
            "sampled_req_indices",
            "previous_tokens",
            LAST_DECODE_SECTION_NAME,
        )
        table |= dict.fromkeys(names, (torch.int64, rows))
        table["output_indices"] = torch.int64, tokens
        table["query_start_loc"] = torch.int64, rows + 1
        table["prefill_start_loc"] = torch.int32, rows + 1
        table["seq_lens"] = torch.int32, rows
        names = ("token_ids", "positions", *(f"slots_{i}" for i in range(self.num_groups)))
        return table | dict.fromkeys(names, (torch.int64, tokens))


class StepBuffer(BufferSections):
    """The inputs of a step, as sections of one allocation.

    ``write`` writes the *host* sections:

    - ``req_indices``, ``starts`` and ``counts`` of each row;
    - ``sampled_req_indices`` and ``sampled_positions`` of each sampled row: its request index, and
      the position of the token before the sampled one;
    - ``output_indices``, see StepInputs.

    ``previous_tokens`` has the tokens at ``sampled_positions``; -1 if only the device has the
    token. The other sections of StepInputs are *derived*: on the host by
    ``compute_derived_inputs``, or by an op on the device, which has the tokens of the previous
    step. CUDA graphs and native programs hold the addresses of the device's buffer. On a CPU the
    host writes directly into that buffer, except for steps that begin early.
    """

    def __init__(self, limits: StepLimits, device: torch.device, *, pinned: bool = False) -> None:
        super().__init__(limits.section_table(), device, pinned=pinned)
        self.limits = limits
        for name in ("req_indices", "sampled_req_indices"):
            self.tensors[name].fill_(-1)

    def write(
        self, batch: StepBatch, req_indices: np.ndarray, starts: np.ndarray, rows: np.ndarray,
        num_logits: int,
    ) -> StepSizes:  # fmt: skip
        """Writes the sections that the host provides.

        Padded rows get request index -1 in a buffer that is copied to a device.

        Args:
            req_indices, starts: ``[R]`` int64, the lists of ``batch`` as arrays.
            rows: ``[S]``, the sampled rows; rows that need logits come first.
        """
        arrays, count, sampled = self.arrays, len(batch), len(rows)
        counts, num_outputs = arrays["counts"][:count], sampled
        arrays["req_indices"][:count], arrays["starts"][:count] = req_indices, starts
        counts[:] = 1 if batch.num_decodes == count else batch.counts
        arrays["sampled_req_indices"][:sampled] = req_indices[rows]
        arrays[LAST_DECODE_SECTION_NAME][:sampled] = (starts + counts)[rows] - 1
        if self.limits.table_rows:
            arrays["req_indices"][count:] = arrays["sampled_req_indices"][sampled:] = -1
            arrays["starts"][count:] = arrays[LAST_DECODE_SECTION_NAME][sampled:] = 0
        if batch.num_decodes == count:
            arrays["output_indices"][:sampled] = rows
        else:
            ends = counts.cumsum()
            arrays["output_indices"][:sampled] = ends[rows] - 1
            if batch.prompt_logprobs:
                spans = np.concatenate(_prompt_logprob_indices(batch, ends - counts))
                num_outputs += len(spans)
                arrays["output_indices"][sampled:num_outputs] = spans
        return StepSizes(count, batch.num_tokens, num_outputs, num_logits, sampled - num_logits)

    def compute_derived_inputs(
        self, input_batch: InputBatch, sizes: StepSizes, num_decodes: int
    ) -> None:
        """Computes tokens, positions, slots and lengths from the written sections and the batch."""
        arrays, (rows, tokens, *_) = self.arrays, sizes
        starts, counts = arrays["starts"][:rows], arrays["counts"][:rows]
        first = arrays["query_start_loc"][: rows + 1]
        np.cumsum(counts, out=first[1:])
        arrays["prefill_start_loc"][: rows - num_decodes + 1] = first[num_decodes:] - num_decodes
        arrays["seq_lens"][:rows] = starts + counts
        table_rows, positions = arrays["req_indices"][:rows], starts
        if tokens != rows:
            table_rows = np.repeat(table_rows, counts)
            positions = np.arange(tokens) + np.repeat(starts - first[:-1], counts)
        derived = {
            "token_ids": input_batch.token_ids[table_rows, positions],
            "positions": positions,
        }
        for group, table in enumerate(input_batch.tables):
            derived[f"slots_{group}"] = table.slot_mapping(table_rows, positions)
        padded = self.limits.padded_tokens
        for name, values in derived.items():
            arrays[name][:tokens] = values
            if tokens < padded:
                # Padding is token 0 at position 0, whose KV goes to the null block.
                arrays[name][tokens:padded] = 0

    def row_arrays(self, count: int) -> RowArrays:
        """The first ``count`` rows as arrays on the host."""
        arrays = self.arrays
        return RowArrays(
            arrays["req_indices"][:count],
            arrays["starts"][:count],
            arrays["query_start_loc"][: count + 1],
            arrays["seq_lens"][:count],
        )

    def kv_group_inputs(
        self, input_batch: InputBatch, block_tables: Sequence[Tensor], num_tokens: int
    ) -> list[KVGroupInputs]:
        """Inputs of each KV group for the first ``num_tokens`` tokens.

        Args:
            block_tables: per KV group, the block tables on the device.
        """
        return [
            KVGroupInputs(
                self.tensors[f"slots_{group}"][:num_tokens], on_device, own.table, own.block_size
            )
            for group, (own, on_device) in enumerate(
                zip(input_batch.tables, block_tables, strict=True)
            )
        ]

    def step_inputs(
        self, input_batch: InputBatch, sizes: StepSizes, num_decodes: int,
        block_tables: Sequence[Tensor], host_buffer: StepBuffer,
    ) -> StepInputs:  # fmt: skip
        """The inputs of the step in this buffer.

        Args:
            block_tables: per KV group, the block tables on the device.
            host_buffer: buffer with the same step's sections on the host.
        """
        rows, tokens, num_outputs, num_logits, num_greedy = sizes
        tensors, host_rows = self.tensors, host_buffer.row_arrays(rows)
        # If all rows are decodes in their original order, the hidden states of every token are
        # returned, so no indices are needed.
        returns_all = num_decodes == rows and 0 in (num_logits, num_greedy)
        return StepInputs(
            num_decodes=num_decodes,
            token_ids=tensors["token_ids"][:tokens],
            positions=tensors["positions"][:tokens],
            req_indices=tensors["req_indices"][:rows],
            seq_lens=tensors["seq_lens"][:rows],
            query_start_loc=tensors["query_start_loc"][: rows + 1],
            prefill_start_loc=tensors["prefill_start_loc"][: rows - num_decodes + 1],
            groups=self.kv_group_inputs(input_batch, block_tables, tokens),
            max_num_seqs=self.limits.rows,
            max_len=int(host_rows.seq_lens.max()),
            num_logits=num_logits,
            num_greedy=num_greedy,
            output_indices=None if returns_all else tensors["output_indices"][:num_outputs],
            host=host_rows,
        )


def make_dummy_batch(
    starts: Sequence[int], counts: Sequence[int], *, num_decodes: int = 0
) -> StepBatch:
    """Makes a step whose request indices are 0, 1, 2, …, and which samples every row."""
    rows = len(counts)
    return StepBatch(
        step=0,
        req_indices=list(range(rows)),
        starts=list(starts),
        counts=list(counts),
        samples=[True] * rows,
        num_decodes=num_decodes,
        num_tokens=sum(counts),
    )


def step_inputs(step_batch: StepBatch, input_batch: InputBatch, device: torch.device) -> StepInputs:
    """Makes a step's inputs on ``device`` without a runner.

    The inputs are in a new buffer, with copies of the persistent batch's block tables. Logits are
    computed for every sampled row.
    """
    rows = np.flatnonzero(step_batch.samples)
    starts = np.array(step_batch.starts, dtype=np.int64)
    req_indices = np.array(step_batch.req_indices, dtype=np.int64)
    num_rows, num_decodes = len(step_batch), step_batch.num_decodes
    max_tokens = max(num_rows, step_batch.num_tokens)
    limits = StepLimits(num_rows, max_tokens, len(input_batch.tables))
    host = StepBuffer(limits, torch.device("cpu"))
    sizes = host.write(step_batch, req_indices, starts, rows, len(rows))
    host.compute_derived_inputs(input_batch, sizes, num_decodes)
    buffer = host if device.type == "cpu" else StepBuffer(limits, device)
    if buffer is not host:
        buffer.copy_from(host, next(reversed(buffer.tensors)))
    tables = [torch.from_numpy(table.table).to(device) for table in input_batch.tables]
    return buffer.step_inputs(input_batch, sizes, num_decodes, tables, host)


def _prompt_logprob_indices(batch: StepBatch, first_token_indices: np.ndarray) -> list[np.ndarray]:
    """Indices, within the step's tokens, of each span of prompt log-probabilities."""
    return [
        np.arange(span.first, span.end) + (first_token_indices[row] - batch.starts[row])
        for row, span in batch.prompt_logprobs.items()
    ]
