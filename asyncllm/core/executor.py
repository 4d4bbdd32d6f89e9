"""The seam between the core and a device: the Executor protocol, and a fake one."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from asyncllm.core.batch import StepBatch, StepResult


class StepOutOfMemoryError(Exception):
    """The device ran out of memory in a step. Nothing of the step counts; the scheduler
    takes it back and tries a smaller one."""


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """What the scheduler has to know about a device once the model is loaded.

    Attributes:
        vocab_size: tokens are 0 to ``vocab_size - 1``.
        num_blocks: KV blocks including the null block 0, which is never allocated.
        block_size: tokens per block.
        max_model_len: longest sequence, prompt and output, in tokens.
        max_num_seqs: slots.
        max_num_batched_tokens: token budget of a step.
        pipeline_depth: steps that may be in flight at once, 1 or 2.
    """

    vocab_size: int
    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    pipeline_depth: int = 1


@runtime_checkable
class Executor(Protocol):
    """Runs steps on a device. Every method is called on the engine thread.

    ``launch`` starts a step and returns; ``collect`` waits for the oldest step launched and
    returns its result, with the GIL released while it waits. Up to
    ``info.pipeline_depth`` steps are in flight. An executor that has no device of its own
    to run ahead (the CPU) does the work in ``collect``.

    Raises:
        StepOutOfMemoryError: from ``launch`` or ``collect``; the step left nothing behind that
            counts. Every step in flight is void then: ``discard`` follows.
        BaseException: anything else kills the engine.
    """

    info: ExecutorInfo

    def launch(self, batch: StepBatch) -> None: ...

    def collect(self) -> StepResult: ...

    def discard(self) -> None:
        """Drops every step in flight, after waiting for the device where it has begun.
        Slots and block tables are void: the next steps assign them anew."""

    def close(self) -> None:
        """Gives back all memory and threads. Idempotent."""


_MASK = (1 << 64) - 1


def mix(state: int, value: int) -> int:
    """One round of splitmix64 (Steele, Lea and Flood 2014) over ``state`` and ``value``."""
    z = (state + (value + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


class FakeExecutor:
    """An executor without a model, for tests of everything above it.

    It has a KV cache of its own: what it keeps for a position is a digest of all tokens up
    to there, made from the digest that it reads, through the block table, at the position
    before. The token it samples is taken from the last digest. A wrong block, slot, start or
    stale token therefore changes the output, and ``reference`` says what it should be.

    Args:
        info: limits to report.
        step_time: seconds each step takes, slept with the GIL released.

    Attributes:
        faults: step number to what happens in ``collect`` of that step: an exception is
            raised, a callable gets the result and returns another.
        gate: if set, each ``collect`` waits for a permit: ``gate.release()`` lets one pass.
        batches: every batch executed, if ``record`` is True.
        row_errors: request id to an exception for each of its sampled rows.
    """

    def __init__(self, info: ExecutorInfo, *, step_time: float = 0.0, record: bool = False) -> None:
        self.info = info
        self.step_time = step_time
        self.record = record
        self.batches: list[StepBatch] = []
        self.faults: dict[int, BaseException | Callable[[StepResult], StepResult]] = {}
        self.row_errors: dict[str, Exception] = {}
        self.gate: threading.Semaphore | None = None
        self.closed = False
        self._queue: deque[StepBatch] = deque()
        self._kv: list[int | None] = [None] * (info.num_blocks * info.block_size)
        self._tokens: dict[int, list[int]] = {}
        self._blocks: dict[int, list[int]] = {}
        self._ids: dict[int, str] = {}

    def reference(self, prompt: Sequence[int], count: int) -> list[int]:
        """The ``count`` tokens that follow ``prompt``, computed without any cache."""
        state = 0
        for token_id in prompt:
            state = mix(state, token_id)
        output = []
        for _ in range(count):
            token_id = state % self.info.vocab_size
            output.append(token_id)
            state = mix(state, token_id)
        return output

    def launch(self, batch: StepBatch) -> None:
        if len(self._queue) >= self.info.pipeline_depth:
            raise RuntimeError(f"more than {self.info.pipeline_depth} steps in flight")
        self._queue.append(batch)

    def collect(self) -> StepResult:
        batch = self._queue.popleft()
        if self.gate is not None:
            self.gate.acquire()
        if self.step_time:
            time.sleep(self.step_time)
        fault = self.faults.pop(batch.step, None)
        if isinstance(fault, BaseException):
            raise fault
        result = self._execute(batch)
        return fault(result) if fault is not None else result

    def discard(self) -> None:
        self._queue.clear()
        self._tokens.clear()
        self._blocks.clear()
        self._ids.clear()

    def close(self) -> None:
        self.closed = True
        self._queue.clear()

    def _execute(self, batch: StepBatch) -> StepResult:
        if self.record:
            self.batches.append(batch)
        for req_index in batch.released:
            self._tokens.pop(req_index, None)
            self._blocks.pop(req_index, None)
        for assignment in batch.assignments:
            self._tokens[assignment.req_index] = list(assignment.token_ids)
            self._blocks[assignment.req_index] = list(assignment.block_ids)
            self._ids[assignment.req_index] = assignment.request_id
        for req_index, block_ids in batch.new_blocks:
            self._blocks[req_index].extend(block_ids)
        result = StepResult(batch.step, [-1] * len(batch))
        for row, state in enumerate(self._forward(batch)):
            if batch.samples[row]:
                self._sample(batch, row, state, result)
        return result

    def _forward(self, batch: StepBatch) -> list[int]:
        """The digest at the last position of each row. A row may read what another writes
        in the same step (a model writes a layer's KV before it reads it), so a writer goes
        before its readers."""
        writer = {
            self._index(batch.req_indices[row], position): row
            for row in range(len(batch))
            for position in range(batch.starts[row], batch.starts[row] + batch.counts[row])
        }
        states: dict[int, int] = {}
        for row in range(len(batch)):
            pending = [row]
            while pending:
                req_index, start = batch.req_indices[pending[-1]], batch.starts[pending[-1]]
                before = writer.get(self._index(req_index, start - 1)) if start else None
                if before is not None and before not in states:
                    pending.append(before)
                    continue
                current = pending.pop()
                if current not in states:
                    states[current] = self._write_row(req_index, start, batch.counts[current])
        return [states[row] for row in range(len(batch))]

    def _write_row(self, req_index: int, start: int, count: int) -> int:
        tokens = self._tokens[req_index]
        state = self._kv[self._index(req_index, start - 1)] if start else 0
        for position in range(start, start + count):
            if state is None:
                raise RuntimeError(f"slot {req_index} reads KV at {position - 1} that nobody wrote")
            state = mix(state, tokens[position])
            self._kv[self._index(req_index, position)] = state
        assert state is not None
        return state

    def _index(self, req_index: int, position: int) -> int:
        block_id = self._blocks[req_index][position // self.info.block_size]
        if block_id == 0:
            raise RuntimeError(f"slot {req_index} has the null block at position {position}")
        return block_id * self.info.block_size + position % self.info.block_size

    def _sample(self, batch: StepBatch, row: int, state: int, result: StepResult) -> None:
        req_index = batch.req_indices[row]
        token_id = state % self.info.vocab_size
        error = self.row_errors.get(self._ids[req_index])
        if error is None:
            result.token_ids[row] = token_id
        else:
            # The next step may be launched already, and needs a token to go on with.
            result.errors[row] = error
        position = batch.starts[row] + batch.counts[row]
        tokens = self._tokens[req_index]
        del tokens[position:]
        tokens.append(token_id)
