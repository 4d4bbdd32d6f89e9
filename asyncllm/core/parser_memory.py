"""ParserMemory: bounds the memory of the parsers of all outputs under grammars."""

from __future__ import annotations

from asyncllm.core.request import OutputGrammar, Request, Status
from asyncllm.owner_lines import OwnerLines

FREE_ACCEPT_SECONDS = 60e-6
"""Average CPU seconds to accept a token up to which a parser's memory is estimated as 0. Grammars
of programming languages and usual schemas take 2 to 7 microseconds a token, and up to 40 on busy
cores."""

PARSER_BYTES_PER_SECOND = 150_000_000
"""Estimated bytes that a parser allocates per CPU second of accepting tokens, beyond
FREE_ACCEPT_SECONDS for each token. llguidance does not report its memory. It took 25 KiB for a
token that took 335 microseconds, 13 KiB for one of 131, 7.6 KiB for one of 57 and 5.5 KiB for one
of 39."""

MIN_LARGE_PARSER_BYTES = 1 << 16
"""Minimum estimated memory of a parser that counts."""

MAX_PARSER_BYTES = 96 << 20
"""Maximum estimated memory of all parsers that count, before outputs are held back."""


def estimate_parser_bytes(accept_seconds: float, num_tokens: int) -> float:
    """Estimate the memory of an output's parser.

    Args:
        accept_seconds: CPU seconds that the parser took to accept all tokens.
        num_tokens: number of these tokens.
    """
    return max(0.0, accept_seconds - num_tokens * FREE_ACCEPT_SECONDS) * PARSER_BYTES_PER_SECOND


class ParserMemory:
    """Decides which outputs wait because parsers take much memory.

    An Earley parser keeps the items of all tokens until the output ends, up to 25 KiB a token.
    Beyond MAX_PARSER_BYTES, of the outputs with large parsers only one goes on. The others are held
    back, without a slot, until it has ended, in turns by owner, or until parsers take half as much.
    No further output of their owners begins until then. So this delays outputs, and changes no
    token.
    """

    def __init__(self) -> None:
        self._large: dict[Request, OutputGrammar] = {}
        self._held: OwnerLines[Request] = OwnerLines()
        self._num_held, self._max_held = 0, 64
        self._num_bytes = 0.0
        self._running: Request | None = None

    def count(self, request: Request, grammar: OutputGrammar) -> None:
        """Count an output's parser from now on, if it is large."""
        if grammar.parser_bytes >= MIN_LARGE_PARSER_BYTES:
            self._large[request] = grammar

    def must_wait(self, request: Request) -> bool:
        """Whether an output may take no more memory now."""
        return (
            self._num_bytes > MAX_PARSER_BYTES
            and request in self._large
            and request is not self._running
        )

    def holds_any_of(self, owner: str | None) -> bool:
        """Whether an output of an owner is held back."""
        return self._held.has_line(owner)

    def hold(self, request: Request, *, has_begun: bool) -> None:
        """Hold an output back until ``next_resumed`` returns it. Outputs that have begun come
        before others of their owner."""
        self._held.push(request.owner, request, rank=0 if has_begun else 1)
        self._num_held += 1

    def next_resumed(self) -> Request | None:
        """Remove and return the next output that goes on; None if none may. Counts all memory anew:
        call this until it returns None, in each turn of the engine's loop."""
        if not (self._large or self._num_held):
            return None
        if self._num_held > self._max_held:
            self._drop_ended()
        large = {one: grammar for one, grammar in self._large.items() if not one.is_finished}
        self._large = large
        self._num_bytes = sum(grammar.parser_bytes for grammar in large.values())
        going_on = (
            one
            for one, grammar in large.items()
            if not (grammar.is_held or one.status is Status.PAUSED)
        )
        self._running = next(going_on, None)
        if self._running is not None and self._num_bytes > MAX_PARSER_BYTES / 2:
            return None
        while (request := self._held.peek()) is not None:
            self._discard(request)
            self._held.end_turn(request.owner)
            if not request.is_finished:
                return request
        return None

    def _drop_ended(self) -> None:
        """Drop held outputs that have ended. Called each time their number has doubled."""
        for request in list(self._held):
            if request.is_finished:
                self._discard(request)
        self._max_held = 2 * self._num_held + 64

    def _discard(self, request: Request) -> None:
        self._held.discard(request.owner, request)
        self._num_held -= 1
