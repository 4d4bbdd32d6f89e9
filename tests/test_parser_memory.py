"""Outputs whose parsers take much memory, held back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from asyncllm.core import parser_memory
from asyncllm.core.request import Request, Status
from asyncllm.core.structured_output import RequestGrammar
from asyncllm.structured.grammar import MIN_QUICK_MASKS, MaskSpeed
from tests.core_rig import Rig
from tests.integrity import check_scheduler

LENGTH, NUM_SLOTS = 16, 4
SECONDS_PER_TOKEN = 0.001 + parser_memory.FREE_ACCEPT_SECONDS
BYTES_PER_TOKEN = 0.001 * parser_memory.PARSER_BYTES_PER_SECOND


class LargeMatcher:
    """Allows everything, and takes time to accept a token."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.seconds = SECONDS_PER_TOKEN
        self.slow_seconds = 0.0
        self.num_accepted = 0
        self.is_released = False

    def accept(self, token_id: int) -> bool:
        is_slow = self.num_accepted % 4 == 0
        self.rig.now += self.slow_seconds if is_slow and self.slow_seconds else self.seconds
        self.num_accepted += 1
        return True

    def bitmask(self) -> bytearray:
        return bytearray(b"\xff" * 125 + bytes(3))

    def rollback(self, num_tokens: int) -> None:
        raise NotImplementedError

    def may_end(self) -> bool:
        return False

    def is_terminated(self) -> bool:
        return False

    def release(self) -> None:
        self.is_released = True


class LargeRig(Rig):
    """Outputs with large parsers, of two owners, fill all slots."""

    def __init__(self, **limits: Any) -> None:
        super().__init__(max_queued_requests=20, max_num_seqs=NUM_SLOTS, **limits)
        self.large = [self.make_large(f"large {i}", "ab"[i // 3]) for i in range(NUM_SLOTS)]

    def make_large(self, name: str, owner: str, **options: Any) -> Request:
        request = self.group(LENGTH, name=name, **options).members[0]
        request.owner = owner
        request.structured_output = RequestGrammar(
            LargeMatcher(self), clock=self.clock, mask_speed=MaskSpeed(MIN_QUICK_MASKS)
        )
        return request

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
    for request in rig.large:
        grammar: Any = request.structured_output
        grammar.matcher.seconds = 0.0
    tokens = rig.finish()
    rig.core._mask_maker.close()
    return tokens


def test_one_goes_on_and_the_others_free_their_slots(rig: LargeRig) -> None:
    rig.until_held()
    (running,) = rig.going_on
    at = {one: one.num_output_tokens for one in rig.held}
    assert all(3 <= count < LENGTH - 2 for count in at.values())
    plain = rig.group(4, name="plain").members[0]
    while not plain.is_finished:
        rig.turn()
    while not running.is_finished:
        assert {one: one.num_output_tokens for one in at} == at
        rig.turn()
    assert rig.finish() == expected()


def test_owners_take_turns(rig: LargeRig) -> None:
    rig.until_held()
    (first,) = rig.going_on
    order = [first.owner]
    while rig.held:
        (running,) = rig.going_on
        while not running.is_finished:
            rig.turn()
        rig.turn()
        order += [one.owner for one in rig.going_on]
    assert order[:3] in (["a", "a", "b"], ["a", "b", "a"], ["b", "a", "a"])
    assert order.index("b") < 2


def test_all_go_on_once_there_is_memory(rig: LargeRig) -> None:
    rig.until_held()
    for one in rig.going_on:
        rig.core.on_abort(one.group)
    for one in rig.held:
        grammar: Any = one.structured_output
        grammar._all_accept_seconds = 0.0
    rig.turn()
    assert (len(rig.going_on), rig.held) == (NUM_SLOTS - 1, [])


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
    assert not rig.core._mask_maker._parser_memory._large


def test_a_stream_that_is_not_read_holds_no_other_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parser_memory, "MAX_PARSER_BYTES", 3.5 * NUM_SLOTS * BYTES_PER_TOKEN)
    rig = LargeRig()
    unread = rig.make_large("unread", "c", on_slow="pause", max_unread=6)
    rig.large.append(unread)
    while not all(one.is_finished for one in rig.large[:-1]):
        rig.turn()
    assert unread.status is Status.PAUSED
    channel = unread.group.channel
    channel.num_read = channel.num_written
    channel.max_unread = 64
    rig.core.on_reader_caught_up(unread.group)
    rig.finish()
    assert unread.num_output_tokens == LENGTH
    rig.core._mask_maker.close()


def test_further_outputs_of_a_held_owner_begin_later(rig: LargeRig) -> None:
    """So the number of parsers has a bound. Those of other owners begin at once."""
    rig.until_held()
    (running,) = rig.going_on
    owner = rig.held[0].owner
    late = rig.make_large("late", owner or "")
    ended = rig.make_large("ended", owner or "")
    other = rig.make_large("other", "c")
    rig.turn()
    assert (late.status, ended.status) == (Status.NEW, Status.NEW)
    assert other.status in (Status.WAITING, Status.RUNNING)
    rig.core.on_abort(ended.group)
    rig.large += [late, other]
    while not running.is_finished:
        assert late.status is Status.NEW
        rig.turn()
    assert all(len(tokens) == LENGTH for tokens in rig.finish())
    assert not ended.num_output_tokens


def test_outputs_that_end_while_they_are_held_are_dropped(rig: LargeRig) -> None:
    rig.until_held()
    owner = rig.held[0].owner
    for i in range(200):
        rig.core.on_abort(rig.make_large(f"ended {i}", owner or "").group)
        rig.steps(1)
        assert len(rig.core._mask_maker._parser_memory._held) <= 70


def test_an_output_that_ends_before_others_of_its_request_frees_its_parser() -> None:
    rig = Rig()
    group = rig.group(3, LENGTH, name="two")
    matchers = [LargeMatcher(rig), LargeMatcher(rig)]
    for member, matcher in zip(group.members, matchers, strict=True):
        member.structured_output = RequestGrammar(
            matcher, clock=rig.clock, mask_speed=MaskSpeed(MIN_QUICK_MASKS)
        )
    first, second = group.members
    while not first.is_finished:
        rig.steps(1)
    assert [matcher.is_released for matcher in matchers] == [True, False]
    while not second.is_finished:
        rig.steps(1)
    assert matchers[1].is_released
    rig.core._mask_maker.close()


def test_a_held_stream_that_is_read_again_holds_no_other_back(rig: LargeRig) -> None:
    """Its reader resumes it, but it still waits for memory."""
    rig.until_held()
    one = rig.held[0]
    one.group.channel.is_backpressured = True
    rig.core.on_reader_caught_up(one.group)
    assert one.status is Status.WAITING
    assert rig.finish() == expected()


def test_quick_parsers_do_not_count(rig: LargeRig) -> None:
    """A token now and then may take longer, as on a busy processor."""
    for request in rig.large:
        grammar: Any = request.structured_output
        grammar.matcher.seconds = 0.0
        grammar.matcher.slow_seconds = 4 * parser_memory.FREE_ACCEPT_SECONDS
        grammar._num_accepted_tokens = 3  # The slow token is the first of four.
    while not all(one.is_finished for one in rig.large):
        rig.turn()
        assert not rig.held
    assert not rig.core._mask_maker._parser_memory._large
