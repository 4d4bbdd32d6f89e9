"""RecordedStep: the model's part of a step as one native call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from asyncllm.core.batch import StepBatch
from asyncllm.gpu.batch.block_table import BlockTable
from asyncllm.gpu.batch.input_batch import InputBatch, span_indices
from asyncllm.gpu.batch.step_inputs import ModelInputs
from asyncllm.gpu.kv_cache import KVCache
from asyncllm.gpu.models.language_model import LanguageModel
from asyncllm.gpu.ops.program import Program
from asyncllm.gpu.ops.recorder import STAND_INS, Recorder, Size, Unrecordable
from asyncllm.native.interface import ARGS

NO_TOKENS = torch.empty(0, dtype=torch.int64, device="cpu")


class RowOrder(NamedTuple):
    """The order of a step's sampled rows: those whose logits are needed come first, and of the
    others the largest is found without them.

    Attributes:
        places: ``[S]``, places among the rows that are sampled; None is as they come.
        num_logits: of them that need their logits.
    """

    places: np.ndarray | None
    num_logits: int


class StepOutput(NamedTuple):
    """Output of the model's part of a step.

    Attributes:
        logits: ``[num_logits, vocab_size]``, of the rows that need them.
        hidden: ``[E, H]`` behind the final norm: of the S rows that are sampled, then at the
            positions that prompt log-probabilities are wanted of.
        tokens: int64, of the rows behind those with logits, as ``ArgmaxLinear`` says.
    """

    logits: Tensor
    hidden: Tensor
    tokens: Tensor


class RowArrays:
    """Static arrays into which a step's rows are written.

    Attributes:
        lines, starts, counts: ``[R]`` int64, of each row: its request index, the position of its
            first token, and how many it has.
        wanted: ``[E]`` int64, tokens whose hidden states are.
    """

    def __init__(self, rows: int, tokens: int) -> None:
        self.lines, self.starts, self.counts = (np.zeros(rows, np.int64) for _ in range(3))
        self.wanted = np.zeros(tokens, np.int64)

    def arrays(self) -> tuple[np.ndarray, ...]:
        return self.lines, self.starts, self.counts, self.wanted

    def write(self, batch: StepBatch, rows: np.ndarray, order: RowOrder) -> tuple[int, ...]:
        """Writes a step.

        Args:
            rows: ``[S]``, those that are sampled.

        Returns:
            The sizes of the step, in the order of Size.
        """
        count, sampled = len(batch), len(rows)
        self.lines[:count], self.starts[:count] = batch.req_indices, batch.starts
        self.counts[:count] = batch.counts
        if order.places is not None:
            rows = rows[order.places]
        wanted = sampled
        if batch.num_decodes == count:
            self.wanted[:sampled] = rows
        else:
            ends = self.counts[:count].cumsum()
            self.wanted[:sampled] = ends[rows] - 1
            if batch.prompt_logprobs:
                spans = np.concatenate(span_indices(batch, ends - self.counts[:count]))
                wanted += len(spans)
                self.wanted[sampled:wanted] = spans
        return count, batch.num_tokens, wanted, order.num_logits, sampled - order.num_logits


class _Inputs(RowArrays):
    """The inputs that the program derives from them."""

    def __init__(self, tables: Sequence[BlockTable], rows: int, tokens: int) -> None:
        super().__init__(rows, tokens)
        self.token_ids, self.positions = np.zeros(tokens, np.int64), np.zeros(tokens, np.int64)
        self.query_start_loc, self.seq_lens = np.zeros(rows + 1, np.int64), np.zeros(rows, np.int64)
        self.slots = [np.zeros(tokens, np.int64) for _ in tables]


class RecordedStep:
    """Decode and mixed steps as one program, whose sizes are arguments of its run.

    Not thread-safe: what a run returns is valid until the next one.

    Args:
        recorder: of the decoder's op set.
        inputs: the persistent batch, whose tables the program reads.
        max_tokens, max_rows: of the largest step, the rows being those that are sampled as well.

    Attributes:
        max_tokens, max_rows: as given.
        rows: what a run reads.
        num_bytes: of the activations, which ``load`` takes.
        program: once they are.
        logits, hidden: of the largest step, likewise.
        greedy: ``[max_rows]`` int64, the largest outputs of rows; None where the model's head does
            not find them.

    Raises:
        Unrecordable: the model does something that no native op does.
    """

    program: Program
    logits: Tensor
    hidden: Tensor
    greedy: Tensor | None

    def __init__(
        self,
        recorder: Recorder,
        decoder: LanguageModel,
        cache: KVCache,
        inputs: InputBatch,
        *,
        max_tokens: int,
        max_rows: int,
    ) -> None:
        max_rows = min(max_rows, max_tokens)
        self.max_tokens, self.max_rows = max_tokens, max_rows
        self.rows = own = _Inputs(inputs.tables, max_rows, max_tokens)
        self._recorder = recorder
        self._capacity = (max_rows, max_tokens, max_tokens, max_rows, max_rows)
        with torch.no_grad(), recorder:
            given = _record_inputs(recorder, own, inputs)
            hidden = decoder.record(given, cache)
            logits = decoder.logits(hidden[: STAND_INS[Size.SAMPLED]])
            recorder.keep(hidden)
            recorder.keep(logits)
            if decoder.argmax is not None:
                recorder.keep(decoder.argmax(hidden[: STAND_INS[Size.GREEDY]]))
        self.num_bytes = recorder.layout(self._capacity)[1]

    def load(self) -> None:
        """Allocates the activations, and makes the program.

        Raises:
            MemoryError: there is not enough.
        """
        self.program = self._recorder.finish(self._capacity)
        del self._recorder
        self.hidden, self.logits, *greedy = self.program.results
        self.greedy = greedy[0].view(-1) if greedy else None

    def order(self, needed: np.ndarray) -> RowOrder:
        """The order of sampled rows.

        Args:
            needed: ``[S]`` bool, whether a row needs its logits.
        """
        count = len(needed) if self.greedy is None else int(np.count_nonzero(needed))
        if count in (0, len(needed)):
            return RowOrder(None, count)
        return RowOrder(np.argsort(~needed, kind="stable"), count)

    def run(self, batch: StepBatch, rows: np.ndarray, order: RowOrder) -> StepOutput:
        """Runs a step, and writes its KV.

        Args:
            rows: ``[S]``, those that are sampled.
        """
        sizes = self.rows.write(batch, rows, order)
        self.program.run(*sizes)
        return self.output(sizes)

    def output(self, sizes: Sequence[int]) -> StepOutput:
        """The output of a run of these sizes."""
        *_, wanted, num_logits, num_greedy = sizes
        tokens = NO_TOKENS if self.greedy is None else self.greedy[:num_greedy]
        return StepOutput(self.logits[:num_logits], self.hidden[:wanted], tokens)


def record_step(
    decoder: LanguageModel, cache: KVCache, inputs: InputBatch, *, max_tokens: int, max_rows: int
) -> RecordedStep | str:
    """The recorded step of a model, or why there is none."""
    recorder = decoder.ops.recorder()
    if recorder is None:
        return f"the op set {decoder.ops.name!r} has no programs"
    try:
        return RecordedStep(
            recorder, decoder, cache, inputs, max_tokens=max_tokens, max_rows=max_rows
        )
    except Unrecordable as reason:
        return str(reason)


def _record_inputs(recorder: Recorder, own: _Inputs, batch: InputBatch) -> list[ModelInputs]:
    """The ops that make the inputs of a step from its rows, and their stand-ins."""
    rows = {name: getattr(own, name).ctypes.data for name in ("lines", "starts", "counts")}
    token_ids = recorder.given(own.token_ids, Size.TOKENS)
    positions = recorder.given(own.positions, Size.TOKENS)
    wanted = recorder.given(own.wanted, Size.WANTED)
    lines, width = batch.token_ids.shape
    args = ARGS["tokens"](
        **rows,
        table=batch.token_ids.ctypes.data, table_lines=lines, table_width=width,
        query_start=own.query_start_loc.ctypes.data, seq_lens=own.seq_lens.ctypes.data,
    )  # fmt: skip
    made = {"token_ids": token_ids, "positions": positions}
    recorder.add("tokens", Size.TOKENS, args, made, [own, batch.token_ids])
    inputs: list[ModelInputs] = []
    for table, slots in zip(batch.tables, own.slots, strict=True):
        slot_mapping = recorder.given(slots, Size.TOKENS)
        lines, width = table.table.shape
        args = ARGS["slots"](
            **rows, table=table.table.ctypes.data, table_lines=lines, table_width=width,
            block_size=table.block_size,
        )  # fmt: skip
        recorder.add("slots", Size.TOKENS, args, {"slots": slot_mapping}, [table.table])
        inputs.append(
            ModelInputs(
                num_decodes=0,
                token_ids=token_ids,
                positions=positions,
                logits_indices=wanted,
                req_indices=wanted[:0],
                host_req_indices=own.lines,
                query_start_loc=own.query_start_loc,
                seq_lens=own.seq_lens,
                starts=own.starts,
                slot_mapping=slot_mapping,
                host_table=table.table,
                device_table=None,
                block_size=table.block_size,
            )
        )
    return inputs
