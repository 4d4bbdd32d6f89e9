"""StepQueue: recorded steps that run one behind the other, on a thread of the native library."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from itertools import cycle

import numpy as np
import torch

from asyncllm.gpu.batch.input_batch import InputBatch
from asyncllm.gpu.graph.recorded_step import RecordedStep, RowArrays, RowOrder, StepOutput
from asyncllm.gpu.launched_step import LaunchedStep
from asyncllm.gpu.ops.native_sampling import sample_args
from asyncllm.gpu.sample.sampler import Sampler
from asyncllm.native.context import fail
from asyncllm.native.interface import JobArgs

DEPTH = 2
"""Steps in flight at most, the one that runs among them."""


class _Buffer(RowArrays):
    """Static buffers of a step, from its launch to its end.

    Attributes:
        lines_of, positions: ``[S]`` int64, of the rows that are sampled, in their order: request
            index, and position of the token before.
        tokens: ``[S]`` int64.
        args: the job.
    """

    def __init__(self, recorded: RecordedStep, inputs: InputBatch, sampler: Sampler) -> None:
        rows, tokens = recorded.max_rows, recorded.max_tokens
        super().__init__(rows, tokens)
        self.lines_of, self.positions, self.tokens = (np.zeros(rows, np.int64) for _ in range(3))
        of, before = torch.from_numpy(self.lines_of), torch.from_numpy(self.positions)
        lines, width = inputs.token_ids.shape
        # Without a head that finds the largest output no row is greedy, and nothing is read there.
        greedy = self.tokens.ctypes.data if recorded.greedy is None else recorded.greedy.data_ptr()
        self.args = JobArgs(
            program=ctypes.pointer(recorded.program.args),
            draw=sample_args(
                recorded.logits, sampler.sampling, of, before, sampler.last_sampled_tokens,
                torch.from_numpy(self.tokens),
            ),
            greedy=greedy, tokens=self.tokens.ctypes.data, lines=self.lines_of.ctypes.data,
            positions=self.positions.ctypes.data, table=inputs.token_ids.ctypes.data,
            table_lines=lines, table_width=width,
        )  # fmt: skip
        own = recorded.rows
        places = zip(self.args.copies, own.arrays(), self.arrays(), strict=True)
        for copy, to, source in places:
            copy.to, copy.source = to.ctypes.data, source.ctypes.data
        self.args.num_copies = len(self.args.copies)

    def set(self, step: LaunchedStep, order: RowOrder, *, samples: bool) -> None:
        """Writes a step, the order of its rows, and whether its tokens are drawn as well."""
        args, batch, count = self.args, step.batch, len(step.rows)
        sizes = self.write(batch, step.rows, order)
        args.sizes[:] = sizes
        for copy, size in zip(args.copies, (sizes[0], sizes[0], sizes[0], sizes[2]), strict=True):
            copy.num_bytes = 8 * size
        args.num_tokens = args.draw.rows = 0
        if not samples:
            return
        lines, positions = step.req_indices, step.positions
        if order.places is not None:
            lines, positions = lines[order.places], positions[order.places]
        self.lines_of[:count], self.positions[:count] = lines, positions
        self.positions[:count] -= 1
        args.num_tokens, args.draw.rows = count, order.num_logits


class QueuedStep:
    """A step in the queue.

    Attributes:
        order: of its sampled rows.
        samples: its tokens come with it; else what they are sampled from.
    """

    def __init__(
        self, queue: StepQueue, buffer: _Buffer, step: LaunchedStep, order: RowOrder, samples: bool
    ) -> None:
        self.order, self.samples = order, samples
        self._queue, self._buffer, self._count = queue, buffer, len(step.rows)

    def wait(self) -> StepOutput:
        """The step's output, valid until the next one is submitted. Its tokens, where it has
        them, are those of ``order``.

        Raises:
            RuntimeError, MemoryError: as a run of the program.
        """
        args, recorded = self._buffer.args, self._queue.recorded
        context = recorded.program.context
        status = context.functions.wait(context.handle, args)
        if status:
            fail(recorded.program.failure(status, args.failed, args.sizes), status)
        if self.samples:
            tokens = torch.from_numpy(self._buffer.tokens[: self._count].copy())
            return StepOutput(recorded.logits[:0], recorded.hidden[:0], tokens)
        return recorded.output(args.sizes)


class StepQueue:
    """Recorded steps that begin without the host: where one ends, the next one runs.

    A step finds its input tokens in the persistent batch, where the job of the one before has
    written them. The batch is not copied: a step that gives a request index away which one in
    flight computes, or blocks before its window, has to wait for that (``takes``).

    While anything is queued, no other op may run on the context.
    """

    def __init__(self, recorded: RecordedStep, inputs: InputBatch, sampler: Sampler) -> None:
        self.recorded, self._sampler = recorded, sampler
        self._buffers = cycle([_Buffer(recorded, inputs, sampler) for _ in range(DEPTH)])
        self._last: _Buffer | None = None

    @staticmethod
    def takes(step: LaunchedStep, before: Iterable[LaunchedStep]) -> bool:
        """Whether a step can be applied while those ``before`` it are in flight: it changes no line
        of the batch that they read, but for what it appends to it."""
        batch = step.batch
        if not batch.released and not batch.assignments and not batch.trimmed:
            return True
        changed = {*batch.released, *(each.req_index for each in batch.assignments)}
        changed.update(req_index for req_index, *_ in batch.trimmed)
        return all(changed.isdisjoint(one.batch.req_indices) for one in before)

    def submit(self, step: LaunchedStep) -> QueuedStep:
        """Queues a step that has been applied: whole if the draw is all that its rows ask for,
        and else up to their logits. Nothing may be submitted behind such a step until it has been
        sampled.

        Raises:
            RuntimeError: in a forked child.
            MemoryError: the thread could not be started.
        """
        sampler, batch = self._sampler, step.batch
        samples = not (batch.masked_rows or batch.prompt_logprobs or step.row_stages.any())
        samples = samples and not len(sampler.state.needing_host(step.req_indices))
        order = self.recorded.order(sampler.needing_logits(step.req_indices, step.masked_places))
        buffer = next(self._buffers)
        buffer.set(step, order, samples=samples)
        context = self.recorded.program.context
        status = context.functions.submit(context.handle, buffer.args)
        if status:
            fail("submit", status)
        self._last = buffer
        return QueuedStep(self, buffer, step, order, samples)

    def drain(self) -> None:
        """Waits for the last step that was submitted; its error is dropped."""
        if self._last is not None:
            context = self.recorded.program.context
            context.functions.wait(context.handle, self._last.args)
