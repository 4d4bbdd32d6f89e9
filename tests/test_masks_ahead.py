"""Slow masks, made ahead on a thread."""

from __future__ import annotations

import asyncio
import functools
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from asyncllm.core import parser_memory
from asyncllm.core.executor import StepOutOfMemoryError
from asyncllm.core.mask_thread import MaskThread
from asyncllm.core.request import Status
from asyncllm.core.request_grammar import RequestGrammar
from asyncllm.structured.grammar import MIN_QUICK_MASKS, Grammar, MaskSpeed
from tests.core_rig import Rig
from tests.integrity import check_scheduler
from tests.structured import ByteRig, texts_of

LENGTH = 12


def known_quick() -> MaskSpeed:
    return MaskSpeed(MIN_QUICK_MASKS)


def grammar_of(rig: Rig, matcher: Any, speed: MaskSpeed) -> RequestGrammar:
    return RequestGrammar(lambda: matcher, clock=rig.clock, mask_speed=speed)


class SlowMatcher:
    """Admits everything. Masks, or the accepting of tokens, take ``seconds`` on the engine thread;
    on another they wait for a gate."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.gate = threading.Event()
        self.slow = True
        self.seconds = 0.01
        self.slow_call = "bitmask"
        self.last_token: int | None = None
        self.error: BaseException | None = None
        self.error_in_step: BaseException | None = None
        self.num_elsewhere = 0
        self.niceness: int | None = None
        self.ended = False
        self._using = threading.Lock()

    @contextmanager
    def alone(self) -> Iterator[None]:
        assert self._using.acquire(blocking=False), "two threads use a matcher"
        try:
            yield
        finally:
            self._using.release()

    def release(self) -> None:
        with self.alone():
            pass

    def work(self, call: str) -> None:
        if call != self.slow_call:
            return
        if threading.current_thread() is not threading.main_thread():
            self.niceness = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
            self.num_elsewhere += 1
            assert self.gate.wait(10)
            if self.error is not None:
                raise self.error
        elif self.slow:
            self.rig.now += self.seconds
            if self.error_in_step is not None:
                raise self.error_in_step

    def accept(self, token_id: int) -> bool:
        with self.alone():
            self.work("accept")
            self.ended = token_id == self.last_token
            return True

    def rollback(self, num_tokens: int) -> None:
        raise NotImplementedError

    def bitmask(self) -> bytearray:
        with self.alone():
            self.work("bitmask")
            return bytearray(b"\xff" * 125 + bytes(3))

    def may_end(self) -> bool:
        return False

    def is_terminated(self) -> bool:
        return self.ended


class SlowRig(Rig):
    """A request of slow masks beside one without a grammar."""

    def __init__(self, slow: bool = True, **limits: Any) -> None:
        super().__init__(**limits)
        self.matcher = SlowMatcher(self)
        self.matcher.slow = slow
        self.hostile = self.group(LENGTH, name="slow")
        self.request = self.hostile.members[0]
        self.grammar = self.request.structured_output = RequestGrammar(
            lambda: self.matcher, clock=self.clock, mask_speed=known_quick()
        )
        self.neighbour = self.group(4 * LENGTH, name="neighbour").members[0]

    def until_ahead(self) -> None:
        """Until its next mask is being made on the thread."""
        while not self.core._mask_maker.num_pending_masks:
            assert not self.request.is_finished
            self.steps(1)
        until = time.monotonic() + 10
        while not self.matcher.num_elsewhere:
            assert time.monotonic() < until
            time.sleep(0.001)

    def finish(self) -> list[int]:
        """Open the gate and take steps to the end; the tokens of the slow request."""
        self.matcher.gate.set()
        while not self.request.is_finished:
            if self.grammar.next_mask is not None and self.core._mask_maker.num_pending_masks:
                self.grammar.next_mask.exception(10)
            self.steps(1)
            check_scheduler(self.scheduler)
        return self.request.output_token_ids


def expected(**limits: Any) -> list[int]:
    return SlowRig(slow=False, **limits).finish()


@pytest.fixture(params=[1, 2], ids=["depth 1", "depth 2"])
def depth(request: Any) -> int:
    return request.param


@pytest.fixture(params=["bitmask", "accept"])
def rig(request: Any, depth: int) -> Iterator[SlowRig]:
    made = SlowRig(pipeline_depth=depth)
    made.matcher.slow_call = request.param
    yield made
    made.matcher.gate.set()
    made.core._mask_maker.close()


def test_neighbours_go_on_while_a_mask_is_made(rig: SlowRig, depth: int) -> None:
    rig.until_ahead()
    rig.steps(4)
    at, blocks, slot = rig.request.num_output_tokens, rig.request.blocks, rig.request.req_index
    before = rig.neighbour.num_output_tokens
    rig.steps(8)
    assert rig.neighbour.num_output_tokens >= before + 7
    assert rig.request.num_output_tokens == at
    assert (rig.request.status, rig.request.req_index) == (Status.RUNNING, slot)
    assert rig.request.blocks is blocks
    assert rig.matcher.num_elsewhere == 1
    assert rig.finish() == expected(pipeline_depth=depth)
    assert rig.matcher.num_elsewhere > LENGTH // 2


@pytest.mark.skipif(sys.platform != "linux", reason="niceness of a thread")
def test_only_the_mask_thread_has_low_priority(rig: SlowRig) -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    rig.until_ahead()
    assert rig.matcher.niceness == min(before + 5, 19)
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_quick_masks_are_made_with_their_step(depth: int) -> None:
    rig = SlowRig(slow=False, pipeline_depth=depth)
    rig.finish()
    assert rig.matcher.num_elsewhere == 0
    assert rig.core._mask_maker._thread is None


@pytest.mark.parametrize(("num_others", "expected"), [(0, []), (1, list(range(9, 24)))])
def test_many_quick_masks_delay_no_rows_without_masks(
    num_others: int, expected: list[int], depth: int
) -> None:
    """The nine cheapest are made within the millisecond that a step may wait."""
    limits = {"max_num_seqs": 32, "num_blocks": 201, "pipeline_depth": depth}
    rig = Rig(max_queued_requests=32, **limits)
    grammars = []
    for i in range(24):
        matcher = SlowMatcher(rig)
        matcher.seconds = 1e-4 * (1 + i / 1000)
        matcher.gate.set()
        grammar = grammar_of(rig, matcher, known_quick())
        rig.group(LENGTH, name=f"{i}").members[0].structured_output = grammar
        grammars.append(grammar)
    for i in range(num_others):
        rig.group(LENGTH, name=f"other {i}")
    gone = rig.group(LENGTH, name="gone")
    matcher = SlowMatcher(rig)
    matcher.slow = False
    grammar = grammar_of(rig, matcher, known_quick())
    gone.members[0].structured_output = grammar
    rig.steps(2)
    rig.core.abort(gone)  # In flight its row is left without a mask, and waits for none.
    rig.steps(2)
    ahead = [i for i, grammar in enumerate(grammars) if grammar.num_masks_ahead]
    assert ahead == expected
    rig.core._mask_maker.close()


@pytest.mark.parametrize("share", [True, False], ids=["one grammar", "several grammars"])
@pytest.mark.parametrize("num_outputs", [1, 8])
def test_a_step_makes_one_slow_mask(depth: int, num_outputs: int, share: bool) -> None:
    """All outputs come to a slow mask in the same step. Those that are not made are made ahead, and
    their requests are computed again."""

    def run(seconds: float) -> tuple[Rig, list[SlowMatcher], list[list[int]]]:
        rig = Rig(max_queued_requests=32, max_num_seqs=32, num_blocks=201, pipeline_depth=depth)
        speed, matchers, requests, grammars = known_quick(), [], [], []
        for i in range(num_outputs):
            matcher = SlowMatcher(rig)
            matcher.gate.set()
            matcher.slow, matcher.seconds = False, seconds
            request = rig.group(LENGTH, name=f"{i}").members[0]
            grammar = grammar_of(rig, matcher, speed if share else known_quick())
            request.structured_output = grammar
            grammars.append(grammar)
            matchers.append(matcher)
            requests.append(request)
        neighbour = rig.group(LENGTH, name="neighbour").members[0]
        rig.steps(4)
        began_at = rig.now
        for matcher in matchers:
            matcher.slow = True
        rig.steps(1)
        waited.append(rig.now - began_at)
        while not (neighbour.is_finished and all(request.is_finished for request in requests)):
            for grammar in grammars:
                if grammar.next_mask is not None:
                    grammar.next_mask.exception(10)
            rig.steps(1)
            check_scheduler(rig.scheduler)
        rig.core._mask_maker.close()
        return rig, matchers, [request.output_token_ids for request in requests]

    waited: list[float] = []
    quick = run(0.0)[2]
    rig, matchers, slow = run(0.01)
    assert slow == quick
    assert waited[1] - waited[0] == pytest.approx(0.01)
    assert rig.core.stats().num_preemptions == num_outputs - 1
    assert all(matcher.num_elsewhere > 4 for matcher in matchers)


@pytest.mark.parametrize("share", [True, False], ids=["one grammar", "several grammars"])
def test_a_step_makes_one_failing_mask(depth: int, share: bool) -> None:
    """A mask beyond the limits of the parser takes longest."""
    rig = Rig(pipeline_depth=depth)
    group = rig.group(*[LENGTH] * 4)
    requests, grammars, speed = list(group.members), [], known_quick()
    for request in requests:
        matcher = SlowMatcher(rig)
        matcher.gate.set()
        matcher.slow = False
        request.structured_output = grammar_of(rig, matcher, speed if share else known_quick())
        grammars.append(matcher)
    rig.steps(4)
    began_at = rig.now
    for matcher in grammars:
        matcher.slow, matcher.error_in_step = True, ValueError("too complex")
    rig.steps(depth)
    assert rig.now - began_at == pytest.approx(0.01)
    rig.steps(3)
    assert all(request.is_finished for request in requests)
    check_scheduler(rig.scheduler)
    rig.core._mask_maker.close()


def test_masks_of_a_new_grammar_are_made_ahead(depth: int) -> None:
    """But for the first, which is made with the grammar, and until enough were quick."""
    first_mask = bytes(SlowMatcher(Rig()).bitmask())
    rig = Rig(pipeline_depth=depth)
    matcher = SlowMatcher(rig)
    matcher.gate.set()
    grammar = Grammar(lambda: matcher, first_mask=first_mask)
    state = RequestGrammar.begin(grammar)
    assert state.num_masks_ahead > 0
    group = rig.group(LENGTH)
    request = group.members[0]
    rig.core.on_add(group, [state])
    while not request.is_finished:
        if state.next_mask is not None:
            state.next_mask.exception(10)
        rig.steps(1)
    assert matcher.num_elsewhere == LENGTH - 1
    assert grammar.mask_speed.num_quick_masks == LENGTH - 1
    grammar.mask_speed.num_quick_masks = MIN_QUICK_MASKS
    assert RequestGrammar.begin(grammar).num_masks_ahead == 0
    rig.core._mask_maker.close()


def test_an_abort_leaves_the_mask_in_the_making_to_its_thread(rig: SlowRig) -> None:
    rig.until_ahead()
    rig.core.abort(rig.hostile)
    rig.steps(4)
    assert rig.request.finish_reason == "abort"
    check_scheduler(rig.scheduler)
    assert rig.core._mask_maker.num_pending_masks == 1
    rig.matcher.gate.set()
    assert rig.grammar.next_mask is not None
    assert rig.grammar.next_mask.result(10)[0] is not None
    rig.steps(1)
    assert rig.core._mask_maker.num_pending_masks == 0
    before = rig.neighbour.num_output_tokens
    rig.steps(4)
    assert rig.neighbour.num_output_tokens > before


@pytest.mark.parametrize("how", ["preempted", "rolled back", "paused"])
def test_a_mask_in_the_making_outlives_its_slot(rig: SlowRig, depth: int, how: str) -> None:
    rig.until_ahead()
    while rig.core._in_flight:
        rig.core._collect()
    if how == "preempted":
        rig.scheduler.preempt(rig.request)
    elif how == "rolled back":
        rig.scheduler.roll_back_steps([])
    else:
        rig.scheduler.pause(rig.request)
        rig.scheduler._evict_slot(rig.request)
        rig.scheduler.resume(rig.request)
    check_scheduler(rig.scheduler)
    assert rig.request.status is Status.WAITING
    num_tokens = rig.neighbour.num_output_tokens
    rig.steps(5)
    # It is not admitted before the mask is made: a step would wait for it.
    assert rig.request.status is Status.WAITING
    assert rig.neighbour.num_output_tokens > num_tokens
    assert rig.finish() == expected(pipeline_depth=depth)


def test_an_error_on_the_thread_ends_its_own_request(rig: SlowRig) -> None:
    rig.until_ahead()
    rig.matcher.error = KeyError("no mask")
    rig.finish()
    assert rig.request.finish_reason is None
    assert rig.core.stats().num_failed == 1
    assert rig.neighbour.status is Status.RUNNING


def test_a_token_accepted_on_the_thread_ends_the_output(depth: int) -> None:
    """Its end comes with the next mask, which there is none of."""
    tokens = expected(pipeline_depth=depth)
    rig = SlowRig(pipeline_depth=depth)
    rig.matcher.slow_call, rig.matcher.last_token = "accept", tokens[5]
    assert tokens.index(tokens[5]) == 5
    assert rig.finish() == tokens[:6]
    assert rig.matcher.num_elsewhere > 0
    assert rig.request.finish_reason == "stop"
    assert rig.core.stats().num_finished == 1
    rig.core._mask_maker.close()


def test_closing_waits_for_one_mask_and_drops_the_others(rig: SlowRig) -> None:
    rig.until_ahead()
    thread = rig.core._mask_maker._thread
    assert thread is not None
    dropped = thread.submit(None, lambda: (None, 0.0), None)
    threading.Timer(0.05, rig.matcher.gate.set).start()
    rig.core._mask_maker.close()
    assert rig.grammar.next_mask is not None
    assert rig.grammar.next_mask.done()
    assert dropped.cancelled()
    assert not any(one.name.startswith("asyncllm-masks") for one in threading.enumerate())


def slow_at(seed: int, share: int, threads: set[str]) -> Any:
    """``compute_mask`` that takes 3 ms at some outputs, by one thread at a time. The
    names of the threads are added to ``threads``."""
    real, using = RequestGrammar.compute_mask, set[int]()

    def compute_mask(self: RequestGrammar, request: Any) -> bytes | None:
        assert id(self) not in using, "two threads use a matcher"
        using.add(id(self))
        threads.add(threading.current_thread().name)
        try:
            if hash((seed, request.index, tuple(request.token_ids[-3:]))) % share == 0:
                until = time.thread_time() + 0.003
                while time.thread_time() < until:
                    pass
            return real(self, request)
        finally:
            using.discard(id(self))

    return compute_mask


@functools.cache
def texts_without_delay(num_blocks: int) -> list[str]:
    return asyncio.run(texts_of(ByteRig(num_blocks=num_blocks), 6))


@settings(max_examples=12, deadline=None)
@example(seed=0, share=1, depth=1, num_blocks=257, fault=None, min_quick_masks=4)
@example(seed=0, share=1, depth=2, num_blocks=257, fault=None, min_quick_masks=4)
@given(
    min_quick_masks=st.sampled_from([0, 4, 256]),
    seed=st.integers(0, 99),
    share=st.integers(1, 12),
    depth=st.sampled_from([1, 2]),
    num_blocks=st.sampled_from([33, 257]),
    fault=st.sampled_from([None, 3, 9]),
)
def test_slow_masks_change_no_output(
    seed: int, share: int, depth: int, num_blocks: int, fault: int | None, min_quick_masks: int
) -> None:
    rig = ByteRig(depth=depth, num_blocks=num_blocks)
    if fault is not None:
        rig.executor.faults[6 + fault] = StepOutOfMemoryError("full")
    threads: set[str] = set()
    with (
        mock.patch.object(RequestGrammar, "compute_mask", slow_at(seed, share, threads)),
        mock.patch("asyncllm.structured.grammar.MIN_QUICK_MASKS", min_quick_masks),
    ):
        found = asyncio.run(texts_of(rig, 6))
    if share == 1 and num_blocks == 257 and fault is None:  # free rows beside the slow ones
        assert "asyncllm-masks_0" in threads
    assert found == texts_without_delay(num_blocks)


def test_dropped_parsers_change_no_output() -> None:
    drops: list[int] = []

    @settings(max_examples=12, deadline=None)
    @example(depth=1, num_blocks=257, max_bytes=10**6, max_unread=20, min_quick_masks=0)
    @example(depth=2, num_blocks=257, max_bytes=0, max_unread=8, min_quick_masks=256)
    @example(depth=2, num_blocks=257, max_bytes=2000, max_unread=None, min_quick_masks=0)
    @given(
        depth=st.sampled_from([1, 2]),
        num_blocks=st.sampled_from([33, 257]),
        max_bytes=st.integers(0, 20_000),
        max_unread=st.none() | st.integers(1, 30),
        min_quick_masks=st.sampled_from([0, 4, 256]),
    )
    def check_dropped_parsers(
        depth: int, num_blocks: int, max_bytes: int, max_unread: int | None, min_quick_masks: int
    ) -> None:
        drop_parser = RequestGrammar.drop_parser

        def counted(self: RequestGrammar) -> None:
            drop_parser(self)
            drops.append(self.num_tokens_to_replay)

        rig = ByteRig(depth=depth, num_blocks=num_blocks)
        with (
            mock.patch.object(RequestGrammar, "drop_parser", counted),
            mock.patch("asyncllm.core.request_grammar.FREE_ACCEPT_SECONDS", 0.0),
            mock.patch.multiple(
                parser_memory,
                MIN_LARGE_PARSER_BYTES=0,
                MAX_PARSER_BYTES=max_bytes,
                MAX_UNREAD_PARSER_BYTES=0,
            ),
            mock.patch("asyncllm.structured.grammar.MIN_QUICK_MASKS", min_quick_masks),
        ):
            found = asyncio.run(texts_of(rig, 6, max_unread))
        assert found == texts_without_delay(num_blocks)

    check_dropped_parsers()
    # How many outputs have parsers at the same time depends on the thread that makes masks.
    assert max(drops) > 16, "more than are replayed at a time"


def test_masks_take_turns_by_owner() -> None:
    """Quick masks come before slow ones, and outputs begin after their owner's slow masks."""
    thread, began, gate, made = MaskThread(), threading.Event(), threading.Event(), []

    def submit(owner: str, name: str, speed: MaskSpeed | None) -> Any:
        def make() -> tuple[bytes | None, float]:
            began.set()
            gate.wait(10)
            made.append(name)
            return b"", 0.0

        return thread.submit(owner, make, speed)

    quick, slow, changed = MaskSpeed(), MaskSpeed(is_known_slow=True), MaskSpeed()
    submit("c", "c", quick)
    assert began.wait(10)
    results = [
        submit("a", "a begins", None),
        submit("a", "a slow", slow),
        submit("a", "a slow meanwhile", changed),
        submit("b", "b slow", slow),
        submit("a", "a quick 1", quick),
        submit("a", "a quick 2", quick),
        submit("b", "b quick", quick),
        submit("b", "cancelled", quick),
    ]
    changed.is_known_slow = True
    results[-1].cancel()
    gate.set()
    for result in results[:-1]:
        result.result(10)
    thread.close()
    quick_ones = ["a quick 1", "b quick", "a quick 2"]
    assert made[:4] == ["c", *sorted(quick_ones, key=made.index)]
    assert set(made[:4]) == {"c", *quick_ones}
    assert made.index("b quick") < made.index("a quick 2")
    assert made[4:] == ["a slow", "b slow", "a slow meanwhile", "a begins"]


def test_the_thread_rests_after_slow_masks_of_busy_engines() -> None:
    def slow_mask() -> tuple[bytes | None, float]:
        until = time.thread_time() + 0.1
        while time.thread_time() < until:
            pass
        return b"", 0.1

    for should_rest in (False, True):
        thread = MaskThread()
        thread.should_rest = should_rest
        thread.submit(None, slow_mask, MaskSpeed()).result(10)
        thread.submit(None, lambda: (b"", 0.0), MaskSpeed()).result(10)
        has_made_quick_at = time.monotonic()
        thread.submit(None, lambda: (b"", 0.0), MaskSpeed(is_known_slow=True)).result(10)
        thread.close()
        assert (thread._rests_until > 0.0) == should_rest
        # A quick mask does not wait for the end of the rest.
        assert not should_rest or has_made_quick_at < thread._rests_until <= time.monotonic()


def test_quick_masks_do_not_hold_up_the_beginning_of_an_output() -> None:
    """After 5 ms of them, it has its turn, and so has a slow mask."""
    thread, gate, made = MaskThread(), threading.Event(), []

    def quick() -> tuple[bytes | None, float]:
        until = time.thread_time() + 0.001
        while time.thread_time() < until:
            pass
        made.append("quick")
        return b"", 0.001

    thread.should_rest = False
    thread.submit("a", lambda: (None, float(not gate.wait(10))), MaskSpeed())
    jobs = [thread.submit("a", quick, MaskSpeed()) for _ in range(30)]
    jobs.append(thread.submit("b", lambda: (None, made.append("begin") or 0.0), None))
    slow = MaskSpeed(is_known_slow=True)
    jobs.append(thread.submit("a", lambda: (b"", made.append("slow") or 0.0), slow))
    gate.set()
    for job in jobs:
        job.result(10)
    thread.close()
    assert made == [*["quick"] * 5, "begin", *["quick"] * 5, "slow", *["quick"] * 20]


def test_a_rest_that_ends_while_the_thread_looks_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No further job notifies the thread."""
    times = iter([0.9])
    clock = SimpleNamespace(
        monotonic=lambda: next(times, 1.1), thread_time=time.thread_time, sleep=time.sleep
    )
    monkeypatch.setattr("asyncllm.core.mask_thread.time", clock)
    thread = MaskThread()
    thread._rests_until = 1.0
    thread.submit(None, lambda: (b"", 0.0), MaskSpeed(is_known_slow=True)).result(10)
    thread.close()


@pytest.mark.parametrize("how", ["aborted", "begun", "paused", "paused and resumed"])
def test_outputs_of_a_grammar_not_known_to_be_quick_begin_in_turns(how: str) -> None:
    """An output occupies no slot until the mask thread has time for it."""
    rig = Rig()
    matcher, blocker = SlowMatcher(rig), threading.Event()
    matcher.gate.set()
    grammar = Grammar(lambda: matcher, first_mask=bytes(matcher.bitmask()))
    state = RequestGrammar.begin(grammar)
    group = rig.group(LENGTH)
    request = group.members[0]
    maker = rig.core._mask_maker
    maker._thread = MaskThread()
    maker._thread.submit(None, lambda: (None, float(blocker.wait(10))), MaskSpeed())
    rig.core.on_add(group, [state])
    rig.steps(3)
    assert (request.status, len(rig.scheduler.running)) == (Status.NEW, 0)
    if how == "aborted":
        rig.core.abort(group)
        rig.steps(1)
    if "paused" in how:  # With its group, whose other outputs may have begun.
        rig.scheduler.pause(request)
    if "resumed" in how:
        rig.scheduler.resume(request)
        rig.steps(1)
    blocker.set()
    thread = maker._thread
    thread.submit("last", lambda: (None, 0.0), None).result(10)
    rig.steps(2)
    if how == "paused":
        rig.scheduler.resume(request)
        rig.steps(1)
    assert rig.core.admission.num_live_requests == (how != "aborted")
    assert (request.num_output_tokens > 0) == (how != "aborted")
    assert len(rig.scheduler.running) == (how != "aborted")
    rig.core.abort(group)
    rig.steps(2)
    check_scheduler(rig.scheduler)
    thread.close()
