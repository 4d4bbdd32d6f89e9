"""Outputs whose parsers take much memory, held back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest

from asyncllm.core import parser_memory
from asyncllm.core.parser_memory import ParserMemory
from asyncllm.core.request import Request, Status
from asyncllm.core.request_grammar import RequestGrammar
from asyncllm.structured.grammar import (
    AUTOMATON_BYTES_PER_SECOND,
    FREE_MASK_SECONDS_PER_TOKEN,
    MIN_QUICK_MASKS,
    GrammarMemoryBound,
    MaskSpeed,
)
from tests.core_rig import Rig
from tests.integrity import check_scheduler

LENGTH, NUM_SLOTS = 16, 4
SECONDS_PER_TOKEN = 0.001 + parser_memory.FREE_ACCEPT_SECONDS
BYTES_PER_TOKEN = 0.001 * parser_memory.PARSER_BYTES_PER_SECOND


class LargeMatcher:
    """Allows everything, and takes time to accept a token and to make a mask. Checks that it has
    accepted all tokens of its output before it makes a mask."""

    seconds = SECONDS_PER_TOKEN
    slow_seconds = 0.0
    mask_seconds = 0.0

    def __init__(self, rig: Rig, request: Request) -> None:
        self.rig = rig
        self.request = request
        self.accepted: list[int] = []
        self.is_released = False

    def accept(self, token_id: int) -> bool:
        assert not self.is_released
        is_slow = len(self.accepted) % 4 == 0
        self.rig.now += self.slow_seconds if is_slow and self.slow_seconds else self.seconds
        self.accepted.append(token_id)
        return True

    def bitmask(self) -> bytearray:
        assert self.accepted == list(self.request.output_token_ids)
        self.rig.now += self.mask_seconds
        return bytearray(b"\xff" * 125 + bytes(3))

    def rollback(self, num_tokens: int) -> None:
        raise NotImplementedError

    def may_end(self) -> bool:
        return False

    def is_terminated(self) -> bool:
        return False

    def release(self) -> None:
        self.is_released = True


def automaton() -> GrammarMemoryBound:
    """An automaton that may have grown by any size."""
    return GrammarMemoryBound(0, 2**40, 2**40, num_accepted_tokens=1)


class LargeRig(Rig):
    """Outputs with large parsers fill all slots."""

    def __init__(self, owners: str = "aaaa", **limits: Any) -> None:
        super().__init__(max_queued_requests=20, max_num_seqs=NUM_SLOTS, **limits)
        self.matchers: list[LargeMatcher] = []
        self.large = [self.make_large(f"large {i}", owner) for i, owner in enumerate(owners)]

    def make_large(self, name: str, owner: str, **options: Any) -> Request:
        request = self.group(LENGTH, name=name, **options).members[0]
        request.owner = owner
        request.structured_output = self.make_grammar(request)
        return request

    def make_grammar(self, request: Request) -> RequestGrammar:
        def new_matcher() -> LargeMatcher:
            self.matchers.append(LargeMatcher(self, request))
            return self.matchers[-1]

        return RequestGrammar(
            new_matcher,
            clock=self.clock,
            mask_speed=MaskSpeed(MIN_QUICK_MASKS),
            memory=automaton(),
        )

    @property
    def num_parsers(self) -> int:
        """Number of the matchers that keep tokens."""
        return sum(1 for one in self.matchers if one.accepted and not one.is_released)

    def turn(self) -> None:
        self.steps(1)
        check_scheduler(self.scheduler)
        thread = self.core._mask_maker._thread
        until = time.monotonic() + 10
        while thread is not None and any(self.pending(one) for one in self.large):
            assert time.monotonic() < until
            time.sleep(0.001)

    def pending(self, request: Request) -> bool:
        grammar: Any = request.structured_output
        mask = None if grammar is None else grammar.next_mask
        return mask is not None and not mask.done()

    @property
    def going_on(self) -> list[Request]:
        return [one for one in self.large if one.status in (Status.RUNNING, Status.WAITING)]

    @property
    def held(self) -> list[Request]:
        return [one for one in self.large if one.status is Status.PAUSED]

    def until_held(self, count: int = NUM_SLOTS - 1) -> None:
        while len(self.held) < count:
            assert any(not one.is_finished for one in self.large)
            self.turn()

    def finish(self) -> list[list[int]]:
        for _ in range(10_000):
            if all(one.is_finished for one in self.large):
                break
            self.turn()
        else:
            pytest.fail("some outputs never end")
        return [one.output_token_ids for one in self.large]


@pytest.fixture(params=[1, 2], ids=["depth 1", "depth 2"])
def rig(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[LargeRig]:
    monkeypatch.setattr(parser_memory, "MAX_PARSER_BYTES", 3.5 * NUM_SLOTS * BYTES_PER_TOKEN)
    made = LargeRig(pipeline_depth=request.param)
    yield made
    made.core._mask_maker.close()


def expected(**limits: Any) -> list[list[int]]:
    rig = LargeRig(**limits)
    with mock.patch.object(LargeMatcher, "seconds", 0.0):
        tokens = rig.finish()
    rig.core._mask_maker.close()
    return tokens


def test_one_goes_on_and_the_others_drop_their_parsers_and_slots(rig: LargeRig) -> None:
    rig.until_held()
    (running,) = rig.going_on
    assert rig.num_parsers == 1
    at = {one: one.num_output_tokens for one in rig.held}
    assert all(3 <= count < LENGTH - 2 for count in at.values())
    plain = rig.group(4, name="plain").members[0]
    while not plain.is_finished:
        rig.turn()
    while not running.is_finished:
        assert {one: one.num_output_tokens for one in at} == at
        rig.turn()
    assert rig.finish() == expected()


def let_automata_grow(monkeypatch: pytest.MonkeyPatch, share: float = 1.0) -> None:
    """Each mask adds a share of the bytes that else a parser gains for a token."""
    seconds = 1024 * FREE_MASK_SECONDS_PER_TOKEN
    seconds += share * BYTES_PER_TOKEN / AUTOMATON_BYTES_PER_SECOND
    monkeypatch.setattr(LargeMatcher, "mask_seconds", seconds)
    monkeypatch.setattr(LargeMatcher, "seconds", 0.0)


def test_one_output_goes_on_while_automata_take_the_memory(
    rig: LargeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_automata_grow(monkeypatch)
    rig.until_held()
    (running,) = rig.going_on
    at = {one: one.num_output_tokens for one in rig.held}
    while not running.is_finished:
        assert {one: one.num_output_tokens for one in at} == at
        rig.turn()
    assert rig.finish() == expected()
    rig.turn()
    memory = rig.core._mask_maker._parser_memory
    assert (memory._automata, memory._large, memory._num_bytes) == ({}, {}, 0)


def test_the_automata_of_held_outputs_count(rig: LargeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    let_automata_grow(monkeypatch)
    rig.until_held()
    (running,) = rig.going_on
    memory = rig.core._mask_maker._parser_memory
    num_bytes = memory._num_bytes
    assert num_bytes > parser_memory.MAX_PARSER_BYTES
    rig.core.on_abort(running.group)
    rig.turn()
    assert num_bytes / 2 < memory._num_bytes < num_bytes
    assert len(rig.going_on) == 1
    rig.large.remove(running)
    assert all(len(tokens) == LENGTH for tokens in rig.finish())


@pytest.mark.parametrize("share", [0.9, 1.1])
def test_an_automaton_of_several_outputs_counts_once(
    rig: LargeRig, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    let_automata_grow(monkeypatch)
    shared = automaton()
    shared.max_added_bytes = int(share * parser_memory.MAX_PARSER_BYTES)
    for one in rig.large:
        one.structured_output.memory = shared  # pyright: ignore
    max_held = 0
    while not all(one.is_finished for one in rig.large):
        rig.turn()
        max_held = max(max_held, len(rig.held))
    assert max_held == (NUM_SLOTS - 1 if share > 1 else 0)
    assert rig.finish() == expected()


def test_masks_of_usual_speed_add_nothing() -> None:
    """An output of a grammar whose automaton others have filled is not held back."""
    rig = LargeRig()
    with mock.patch.object(LargeMatcher, "mask_seconds", 1024 * FREE_MASK_SECONDS_PER_TOKEN):
        with mock.patch.object(LargeMatcher, "seconds", 0.0):
            rig.turn()
    grammar = rig.large[0].structured_output
    assert isinstance(grammar, RequestGrammar)
    assert grammar.memory.automaton_bytes == grammar.added_automaton_bytes == 0
    grammar.memory.record_mask(1.0)
    memory = ParserMemory()
    memory.count(rig.large[0], grammar)
    assert memory.next_resumed() is None
    assert memory._num_bytes == AUTOMATON_BYTES_PER_SECOND > parser_memory.MAX_PARSER_BYTES
    assert not memory.must_wait(rig.large[0])
    grammar.memory.max_added_bytes = 1000
    assert grammar.memory.automaton_bytes == 1000
    rig.core._mask_maker.close()


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parser_memory, "MAX_PARSER_BYTES", 3.5 * NUM_SLOTS * BYTES_PER_TOKEN)


@pytest.mark.usefixtures("no_room")
@pytest.mark.parametrize("grows", [False, True])
def test_an_owner_within_its_share_is_not_held_back(
    monkeypatch: pytest.MonkeyPatch, grows: bool
) -> None:
    rig = LargeRig("aaab")
    if grows:
        let_automata_grow(monkeypatch)
    rig.until_held(2)
    *large, other = rig.large
    at = {one: one.num_output_tokens for one in rig.held}
    assert len(at) == 2
    assert other not in at
    while not other.is_finished:
        rig.turn()
        assert other.status is not Status.PAUSED
        if any(one.is_finished for one in large):
            break
        assert {one: one.num_output_tokens for one in at} == at
    assert rig.finish() == expected()
    rig.core._mask_maker.close()


@pytest.mark.usefixtures("no_room")
def test_one_output_of_each_owner_goes_on() -> None:
    rig = LargeRig("aabb")
    rig.until_held(2)
    assert sorted(str(one.owner) for one in rig.held) == ["a", "b"]
    going_on = rig.going_on
    while not any(one.is_finished for one in going_on):
        rig.turn()
    rig.turn()
    assert {one.owner for one in rig.large if not one.is_finished} == {"a", "b"}
    assert all(one.num_output_tokens for one in rig.large)
    assert rig.finish() == expected()
    rig.core._mask_maker.close()


@pytest.mark.usefixtures("no_room")
def test_unread_streams_hold_back_no_other_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    """They keep what their forms' automata have gained, and no token more is made for them."""
    rig = LargeRig("")
    let_automata_grow(monkeypatch)
    unread = rig.make_large("unread", "a", on_slow="pause", max_unread=2)
    rig.large.append(unread)
    while unread.status is not Status.PAUSED:
        rig.turn()
    grammar = unread.structured_output
    assert isinstance(grammar, RequestGrammar)
    grammar.memory.record_mask(2 * parser_memory.MAX_PARSER_BYTES / AUTOMATON_BYTES_PER_SECOND)
    let_automata_grow(monkeypatch, 0.1)
    others = [rig.make_large(f"other {i}", "b") for i in range(3)]
    rig.large += others
    while not all(one.is_finished for one in others):
        rig.turn()
        assert rig.held == [unread]
    assert rig.core._mask_maker._parser_memory._num_bytes > parser_memory.MAX_PARSER_BYTES
    rig.core.on_abort(unread.group)
    rig.core._mask_maker.close()


@pytest.mark.parametrize(("num_tokens", "num_resumed"), [(8, 1), (3, 2), (2, 3)])
def test_outputs_go_on_whose_parsers_fit_into_half_of_the_memory(
    rig: LargeRig, num_tokens: int, num_resumed: int
) -> None:
    rig.until_held()
    (running,) = rig.going_on
    for one in rig.held:
        grammar: Any = one.structured_output
        grammar._all_accept_seconds = num_tokens * 0.001
        grammar._all_accept_seconds += (
            grammar.num_tokens_to_replay * parser_memory.FREE_ACCEPT_SECONDS
        )
    rig.core.on_abort(running.group)
    rig.turn()
    assert len(rig.going_on) == num_resumed
    rig.large.remove(running)
    assert all(len(tokens) == LENGTH for tokens in rig.finish())


def test_parsers_of_held_outputs_that_end_are_freed(rig: LargeRig) -> None:
    matchers = [one.structured_output.matcher for one in rig.large]  # pyright: ignore
    rig.until_held()
    for one in rig.large:
        rig.core.on_abort(one.group)
    rig.turn()
    assert all(matcher.is_released for matcher in matchers)
    assert not rig.scheduler.has_work()
    plain = rig.group(4, name="plain").members[0]
    while not plain.is_finished:
        rig.turn()
    memory = rig.core._mask_maker._parser_memory
    assert (memory._large, memory._num_bytes, memory._running) == ({}, 0, {})


def make_unread(rig: LargeRig, count: int) -> list[Request]:
    """Streams of one owner each, which pause once 6 tokens are unread."""
    return [
        rig.make_large(f"unread {i}", f"reader {i}", on_slow="pause", max_unread=6)
        for i in range(count)
    ]


def read(rig: LargeRig, request: Request) -> None:
    channel = request.group.channel
    channel.num_read = channel.num_written
    channel.max_unread = 64
    rig.core.on_reader_caught_up(request.group)


def test_a_stream_that_is_not_read_holds_no_other_back(rig: LargeRig) -> None:
    (unread,) = make_unread(rig, 1)
    rig.large.append(unread)
    while not all(one.is_finished for one in rig.large[:-1]):
        rig.turn()
    assert unread.status is Status.PAUSED
    read(rig, unread)
    rig.finish()
    assert unread.num_output_tokens == LENGTH


def test_streams_that_are_not_read_drop_their_parsers(
    monkeypatch: pytest.MonkeyPatch, rig: LargeRig
) -> None:
    """The streams that have been unread longest, although their parsers are not large."""
    limit = 2.5 * 5 * SECONDS_PER_TOKEN * parser_memory.PARSER_BYTES_PER_SECOND
    monkeypatch.setattr(parser_memory, "MAX_UNREAD_PARSER_BYTES", limit)
    monkeypatch.setattr("asyncllm.core.request_grammar.FREE_ACCEPT_SECONDS", 1.0)
    rig.finish()
    rig.large = make_unread(rig, 12)
    while len(rig.held) < 12:
        rig.turn()
        assert rig.num_parsers <= 2 + 2 * NUM_SLOTS  # Those that paused in this turn, and new ones.
    rig.turn()
    assert rig.num_parsers == 2
    dropped = [one for one in rig.large if one.structured_output.is_held]  # pyright: ignore
    assert dropped == rig.large[:10]
    for one in (*rig.large[6:], *rig.large[:6]):
        read(rig, one)
        rig.turn()
    assert rig.finish() == expected_unread(12)
    assert rig.core._mask_maker._parser_memory._num_unread_bytes == 0


def expected_unread(count: int) -> list[list[int]]:
    rig = LargeRig()
    rig.large = [rig.make_large(f"unread {i}", f"reader {i}") for i in range(count)]
    with mock.patch.object(LargeMatcher, "seconds", 0.0):
        tokens = rig.finish()
    rig.core._mask_maker.close()
    return tokens


def test_unread_streams_that_end_are_forgotten(
    monkeypatch: pytest.MonkeyPatch, rig: LargeRig
) -> None:
    monkeypatch.setattr(parser_memory, "MAX_UNREAD_PARSER_BYTES", 2.5 * 5 * BYTES_PER_TOKEN)
    unread = make_unread(rig, 6)
    while not all(one.status is Status.PAUSED for one in unread):
        rig.turn()
    for one in unread:
        rig.core.on_abort(one.group)
    rig.finish()
    memory = rig.core._mask_maker._parser_memory
    assert (rig.num_parsers, memory._unread, memory._large, len(memory._held)) == (0, {}, {}, 0)
    assert memory._num_unread_bytes == 0


def test_further_outputs_begin_while_others_are_held(rig: LargeRig) -> None:
    rig.until_held()
    (running,) = rig.going_on
    further = [rig.make_large(f"further {i}", "abc"[i]) for i in range(3)]
    rig.large += further
    while not running.is_finished:
        rig.turn()
        assert rig.num_parsers <= NUM_SLOTS
    assert all(one.num_output_tokens for one in further)
    assert all(len(tokens) == LENGTH for tokens in rig.finish())


def test_held_outputs_that_end_are_forgotten(rig: LargeRig) -> None:
    rig.until_held()
    for one in rig.held:
        rig.core.on_abort(one.group)
    rig.turn()
    assert len(rig.core._mask_maker._parser_memory._held) == 0
    rig.finish()


def _same(matcher: LargeMatcher) -> LargeMatcher:
    return matcher


def test_an_output_that_ends_before_others_of_its_request_frees_its_parser() -> None:
    rig = Rig()
    group = rig.group(3, LENGTH, name="two")
    matchers = [LargeMatcher(rig, one) for one in group.members]
    for member, matcher in zip(group.members, matchers, strict=True):
        member.structured_output = RequestGrammar(
            partial(_same, matcher), clock=rig.clock, mask_speed=MaskSpeed(MIN_QUICK_MASKS)
        )
    first, second = group.members
    while not first.is_finished:
        rig.steps(1)
    assert [matcher.is_released for matcher in matchers] == [True, False]
    while not second.is_finished:
        rig.steps(1)
    assert matchers[1].is_released
    rig.core._mask_maker.close()


def test_a_held_stream_that_is_read_again_waits_for_memory(rig: LargeRig) -> None:
    rig.until_held()
    for one in rig.held:
        one.group.channel.is_backpressured = True
    rig.turn()
    for one in rig.held:
        rig.core.on_reader_caught_up(one.group)
        assert one.status is Status.PAUSED
    rig.turn()
    assert len(rig.held) == NUM_SLOTS - 1
    assert rig.finish() == expected()


def test_a_held_stream_has_no_parser_that_counts_as_unread(rig: LargeRig) -> None:
    rig.until_held()
    group = rig.held[0].group
    rig.core.output_processor._apply_backpressure(group, group.channel)
    assert rig.core._mask_maker._parser_memory._unread == {}


def test_a_held_stream_that_nobody_reads_does_not_go_on(rig: LargeRig) -> None:
    """The others go on, and it goes on once it is read."""
    rig.until_held()
    unread = rig.held[0]
    unread.group.channel.is_backpressured = True
    at = unread.num_output_tokens
    while not all(one.is_finished for one in rig.large if one is not unread):
        rig.turn()
    rig.turn()
    assert (unread.num_output_tokens, rig.num_parsers) == (at, 0)
    rig.core.on_reader_caught_up(unread.group)
    assert rig.finish() == expected()


def test_quick_parsers_do_not_count(rig: LargeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token now and then may take longer, as on a busy processor."""
    monkeypatch.setattr(LargeMatcher, "seconds", 0.0)
    monkeypatch.setattr(LargeMatcher, "slow_seconds", 4 * parser_memory.FREE_ACCEPT_SECONDS)
    for request in rig.large:
        grammar: Any = request.structured_output
        grammar._num_accepted_tokens = 3  # The slow token is the first of four.
    while not all(one.is_finished for one in rig.large):
        rig.turn()
        assert not rig.held
    assert not rig.core._mask_maker._parser_memory._large
