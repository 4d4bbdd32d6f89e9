"""MaskMaker: the token masks of a step."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

from asyncllm.core.batch import GrammarMask
from asyncllm.core.mask_thread import MaskResult, MaskThread
from asyncllm.core.parser_memory import ParserMemory
from asyncllm.core.request import Status
from asyncllm.core.request_grammar import NUM_MASKS_AHEAD, RequestGrammar
from asyncllm.structured.grammar import MaskSpeed

if TYPE_CHECKING:
    from asyncllm.core.request import Request
    from asyncllm.core.scheduled_step import ScheduledStep
    from asyncllm.core.scheduler import Scheduler

_MIN_STEP_WAIT_SECONDS = 0.001
"""Maximum seconds that a step waits for its masks; a tenth of the step's time if that is more."""

_SLOW_MASK_WAIT_FRACTION = 1 / 8
"""A mask is slow if it takes more than this fraction of the time that a step may wait for masks."""

_SLOW_GRAMMAR_WAIT_FRACTION = 1 / 2
"""A grammar is slow if one of its masks takes more than this fraction of the time that a step may
wait for masks."""


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
    more masks of grammars that are not known to be quick, and of no grammar if slow masks alone
    took this time: their requests are computed again once their masks are made.

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
        total = slow_total = 0.0
        limit = max(_MIN_STEP_WAIT_SECONDS, step_time / 10)
        for row in batch.masked_rows:
            request = step.requests[row]
            if request.epoch != step.epochs[row]:
                continue  # The request has ended or was preempted: its token is discarded.
            grammar = _grammar_of(request)
            speed, is_first = grammar.mask_speed, grammar.first_mask is not None
            is_made = grammar.next_mask is not None or is_first
            if not is_made and (slow_total if speed.is_known_quick else total) > limit:
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
                seconds = grammar.clock() - began
                total, slow_total = total + seconds, slow_total + seconds
                speed.record(is_slow=True)  # A mask beyond the parser's limits takes longest.
                continue
            total += waited
            if waited > limit * _SLOW_GRAMMAR_WAIT_FRACTION:
                slow_total += waited
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
        made. A request that is held back is paused, and its mask is queued later."""
        if self._parser_memory.must_wait(request):
            self._drop_parser(request)
            self._scheduler.pause(request)
            self._parser_memory.hold(request)
        else:
            self._queue_mask(request)

    def review_parsers(self) -> None:
        """Drop the parsers of streams under backpressure, and resume held requests, as ParserMemory
        decides. Call this in each turn of the engine's loop."""
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
        self._request_masks_ahead(request)  # Else it would run ahead of the placeholder.

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
        """Replay tokens on the mask thread, and make the mask once all are replayed."""
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
        _grammar_of(request).num_masks_ahead = NUM_MASKS_AHEAD
        request.run_ahead_end = 0

    def _decrement_num_masks_ahead(self, request: Request, grammar: RequestGrammar) -> None:
        grammar.num_masks_ahead -= 1
        if not grammar.num_masks_ahead and not request.needs_host:
            request.run_ahead_end = request.max_total_tokens
