"""Scheduler: chooses the requests and tokens of each step, under one token budget.

There is no prefill phase and no decode phase (the design of vLLM v1). A step computes some number
of tokens for each of some requests, so that ``num_computed_tokens`` catches up with the tokens that
a request has, known or in flight. A long prompt is thereby chunked, a prefix hit is a head start,
and a preempted request simply starts over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from asyncllm.core.admission_pace import AdmissionPace
from asyncllm.core.batch import SlotAssignment, StepBatch, StepResult
from asyncllm.core.executor import ExecutorInfo
from asyncllm.core.idle_requests import IdleRequests
from asyncllm.core.in_process import UnpicklableObjects, picklable_params
from asyncllm.core.kv_cache import FreedEntries, KVCacheManager, block_ids
from asyncllm.core.prompt_logprobs import (
    append_prompt_logprobs,
    budget_cost_per_token,
    prompt_logprob_spans,
)
from asyncllm.core.request import Request, Status
from asyncllm.core.scheduled_step import ScheduledStep
from asyncllm.core.token_budget import TokenBudget
from asyncllm.core.waiting_queue import WaitingQueue
from asyncllm.errors import KVCacheTooSmallError, RequestError
from asyncllm.outputs import FinishReason, TokenLogprobs

TokenEvent = tuple[Request, int, TokenLogprobs | None, BaseException | None]
"""``(request, token id, log-probabilities, error)``: a sampled token, or the exception that ends
the request. A plain tuple, because one is made with every token, and a NamedTuple takes five times
as long."""


class Scheduler:
    """Decides which requests run in a step, and how many tokens each computes.

    It accounts for blocks, slots and tokens in flight.

    Args:
        info: the executor's limits.
        policy: "fcfs", "priority" or "deadline".
        enable_prefix_caching: cache and find shared prefixes, if the executor has no states or
            keeps snapshots of them.
        in_process: UnpicklableObjects of an executor in this process; None for other executors.
    """

    def __init__(
        self,
        info: ExecutorInfo,
        *,
        policy: str = "fcfs",
        enable_prefix_caching: bool = True,
        in_process: UnpicklableObjects | None = None,
    ) -> None:
        self.info = info
        self.kv = KVCacheManager(
            info.num_blocks,
            info.kv_groups,
            step_tokens=info.max_step_tokens,
            enable_prefix_caching=enable_prefix_caching
            and (not info.has_states or info.num_state_snapshots > 0),
            num_state_snapshots=info.num_state_snapshots,
        )
        self.in_process = in_process or UnpicklableObjects()
        self.num_lookahead_tokens = info.max_tokens_per_row - 1
        self.budget = TokenBudget(info.max_num_batched_tokens)
        self.pace = AdmissionPace()
        self.waiting = WaitingQueue(policy)
        # Requests that lost their blocks without running, until ``_release_evicted``.
        self.evicted = WaitingQueue(policy)
        # Requests that wait for a slot and for their mask.
        self.awaiting_mask: dict[Request, None] = {}
        # Further outputs that wait for the first one to compute their prompt.
        self.awaiting_prompt: dict[Request, dict[Request, None]] = {}
        self.running: dict[Request, None] = {}
        self.paused: dict[Request, None] = {}
        self.failed: list[tuple[Request, Exception]] = []
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self._idle_requests = IdleRequests()
        # Paused requests that hold a slot, in the order of their pauses.
        self._idle_slots: dict[Request, None] = {}
        self._next_recompute_at = 0
        self._free_req_indices = list(range(info.max_num_seqs - 1, -1, -1))
        self._released_req_indices: list[int] = []
        self._latest_step: ScheduledStep | None = None
        self._num_steps = 0

    # --- requests come, pause and go ---------------------------------------------------

    def add(self, request: Request) -> None:
        request.status = Status.WAITING
        request.budget_cost_per_token = budget_cost_per_token(request, self.info.vocab_size)
        self._queue(request)

    def _queue(self, request: Request) -> None:
        grammar, first = request.structured_output, request.first_member
        if grammar is not None and grammar.awaits_mask:
            self.awaiting_mask[request] = None
        elif first is not None and self._awaits_prompt(request, first):
            self.awaiting_prompt.setdefault(first, {})[request] = None
        else:
            self.waiting.push(request)

    def _awaits_prompt(self, request: Request, first: Request) -> bool:
        has_begun = first.is_finished or first.num_output_tokens > 0
        return not has_begun and self.kv.copies_last_block(request)

    def _end_prompt_wait(self, first: Request) -> None:
        """Queue the outputs that waited for the first one's prompt."""
        for request in self.awaiting_prompt.pop(first, ()):
            self._queue(request)

    def begin_mask_wait(self, request: Request) -> None:
        """Remove a request from the waiting queue until its mask is made. In the queue, it would
        hold up the requests behind it."""
        if request in self.waiting:
            self.waiting.discard(request)
            self.awaiting_mask[request] = None

    def end_mask_wait(self, request: Request) -> None:
        """Return a request to its place in the waiting queue, because its mask is made."""
        if request in self.awaiting_mask:
            del self.awaiting_mask[request]
            self.waiting.push(request)

    def finish(self, request: Request, reason: FinishReason | None) -> None:
        """End a request in any state and free its blocks. ``reason`` is None if an exception ends
        the request. Idempotent."""
        if request.status is Status.FINISHED:
            return
        self._remove_from_schedule(request)
        self._release_slot(request)
        self._idle_requests.entries.pop(request, None)
        self.kv.free(request)
        request.epoch += 1
        request.num_placeholders = 0
        request.status = Status.FINISHED
        request.finish_reason = reason
        self.in_process.processors.pop(request.arrival_index, None)
        self._end_prompt_wait(request)

    def pause(self, request: Request) -> None:
        """Stop scheduling a request until ``resume``. The request keeps its slot and its blocks
        until another request needs them, and still accepts a token in flight."""
        if request.status in (Status.FINISHED, Status.PAUSED):
            return
        if request.status is Status.RUNNING:
            self._idle_slots[request] = None
        self._remove_from_schedule(request)
        request.status = Status.PAUSED
        self.paused[request] = None
        if request.blocks:
            self._idle_requests.add(request)

    def resume(self, request: Request) -> None:
        """Run a paused request in its slot again. It is queued instead if it has lost the slot, or
        if too few blocks are free."""
        if request.status is not Status.PAUSED:
            return
        del self.paused[request]
        if request in self._idle_slots:
            if self._has_spare_blocks(request):
                del self._idle_slots[request]
                self._idle_requests.entries.pop(request, None)
                self.waiting.push(request)
                self._run(request)
                return
            self._evict_slot(request)
        if request.is_evicted:
            request.status = Status.WAITING
            self.evicted.push(request)
        else:
            self.add(request)
        if request in self._idle_requests.entries:
            self._idle_requests.add(request)

    def _run(self, request: Request) -> None:
        self.waiting.admit(request)
        request.status = Status.RUNNING
        self.running[request] = None

    def _remove_from_schedule(self, request: Request) -> None:
        if request.status is Status.RUNNING:
            del self.running[request]
            self.waiting.release(request)
        elif request.status is Status.WAITING:
            self.waiting.discard(request)
            self.evicted.discard(request)
            self.awaiting_mask.pop(request, None)
            if request.first_member in self.awaiting_prompt:
                self.awaiting_prompt[request.first_member].pop(request, None)
        elif request.status is Status.PAUSED:
            del self.paused[request]

    def _release_slot(self, request: Request) -> None:
        if request.req_index >= 0:
            self._idle_slots.pop(request, None)
            self._released_req_indices.append(request.req_index)
            self._free_req_indices.append(request.req_index)
            request.req_index = -1

    def _evict_slot(self, request: Request) -> None:
        """Release a paused request's slot. With recurrent states the request frees its blocks too,
        because they are of no use without the state, which is lost with the slot."""
        self._release_slot(request)
        if self.info.has_states:
            self._idle_requests.entries.pop(request, None)
            self.kv.free(request)
            request.is_evicted = True

    def requests(self) -> Iterable[Request]:
        """Iterate over the requests that have not finished."""
        yield from self.running
        yield from self.waiting
        yield from self.evicted
        yield from self.awaiting_mask
        for members in self.awaiting_prompt.values():
            yield from members
        yield from self.paused

    def has_work(self) -> bool:
        return bool(self.running or self.waiting or self.evicted)

    # --- one step ----------------------------------------------------------------------

    def schedule(self) -> ScheduledStep | None:
        """Make the next step; None if there is nothing to compute now. Requests that can never run
        are put into ``failed``."""
        step = ScheduledStep(StepBatch(self._num_steps))
        if self.kv.states is not None:
            self.kv.states.cache_saved_snapshots()
        scheduled: dict[Request, int] = {}
        block_table_updates: dict[Request, tuple[tuple[list[int], ...], list[FreedEntries]]] = {}
        budget, preempted = self._schedule_running(scheduled, block_table_updates)
        for request, count in scheduled.items():
            self._add_row(request, count, step)
        if not preempted and budget > 0:
            self._schedule_waiting(step, budget)
        if not step.requests:
            return None
        step.order_decodes_first()
        batch = step.batch
        for request, (new, freed) in block_table_updates.items():
            if request in scheduled:
                batch.new_blocks.append((request.req_index, new))
                if freed:
                    batch.freed_entries += [(request.req_index, *entries) for entries in freed]
        if step.has_grammar_mask:
            batch.masked_rows = step.masked_rows()
        if batch.num_decodes < len(step.requests):
            batch.prompt_logprobs = prompt_logprob_spans(step, self.info.vocab_size)
        batch.released_indices, self._released_req_indices = self._released_req_indices, []
        batch.block_copies, self.kv.block_copies = self.kv.block_copies, []
        batch.assignments = [self._make_assignment(r) for r in step.admitted]
        self._num_steps += 1
        self._latest_step = step
        return step

    def _schedule_running(
        self,
        scheduled: dict[Request, int],
        block_table_updates: dict[Request, tuple[tuple[list[int], ...], list[FreedEntries]]],
    ) -> tuple[int, bool]:
        """Schedule running requests in order, and preempt when blocks run out. Returns the rest of
        the token budget, and whether a request was preempted."""
        budget = self.budget.tokens
        lookahead = self.num_lookahead_tokens
        preempted = False
        for request in list(self.running):
            if budget <= 0:
                break
            if request.status is not Status.RUNNING:
                continue
            total = len(request.token_ids) + request.num_placeholders
            if request.num_placeholders and total >= request.run_ahead_end:
                continue
            count, cost = total - request.num_computed_tokens, request.budget_cost_per_token
            if count * cost > budget:
                count = max(1, budget // cost)
            end = request.num_computed_tokens + count + lookahead
            if end > request.num_covered_tokens:
                end = min(end, self.info.max_model_len, request.snapshot_at)
                count = min(count, end - request.num_computed_tokens)
                freed = self.kv.free_out_of_window(request)
                block_ids = self.kv.grow(request, end)
                while block_ids is None:
                    victim = self._idle_requests.next_victim() or max(
                        self.running, key=lambda r: r.sort_key
                    )
                    if victim is request and len(self.running) == 1:
                        self._fail_too_large(request, end)
                        break
                    preempted = True
                    self.preempt(victim)
                    budget += scheduled.pop(victim, 0) * victim.budget_cost_per_token
                    if victim is request:
                        break
                    block_ids = self.kv.grow(request, end)
                if block_ids is None:
                    continue
                block_table_updates[request] = block_ids, freed
            scheduled[request] = count
            budget -= count * cost
        return budget, preempted

    def _schedule_waiting(self, step: ScheduledStep, budget: int) -> None:
        """Admit waiting requests in the queue's order while slots, blocks and budget last. If one
        does not fit, no later request is admitted before it, so that it does not starve. Beside
        requests of several owners, AdmissionPace bounds the admissions."""
        self._release_evicted()
        states, max_num_seqs = self.kv.states, self.info.max_num_seqs
        is_paced = bool(self.running) and self.waiting.num_owners > 1
        self.pace.begin_step()
        skipped: list[Request] = []
        while budget > 0 and len(self.running) < max_num_seqs:
            request = self.waiting.peek()
            if request is None or len(skipped) > max_num_seqs:
                break
            if request.num_placeholders or (states is not None and states.awaits_snapshot(request)):
                # Skip this request for a step: its token in flight is not known yet, or this step
                # saves a snapshot of its prefix. Other requests may overtake it.
                self.waiting.discard(request)
                skipped.append(request)
                continue
            if not self._admit(request):
                if request.is_finished:
                    continue
                break
            step.admitted.append(request)
            if states is not None and request.num_computed_tokens:
                step.batch.state_loads.append((request.req_index, states.load(request)))
            end = min(len(request.token_ids), request.snapshot_at)
            max_count = max(1, budget // request.budget_cost_per_token)
            count = min(end - request.num_computed_tokens, max_count)
            self._add_row(request, count, step)
            budget -= count * request.budget_cost_per_token
            if is_paced and not self.pace.count(request, count):
                self.waiting.set_aside(request.owner)
        for request in skipped:
            self.waiting.push(request)
        self.waiting.restore_owners()

    def _admit(self, request: Request) -> bool:
        idle = self._idle_requests
        was_idle = idle.entries.pop(request, None) is not None
        # Keep no blocks free while idle requests hold some: running requests can take those.
        min_free_blocks = 0 if idle.entries or not self.running else self.kv.watermark
        while not self._take_blocks(request, min_free_blocks):
            victim = idle.next_victim()
            if victim is None:
                if not self.running:
                    self._fail_too_large(request, self._num_reserved_tokens(request))
                elif was_idle:
                    idle.add(request)
                return False
            self.preempt(victim)
        if not self._free_req_indices:
            self._evict_slot(next(iter(self._idle_slots)))
        request.req_index = self._free_req_indices.pop()
        self._run(request)
        if request.first_scheduled_at is None:
            request.begin()
            self.num_prompt_tokens += request.num_prompt_tokens
        return True

    def _release_evicted(self) -> None:
        """Let the first of ``evicted`` wait for admission, if that slows others little.

        If more streams pause than the cache holds, each resumed one evicts another, and computes
        its prompt again for a few tokens. So there have to be free blocks for it, or as many
        generated tokens as the last such request computed again, or no other work.
        """
        request = self.evicted.peek()
        if request is None:
            return
        num_tokens = self._num_reserved_tokens(request)
        num_free = self.kv.pool.num_free - self.kv.watermark
        is_free = not self.info.has_states and self.kv.max_blocks_for(num_tokens) <= num_free
        is_paid = self.num_generated_tokens >= self._next_recompute_at
        if is_free or is_paid or not (self.running or self.waiting):
            self.evicted.discard(request)
            self._queue(request)
            request.is_evicted = False
            if not is_free:
                self._next_recompute_at = self.num_generated_tokens + num_tokens

    def _has_spare_blocks(self, request: Request) -> bool:
        num_tokens = self._num_reserved_tokens(request)
        num_free = self.kv.pool.num_free - self.kv.watermark
        return num_tokens <= request.num_covered_tokens or len(self.kv.groups) < num_free

    def _take_blocks(self, request: Request, min_free_blocks: int) -> bool:
        num_tokens = self._num_reserved_tokens(request)
        if request.blocks:
            self.kv.free_out_of_window(request)
            return self.kv.grow(request, num_tokens, min_free_blocks) is not None
        return self.kv.admit(request, num_tokens, self.kv.find_prefix(request), min_free_blocks)

    def _num_reserved_tokens(self, request: Request) -> int:
        """Number of tokens that a request needs blocks for on admission, drafts included."""
        return min(len(request.token_ids) + self.num_lookahead_tokens, self.info.max_model_len)

    def _add_row(self, request: Request, num_new_tokens: int, step: ScheduledStep) -> None:
        """Add a row to the step, and count its tokens as computed."""
        batch = step.batch
        start = request.num_computed_tokens
        end = start + num_new_tokens
        samples = end == len(request.token_ids) + request.num_placeholders
        step.requests.append(request)
        step.epochs.append(request.epoch)
        batch.req_indices.append(request.req_index)
        batch.starts.append(start)
        batch.counts.append(num_new_tokens)
        batch.samples.append(samples)
        batch.num_tokens += num_new_tokens
        request.num_computed_tokens = end
        if samples:
            request.num_placeholders += 1
            if num_new_tokens == 1:
                batch.num_decodes += 1
            if request.structured_output is not None:
                step.has_grammar_mask = True
        if end >= request.cache_blocks_at:
            step.newly_cached_blocks += self.kv.cache_blocks(request)
            if end == request.snapshot_at:
                assert self.kv.states is not None
                snapshot = self.kv.states.save(request, step.newly_cached_snapshots)
                if snapshot is not None:
                    batch.state_saves.append((request.req_index, snapshot))

    def _make_assignment(self, request: Request) -> SlotAssignment:
        processors_key = -1
        if request.sampling.logits_processors:
            processors_key = request.arrival_index
            self.in_process.processors[processors_key] = request.sampling.logits_processors
        return SlotAssignment(
            req_index=request.req_index,
            request_id=request.request_id,
            token_ids=request.token_ids.copy(),
            num_prompt_tokens=request.num_prompt_tokens,
            block_ids=block_ids(request.blocks),
            sampling=picklable_params(request.sampling),
            eos_token_ids=request.eos_token_ids,
            processors_key=processors_key,
            token_rules=request.token_rules,
            claiming_processors=request.claiming_processors,
        )

    # --- results -----------------------------------------------------------------------

    def update(self, step: ScheduledStep, result: StepResult) -> Iterator[TokenEvent]:
        """Apply the result of a step, token by token, while the caller iterates. A token may finish
        its request here. If the caller ends a request between two events (for a stop string), the
        rest of its row's tokens is dropped.

        Raises:
            ValueError: if the result does not fit the step, which means a broken executor.
        """
        step.check_result(result, self.info)
        token_ids, counts, logprobs = result.token_ids, result.counts, result.logprobs
        epochs = step.epochs
        exceptions = self.in_process.errors.pop(result.step, {})
        if result.prompt_logprobs:
            append_prompt_logprobs(step, result)
        end = 0
        for row, request in enumerate(step.requests):
            i = first = end
            end += counts[row]
            epoch = epochs[row]
            if request.epoch != epoch:
                continue
            if first == end:
                if row in result.errors:
                    self.kv.uncache_request(request)
                    self.finish(request, None)
                    error = exceptions.get(row)
                    if error is None:
                        message = result.errors[row].message
                        error = RequestError(f"request {request.request_id!r} failed: {message}")
                    yield request, -1, None, error
                continue
            request.num_placeholders -= 1
            while True:
                token_id = token_ids[i]
                request.token_ids.append(token_id)
                self.num_generated_tokens += 1
                if request in self.awaiting_prompt:
                    self.kv.cache_last_block(request)
                    self._end_prompt_wait(request)
                if request.num_computed_tokens >= request.cache_blocks_at:
                    assert self._latest_step is not None
                    self._latest_step.newly_cached_blocks += self.kv.cache_blocks(request)
                reason = request.check_stop(token_id)
                if request.structured_output is not None:
                    try:
                        reason = request.structured_output.advance(request, token_id, reason)
                    except BaseException as error:  # A grammar backend's native code may panic.
                        self.finish(request, None)
                        yield request, -1, None, error
                        break
                if reason is not None:
                    self.finish(request, reason)
                token_logprobs = logprobs[row][i - first] if logprobs and row in logprobs else None
                yield request, token_id, token_logprobs, None
                i += 1
                if i == end or request.epoch != epoch:
                    break
                # The token was an accepted draft, whose KV the step has written.
                request.num_computed_tokens += 1

    def roll_back_steps(self, steps: Iterable[ScheduledStep]) -> None:
        """Undo ``steps``, which must be all steps in flight. Blocks and states that they cached
        leave the prefix cache. Every request that has a row in them or holds a slot is reset, so
        that it is recomputed."""
        steps = list(steps)
        for step in steps:
            self.kv.uncache_blocks(step.newly_cached_blocks, step.newly_cached_snapshots)
        affected = dict.fromkeys((*self.running, *self._idle_slots))
        for step in steps:
            for request, epoch in zip(step.requests, step.epochs, strict=True):
                if request.epoch == epoch and request.status is not Status.FINISHED:
                    affected[request] = None
        for request in affected:
            self._reset_for_recompute(request)

    # --- preemption --------------------------------------------------------------------

    def preempt(self, request: Request) -> None:
        """Free a request's blocks and slot. Its known tokens are recomputed later."""
        self.num_preemptions += 1
        request.num_preemptions += 1
        request.is_evicted = request.status is not Status.RUNNING
        if request.status is Status.WAITING:
            self.waiting.discard(request)
            self.awaiting_mask.pop(request, None)
            self.evicted.push(request)
        self._reset_for_recompute(request)

    def _reset_for_recompute(self, request: Request) -> None:
        """Free the request's blocks, and ignore its results in flight; known tokens are kept. A
        running request is queued again, before later requests of the same owner."""
        if request.status is Status.RUNNING:
            self._remove_from_schedule(request)
            self.add(request)
        self._release_slot(request)
        self._idle_requests.entries.pop(request, None)
        self.kv.free(request)
        grammar = request.structured_output
        request.num_placeholders = int(grammar is not None and grammar.awaits_mask)
        request.epoch += 1

    def _fail_too_large(self, request: Request, num_tokens: int) -> None:
        needed, usable = self.kv.max_blocks_for(num_tokens), self.kv.pool.num_usable
        self.finish(request, None)
        error = KVCacheTooSmallError(
            f"request {request.request_id!r} needs {needed} KV blocks for {num_tokens} tokens, "
            f"the cache has {usable}; raise kv_cache_memory or num_blocks"
        )
        self.failed.append((request, error))
