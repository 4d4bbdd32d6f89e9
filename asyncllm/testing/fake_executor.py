"""FakeExecutor: an executor without a model, for tests of everything above it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from asyncllm.core.batch import StepBatch, StepResult
from asyncllm.core.executor import ExecutorInfo

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
            (block_ids,) = assignment.block_ids
            self._blocks[assignment.req_index] = list(block_ids)
            self._ids[assignment.req_index] = assignment.request_id
        for req_index, (block_ids,) in batch.new_blocks:
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
