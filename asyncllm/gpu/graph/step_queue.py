"""StepQueue: recorded steps that run in order on a thread of the native library."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from itertools import cycle
from typing import Any

import numpy as np
import torch

from asyncllm.gpu.batch.host_buffer import HostBuffer
from asyncllm.gpu.batch.sampling_inputs import RowsToSample, SamplingStages
from asyncllm.gpu.batch.step_buffer import LAST_DECODE_SECTION_NAME
from asyncllm.gpu.graph.recorded_step import RecordedStep
from asyncllm.gpu.graph.streams import DeviceStream
from asyncllm.gpu.launched_step import LaunchedStep
from asyncllm.gpu.ops.native_sampling import process_logits_args, sample_args
from asyncllm.gpu.sample.sampler import Sampler
from asyncllm.gpu.step_memory import StepMemory
from asyncllm.native.context import raise_for_status
from asyncllm.native.interface import STRUCTS

MAX_STEPS_IN_FLIGHT = 2
"""Maximum number of steps in flight, the running one included."""

_PROCESSED_LOGITS_PER_THREAD = 2**18
"""Number of processed logits, 1 MiB, that a thread holds at a time, unless one row has more."""


class _Job(HostBuffer):
    """A queued step's buffer and its arguments for the native library.

    Attributes:
        args: arguments for the library's thread, which copies the step's inputs into the program's
            buffer, runs the program, samples, and writes the tokens to the persistent batch.
        sampling_args: arguments of a job that only samples, from the logits of the step's program.
        processing: arguments of logits processing, for all rows and without grammar masks.
        processing_stages: logits-processing stages that ``processing`` has the tables of; None
            before the first step with processed logits.
    """

    processing: Any = None
    processing_stages: SamplingStages | None = None

    def __init__(self, recorded_step: RecordedStep, memory: StepMemory, sampler: Sampler) -> None:
        own, token_ids = memory.buffer, sampler.input_batch.token_ids
        super().__init__(own.limits, memory.info.vocab_size, sampler.state.num_logprobs)
        given, tokens = own.tensors, self.tokens
        indices, positions = given["sampled_req_indices"], given[LAST_DECODE_SECTION_NAME]
        rows = RowsToSample(indices, positions, memory.last_sampled_tokens)
        # If the output head has no argmax op, the sampler samples all rows, and nothing reads
        # the greedy tokens.
        greedy = tokens if recorded_step.greedy is None else recorded_step.greedy
        lines, width = token_ids.shape
        self._block_arrays = recorded_step.cache.block_arrays()
        self._block_copies = np.empty((0, 2), dtype=np.int64)
        self.args = STRUCTS["Job"](
            program=ctypes.pointer(recorded_step.program.args),
            to=own.memory.data_ptr(), **{"from": self.memory.data_ptr()},
            block_arrays=self._block_arrays.ctypes.data, num_block_arrays=len(self._block_arrays),
            draw=sample_args(recorded_step.logits, memory.scalars, rows, tokens),
            previous_tokens=given["previous_tokens"].data_ptr(),
            greedy=greedy.data_ptr(), tokens=tokens.data_ptr(),
            lines=indices.data_ptr(), positions=positions.data_ptr(),
            table=token_ids.ctypes.data, table_lines=lines, table_width=width,
        )  # fmt: skip
        self.sampling_args = STRUCTS["Job"].from_buffer_copy(self.args)
        self.sampling_args.program = None

    def set_inputs(self, step: LaunchedStep) -> None:
        """Sets the arguments of the program, without sampling."""
        args, sizes = self.args, step.sizes
        assert sizes is not None
        args.sizes[:] = sizes
        begin = self.tensors["output_indices"].data_ptr() - self.memory.data_ptr()
        args.bytes = begin + self.tensors["output_indices"].itemsize * sizes.outputs
        args.num_tokens = args.draw.rows = args.process.rows = args.top_rows = 0
        pairs = step.batch.block_copies
        args.num_block_copies = len(pairs)
        if pairs:
            self._block_copies = np.array(pairs, dtype=np.int64)
            args.block_copies = self._block_copies.ctypes.data

    def set_sampling(self, step: LaunchedStep, args: Any) -> None:
        """Sets the arguments of sampling in ``args``, which are this job's ``args`` or
        ``sampling_args``."""
        sizes = step.sizes
        assert sizes is not None
        args.sizes[:] = sizes
        args.num_tokens, args.draw.rows = sizes.logits + sizes.greedy, sizes.logits
        if step.num_processed:
            args.process = self.processing
            args.process.rows = step.num_processed
            if step.masks is not None:
                masks = self.grammar_masks
                args.process.mask_slots = masks.slots.data_ptr()
                args.process.mask_words = masks.words.data_ptr()
                args.process.num_masks = len(masks.words)
        else:
            args.process.rows = 0
        asked = np.flatnonzero(step.row_logprobs >= 0)
        args.top_rows = asked[-1] + 1 if len(asked) else 0
        if args.top_rows:
            top = self.logprobs
            args.top = top.values.shape[1] - 1
            args.top_values, args.top_ids = top.values.data_ptr(), top.ids.data_ptr()


class StepQueue(DeviceStream):
    """Runs recorded steps one after the other, without the host in between.

    A step finds its input tokens in the persistent batch, where the previous step has written them.
    The batch is not copied. So a step that reassigns a request index, or frees blocks behind a
    request's sliding window, has to wait for the steps in flight that have a row of the same
    request index.

    While a step is queued, no other op may run on the native library's context.

    Attributes:
        min_step_tokens: minimum number of tokens of a step that is queued behind a running step;
            None if only steps with grammar masks are queued there.
    """

    def __init__(self, recorded_step: RecordedStep, memory: StepMemory, sampler: Sampler) -> None:
        self.recorded_step = recorded_step
        self.min_step_tokens: int | None = None
        self._memory, self._sampler = memory, sampler
        self._jobs = cycle(
            [_Job(recorded_step, memory, sampler) for _ in range(MAX_STEPS_IN_FLIGHT)]
        )
        self._last_args: Any = None
        num_rows, vocab_size = recorded_step.logits.shape
        rows_per_thread = max(1, _PROCESSED_LOGITS_PER_THREAD // vocab_size)
        num_rows = min(num_rows, rows_per_thread * recorded_step.program.context.num_threads)
        self._processed_logits = torch.empty((num_rows, vocab_size), dtype=torch.float32)

    def can_begin_early(self, step: LaunchedStep, earlier_steps: Iterable[LaunchedStep]) -> bool:
        """Whether to run a step while earlier steps are in flight.

        That pays if the step has at least ``min_step_tokens`` tokens or awaits masks. It is
        possible if the step changes rows of the earlier steps only by appending to them.
        """
        batch, least = step.batch, self.min_step_tokens
        # A step that loads or saves recurrent states cannot begin early: the host copies the states
        # before and after it.
        if not len(batch) or batch.state_loads or batch.state_saves:
            return False
        if not batch.masked_rows and (least is None or batch.num_tokens < least):
            return False
        if not batch.released_indices and not batch.assignments and not batch.freed_entries:
            return True
        changed = {*batch.released_indices, *(each.req_index for each in batch.assignments)}
        changed.update(req_index for req_index, *_ in batch.freed_entries)
        return all(changed.isdisjoint(one.batch.req_indices) for one in earlier_steps)

    def submit(self, step: LaunchedStep, *, is_early: bool) -> None:
        """Queues a step that has been applied to the batch, or runs it if it is not early.

        The step's rows are sampled too, unless some await masks or need the host, or the step has
        prompt log-probabilities. Otherwise it stops at the logits, and no step may be submitted
        behind it until ``sample`` or the caller has sampled it.

        Raises:
            RuntimeError: the process is a forked child.
            MemoryError: the native thread could not be started.
        """
        batch = step.batch
        job = step.buffer = next(self._jobs)
        self._memory.upload(step)
        self._memory.write_host_buffer(step)
        step.is_sampling_queued = not (
            batch.masked_rows
            or batch.prompt_logprobs
            or self._sampler.any_row_needs_host(step.req_indices)
        )
        job.set_inputs(step)
        if step.is_sampling_queued:
            self._prepare_stages(step, job)
            job.set_sampling(step, job.args)
        self._run(job.args, is_early=is_early)

    def sample(self, step: LaunchedStep, *, is_early: bool) -> bool:
        job = step.buffer
        assert isinstance(job, _Job)
        if is_early and step.batch.prompt_logprobs:
            return False  # Ops compute these, and none may run while a job is queued.
        if self._sampler.any_row_needs_host(step.req_indices):
            return False
        step.write_masks()
        step.is_sampling_queued = step.is_sampled_apart = True
        self._prepare_stages(step, job)
        job.set_sampling(step, job.sampling_args)
        self._run(job.sampling_args, is_early=is_early)
        return True

    def _run(self, args: Any, *, is_early: bool) -> None:
        context = self.recorded_step.program.context
        run = context.functions.submit if is_early else context.functions.run_job
        status = run(context.handle, args)
        if status and is_early:
            raise_for_status("submit", status)
        self._last_args = args

    def _prepare_stages(self, step: LaunchedStep, job: _Job) -> None:
        """Sets the stages of a step that its job samples, and the job's arguments for them."""
        if step.row_stages.any():
            step.stages |= SamplingStages(int(np.bitwise_or.reduce(step.row_stages)))
        if step.stages & SamplingStages.LOGPROBS:
            step.row_logprobs = self._sampler.state.logprobs[step.req_indices]
        tables = self._memory.tables.allocated_stages
        if step.num_processed and job.processing_stages != tables:
            logits, job.processing_stages = self.recorded_step.logits, tables
            rows = self._memory.sampling_rows(len(logits))
            args = process_logits_args(logits, rows, tables, self._processed_logits)
            batch, state = self._sampler.input_batch, self._sampler.state
            args.bad_words = state.bad_words.ctypes.data
            args.num_prompt_tokens = batch.num_prompt_tokens.ctypes.data
            args.token_ids, args.max_tokens = job.args.table, job.args.table_width
            job.processing = args
            for own in (job.args, job.sampling_args):
                own.rows_per_turn = len(self._processed_logits)

    def wait(self, step: LaunchedStep) -> None:
        """Waits for a submitted step, whose output is valid until the next one is submitted.

        Raises:
            RuntimeError, MemoryError: the run of the program failed.
        """
        job, recorded_step = step.buffer, self.recorded_step
        if not isinstance(job, _Job):
            return
        context = recorded_step.program.context
        status = context.functions.wait(context.handle, job.args)
        if status:
            recorded_step.program.raise_failure(status, job.args.failed, job.args.sizes)
        if step.is_sampled_apart:
            status = context.functions.wait(context.handle, job.sampling_args)
            if status:
                raise_for_status("sample", status)
        step.output = recorded_step.output(job.args.sizes)

    def synchronize(self) -> None:
        """Waits for the last submitted step, and ignores its error."""
        if self._last_args is not None:
            context = self.recorded_step.program.context
            context.functions.wait(context.handle, self._last_args)
