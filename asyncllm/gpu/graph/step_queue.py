"""StepQueue: recorded steps that run one behind the other, on a thread of the native library."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from itertools import cycle

from asyncllm.gpu.batch.host_buffer import HostBuffer
from asyncllm.gpu.batch.input_batch import InputBatch
from asyncllm.gpu.batch.step_buffer import ROWS
from asyncllm.gpu.graph.recorded_step import RecordedStep
from asyncllm.gpu.graph.streams import SyncStream
from asyncllm.gpu.launched_step import LaunchedStep
from asyncllm.gpu.ops.native_sampling import sample_args
from asyncllm.gpu.sample.sampler import Sampler
from asyncllm.gpu.step_memory import StepMemory
from asyncllm.native.context import fail
from asyncllm.native.interface import JobArgs

DEPTH = 2
"""Steps in flight at most, the one that runs among them."""


class _Job(HostBuffer):
    """A step of the queue, from its launch to its end.

    Attributes:
        args: what the library's thread reads. It copies the given sections into the program's own,
            runs the program, draws, and writes the tokens into the persistent batch.
    """

    def __init__(
        self, recorded: RecordedStep, memory: StepMemory, batch: InputBatch, num_logprobs: int
    ) -> None:
        own = memory.buffer
        super().__init__(own.limits, memory.info.vocab_size, num_logprobs)
        given, tokens = own.tensors, self.tokens
        indices, positions = given["sampled_req_indices"], given[ROWS]
        # Without a head that finds the largest output no row is greedy, and nothing is read there.
        greedy = tokens if recorded.greedy is None else recorded.greedy
        lines, width = batch.token_ids.shape
        self.args = JobArgs(
            program=ctypes.pointer(recorded.program.args),
            to=own.memory.data_ptr(), source=self.memory.data_ptr(),
            draw=sample_args(
                recorded.logits, memory.scalars, indices, positions, memory.last_sampled_tokens,
                tokens,
            ),
            greedy=greedy.data_ptr(), tokens=tokens.data_ptr(),
            lines=indices.data_ptr(), positions=positions.data_ptr(),
            table=batch.token_ids.ctypes.data, table_lines=lines, table_width=width,
        )  # fmt: skip

    def set_sizes(self, step: LaunchedStep) -> None:
        """Sets the sizes of the step that is written here, and whether its tokens are drawn."""
        args, sizes = self.args, step.sizes
        assert sizes is not None
        args.sizes[:] = sizes
        begin = self.tensors["wanted"].data_ptr() - self.memory.data_ptr()
        args.num_bytes = begin + self.tensors["wanted"].itemsize * sizes.wanted
        args.num_tokens = sizes.logits + sizes.greedy if step.is_drawn else 0
        args.draw.rows = sizes.logits if step.is_drawn else 0


class StepQueue(SyncStream):
    """Recorded steps that begin without the host: where one ends, the next one runs.

    A step finds its input tokens in the persistent batch, where the job of the one before has
    written them. The batch is not copied: a step that gives a request index away which one in
    flight computes, or blocks before its window, has to wait for that.

    While anything is queued, no other op may run on the context.

    Attributes:
        least_tokens: of a step that begins before it is collected; None where steps do so only
            while their masks are made.
    """

    def __init__(
        self, recorded: RecordedStep, memory: StepMemory, batch: InputBatch, sampler: Sampler
    ) -> None:
        self.recorded = recorded
        self.least_tokens: int | None = None
        self._memory, self._sampler = memory, sampler
        num_logprobs = sampler.state.num_logprobs
        self._jobs = cycle([_Job(recorded, memory, batch, num_logprobs) for _ in range(DEPTH)])
        self._last: _Job | None = None

    def takes(self, step: LaunchedStep, before: Iterable[LaunchedStep]) -> bool:
        """Whether a step is long enough or awaits masks, and can be applied while those before it
        are in flight: it changes no line of the batch that they read, but for what it appends."""
        batch, least = step.batch, self.least_tokens
        # The host copies states before the step, and behind it.
        if not len(batch) or batch.state_loads or batch.state_saves:
            return False
        if not batch.masked_rows and (least is None or batch.num_tokens < least):
            return False
        if not batch.released and not batch.assignments and not batch.trimmed:
            return True
        changed = {*batch.released, *(each.req_index for each in batch.assignments)}
        changed.update(req_index for req_index, *_ in batch.trimmed)
        return all(changed.isdisjoint(one.batch.req_indices) for one in before)

    def submit(self, step: LaunchedStep) -> bool:
        """Queues a step that has been applied: whole if the draw is all that its rows ask for,
        and else up to their logits. Nothing may be submitted behind such a step until it has been
        sampled.

        Raises:
            RuntimeError: in a forked child.
            MemoryError: the thread could not be started.
        """
        job = step.buffer = next(self._jobs)
        self._memory.receive(step)
        self._memory.write(step)
        asks = step.batch.masked_rows or step.batch.prompt_logprobs or step.row_stages.any()
        step.is_drawn = not asks and not len(self._sampler.state.needing_host(step.req_indices))
        job.set_sizes(step)
        context = self.recorded.program.context
        status = context.functions.submit(context.handle, job.args)
        if status:
            fail("submit", status)
        self._last = job
        return True

    def wait(self, step: LaunchedStep) -> None:
        """Waits for a step that was submitted. Its output is valid until the next one is.

        Raises:
            RuntimeError, MemoryError: as a run of the program.
        """
        job, recorded = step.buffer, self.recorded
        if not isinstance(job, _Job):
            return
        context = recorded.program.context
        status = context.functions.wait(context.handle, job.args)
        if status:
            fail(recorded.program.failure(status, job.args.failed, job.args.sizes), status)
        step.output = recorded.output(job.args.sizes)

    def synchronize(self) -> None:
        """Waits for the last step that was submitted; its error is dropped."""
        if self._last is not None:
            context = self.recorded.program.context
            context.functions.wait(context.handle, self._last.args)
