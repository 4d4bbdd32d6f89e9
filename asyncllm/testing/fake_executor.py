"""FakeExecutor: executor without a model, for tests of schedulers and engines."""

from __future__ import annotations

import functools
import operator
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import cast

from asyncllm.core.batch import GrammarMask, PromptLogprobSpan, RowError, StepBatch, StepResult
from asyncllm.core.block_pool import NULL_BLOCK_ID
from asyncllm.core.executor import ExecutorInfo
from asyncllm.core.in_process import UnpicklableObjects
from asyncllm.outputs import Logprob, TokenLogprobs

_UINT64_MASK = (1 << 64) - 1


def hash_pair(state: int, value: int) -> int:
    """Hash two numbers to 64 bits: one round of splitmix64 (Steele, Lea and Flood 2014)."""
    z = (state + (value + 1) * 0x9E3779B97F4A7C15) & _UINT64_MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _UINT64_MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _UINT64_MASK
    return z ^ (z >> 31)


class _TokenDigests:
    """Digests of a sequence's tokens in one KV group; they replace keys and values.

    Without a window, a digest is computed from the token and the digest before it. With a window,
    it is computed from the token, its position and all earlier digests in the window.

    Args:
        window: size of the sliding window in tokens; None without.
        start: position of the next digest.
        digests: the digests before ``start``, as far back as the window reaches.
    """

    def __init__(
        self, group: int, window: int | None, start: int = 0, digests: list[int] | None = None
    ) -> None:
        self._group, self._window = group, window
        self._next, self._digests = start, digests or []

    def append(self, token_id: int) -> int:
        """Append the digest of the next token; returns the digest."""
        if self._window is None:
            state = self._digests[-1] if self._digests else self._group
        else:
            seen = self._digests[max(0, len(self._digests) - self._window + 1) :]
            state = hash_pair(hash_pair(self._group, self._next), hash(tuple(seen)) & _UINT64_MASK)
            self._digests = seen
        state = hash_pair(state, token_id)
        self._digests.append(state)
        self._next += 1
        return state


def allowed_tokens(mask: bytes, vocab_size: int) -> list[int]:
    """Token ids that a mask in the layout of GrammarMask allows, in ascending order.

    Raises:
        ValueError: if the mask allows no token, or has the wrong length.
    """
    size = 4 * -(-vocab_size // 32)
    if len(mask) != size:
        raise ValueError(f"a grammar's mask has {len(mask)} bytes; expected {size}")
    allowed = [t for t in range(vocab_size) if mask[t // 8] >> t % 8 & 1]
    if not allowed:
        raise ValueError("no token is left to sample: the grammar allows none")
    return allowed


class FakeExecutor:
    """Executor without a model, for tests of schedulers and engines.

    At each position, the KV cache stores a digest of all tokens up to that position. A digest is
    computed from the digest before it, which is read through the block table, and the sampled token
    is computed from the last digest. So a wrong block, request index, start or token changes the
    output; ``reference`` computes the correct output.

    - KV groups have different digests, so a block of another group changes the output.
    - In a group with a window, a digest is computed from exactly the tokens in the window. So a
      block that is freed too early changes the output; a block that is freed too late does not.
    - If ``info.max_tokens_per_row`` is above 1, the executor imitates speculative decoding: the
      digest decides how many drafts are accepted, and rejected drafts leave wrong KV behind.
    - With ``info.has_states``, the executor keeps one more digest per request index, like a
      recurrent layer's state: a row at position 0 resets this state, any other row continues it.
      State snapshots are copied before and after the step, as on a device.
    - Prompt log-probabilities are computed from the digests: the token that follows from the
      digest has rank 1, the next higher ids have the next ranks, and rank r has -r / 10.
    - Under a grammar's mask, a row keeps its token if that is allowed; otherwise the digest selects
      an allowed one. Such a row yields one token, also if ``max_tokens_per_row`` is larger.

    Args:
        info: limits that the executor reports to the engine.
        step_time: duration of each step in seconds.
        record: keep every executed batch in ``batches``.

    Attributes:
        faults: faults by step number, for ``collect`` of that step: an exception to raise, or a
            function that gets the result and returns another.
        gate: semaphore that each ``collect`` acquires; None for no wait.
        sleep: function that is called with ``step_time`` in each step.
        batches: the executed batches, if ``record`` is True.
        row_errors: exception by request id; each sampled row of that request fails with it.
    """

    def __init__(self, info: ExecutorInfo, *, step_time: float = 0.0, record: bool = False) -> None:
        self.info = info
        self.in_process = UnpicklableObjects()
        self.step_time = step_time
        self.sleep: Callable[[float], None] = time.sleep
        self.record = record
        self.batches: list[StepBatch] = []
        self.faults: dict[int, BaseException | Callable[[StepResult], StepResult]] = {}
        self.row_errors: dict[str, Exception] = {}
        self.gate: threading.Semaphore | None = None
        self.closed = False
        self._launched_batches: deque[StepBatch] = deque()
        self._masks: dict[int, GrammarMask] = {}
        self._block_size = max(group.block_size for group in info.kv_groups)
        self._kv_digests: list[int | None] = [None] * (info.num_blocks * self._block_size)
        self._tokens_by_index: dict[int, list[int]] = {}
        self._blocks_by_index: dict[int, tuple[list[int], ...]] = {}
        self._request_ids: dict[int, str] = {}
        self._states = [0] * (info.max_num_seqs + info.num_state_snapshots)

    def reference(self, prompt: Sequence[int], count: int) -> list[int]:
        """Compute the ``count`` tokens that follow ``prompt``, without a KV cache."""
        digests = self._make_token_digests()
        states = list(range(len(digests)))
        for token_id in prompt:
            states = [group_digests.append(token_id) for group_digests in digests]
        tokens = []
        for _ in range(count):
            tokens.append(self._next_token(states))
            states = [group_digests.append(tokens[-1]) for group_digests in digests]
        return tokens

    def reference_prompt_logprobs(self, prompt: Sequence[int], count: int) -> list[TokenLogprobs]:
        """Compute the log-probabilities of the prompt's tokens from the second on, without a KV
        cache.

        Args:
            count: number of most likely tokens to add at each position.
        """
        digests = self._make_token_digests()[: len(self.info.kv_groups)]
        entries = []
        for position in range(1, len(prompt)):
            states = [group_digests.append(prompt[position - 1]) for group_digests in digests]
            entries.append(self._logprobs(states, prompt[position], count))
        return entries

    def _make_token_digests(self) -> list[_TokenDigests]:
        """Make an empty ``_TokenDigests`` per KV group, and one for the recurrent state if any."""
        windows = [spec.window for spec in self.info.kv_groups] + [None] * self.info.has_states
        return [_TokenDigests(index, window) for index, window in enumerate(windows)]

    def _logprobs(self, digests: Sequence[int], token_id: int, num_top: int) -> TokenLogprobs:
        likeliest, size = self._next_token(digests), self.info.vocab_size
        top = [Logprob((likeliest + r - 1) % size, -r / 10, r) for r in range(1, num_top + 1)]
        rank = (token_id - likeliest) % size + 1
        return TokenLogprobs(Logprob(token_id, -rank / 10, rank), tuple(top))

    def _next_token(self, digests: Sequence[int]) -> int:
        """Token that is computed from the last digests of all KV groups."""
        return functools.reduce(operator.xor, digests) % self.info.vocab_size

    def launch(self, batch: StepBatch) -> None:
        if len(self._launched_batches) >= self.info.pipeline_depth:
            raise RuntimeError(f"more than {self.info.pipeline_depth} steps in flight")
        self._launched_batches.append(batch)

    def sample(self, masks: GrammarMask) -> None:
        awaiting_masks = (
            b for b in self._launched_batches if b.masked_rows and b.step not in self._masks
        )
        batch = next(awaiting_masks, None)
        if batch is None or batch.step != masks.step:
            expected = "none" if batch is None else f"those of step {batch.step}"
            raise RuntimeError(f"masks of step {masks.step} came; expected {expected}")
        if not set(masks.rows) <= set(batch.masked_rows):
            raise RuntimeError(
                f"masks of rows {masks.rows} came; expected some of {batch.masked_rows}"
            )
        self._masks[masks.step] = masks

    def collect(self) -> StepResult:
        batch = self._launched_batches[0]
        if batch.masked_rows and batch.step not in self._masks:
            raise RuntimeError(f"step {batch.step} awaits its masks")
        self._launched_batches.popleft()
        if self.gate is not None:
            self.gate.acquire()
        if self.step_time:
            self.sleep(self.step_time)
        fault = self.faults.pop(batch.step, None)
        if isinstance(fault, BaseException):
            raise fault
        result = self._execute(batch)
        return fault(result) if fault is not None else result

    def discard(self) -> None:
        self._launched_batches.clear()
        self._masks.clear()
        self._tokens_by_index.clear()
        self._blocks_by_index.clear()
        self._request_ids.clear()

    def close(self) -> None:
        self.closed = True
        self._launched_batches.clear()

    def _execute(self, batch: StepBatch) -> StepResult:
        if self.record:
            self.batches.append(batch)
        for req_index in batch.released_indices:
            self._tokens_by_index.pop(req_index, None)
            self._blocks_by_index.pop(req_index, None)
        for assignment in batch.assignments:
            self._tokens_by_index[assignment.req_index] = list(assignment.token_ids)
            self._blocks_by_index[assignment.req_index] = tuple(map(list, assignment.block_ids))
            self._request_ids[assignment.req_index] = assignment.request_id
        for req_index, block_ids in batch.new_blocks:
            for blocks, new in zip(self._blocks_by_index[req_index], block_ids, strict=True):
                blocks.extend(new)
        for req_index, group, first, end in batch.freed_entries:
            self._blocks_by_index[req_index][group][first:end] = [NULL_BLOCK_ID] * (end - first)
        self._copy_blocks(batch.block_copies)
        result = StepResult(batch.step, [], [0] * len(batch))
        masks = self._masks.pop(batch.step, GrammarMask(batch.step))
        mask_of = dict(zip(masks.rows, masks.masks, strict=True))
        groups = range(len(self.info.kv_groups))
        digests = [self._forward_group(batch, group) for group in groups]
        if self.info.has_states:
            digests.append(self._advance_states(batch))
        forwarded = list(zip(*digests, strict=True))
        for row, span in batch.prompt_logprobs.items():
            result.prompt_logprobs[row] = self._span_logprobs(batch.req_indices[row], span)
        for row, states in enumerate(forwarded):
            if batch.samples[row]:
                digests = self._token_digests(batch, row, states)
                self._sample(batch, row, digests, result, mask_of.get(row))
        return result

    def _copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        size, digests = self._block_size, self._kv_digests
        copies = [digests[source * size : (source + 1) * size] for source, _ in pairs]
        for (_, target), copied in zip(pairs, copies, strict=True):
            digests[target * size : (target + 1) * size] = copied

    def _token_digests(self, batch: StepBatch, row: int, digests: Sequence[int]) -> Sequence[int]:
        """Digests from which a row's token is computed. A subclass may replace them."""
        return digests

    def _span_logprobs(self, req_index: int, span: PromptLogprobSpan) -> list[TokenLogprobs]:
        groups, entries = range(len(self.info.kv_groups)), []
        for position in range(span.first, span.end):
            states = [self._kv_digests[self._kv_index(g, req_index, position)] for g in groups]
            token_id = self._tokens_by_index[req_index][position + 1]
            entries.append(self._logprobs(cast("list[int]", states), token_id, span.num_top))
        return entries

    def _forward_group(self, batch: StepBatch, group: int) -> list[int]:
        """Compute the digest at the last position of each row, in one KV group.

        A row may read KV that another row writes in the same step, because a model writes all KV of
        a layer before it reads any. So the row that writes is computed first.
        """
        writer = {
            self._kv_index(group, batch.req_indices[row], position): row
            for row in range(len(batch))
            for position in range(batch.starts[row], batch.starts[row] + batch.counts[row])
        }
        states: dict[int, int] = {}
        for row in range(len(batch)):
            pending = [row]
            while pending:
                current = pending[-1]
                req_index, start = batch.req_indices[current], batch.starts[current]
                read = [
                    self._kv_index(group, req_index, at)
                    for at in self._attended_positions(group, start)
                ]
                before = [writer[at] for at in read if at in writer]
                if before := [row for row in before if row not in states]:
                    pending += before
                    continue
                pending.pop()
                if current not in states:
                    end = start + batch.counts[current]
                    tokens = self._tokens_by_index[req_index][start:end]
                    states[current] = self._write_digests(group, req_index, start, tokens)
        return [states[row] for row in range(len(batch))]

    def _advance_states(self, batch: StepBatch) -> list[int]:
        """Compute the recurrent state after each row."""
        first = self.info.max_num_seqs - 1  # Snapshots are numbered from 1.
        for req_index, snapshot in batch.state_loads:
            self._states[req_index] = self._states[first + snapshot]
        for req_index, start, count in zip(
            batch.req_indices, batch.starts, batch.counts, strict=True
        ):
            state = self._states[req_index] if start else len(self.info.kv_groups)
            tokens = self._tokens_by_index[req_index][start : start + count]
            self._states[req_index] = functools.reduce(hash_pair, tokens, state)
        for req_index, snapshot in batch.state_saves:
            self._states[first + snapshot] = self._states[req_index]
        return [self._states[req_index] for req_index in batch.req_indices]

    def _write_digests(self, group: int, req_index: int, start: int, tokens: Sequence[int]) -> int:
        """Write the digests of ``tokens`` from position ``start`` on; returns the last digest."""
        seen = self._attended_positions(group, start)
        states = [self._kv_digests[self._kv_index(group, req_index, position)] for position in seen]
        if None in states:
            raise RuntimeError(
                f"request index {req_index} reads KV at {seen[states.index(None)]} that no step "
                "wrote"
            )
        window = self.info.kv_groups[group].window
        digests = _TokenDigests(group, window, start, cast("list[int]", states))
        state = group
        for position, token_id in enumerate(tokens, start):
            state = digests.append(token_id)
            self._kv_digests[self._kv_index(group, req_index, position)] = state
        return state

    def _attended_positions(self, group: int, position: int) -> range:
        """Earlier positions whose digests are read to compute the one at ``position``."""
        window = self.info.kv_groups[group].window
        return range(max(0, position - (1 if window is None else window - 1)), position)

    def _kv_index(self, group: int, req_index: int, position: int) -> int:
        block_size = self.info.kv_groups[group].block_size
        block_id = self._blocks_by_index[req_index][group][position // block_size]
        if block_id == NULL_BLOCK_ID:
            raise RuntimeError(
                f"request index {req_index} has the null block at position {position}"
            )
        return block_id * self._block_size + position % block_size

    def _sample(
        self,
        batch: StepBatch,
        row: int,
        digests: Sequence[int],
        result: StepResult,
        mask: bytes | None,
    ) -> None:
        req_index, info = batch.req_indices[row], self.info
        position = batch.starts[row] + batch.counts[row]
        error = self.row_errors.get(self._request_ids[req_index])
        yielded, drafts = [self._next_token(digests)], 0
        if mask is None:
            drafts = min(info.max_tokens_per_row, info.max_model_len - position) - 1
        else:
            try:
                allowed = allowed_tokens(mask, info.vocab_size)
                if yielded[0] not in allowed:
                    yielded = [allowed[yielded[0] % len(allowed)]]
            except ValueError as broken:
                error = error or broken
        accepted = hash_pair(digests[0], 0) % (drafts + 1) if drafts > 0 else 0
        for i in range(drafts):
            draft = yielded[-1] if i < accepted else ~yielded[-1] % info.vocab_size
            groups = range(len(digests))
            digests = [self._write_digests(g, req_index, position + i, [draft]) for g in groups]
            if i < accepted:
                yielded.append(self._next_token(digests))
        if error is None:
            result.token_ids += yielded
            result.counts[row] = len(yielded)
        else:
            result.prompt_logprobs.pop(row, None)
            result.errors[row] = RowError.of(error)
            self.in_process.errors.setdefault(batch.step, {})[row] = error
        # A failed row has tokens too: the next step may already be launched, and reads them.
        tokens = self._tokens_by_index[req_index]
        del tokens[position:]
        tokens += yielded
