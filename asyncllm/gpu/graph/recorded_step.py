"""RecordedStep: a step's forward pass as one native program."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from asyncllm.gpu.batch.input_batch import InputBatch
from asyncllm.gpu.batch.step_buffer import StepBuffer
from asyncllm.gpu.batch.step_inputs import KVGroupInputs, StepInputs
from asyncllm.gpu.graph.forward_pass import ForwardPass
from asyncllm.gpu.kv_cache import KVCache
from asyncllm.gpu.models.language_model import EMPTY_TOKEN_TENSOR, LanguageModel, StepOutput
from asyncllm.gpu.ops.program import Program
from asyncllm.gpu.ops.recorder import FAKE_ROW_COUNTS, DynamicSize, Recorder, UnrecordableError
from asyncllm.native.interface import OP_ARG_STRUCTS


class RecordedStep(ForwardPass):
    """The forward pass of decode and mixed steps of any size as one native program.

    A StepQueue runs it. The output of a run is valid until the next run.

    Args:
        input_batch: the persistent batch, whose tables the program reads in place.
        buffer: the step's inputs: the program reads the host sections and computes the derived
            ones.

    Attributes:
        num_bytes: bytes of the activations.
        program: the native program, set by ``make_program``.
        logits, hidden: outputs, with room for the largest step; set by ``make_program``.
        greedy: ``[max_rows]`` int64, tokens with the largest logit; None if the model has no
            ``argmax_function``. Set by ``make_program``.

    Raises:
        UnrecordableError: a part of the model has no native op.
    """

    is_recorded = True
    program: Program
    logits: Tensor
    hidden: Tensor
    greedy: Tensor | None

    def __init__(
        self, model: LanguageModel, cache: KVCache, input_batch: InputBatch, buffer: StepBuffer
    ) -> None:
        recorder = model.ops.recorder()
        if recorder is None:
            raise UnrecordableError(f"the op set {model.ops.name!r} has no programs")
        for attention in model.attention.values():
            if not getattr(attention, "is_recordable", False):
                raise UnrecordableError(f"attention {attention.name!r} has no native kernel")
        rows, tokens = buffer.limits.rows, buffer.limits.tokens
        self._recorder, self.cache = recorder, cache
        self._capacity = (rows, tokens, tokens, rows, rows)
        with torch.no_grad(), recorder:
            found = model.forward(_record_inputs(recorder, input_batch, buffer, model), cache)
            recorder.keep_result(found.hidden)
            recorder.keep_result(found.logits)
            self.finds_greedy_tokens = model.argmax_function is not None
            if self.finds_greedy_tokens:
                recorder.keep_result(found.tokens.view(-1, 1))
        self.num_bytes = recorder.place_activations(self._capacity)[1]

    def make_program(self) -> None:
        """Allocates the activations, and makes the program.

        Raises:
            MemoryError: too little memory for the activations.
        """
        self.program = self._recorder.make_program(self._capacity)
        del self._recorder
        self.hidden, self.logits, *greedy = self.program.results
        self.greedy = greedy[0].view(-1) if greedy else None
        self.description = f"one native program of {len(self.program.names)} ops"

    def output(self, sizes: Sequence[int]) -> StepOutput:
        """Returns views of the last run's outputs; ``sizes`` are the sizes of that run."""
        *_, num_outputs, num_logits, num_greedy = sizes
        tokens = EMPTY_TOKEN_TENSOR if self.greedy is None else self.greedy[:num_greedy]
        return StepOutput(self.logits[:num_logits], self.hidden[:num_outputs], tokens)


def record_step(
    model: LanguageModel, cache: KVCache, input_batch: InputBatch, buffer: StepBuffer
) -> RecordedStep | str:
    """Records a model's forward pass; if that fails, returns the reason instead."""
    try:
        return RecordedStep(model, cache, input_batch, buffer)
    except UnrecordableError as reason:
        return str(reason)


def _record_inputs(
    recorder: Recorder, input_batch: InputBatch, buffer: StepBuffer, model: LanguageModel
) -> StepInputs:
    """Records the ops that compute a step's inputs from the sections that the host writes.

    Returns:
        The inputs: fake tensors that stand for sections of ``buffer``.
    """
    arrays, host = buffer.arrays, buffer.row_arrays(buffer.limits.rows)
    rows = {
        "lines": host.req_indices.ctypes.data,
        "starts": host.starts.ctypes.data,
        "counts": arrays["counts"].ctypes.data,
    }
    made = {
        name: recorder.add_input(arrays[name], DynamicSize.TOKENS)
        for name in ("token_ids", "positions")
    }
    lines, width = input_batch.token_ids.shape
    args = OP_ARG_STRUCTS["tokens"](
        **rows,
        table=input_batch.token_ids.ctypes.data, table_lines=lines, table_width=width,
        query_start=host.query_start_loc.ctypes.data, seq_lens=host.seq_lens.ctypes.data,
    )  # fmt: skip
    recorder.add_op("tokens", DynamicSize.TOKENS, args, made, [buffer, input_batch.token_ids])
    groups = []
    for group, table in enumerate(input_batch.tables):
        slots = recorder.add_input(arrays[f"slots_{group}"], DynamicSize.TOKENS)
        lines, width = table.table.shape
        args = OP_ARG_STRUCTS["slots"](
            **rows, table=table.table.ctypes.data, table_lines=lines, table_width=width,
            block_size=table.block_size,
        )  # fmt: skip
        recorder.add_op("slots", DynamicSize.TOKENS, args, {"slots": slots}, [table.table])
        blocks = torch.from_numpy(table.table)
        groups.append(KVGroupInputs(slots, blocks, table.table, table.block_size))
    tensors = buffer.tensors
    return StepInputs(
        num_decodes=0,
        token_ids=made["token_ids"],
        positions=made["positions"],
        req_indices=tensors["req_indices"],
        seq_lens=tensors["seq_lens"],
        query_start_loc=tensors["query_start_loc"],
        prefill_start_loc=tensors["prefill_start_loc"],
        groups=groups,
        max_num_seqs=buffer.limits.rows,
        max_len=input_batch.token_ids.shape[1],
        num_logits=FAKE_ROW_COUNTS[DynamicSize.SAMPLED_TOKENS],
        num_greedy=FAKE_ROW_COUNTS[DynamicSize.GREEDY_TOKENS]
        if model.argmax_function is not None
        else 0,
        output_indices=recorder.add_input(arrays["output_indices"], DynamicSize.OUTPUT_TOKENS),
        host=host,
    )
