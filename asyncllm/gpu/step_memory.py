"""StepMemory: the memory that a device's steps share, at fixed addresses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from asyncllm.core.executor import ExecutorInfo
from asyncllm.gpu.batch.grammar_masks import GrammarMasks
from asyncllm.gpu.batch.host_buffer import HostBuffer
from asyncllm.gpu.batch.input_batch import InputBatch
from asyncllm.gpu.batch.sampling_inputs import (
    LogitsTables,
    SamplingRows,
    SamplingStages,
    TopLogprobs,
)
from asyncllm.gpu.batch.step_buffer import LAST_DECODE_SECTION_NAME, StepBuffer, StepLimits
from asyncllm.gpu.batch.step_inputs import KVGroupInputs, StepInputs
from asyncllm.gpu.h2d import copy_to_device
from asyncllm.gpu.launched_step import LaunchedStep
from asyncllm.gpu.ops.torch_ops import TorchOps
from asyncllm.gpu.sample.sampling_state import SamplingState


class StepMemory:
    """Input buffer of the running step, and the batch state that the step reads.

    If ``on_device``, the batch's state lies on the device and is changed there, in the order of
    the steps. Otherwise steps read the host's own arrays in place, and nothing is copied.

    Attributes:
        buffer: input buffer of the running step; unless ``on_device``, the host writes it in place.
        block_tables: ``[N, W]`` int32 per KV group, by request index; ``[N + 1, W]`` with a dummy
            last row if ``on_device``.
        last_sampled_tokens: ``[N + 1]`` int64, by request index.
        scalars: sampling parameters by request index, ``[N + 1]`` each.
        tables: LogitsTables of rules and penalties, by request index.
        sampled_tokens: ``[N]`` int64, the tokens of the last step, by sampled row.
        masks, logprobs: grammar masks and top log-probabilities of the step being sampled, by
            sampled row; None until a step needs them.
    """

    def __init__(
        self, info: ExecutorInfo, input_batch: InputBatch, state: SamplingState, ops: TorchOps,
        device: torch.device, *, on_device: bool, padded_tokens: int = 0,
    ) -> None:  # fmt: skip
        self.info, self.device, self.on_device = info, device, on_device
        self._input_batch, self._ops, self._state = input_batch, ops, state
        rows, tokens = info.max_num_seqs, info.max_num_batched_tokens
        table_rows = rows + 1 if on_device else 0
        limits = StepLimits(rows, max(rows, tokens), len(info.kv_groups), table_rows, padded_tokens)
        self.last_sampled_tokens = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        self.tables = LogitsTables(rows, info.vocab_size, device)
        self.masks: GrammarMasks | None = None
        self.logprobs: TopLogprobs | None = None
        self.scalars: Mapping[str, Tensor]
        self.buffer: StepBuffer
        if not on_device:
            self.block_tables = [torch.from_numpy(table.table) for table in input_batch.tables]
            own = self.buffer = HostBuffer(limits, info.vocab_size, state.num_logprobs)
            self.scalars, self.sampled_tokens = state.sections.tensors, own.tokens
            self.host_buffers = [own]
            return
        widths = [table.table.shape[1] for table in input_batch.tables]
        self.block_tables = [
            torch.zeros((rows + 1, width), dtype=torch.int32, device=device) for width in widths
        ]
        padding, pinned = [rows * width for width in widths], device.type == "cuda"
        self.buffer = StepBuffer(limits, device)
        for group, index in enumerate(padding):
            self.buffer.tensors[f"changed_{group}"].fill_(index)
        self.scalars = self.buffer.tensors
        self.scalars["top_p"].fill_(1.0)
        self.sampled_tokens = torch.full((rows,), -1, dtype=torch.int64, device=device)
        # Make one buffer more than steps in flight, because a copy reads its buffer only when the
        # stream reaches the copy.
        self.host_buffers = [
            HostBuffer(limits, info.vocab_size, state.num_logprobs, padding, pinned=pinned)
            for _ in range(info.pipeline_depth + 1)
        ]

    # --- copies of a step to the device and back ---------------------------------------

    def write_host_buffer(self, step: LaunchedStep) -> None:
        """Writes a step to its host buffer. Apply the step's changes to the batch first."""
        host = step.buffer
        step.sizes = host.write(
            step.batch, step.row_indices, step.starts, step.rows, step.num_logits
        )
        if not self.on_device:
            return
        self.write_previous_tokens(step, host)
        host.set_scalar_params(self._state)
        table_changes = [table.pop_changes() for table in self._input_batch.tables]
        step.overflow_block_table_changes = host.set_block_table_changes(table_changes)

    def write_previous_tokens(self, step: LaunchedStep, buffer: StepBuffer) -> None:
        """Writes the token before each sampled token; -1 if only the device has it so far."""
        tokens = self._input_batch.token_ids[step.req_indices, step.positions - 1]
        buffer.arrays["previous_tokens"][: len(tokens)] = tokens

    def upload(self, step: LaunchedStep) -> None:
        """Queues the copy of a step's inputs to the device, and the updates of the batch state on
        the device."""
        for update in step.logits_table_updates:
            update.write(self.tables)
        if not self.on_device:
            return
        tokens_end = next(reversed(self.buffer.tensors))
        self.buffer.copy_from(
            step.buffer, LAST_DECODE_SECTION_NAME if step.is_decode else tokens_end
        )
        if step.overflow_block_table_changes or not step.is_decode:
            no_rows = self.decode_step_inputs(0)
            for group, *arrays in step.overflow_block_table_changes:
                indices, values = (copy_to_device(array, self.device) for array in arrays)
                changed = replace(no_rows.groups[group], table_changes=(indices, values))
                self._ops.fill_decode_inputs(no_rows, changed)
            if not step.is_decode:
                self.derive_decode_inputs(no_rows)

    def prepare_sampling(self, stages: SamplingStages, host_buffer: HostBuffer) -> None:
        """Queues the copy of grammar masks, and allocates log-probability buffers, if needed."""
        if stages & SamplingStages.LOGPROBS and self.logprobs is None:
            sizes = self.info.max_num_seqs, self._state.num_logprobs
            own = self.buffer
            on_host = isinstance(own, HostBuffer)
            self.logprobs = own.logprobs if on_host else TopLogprobs(*sizes, self.device)
        if stages & SamplingStages.MASKS:
            if not self.on_device:
                self.masks = host_buffer.grammar_masks
                return
            if self.masks is None:
                sizes = self.info.max_num_seqs, self.info.vocab_size
                self.masks = GrammarMasks(*sizes, self.device)
            self.masks.copy_from(host_buffer.grammar_masks)

    def copy_outputs_to_host(self, step: LaunchedStep) -> None:
        """Queues the copy of the step's tokens and log-probabilities to its host buffer."""
        host, count = step.buffer, len(step.rows)
        host.tokens[:count].copy_(self.sampled_tokens[:count], non_blocking=True)
        if step.stages & SamplingStages.LOGPROBS:
            assert self.logprobs is not None
            host.logprobs.copy_from(self.logprobs, count)

    def derive_inputs(self, step: LaunchedStep) -> StepInputs:
        """Computes positions, lengths and KV slots on the host, and returns the step's inputs."""
        assert step.sizes is not None
        sizes, decodes, host = step.sizes, step.batch.num_decodes, step.buffer
        host.compute_derived_inputs(self._input_batch, sizes, decodes)
        return self.buffer.step_inputs(self._input_batch, sizes, decodes, self.block_tables, host)

    def insert_sampled_tokens(self, inputs: StepInputs) -> None:
        """Queues the op that replaces placeholders among the input tokens of decode rows.

        An earlier step sampled the tokens to insert, and only the device has them.
        """
        count = inputs.num_decodes
        if self.on_device and count:
            tokens = inputs.token_ids[:count]
            sampled = self.last_sampled_tokens[inputs.req_indices[:count]]
            torch.where(tokens < 0, sampled, tokens, out=tokens)

    # --- inputs at fixed addresses, for a capture --------------------------------------

    def decode_step_inputs(self, num_rows: int, *, has_balanced_splits: bool = False) -> StepInputs:
        """Inputs of ``num_rows`` decode rows, padding included.

        Their values exist on the device alone, where ``derive_decode_inputs`` computes them.
        """
        tensors = self.buffer.tensors
        rows, none = slice(num_rows), tensors["prefill_start_loc"][:0]
        return StepInputs(
            num_decodes=num_rows,
            token_ids=tensors["token_ids"][rows],
            positions=tensors["starts"][rows],
            req_indices=tensors["req_indices"][rows],
            seq_lens=tensors["seq_lens"][rows],
            query_start_loc=none,
            prefill_start_loc=none,
            groups=[
                replace(
                    own, table_changes=(tensors[f"changed_{group}"], tensors[f"new_blocks_{group}"])
                )
                for group, own in enumerate(self._kv_group_inputs(num_rows))
            ],
            max_num_seqs=self.info.max_num_seqs,
            max_len=self.info.max_model_len,
            num_logits=num_rows,
            has_balanced_splits=has_balanced_splits,
            previous_tokens=tensors["previous_tokens"][rows],
            last_sampled_tokens=self.last_sampled_tokens,
        )

    def padded_inputs(self, num_tokens: int) -> StepInputs:
        """Inputs of a mixed step for its first ``num_tokens`` tokens, padding included. Arrays with
        an entry per row are empty."""
        tensors, tokens = self.buffer.tensors, slice(num_tokens)
        return replace(
            self.decode_step_inputs(0),
            token_ids=tensors["token_ids"][tokens],
            positions=tensors["positions"][tokens],
            groups=self._kv_group_inputs(num_tokens),
        )

    def _kv_group_inputs(self, num_tokens: int) -> list[KVGroupInputs]:
        return self.buffer.kv_group_inputs(self._input_batch, self.block_tables, num_tokens)

    def derive_decode_inputs(self, inputs: StepInputs) -> None:
        """Queues the op that fills the tensors of ``decode_step_inputs`` for the latest step."""
        for group in inputs.groups:
            self._ops.fill_decode_inputs(inputs, group)

    def sampling_rows(self, num_rows: int) -> SamplingRows:
        """Sampling inputs of the first ``num_rows`` sampled rows of the latest step."""
        tensors, masks, rows = self.buffer.tensors, self.masks, slice(num_rows)
        return SamplingRows(
            req_indices=tensors["sampled_req_indices"][rows],
            positions=tensors[LAST_DECODE_SECTION_NAME][rows],
            host_token_ids=tensors["previous_tokens"][rows],
            last_sampled_tokens=self.last_sampled_tokens,
            params=self.scalars,
            tables=self.tables,
            mask_slots=None if masks is None else masks.slots[rows],
            mask_words=None if masks is None else masks.words,
        )
