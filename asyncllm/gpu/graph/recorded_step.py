"""RecordedStep: the model's part of a step as one native call."""

from __future__ import annotations

from collections.abc import Sequence

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
from asyncllm.logger import get_logger
from asyncllm.native import ARGS

logger = get_logger(__name__)


class _Inputs:
    """Arrays that a step is written into, at addresses that stay.

    Attributes:
        lines, starts, counts: ``[R]`` int64, of each row: its request index, the position of its
            first token, and how many it has.
        wanted: ``[E]`` int64, tokens whose hidden states are.
    """

    def __init__(self, tables: Sequence[BlockTable], rows: int, tokens: int) -> None:
        def array(count: int) -> np.ndarray:
            return np.zeros(count, dtype=np.int64)

        self.lines, self.starts, self.counts = array(rows), array(rows), array(rows)
        self.wanted = array(tokens)
        self.token_ids, self.positions = array(tokens), array(tokens)
        self.query_start_loc, self.seq_lens = array(rows + 1), array(rows)
        self.slots = [array(tokens) for _ in tables]


class RecordedStep:
    """Decode and mixed steps as one program, whose sizes are arguments of its run.

    Not thread-safe: what a run returns is valid until the next one.

    Args:
        recorder: of the decoder's op set.
        inputs: the persistent batch, whose tables the program reads.
        max_tokens, max_rows: of the largest step, the rows being those that are sampled as well.

    Attributes:
        num_bytes: of the activations, which ``load`` takes.
        program: once they are.

    Raises:
        Unrecordable: the model does something that no native op does.
    """

    program: Program

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
        self._inputs = own = _Inputs(inputs.tables, max_rows, max_tokens)
        self._all_rows = np.arange(max_rows)
        self._recorder, self._capacity = recorder, (max_rows, max_tokens, max_tokens, max_rows)
        with torch.no_grad(), recorder:
            given = _record_inputs(recorder, own, inputs)
            hidden = decoder.record(given, cache)
            logits = decoder.logits(hidden[: STAND_INS[Size.SAMPLED]])
            recorder.keep(hidden)
            recorder.keep(logits)
        self.num_bytes = recorder.layout(self._capacity)[1]

    def load(self) -> None:
        """Takes its memory.

        Raises:
            MemoryError: there is not enough.
        """
        self.program = self._recorder.finish(self._capacity)
        del self._recorder
        self._hidden, self._logits = self.program.results

    def run(self, batch: StepBatch, rows: np.ndarray, num_logits: int) -> tuple[Tensor, Tensor]:
        """Runs a step, and writes its KV.

        Args:
            rows: ``[S]``, those that are sampled.
            num_logits: how many of them need their logits.

        Returns:
            Logits ``[num_logits, vocab_size]``, and hidden states ``[E, H]`` behind the final norm:
            of the S rows, then at the positions that prompt log-probabilities are wanted of.
        """
        own, count, sampled = self._inputs, len(batch), len(rows)
        own.lines[:count], own.starts[:count] = batch.req_indices, batch.starts
        own.counts[:count] = batch.counts
        wanted = sampled
        if batch.num_decodes == count:
            own.wanted[:sampled] = self._all_rows[:sampled]
        else:
            ends = own.counts[:count].cumsum()
            own.wanted[:sampled] = ends[rows] - 1
            if batch.prompt_logprobs:
                spans = np.concatenate(span_indices(batch, ends - own.counts[:count]))
                wanted += len(spans)
                own.wanted[sampled:wanted] = spans
        self.program.run(count, batch.num_tokens, wanted, num_logits)
        return self._logits[:num_logits], self._hidden[:wanted]


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
