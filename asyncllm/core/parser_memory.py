"""ParserMemory: bounds the memory of the parsers of all outputs under grammars."""

from __future__ import annotations

from collections import Counter, defaultdict

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
"""Minimum estimated bytes of a running output's parser, or of a lexer automaton, that count."""

MAX_PARSER_BYTES = 96 << 20
"""Maximum estimated bytes of all counted parsers and automata, before outputs are held back."""

MAX_UNREAD_PARSER_BYTES = 32 << 20
"""Maximum estimated memory of the parsers of streams under backpressure."""


class ParserMemory:
    """Bound on the memory of parsers: decides which outputs drop their parsers and wait.

    An Earley parser keeps the items of all tokens until the output ends, up to 25 KiB a token. An
    output that has dropped its parser rebuilds it before its next mask, by replaying its tokens. So
    dropping delays outputs, and changes no token. The lexer's automaton (a lazily built DFA) is
    shared by all outputs of a grammar. It gains states as they are written, and is freed with the
    last of them. Usual grammars add few states after their first outputs.

    An output is large if its parser is, or if it has added much to an automaton. Beyond
    MAX_PARSER_BYTES, owners with more than an equal share of the memory keep one large output
    running each. Their other large outputs are held back: they drop their parsers and are paused.
    Held outputs resume in turns by owner. The next one resumes once its owner's memory, its parser
    included, is at most half of the share, or once its owner has no large output running.

    Beyond MAX_UNREAD_PARSER_BYTES, streams under backpressure drop their parsers, those paused
    first before others. They are held back once their readers catch up.
    """

    def __init__(self) -> None:
        self._large: dict[Request, OutputGrammar] = {}
        self._automata: dict[Request, GrammarMemoryBound] = {}
        self._automaton_owners: dict[GrammarMemoryBound, Counter[str | None]] = {}
        self._owner_bytes: dict[str | None, float] = {}
        self._num_bytes = 0.0
        self._unread: dict[Request, int] = {}
        self._num_unread_bytes = 0
        self._held: OwnerLines[Request] = OwnerLines()
        self._has_held = False  # An attribute, because each turn of the loop reads it.
        self._running: dict[str | None, Request] = {}

    def count(self, request: Request, grammar: OutputGrammar) -> None:
        """Count an output if it is large, and its grammar's automaton if that is large."""
        memory = grammar.memory
        if memory.automaton_bytes >= MIN_LARGE_PARSER_BYTES and request not in self._automata:
            self._automata[request] = memory
            self._automaton_owners.setdefault(memory, Counter())[request.owner] += 1
        own_bytes = max(grammar.excess_parser_bytes, grammar.added_automaton_bytes)
        if own_bytes >= MIN_LARGE_PARSER_BYTES:
            self._large[request] = grammar

    def must_wait(self, request: Request) -> bool:
        """Whether an output has to be held back before its next mask."""
        return (
            request in self._large
            and request is not self._running.get(request.owner)
            and self._is_beyond_share(request.owner)
        )

    def _is_beyond_share(self, owner: str | None) -> bool:
        """Whether the maximum is exceeded, and an owner has more than its share of it."""
        is_exceeded = self._num_bytes > MAX_PARSER_BYTES
        return is_exceeded and self._owner_bytes.get(owner, 0) > self._share

    @property
    def _share(self) -> float:
        """An owner's share of the maximum, which all owners with counted memory divide equally."""
        return MAX_PARSER_BYTES / max(1, len(self._owner_bytes))

    def hold(self, request: Request) -> None:
        """Hold back an output that has dropped its parser, until ``next_resumed`` returns it."""
        self._forget_parser(request)
        self._held.push(request.owner, request)
        self._has_held = True

    def add_unread(self, request: Request) -> None:
        """Count the parser of a stream that was paused by backpressure, apart from running ones.

        Thousands of streams may be unread, and ``next_resumed`` adds up the running ones in each
        turn of the loop.
        """
        self._large.pop(request, None)
        grammar = request.structured_output
        if grammar is not None and grammar.parser_bytes and not grammar.is_held:
            self._unread[request] = grammar.parser_bytes
            self._num_unread_bytes += grammar.parser_bytes

    def discard_unread(self, request: Request) -> None:
        """Stop counting a stream among those under backpressure."""
        self._num_unread_bytes -= self._unread.pop(request, 0)

    def forget(self, request: Request) -> None:
        """Stop counting an output that has ended."""
        memory = self._automata.pop(request, None)
        if memory is not None:
            owners = self._automaton_owners[memory]
            owners[request.owner] -= 1
            if not owners[request.owner]:
                del owners[request.owner]
            if not owners:
                del self._automaton_owners[memory]
        self._forget_parser(request)

    def _forget_parser(self, request: Request) -> None:
        """Stop counting an output's parser, which it has dropped or is about to rebuild."""
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
        self._add_up()
        num_tries = self._held.num_owners if self._has_held else 0
        while num_tries and (request := self._held.peek()) is not None:
            owner, grammar = request.owner, request.structured_output
            assert grammar is not None  # Else the request has ended, and was forgotten.
            if request.group.channel.is_backpressured:
                self._forget_parser(request)  # It is held again once its reader catches up.
                continue
            num_bytes = self._owner_bytes.get(owner, 0) + grammar.excess_parser_bytes
            if num_bytes <= self._share / 2 or owner not in self._running:
                self._forget_parser(request)
                self._held.end_turn(owner)
                self.count(request, grammar)
                return request
            self._held.end_turn(owner)
            num_tries -= 1
        return None

    def _add_up(self) -> None:
        """Add up the counted memory of each owner, and choose its output that keeps running.

        If outputs of several owners share an automaton, each owner counts an equal part of it.
        """
        self._running.clear()
        owner_bytes: defaultdict[str | None, float] = defaultdict(float)
        for request, grammar in self._large.items():
            owner_bytes[request.owner] += grammar.excess_parser_bytes
            if request.status is not Status.PAUSED:
                self._running.setdefault(request.owner, request)
        for memory, owners in self._automaton_owners.items():
            for owner in owners:
                owner_bytes[owner] += memory.automaton_bytes / len(owners)
        self._owner_bytes, self._num_bytes = owner_bytes, sum(owner_bytes.values())
