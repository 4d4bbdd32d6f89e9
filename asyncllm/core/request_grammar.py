"""RequestGrammar: a request's grammar, with the state of its output."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from asyncllm.core.mask_thread import GIL_YIELD_SECONDS, MaskResult
from asyncllm.core.parser_memory import FREE_ACCEPT_SECONDS, PARSER_BYTES_PER_SECOND
from asyncllm.errors import RequestError
from asyncllm.outputs import FinishReason
from asyncllm.structured.grammar import (
    FREE_MASK_SECONDS_PER_TOKEN,
    Grammar,
    GrammarMatcher,
    GrammarMemoryBound,
    MaskSpeed,
    automaton_bytes,
)

if TYPE_CHECKING:
    from asyncllm.core.reasoning import ReasoningTracker
    from asyncllm.core.request import Request

NUM_MASKS_AHEAD = 16
"""Minimum number of masks that are made ahead, once a request's masks are. Quick masks are made in
their step again afterwards."""

_MAX_REPLAYED_TOKENS = 16
"""Maximum number of tokens that one job of the mask thread replays."""


@dataclass(slots=True, eq=False)
class RequestGrammar:
    """Grammar of a request, with its state. The state depends only on the tokens that the request
    has accepted, so preemption, rollback and late results do not change it.

    The grammar applies after the model's reasoning. Output that begins like the opening delimiter
    of reasoning may also be an answer, if the grammar admits those tokens: the matcher then follows
    them, and rolls back if reasoning is opened after all.

    Attributes:
        new_matcher: makes a matcher that has accepted no token; None once the request has ended.
        special_tokens: ids of the special tokens, which add no text. If the grammar names a stop
            token, that token is part of the output, and ends the output only where the grammar may
            end.
        clock: function that returns the calling thread's CPU seconds. By wall-clock time, a quick
            mask would count as slow on a busy machine.
        mask_speed: speed of the masks of all outputs under the same grammar.
        memory: bound on the memory that all outputs of the grammar share; an empty one once the
            request has ended.
        first_mask: the matcher's mask until it accepts a token; None afterwards, and if it is not
            known.
        accept_seconds: seconds that the matcher took to accept tokens since the last mask.
        num_tokens_to_replay: number of the output's tokens that a new matcher must still accept
            before its mask is computed.
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
    memory: GrammarMemoryBound = field(default_factory=GrammarMemoryBound)
    first_mask: bytes | None = None
    _matcher: GrammarMatcher | None = field(init=False, default=None)
    accept_seconds: float = field(init=False, default=0.0)
    _all_accept_seconds: float = field(init=False, default=0.0)
    _num_accepted_tokens: int = field(init=False, default=0)
    _slow_mask_seconds: float = field(init=False, default=0.0)
    _known_stop_bits: tuple[int, int] | None = field(init=False, default=None)
    num_tokens_to_replay: int = field(init=False, default=0)
    pending_token: int | None = field(init=False, default=None)
    num_masks_ahead: int = field(init=False, default=0)
    next_mask: Future[MaskResult] | None = field(init=False, default=None)
    awaits_mask: bool = field(init=False, default=False)
    num_delimiter_tokens: int | None = field(init=False, default=0)

    @property
    def matcher(self) -> GrammarMatcher:
        """Matcher of the output. Made on first use, because a request may have hundreds of outputs
        and end before they run. See ``num_tokens_to_replay``."""
        if self._matcher is None:
            assert self.new_matcher is not None, "the request has ended"
            self._matcher = self.new_matcher()
        return self._matcher

    @classmethod
    def begin(cls, grammar: Grammar) -> Self:
        """Make the state of a new output. Its masks are made ahead of their steps until the grammar
        is known to be quick."""
        state = cls(
            grammar.new_matcher,
            grammar.special_token_ids,
            mask_speed=grammar.mask_speed,
            memory=grammar.memory,
            first_mask=grammar.first_mask,
        )
        if not grammar.mask_speed.is_known_quick:
            state.num_masks_ahead = NUM_MASKS_AHEAD
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
        began = self.clock()
        mask = self.matcher.bitmask()
        slow_seconds = self.clock() - began - 8 * len(mask) * FREE_MASK_SECONDS_PER_TOKEN
        if slow_seconds > 0:
            self._slow_mask_seconds += slow_seconds
            self.memory.record_mask(slow_seconds)
        return mask

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
        size, allowed = len(mask), int.from_bytes(mask, "little")  # A bit per token.
        if self.num_delimiter_tokens is None:
            allowed, may_end = 0, False
        if request.stop_token_ids:
            named, others = self._stop_bits(request, 8 * size)
            may_stop = may_end and len(request.token_ids) + 1 >= request.min_total_tokens
            allowed = allowed | named | others if may_stop else allowed & ~others
        begin_token = None if reasoning is None else reasoning.next_begin_token()
        if begin_token is not None and begin_token < 8 * size:
            allowed |= 1 << begin_token
        rules = request.token_rules
        if rules is not None and rules.allowed_mask is not None:
            allowed &= int.from_bytes(rules.allowed_mask, "little")
        if allowed:
            return allowed.to_bytes(size, "little")
        if may_end:
            return None
        raise RequestError(
            f"request {request.request_id!r}: no token may follow {len(request.token_ids)} tokens "
            "under the grammar of structured_outputs: it admits nothing there, or the tokenizer "
            "cannot spell what it does"
        )

    def _stop_bits(self, request: Request, num_bits: int) -> tuple[int, int]:
        """Bit masks of the special stop tokens, which grammars may name, and of the others."""
        if self._known_stop_bits is None:
            bits = bytearray(num_bits // 8), bytearray(num_bits // 8)
            for token_id in request.stop_token_ids:
                if token_id < num_bits:
                    bits[token_id not in self.special_tokens][token_id >> 3] |= 1 << (token_id & 7)
            named, others = (int.from_bytes(one, "little") for one in bits)
            self._known_stop_bits = named, others
        return self._known_stop_bits

    def drop_parser(self) -> None:
        """Free the parser's memory, and hold the output back. Before the next mask, a new matcher
        replays the output's tokens. No other thread may be using the matcher, and no token may be
        in flight."""
        self._release_matcher()
        self.num_tokens_to_replay = self._num_accepted_tokens
        self.next_mask = None
        self.awaits_mask = True

    def replay_tokens(self, request: Request) -> None:
        """Replay the next _MAX_REPLAYED_TOKENS tokens of the output into a new matcher.

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
    def added_automaton_bytes(self) -> int:
        """Estimated bytes that this output's masks have added to the grammar's automaton."""
        return automaton_bytes(self._slow_mask_seconds)

    @property
    def is_held(self) -> bool:
        """Whether the output is held back; see ParserMemory."""
        return self.awaits_mask and self.next_mask is None

    def release(self) -> None:
        """Free the grammar's state once the request has ended. If another thread is making a mask,
        the state is freed when that mask is done. Any thread may call this."""
        self.new_matcher = None
        self.memory = GrammarMemoryBound()  # GrammarCompiler counts a bound while it is alive.
        if self.next_mask is None or self.next_mask.cancel():
            self._release_matcher()
        else:
            self.next_mask.add_done_callback(lambda _: self._release_matcher())

    def _release_matcher(self) -> None:
        matcher, self._matcher = self._matcher, None
        if matcher is not None:
            matcher.release()


def _grammar_violation_error(request: Request, token_id: int) -> RequestError:
    return RequestError(
        f"request {request.request_id!r}: token {token_id} does not follow the grammar of "
        "structured_outputs"
    )


def _allows_token(mask: bytearray, token_id: int) -> bool:
    return token_id >> 3 < len(mask) and bool(mask[token_id >> 3] >> (token_id & 7) & 1)
