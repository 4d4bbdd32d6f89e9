"""StepRunner: runs the steps of one model."""

from __future__ import annotations

from functools import partial
from itertools import cycle

import numpy as np
import torch
from torch import Tensor

from asyncllm.core.executor import ExecutorInfo
from asyncllm.core.in_process import UnpicklableObjects
from asyncllm.gpu.batch.input_batch import PLACEHOLDER_TOKEN, InputBatch
from asyncllm.gpu.batch.sampling_inputs import LOGITS_PROCESSING_STAGES, SamplingStages, TopLogprobs
from asyncllm.gpu.graph.forward_pass import ForwardPass
from asyncllm.gpu.graph.streams import DeviceStream
from asyncllm.gpu.kv_cache import KVCache
from asyncllm.gpu.launched_step import LaunchedStep
from asyncllm.gpu.models.language_model import LanguageModel
from asyncllm.gpu.sample.host_rows import HostRows
from asyncllm.gpu.sample.prompt_logprobs import gather_prompt_logprobs, prompt_logprob_tokens
from asyncllm.gpu.sample.sample_output import SampleOutput
from asyncllm.gpu.sample.sampler import Sampler
from asyncllm.gpu.step_memory import StepMemory


class StepRunner:
    """Runs steps, and owns all large memory, so that dropping the runner frees all of it.

    A step goes through three stages. First its changes are applied to the persistent batch, and its
    inputs are written to a buffer. Then the copy of this buffer, the forward pass and sampling are
    queued on the stream. Finally the host waits for the step's tokens. Devices differ in the
    stream, the memory that steps share, and the ForwardPass.

    Args:
        on_device: the batch's state lies on the device, see StepMemory.
        in_process: the executor's UnpicklableObjects, which holds the logits processors.
        num_logprobs: log-probabilities per token for which a step has buffers.
        padded_tokens: largest number of tokens to which mixed steps are padded.

    Attributes:
        stream: stream on which work is queued; a StepQueue once the forward pass is recorded.
        forward_pass: runs the forward pass, op by op or as it was captured or recorded.
        memory: the memory that steps share.
    """

    def __init__(
        self, model: LanguageModel, cache: KVCache, info: ExecutorInfo, stream: DeviceStream,
        in_process: UnpicklableObjects, *, on_device: bool, num_logprobs: int,
        padded_tokens: int = 0,
    ) -> None:  # fmt: skip
        self.model, self.cache, self.info, self.stream = model, cache, info, stream
        self._in_process = in_process
        self.device = model.embedding.device
        self.input_batch = InputBatch(
            info.max_num_seqs, info.max_model_len, info.kv_groups, tracks_tables=on_device
        )
        self.sampler = Sampler(
            info.max_num_seqs, info.vocab_size, self.input_batch, model.ops, num_logprobs,
            in_process.logits_processors,
        )  # fmt: skip
        self._on_device, self._padded_tokens = on_device, padded_tokens
        self._zeroes_blocks = any(each.needs_zeroed_blocks for each in model.attention.values())
        self.memory: StepMemory
        self.forward_pass: ForwardPass
        self.allocate_step_memory(info)

    def allocate_step_memory(self, info: ExecutorInfo) -> None:
        """Reallocates the steps' memory for the limits of ``info``, before the first step."""
        self.info = info
        self.memory = StepMemory(
            info, self.input_batch, self.sampler.state, self.model.ops, self.device,
            on_device=self._on_device, padded_tokens=self._padded_tokens,
        )  # fmt: skip
        self._buffers = cycle(self.memory.host_buffers)
        self.forward_pass = ForwardPass(self.model, self.cache, self.memory)

    # --- a step --------------------------------------------------------------------------

    def begin(self, step: LaunchedStep, *, is_early: bool) -> None:
        """Applies the step's changes and begins its work.

        If the step awaits masks, its work stops at the logits; ``sample`` then queues the rest.

        Args:
            is_early: whether the step begins before the ``collect`` that returns its tokens, and
                meanwhile runs on another thread or a device.
        """
        self._apply_batch_changes(step)
        if not len(step.batch):
            step.is_sampling_queued = True
            return
        if step.batch.prompt_logprobs:
            step.prompt_logprob_tokens = prompt_logprob_tokens(step.batch, self.input_batch)
        if self.forward_pass.is_recorded:
            self._load_states(step)
            self.stream.submit(step, is_early=is_early)
            self._save_states(step)
            return
        step.buffer = next(self._buffers)
        self.memory.write_host_buffer(step)
        if not self.forward_pass.prepare(step):
            step.inputs = self.memory.derive_inputs(step)
        self._prepare_sampling(step)
        if self.memory.on_device:
            # Mark the new positions: until the step is collected, only the device has their tokens.
            self.input_batch.token_ids[step.req_indices, step.positions] = PLACEHOLDER_TOKEN
        self.stream.run(partial(self._run_forward, step))
        if not step.awaits_masks:
            self.sample(step)

    def sample(self, step: LaunchedStep) -> None:
        """Queues the sampling of a step that no longer awaits masks."""
        step.write_masks()
        self.stream.run(partial(self._sample_rows, step))
        step.event, step.is_sampling_queued = self.stream.record_event(), True

    def finish(self, step: LaunchedStep) -> SampleOutput:
        """Waits for a step, and samples the rows that need the host."""
        self.stream.wait(step)
        if not step.is_sampling_queued:
            if step.batch.prompt_logprobs:
                self._keep_hidden_states(step)
            if self.stream.sample(step, is_early=False):
                self.stream.wait(step)
            else:
                self._prepare_sampling(step)
                self.sample(step)
        output = step.read_sample_output()
        if step.host_rows is not None or step.prompt_hidden is not None:
            with self.stream.use_side_stream():
                if step.host_rows is not None:
                    output.merge(step.host_rows.sampled_indices, step.host_rows.sample())
                if step.prompt_hidden is not None:
                    output.prompt_logprobs, errors = gather_prompt_logprobs(
                        step.batch.prompt_logprobs, step.prompt_logprob_tokens, step.prompt_hidden,
                        self.model,
                    )  # fmt: skip
                    step.failures = errors | step.failures
        return output

    def store_tokens(self, step: LaunchedStep, tokens: np.ndarray) -> None:
        """Writes tokens to the batch.

        Rows whose request index has been reassigned since the step are skipped. A failed row gets
        token 0, a valid index of the embedding; what is computed from it is discarded.
        """
        same = self.input_batch.epochs[step.req_indices] == step.epochs
        at = step.req_indices[same], step.positions[same]
        self.input_batch.token_ids[at] = np.maximum(tokens[same], 0)

    # --- parts of a step -----------------------------------------------------------------

    def _apply_batch_changes(self, step: LaunchedStep) -> None:
        """Applies the step's changes to the batch and to the sampling parameters."""
        batch, sampler, state = step.batch, self.sampler, self.sampler.state
        self.input_batch.apply_step_changes(batch)
        if self._zeroes_blocks and (batch.assignments or batch.new_blocks):
            step.blocks_to_zero = self.input_batch.unfilled_blocks(batch)
        for req_index in batch.released_indices:
            sampler.release(req_index)
        for assignment in batch.assignments:
            update = sampler.add_request(self._in_process.restore_logits_processors(assignment))
            if update is not None:
                step.logits_table_updates.append(update)
        if not self.memory.on_device:
            self._order_rows(step)
        step.epochs = self.input_batch.epochs[step.req_indices]
        step.row_stages = state.stages[step.req_indices]
        if failures := sampler.failures:
            # Copy the failures to the step: when it is collected, its request indices may belong to
            # other requests.
            step.failures = {
                row: failures[req_index]
                for row, req_index in enumerate(batch.req_indices)
                if req_index in failures
            }

    def _order_rows(self, step: LaunchedStep) -> None:
        """Orders the sampled rows by what the step has to compute for them."""
        state, forward_pass = self.sampler.state, self.forward_pass
        is_processed = np.zeros(len(step.rows), dtype=np.bool_)
        needs_logits = ~is_processed
        if forward_pass.is_recorded:
            stages = state.stages[step.req_indices]
            is_processed = stages & LOGITS_PROCESSING_STAGES.value != 0
            if step.batch.masked_rows:
                is_processed[step.sampled_indices_of(step.batch.masked_rows)] = True
        if forward_pass.finds_greedy_tokens:
            needs_logits = state.needs_logits[step.req_indices]
            if step.batch.masked_rows:
                needs_logits[step.sampled_indices_of(step.batch.masked_rows)] = True
        step.order_rows(is_processed, needs_logits)

    def _prepare_sampling(self, step: LaunchedStep) -> None:
        """Sets the step's sampling stages, and the rows that are sampled on the host."""
        sampled_indices = self.sampler.rows_needing_host(step.req_indices, step.positions)
        if len(sampled_indices):
            at = step.req_indices[sampled_indices], step.positions[sampled_indices]
            step.host_rows = HostRows(self.sampler, sampled_indices, *at)
        if step.row_stages.any():
            step.stages |= SamplingStages(int(np.bitwise_or.reduce(step.row_stages)))
        if step.stages & SamplingStages.LOGPROBS:
            step.row_logprobs = self.sampler.state.logprobs[step.req_indices]
        if step.stages and not self.memory.on_device:
            self.memory.write_previous_tokens(step, self.memory.buffer)

    def _run_forward(self, step: LaunchedStep) -> None:
        """Queues a forward pass, with the copies of its inputs and its recurrent states."""
        if step.batch.block_copies:
            self.cache.copy_blocks(step.batch.block_copies)
        # Clear blocks after the copies: a block that is copied may have a new owner in this step.
        if len(step.blocks_to_zero):
            self.cache.clear(step.blocks_to_zero)
        self._load_states(step)
        self.memory.upload(step)
        step.output = self.forward_pass.forward(step)
        self._save_states(step)
        if step.batch.prompt_logprobs:
            self._keep_hidden_states(step)

    def _load_states(self, step: LaunchedStep) -> None:
        if step.batch.state_loads and self.cache.states is not None:
            self.cache.states.load_snapshots(step.batch.state_loads)

    def _save_states(self, step: LaunchedStep) -> None:
        if step.batch.state_saves and self.cache.states is not None:
            self.cache.states.save_snapshots(step.batch.state_saves)

    def _keep_hidden_states(self, step: LaunchedStep) -> None:
        """Keeps the hidden states from which prompt log-probabilities are computed."""
        assert step.output is not None
        hidden = step.output.hidden[len(step.rows) :]
        # Clone the hidden states: on a device the next step overwrites them before they are read.
        step.prompt_hidden = hidden.clone() if self.memory.on_device else hidden

    def _sample_rows(self, step: LaunchedStep) -> None:
        """Samples the step's tokens into the step's buffer.

        For rows that the host samples, only their sampling inputs are copied.
        """
        assert step.output is not None
        memory, count, (logits, _, largest) = self.memory, step.num_logits, step.output
        if step.stages:
            memory.prepare_sampling(step.stages, step.buffer)
        num_apart = 0
        if step.host_rows is not None:
            rows = memory.sampling_rows(count)
            index = step.host_rows.copy_inputs(logits, rows, memory.scalars, step.stages)
            rows.req_indices.index_fill_(0, index, -1)
            num_apart = len(step.host_rows.sampled_indices)
        if num_apart < count and not self.forward_pass.sample(step):
            if step.stages and not memory.on_device:
                self._sample_by_stages(step, logits)
            else:
                self.sample_logits(logits, step.stages)
        if count < len(step.rows):
            memory.sampled_tokens.numpy()[count : len(step.rows)] = largest.numpy()
        if step.buffer is not memory.buffer:
            memory.copy_outputs_to_host(step)

    def sample_logits(self, logits: Tensor, stages: SamplingStages) -> None:
        """Samples one token per row of ``logits``, which belong to the latest step's first sampled
        rows."""
        memory, count = self.memory, len(logits)
        top = memory.logprobs if stages & SamplingStages.LOGPROBS else None
        tokens, rows = memory.sampled_tokens[:count], memory.sampling_rows(count)
        self.sampler.sample(logits, rows, memory.scalars, stages, tokens, top)

    def _sample_by_stages(self, step: LaunchedStep, logits: Tensor) -> None:
        """Samples rows with sampling stages in a call of their own, which is faster on a CPU."""
        memory, count = self.memory, step.num_logits
        staged = step.row_stages[:count] != 0
        if step.masks is not None:
            staged[step.sampled_indices_of(step.masks.rows)] = True
        if step.host_rows is not None:
            staged[step.host_rows.sampled_indices] = False
        some = np.flatnonzero(staged)
        if len(some) in (0, count):
            self.sample_logits(logits, step.stages)
            return
        index, rows = torch.from_numpy(some), memory.sampling_rows(count)
        tokens = memory.sampled_tokens
        own, found, top = rows.select(index), tokens[index], None
        if step.stages & SamplingStages.LOGPROBS:
            top = TopLogprobs(len(some), self.sampler.state.num_logprobs, self.device)
        self.sampler.sample(logits[index], own, memory.scalars, step.stages, found, top)
        rows.req_indices.index_fill_(0, index, -1)
        if bool((rows.req_indices >= 0).any()):
            self.sample_logits(logits, SamplingStages.NONE)
        tokens[index] = found
        if top is not None and memory.logprobs is not None:
            memory.logprobs.values[index], memory.logprobs.ids[index] = top.values, top.ids
