"""RequestGrammar: a request's grammar; MaskMaker: the token masks of a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Self

from asyncllm.core.batch import GrammarMask
from asyncllm.core.mask_thread import GIL_YIELD_SECONDS, MaskResult, MaskThread
from asyncllm.core.parser_memory import (
    FREE_ACCEPT_SECONDS,
    PARSER_BYTES_PER_SECOND,
    ParserMemory,
)
from asyncllm.core.request import Status
from asyncllm.errors import RequestError
from asyncllm.outputs import FinishReason
from asyncllm.structured.grammar import Grammar, GrammarMatcher, MaskSpeed

if TYPE_CHECKING:
    from asyncllm.core.reasoning import ReasoningTracker
    from asyncllm.core.request import Request
    from asyncllm.core.scheduled_step import ScheduledStep
    from asyncllm.core.scheduler import Scheduler


@dataclass(slots=True, eq=False)
class RequestGrammar:
    """Grammar of a request, with its state. The state depends only on the tokens that the request
    has accepted, so preemption, rollback and late results do not change it.

    The grammar applies after the model's reasoning. Output that begins like the opening delimiter
    of reasoning may also be an answer, if the grammar admits those tokens: the matcher then follows
    them, and rolls back if reasoning is opened after all.

    Attributes:
        new_matcher: makes a matcher that has accepted no token; None once the request has ended.
        matcher: the matcher of the tokens so far; see ``num_tokens_to_replay``.
        special_tokens: ids of the special tokens, which add no text. If the grammar names a stop
            token, that token is part of the output, and ends the output only where the grammar may
            end.
        clock: function that returns the calling thread's CPU seconds. By wall-clock time, a quick
            mask would count as slow on a busy machine.
        mask_speed: speed of the masks of all outputs under the same grammar.
        first_mask: the matcher's mask until it accepts a token; None afterwards, and if it is not
            known.
        accept_seconds: seconds that the matcher took to accept tokens since the last mask.
        num_tokens_to_replay: number of the output's tokens that the matcher has lost, and must
            accept again before it is used.
        num_masks_ahead: number of masks that MaskMaker must still make ahead of their step. While
            it is not 0, a token is accepted along with the next mask.
        pending_token: the last token, if it waits for the next mask.
        next_mask: future of the next mask, which another thread makes; that thread owns the matcher
            until the mask is done.
        awaits_mask: whether the request is not scheduled until the engine thread has been notified
            that ``next_mask`` is done. Until then the request has a placeholder, even if it is
            preempted.
        num_delimiter_tokens: number of tokens of a possible reasoning delimiter that the matcher
            has followed; None if the grammar does not admit these tokens.
    """

    new_matcher: Callable[[], GrammarMatcher] | None
    special_tokens: Collection[int] = ()
    clock: Callable[[], float] = time.thread_time
    mask_speed: MaskSpeed = field(default_factory=MaskSpeed)
    first_mask: bytes | None = None
    matcher: GrammarMatcher = field(init=False)
    accept_seconds: float = field(init=False, default=0.0)
    _all_accept_seconds: float = field(init=False, default=0.0)
    _num_accepted_tokens: int = field(init=False, default=0)
    num_tokens_to_replay: int = field(init=False, default=0)
    pending_token: int | None = field(init=False, default=None)
    num_masks_ahead: int = field(init=False, default=0)
    next_mask: Future[MaskResult] | None = field(init=False, default=None)
    awaits_mask: bool = field(init=False, default=False)
    num_delimiter_tokens: int | None = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.matcher = self._make_matcher()

    def _make_matcher(self) -> GrammarMatcher:
        assert self.new_matcher is not None, "the request has ended"
        return self.new_matcher()

    @classmethod
    def begin(cls, grammar: Grammar) -> Self:
        """Make the state of a new output. Its masks are made ahead of their steps until the grammar
        is known to be quick."""
        state = cls(
            grammar.new_matcher,
            grammar.special_token_ids,
            mask_speed=grammar.mask_speed,
            first_mask=grammar.first_mask,
        )
        if not grammar.mask_speed.is_known_quick:
            state.num_masks_ahead = _NUM_MASKS_AHEAD
        return state

    def advance(
        self, request: Request, token_id: int, finish_reason: FinishReason | None
    ) -> FinishReason | None:
        """Accept the token just appended. Call this before ``request.reasoning.push``.

        Returns the finish reason: ``finish_reason``, or "stop" for a complete output, which needs
        no EOS. If accepting is slow, the thread that makes the next mask accepts the token; a
        complete output is then noticed only with that mask.

        Raises:
            Exception: RequestError for a token that is not allowed, or any error of the matcher.
        """
        began = self.clock()
        try:
            return self._advance(request, token_id, finish_reason)
        finally:
            self.accept_seconds += self.clock() - began

    def _advance(
        self, request: Request, token_id: int, finish_reason: FinishReason | None
    ) -> FinishReason | None:
        reasoning = request.reasoning
        is_thinking = reasoning is not None and reasoning.is_thinking
        if finish_reason == "stop":  # The matcher gets a stop token only if the grammar names it.
            if is_thinking or token_id not in self.special_tokens or self.matcher.may_end():
                return finish_reason
            return self._accept_grammar_stop_token(request, token_id)
        if reasoning is not None:
            if is_thinking:
                return finish_reason
            if token_id == reasoning.next_begin_token():
                self._track_reasoning_delimiter(reasoning, token_id)
                if not self.num_delimiter_tokens:
                    return finish_reason
                return self._final_finish_reason(finish_reason)
        if self.num_delimiter_tokens is None:
            raise _grammar_violation_error(request, token_id)
        if self.num_masks_ahead and finish_reason is None:
            self.pending_token = token_id
            return None
        self._accept_token(request, token_id)
        return self._final_finish_reason(finish_reason)

    def _accept_token(self, request: Request, token_id: int) -> None:
        self.first_mask = None
        began = self.clock()
        is_allowed = self.matcher.accept(token_id)
        self._all_accept_seconds += self.clock() - began
        self._num_accepted_tokens += 1
        if not is_allowed:
            raise _grammar_violation_error(request, token_id)

    def _bitmask(self) -> bytearray:
        if self.first_mask is not None:
            return bytearray(self.first_mask)
        return self.matcher.bitmask()

    def _accept_grammar_stop_token(self, request: Request, token_id: int) -> FinishReason | None:
        """Accept a stop token where the grammar cannot end. The mask allowed the token, so the
        grammar names this token."""
        self._accept_token(request, token_id)
        if self.matcher.may_end():
            return "stop"
        request.stop_reason = None
        return "length" if len(request.token_ids) >= request.max_total_tokens else None

    def _final_finish_reason(self, finish_reason: FinishReason | None) -> FinishReason | None:
        return "stop" if self.matcher.is_terminated() else finish_reason

    def _track_reasoning_delimiter(self, reasoning: ReasoningTracker, token_id: int) -> None:
        matcher, num_followed = self.matcher, self.num_delimiter_tokens
        is_last = reasoning.lacks_one_begin_token()
        if not is_last:
            if num_followed is None:
                return
            if _allows_token(self._bitmask(), token_id) and matcher.accept(token_id):
                self.first_mask = None
                self._num_accepted_tokens += 1
                self.num_delimiter_tokens = num_followed + 1
                return
        if num_followed:
            matcher.rollback(num_followed)
            self._num_accepted_tokens -= num_followed
        self.num_delimiter_tokens = 0 if is_last else None

    def compute_mask(self, request: Request) -> bytes | None:
        """Bitmask of the tokens that may come next. During reasoning it is ``b""``, which allows
        all tokens. Returns None if the output is complete and no token can follow.

        A stop token is allowed where the grammar names it. From the output's ``min_tokens``-th
        token on, it is also allowed wherever the grammar may end. A grammar that cannot go on ends
        the output even earlier.

        Raises:
            Exception: RequestError if no token is allowed and the output is not complete, or any
                error of the matcher.
        """
        while self.num_tokens_to_replay:
            self.replay_tokens(request)
        matcher, reasoning, token_id = self.matcher, request.reasoning, self.pending_token
        if token_id is not None:
            self.pending_token = None
            self._accept_token(request, token_id)
            if matcher.is_terminated():
                return None
        if reasoning is not None and reasoning.is_thinking:
            return b""
        mask, may_end = self._bitmask(), matcher.may_end()
        if self.num_delimiter_tokens is None:
            mask, may_end = bytearray(len(mask)), False
        stops = may_end and len(request.token_ids) + 1 >= request.min_total_tokens
        for token_id in request.stop_token_ids:
            byte, bit = token_id >> 3, 1 << (token_id & 7)
            if byte < len(mask) and not (token_id in self.special_tokens and mask[byte] & bit):
                mask[byte] = mask[byte] | bit if stops else mask[byte] & ~bit
        begin_token = None if reasoning is None else reasoning.next_begin_token()
        if begin_token is not None and begin_token >> 3 < len(mask):
            mask[begin_token >> 3] |= 1 << (begin_token & 7)
        rules = request.token_rules
        if rules is not None and rules.allowed_mask is not None:
            common = int.from_bytes(mask, "little") & int.from_bytes(rules.allowed_mask, "little")
            mask = bytearray(common.to_bytes(len(mask), "little"))
        if mask != bytes(len(mask)):
            return bytes(mask)
        if may_end:
            return None
        raise RequestError(
            f"request {request.request_id!r}: no token may follow {len(request.token_ids)} tokens "
            "under the grammar of structured_outputs: it admits nothing there, or the tokenizer "
            "cannot spell what it does"
        )

    def drop_parser(self) -> None:
        """Free the parser's memory. The output is held back until it is resumed, and the matcher
        then accepts the output's tokens again. No other thread may be using the matcher, and no
        token may be in flight."""
        self.matcher.release()
        self.matcher = self._make_matcher()
        self.num_tokens_to_replay = self._num_accepted_tokens
        self.next_mask = None
        self.awaits_mask = True

    def replay_tokens(self, request: Request) -> None:
        """Let a new matcher accept some of the tokens again that the one before it had accepted.

        Raises:
            Exception: RequestError for a token that is not allowed, or any error of the matcher;
                the other tokens are not replayed then.
        """
        num_left, self.num_tokens_to_replay = self.num_tokens_to_replay, 0
        num_replayed = min(num_left, _MAX_REPLAYED_TOKENS)
        start = len(request.token_ids) - (self.pending_token is not None) - num_left
        for token_id in request.token_ids[start : start + num_replayed]:
            time.sleep(GIL_YIELD_SECONDS)
            if not self.matcher.accept(token_id):
                raise _grammar_violation_error(request, token_id)
        self.num_tokens_to_replay = num_left - num_replayed

    @property
    def parser_bytes(self) -> int:
        """Estimated memory of the matcher."""
        return int(self._all_accept_seconds * PARSER_BYTES_PER_SECOND)

    @property
    def excess_parser_bytes(self) -> int:
        """Estimated memory of the matcher, beyond what parsers of usual grammars take."""
        free_seconds = self._num_accepted_tokens * FREE_ACCEPT_SECONDS
        return int(max(0.0, self._all_accept_seconds - free_seconds) * PARSER_BYTES_PER_SECOND)

    @property
    def is_held(self) -> bool:
        """Whether the output is held back; see ParserMemory."""
        return self.awaits_mask and self.next_mask is None

    def release(self) -> None:
        """Free the grammar's state once the request has ended. If another thread is making a mask,
        the state is freed when that mask is done. Any thread may call this."""
        self.new_matcher = None
        if self.next_mask is None or self.next_mask.cancel():
            self.matcher.release()
        else:
            self.next_mask.add_done_callback(lambda _: self.matcher.release())


def _grammar_violation_error(request: Request, token_id: int) -> RequestError:
    return RequestError(
        f"request {request.request_id!r}: token {token_id} does not follow the grammar of "
        "structured_outputs"
    )


def _allows_token(mask: bytearray, token_id: int) -> bool:
    return token_id >> 3 < len(mask) and bool(mask[token_id >> 3] >> (token_id & 7) & 1)


def _grammar_of(request: Request) -> RequestGrammar:
    grammar = request.structured_output
    assert isinstance(grammar, RequestGrammar)
    return grammar


def _rows_beyond(limit: float, waits: dict[int, float]) -> list[int]:
    """Select the rows with the slowest masks, so that the others take at most ``limit`` seconds.

    Args:
        waits: seconds that a step waited for its masks, by row.
    """
    rows, seconds = [], 0.0
    for row in sorted(waits, key=waits.__getitem__):
        seconds += waits[row]
        if seconds > limit:
            rows.append(row)
    return rows


_NUM_MASKS_AHEAD = 16
"""Minimum number of masks that are made ahead, once a request's masks are. Quick masks are made in
their step again afterwards."""

_MAX_REPLAYED_TOKENS = 16
"""Maximum number of tokens that a matcher accepts again before the mask thread turns to other
outputs."""

_MIN_STEP_WAIT_SECONDS = 0.001
"""Maximum seconds that a step waits for its masks; a tenth of the step's time if that is more."""

_SLOW_MASK_WAIT_FRACTION = 1 / 8
"""A mask is slow if it takes more than this fraction of the time that a step may wait for masks."""

_SLOW_GRAMMAR_WAIT_FRACTION = 1 / 2
"""A grammar is slow if one of its masks takes more than this fraction of the time that a step may
wait for masks."""


class MaskMaker:
    """Makes grammar masks: quick ones in their step, others ahead of time on a thread.

    A step may wait ``max(1 ms, a tenth of its time)`` for its masks, and for grammars to accept the
    tokens before those masks. If this takes longer and delays other rows, a request with slow masks
    is scheduled from then on only once its next mask is made: until then its last token is treated
    as if still in flight. If rows without masks are delayed, the slowest of the quick masks are
    made ahead too, until the step waits no longer than that for the others. So a grammar delays
    only its own request, and changes no token. Where parsers take much memory, outputs are held
    back: see ParserMemory.

    All masks of a grammar are made ahead until MIN_QUICK_MASKS in a row were quick, because many
    outputs may come to a slow one in the same step. A step that has waited for its time makes no
    more masks of grammars that are not known to be quick: their requests are computed again once
    their masks are made.

    Args:
        send: function that asks the engine thread to call a function with arguments.
    """

    def __init__(
        self, send: Callable[..., None], scheduler: Scheduler, parser_memory: ParserMemory
    ) -> None:
        self._send = send
        self._scheduler = scheduler
        self._parser_memory = parser_memory
        self._thread: MaskThread | None = None
        self._delays_others = False
        self.num_pending_masks = 0

    def begin(self, request: Request) -> None:
        """Let a new output wait for a slot, at once if the grammar is known to be quick. Otherwise
        wait until the mask thread has time for another output, so that outputs with slow masks do
        not occupy all slots while they wait for the thread."""
        is_quick = _grammar_of(request).mask_speed.is_known_quick
        turn = None if is_quick else self._submit(request, lambda: (None, 0.0), None)
        if turn is None:
            self._scheduler.add(request)
        else:
            turn.add_done_callback(lambda _: self._send(self._start, request))

    def _start(self, request: Request) -> None:
        if request.status is Status.NEW:  # Else it has ended, or was paused with its group.
            self._scheduler.add(request)

    def make_masks(
        self, step: ScheduledStep, step_time: float
    ) -> tuple[GrammarMask, list[tuple[Request, BaseException | None]], list[Request]]:
        """Make the masks of a step, once all tokens before it are known. Also returns the requests
        that end without a mask, each with its error, or with None if its output is complete, and
        the requests whose masks the step does not wait for. The caller preempts those, and calls
        ``make_mask_ahead``.

        Args:
            step_time: seconds that a step takes.
        """
        batch = step.batch
        masks = GrammarMask(batch.step)
        ends: list[tuple[Request, BaseException | None]] = []
        overdue: list[Request] = []
        slow: list[int] = []
        rows_ahead: list[int] = []
        quick_waits: dict[int, float] = {}
        total = 0.0
        limit = max(_MIN_STEP_WAIT_SECONDS, step_time / 10)
        for row in batch.masked_rows:
            request = step.requests[row]
            if request.epoch != step.epochs[row]:
                continue  # The request has ended or was preempted: its token is discarded.
            grammar = _grammar_of(request)
            speed, is_first = grammar.mask_speed, grammar.first_mask is not None
            may_be_slow = not (grammar.next_mask or is_first or speed.is_known_quick)
            if may_be_slow and total > limit:
                self._request_masks_ahead(request)
                overdue.append(request)
                continue
            began = grammar.clock()
            try:
                waited, grammar.accept_seconds = grammar.accept_seconds, 0.0
                if grammar.next_mask is None:
                    mask, seconds = self._make_mask(grammar, request)
                    waited += seconds
                    seconds = waited
                else:
                    mask, seconds = grammar.next_mask.result()
                    grammar.next_mask = None
            except BaseException as error:  # A grammar backend's native code may panic.
                ends.append((request, error))
                total += grammar.clock() - began
                speed.record(is_slow=True)  # A mask beyond the parser's limits takes longest.
                continue
            total += waited
            if mask != b"" and not is_first:
                speed.record(is_slow=seconds > limit * _SLOW_GRAMMAR_WAIT_FRACTION)
            self._parser_memory.count(request, grammar)
            if not speed.is_known_quick or self._parser_memory.must_wait(request):
                rows_ahead.append(row)
            elif seconds > limit * _SLOW_MASK_WAIT_FRACTION:
                slow.append(row)
            elif grammar.num_masks_ahead:
                self._decrement_num_masks_ahead(request, grammar)
            else:
                quick_waits[row] = waited
            if mask is None:
                ends.append((request, None))
            elif mask:
                masks.rows.append(row)
                masks.masks.append(mask)
        delays_others = total > limit and len(slow) < len(step.requests)
        rows_ahead += [
            row for row in slow if delays_others or _grammar_of(step.requests[row]).num_masks_ahead
        ]
        if delays_others and len(batch.masked_rows) < len(step.requests):
            rows_ahead += _rows_beyond(limit, quick_waits)
        for row in rows_ahead:
            self._request_masks_ahead(step.requests[row])
        self._delays_others = len(rows_ahead) + len(overdue) < len(step.requests)
        return masks, ends, overdue

    def make_masks_ahead(self, step: ScheduledStep) -> None:
        """Submit mask jobs to the thread, for the requests whose masks are made ahead. Call this
        once the step's tokens are accepted."""
        for row in step.batch.masked_rows:
            request = step.requests[row]
            if request.epoch != step.epochs[row]:
                continue
            # If the request's next step is already scheduled, that step makes the mask.
            if _grammar_of(request).num_masks_ahead and not request.num_placeholders:
                self.make_mask_ahead(request)

    def make_mask_ahead(self, request: Request) -> None:
        """Queue a request's next mask on the thread. The request is not scheduled until the mask is
        made. A request that is held back loses its slot, and its mask is queued later."""
        if self._parser_memory.must_wait(request):
            self._drop_parser(request)
            self._scheduler.pause(request)
            self._parser_memory.hold(request)
        else:
            self._queue_mask(request)

    def review_parsers(self) -> None:
        """Drop the parsers of unread streams, and let held requests go on, as ParserMemory decides.
        Call this in each turn of the engine's loop."""
        for request in self._parser_memory.pop_unread():
            self._drop_parser(request)
        while (request := self._parser_memory.next_resumed()) is not None:
            _grammar_of(request).awaits_mask = False
            request.num_placeholders = 0
            self._queue_mask(request)
            self._scheduler.resume(request)

    def _drop_parser(self, request: Request) -> None:
        _grammar_of(request).drop_parser()
        request.num_placeholders = 1
        self._request_masks_ahead(request)  # So that it is not scheduled with the placeholder.

    def _queue_mask(self, request: Request) -> None:
        grammar = _grammar_of(request)
        make_mask, speed = partial(self._make_mask, grammar, request), grammar.mask_speed
        if grammar.num_tokens_to_replay:
            make_mask, speed = partial(self._replay_tokens, grammar, request), None
        grammar.next_mask = self._submit(request, make_mask, speed)
        if grammar.next_mask is None:  # No thread can be started: the step makes the mask.
            self._scheduler.end_mask_wait(request)
            return
        grammar.awaits_mask = True
        request.num_placeholders = 1
        self._scheduler.begin_mask_wait(request)
        self.num_pending_masks += 1
        grammar.next_mask.add_done_callback(lambda _: self._send(self._on_mask_made, request))

    def _submit(
        self, request: Request, make_mask: Callable[[], MaskResult], speed: MaskSpeed | None
    ) -> Future[MaskResult] | None:
        """Call ``MaskThread.submit``; returns None if no thread can be started."""
        if self._thread is None:
            self._thread = MaskThread()
        self._thread.should_rest = self._delays_others
        try:
            return self._thread.submit(request.owner, make_mask, speed)
        except RuntimeError:
            self._thread = None
            return None

    def close(self) -> None:
        """Cancel the masks that were not begun, and wait for the mask being made."""
        if self._thread is not None:
            self._thread.close()

    def _make_mask(self, grammar: RequestGrammar, request: Request) -> MaskResult:
        began = grammar.clock()
        return grammar.compute_mask(request), grammar.clock() - began

    def _replay_tokens(self, grammar: RequestGrammar, request: Request) -> MaskResult:
        """Job of the thread that makes no mask."""
        began = grammar.clock()
        grammar.replay_tokens(request)
        if grammar.num_tokens_to_replay:
            return None, grammar.clock() - began
        return self._make_mask(grammar, request)

    def _on_mask_made(self, request: Request) -> None:
        self.num_pending_masks -= 1
        if request.is_finished:
            return
        grammar = _grammar_of(request)
        grammar.awaits_mask = False
        request.num_placeholders -= 1
        if grammar.num_tokens_to_replay:
            self._queue_mask(request)
        else:
            self._scheduler.end_mask_wait(request)

    def _request_masks_ahead(self, request: Request) -> None:
        _grammar_of(request).num_masks_ahead = _NUM_MASKS_AHEAD
        request.run_ahead_end = 0

    def _decrement_num_masks_ahead(self, request: Request, grammar: RequestGrammar) -> None:
        grammar.num_masks_ahead -= 1
        if not grammar.num_masks_ahead and not request.needs_host:
            request.run_ahead_end = request.max_total_tokens
