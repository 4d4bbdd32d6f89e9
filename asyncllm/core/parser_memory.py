"""ParserMemory: bounds the memory of the parsers of all outputs under grammars."""

from __future__ import annotations

from asyncllm.core.request import OutputGrammar, Request, Status
from asyncllm.owner_lines import OwnerLines
from asyncllm.structured.grammar import GrammarMemoryBound

FREE_ACCEPT_SECONDS = 60e-6
"""Average CPU seconds to accept a token up to which the parser of a running output does not count.
Grammars of programming languages and usual schemas take 2 to 7 microseconds a token, and up to 40
on busy cores."""

PARSER_BYTES_PER_SECOND = 150_000_000
"""Estimated bytes that a parser allocates per CPU second of accepting tokens. llguidance does not
report its memory. It took 25 KiB for a token that took 335 microseconds, 13 KiB for one of 131,
7.6 KiB for one of 57, 2.8 KiB for one of 34 on a faster processor, and 0.7 KiB for one of 6."""

MIN_LARGE_PARSER_BYTES = 1 << 16
"""Minimum estimated memory that counts, of a running output's parser or of an automaton."""

MAX_PARSER_BYTES = 96 << 20
"""Maximum estimated memory of all parsers and automata that count, before outputs are held back."""

MAX_UNREAD_PARSER_BYTES = 32 << 20
"""Maximum estimated memory of the parsers of streams under backpressure."""


class ParserMemory:
    """Bound on the memory of parsers: decides which outputs drop their parsers and wait.

    An Earley parser keeps the items of all tokens until the output ends, up to 25 KiB a token. An
    output that has dropped its parser rebuilds it before its next mask, by replaying its tokens. So
    dropping delays outputs, and changes no token. A grammar's automaton gains states for its
    outputs' tokens, up to its own maximum, and keeps them as long as one of these outputs lives.
    A usual grammar's automaton has most of its states after a few outputs.

    Beyond MAX_PARSER_BYTES, only one output with a large parser, or that has added much to an
    automaton, keeps running. The others are held back: they drop their parsers and are paused. Held
    outputs resume in turns by owner. The next one resumes once its parser fits into half of the
    maximum, or once no other such output is running.

    Beyond MAX_UNREAD_PARSER_BYTES, streams under backpressure drop their parsers, those paused
    first before others. They are held back once their readers catch up.
    """

    def __init__(self) -> None:
        self._large: dict[Request, OutputGrammar] = {}
        self._automata: dict[Request, GrammarMemoryBound] = {}
        self._num_bytes = 0
        self._unread: dict[Request, int] = {}
        self._num_unread_bytes = 0
        self._held: OwnerLines[Request] = OwnerLines()
        self._has_held = False  # An attribute, because each turn of the loop reads it.
        self._running: Request | None = None

    def count(self, request: Request, grammar: OutputGrammar) -> None:
        """Count an output's parser and its grammar's automaton from now on, if they are large."""
        if grammar.memory.automaton_bytes >= MIN_LARGE_PARSER_BYTES:
            self._automata[request] = grammar.memory
        own_bytes = max(grammar.excess_parser_bytes, grammar.added_automaton_bytes)
        if own_bytes >= MIN_LARGE_PARSER_BYTES:
            self._large[request] = grammar

    def must_wait(self, request: Request) -> bool:
        """Whether an output has to be held back before its next mask."""
        return (
            self._num_bytes > MAX_PARSER_BYTES
            and request in self._large
            and request is not self._running
        )

    def hold(self, request: Request) -> None:
        """Hold back an output that has dropped its parser, until ``next_resumed`` returns it."""
        self._forget_parser(request)
        self._held.push(request.owner, request)
        self._has_held = True

    def add_unread(self, request: Request) -> None:
        """Count the parser of a stream that was paused by backpressure."""
        grammar = request.structured_output
        if grammar is not None and grammar.parser_bytes and not grammar.is_held:
            self._unread[request] = grammar.parser_bytes
            self._num_unread_bytes += grammar.parser_bytes

    def discard_unread(self, request: Request) -> None:
        """Stop counting a stream among those under backpressure."""
        self._num_unread_bytes -= self._unread.pop(request, 0)

    def forget(self, request: Request) -> None:
        """Stop counting an output that has ended."""
        self._automata.pop(request, None)
        self._forget_parser(request)

    def _forget_parser(self, request: Request) -> None:
        """Stop counting the parser of an output that has dropped it."""
        self._large.pop(request, None)
        self.discard_unread(request)
        if self._has_held:
            self._held.discard(request.owner, request)
            self._has_held = len(self._held) > 0

    def pop_unread(self) -> list[Request]:
        """Remove and return the streams under backpressure that have to drop their parsers."""
        excess = self._num_unread_bytes - MAX_UNREAD_PARSER_BYTES
        popped: list[Request] = []
        for request, num_bytes in self._unread.items():
            if excess <= 0:
                break
            if not request.num_placeholders:  # Else the parser is in use.
                popped.append(request)
                excess -= num_bytes
        for request in popped:
            self._forget_parser(request)
        return popped

    def next_resumed(self) -> Request | None:
        """Remove and return the next held output to resume; None if none may. Adds up all memory
        anew: call this until it returns None, in each turn of the engine's loop."""
        large = self._large
        self._num_bytes = sum(grammar.excess_parser_bytes for grammar in large.values())
        self._num_bytes += sum(one.automaton_bytes for one in set(self._automata.values()))
        going_on = (one for one in large if one.status is not Status.PAUSED)
        self._running = next(going_on, None)
        while self._has_held and (request := self._held.peek()) is not None:
            grammar = request.structured_output
            assert grammar is not None  # Else the request has ended, and was forgotten.
            is_unread = request.group.channel.is_backpressured
            num_bytes = self._num_bytes + grammar.excess_parser_bytes
            if not is_unread and self._running is not None and num_bytes > MAX_PARSER_BYTES / 2:
                return None
            self._forget_parser(request)
            self._held.end_turn(request.owner)
            if not is_unread:  # Else it is held again once its reader catches up.
                self.count(request, grammar)
                return request
        return None
