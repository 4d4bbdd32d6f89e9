"""ParseQueue: when a connection that receives little at a time waits for a parse turn."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from types import SimpleNamespace

import pytest

from asyncllm.serving.bounded_protocol import (
    BYTES_PER_EVENT,
    MAX_BYTES_PER_PARSE_TURN,
    MIN_COUNTED_BYTES,
    BoundedProtocol,
)
from asyncllm.serving.parse_queue import (
    MAX_SHARED_BYTES,
    MAX_SHARED_BYTES_PER_SECOND,
    MIN_PAUSE_SECONDS,
    ParseQueue,
)

RECEIVE_BYTES = MIN_COUNTED_BYTES + BYTES_PER_EVENT
RECEIVES_PER_TURN = MAX_BYTES_PER_PARSE_TURN // RECEIVE_BYTES


class Loop:
    """An event loop whose time passes in ``run``."""

    def __init__(self):
        self.now = 0.0
        self._timers = []
        self._numbers = itertools.count()

    def time(self):
        return self.now

    def call_at(self, when, call):
        heapq.heappush(self._timers, (max(when, self.now), next(self._numbers), call))
        return SimpleNamespace(cancel=lambda: None)

    def every(self, seconds, call, first_at=0.0):
        def call_again():
            self.call_at(self.now + seconds, call_again)
            call()

        self.call_at(first_at, call_again)

    def run(self, seconds):
        end = self.now + seconds
        while self._timers and self._timers[0][0] <= end:
            self.now, _, call = heapq.heappop(self._timers)
            call()
        self.now = end


class Connection(BoundedProtocol):
    """A connection that parses an event with each receive.

    Attributes:
        num_parsed: number of receives that were parsed at once.
        num_waits: number of receives that had to wait for a parse turn.
    """

    limits = SimpleNamespace(send_timeout=60.0)

    def __init__(self, parse_queue, num_events=1):
        super().__init__()
        self.parse_queue = parse_queue
        self.num_parsed = self.num_waits = 0
        self._num_events = num_events
        self.transport = SimpleNamespace(
            pause_reading=lambda: None, resume_reading=lambda: None, is_closing=lambda: False
        )

    def receive(self, data=b"x"):
        if not self._waits_for_parse_turn:
            self.data_received(data)
            self.num_parsed += not self._waits_for_parse_turn
            self.num_waits += self._waits_for_parse_turn

    def pipeline(self):
        """Wait for one parse turn after another."""
        self._parse = self._queue_for_parse_turn
        self._queue_for_parse_turn()

    def _parse(self):
        self._unparsed.clear()

    def _num_parsed_events(self):
        return self._num_events

    def _may_read(self):
        return True

    def _has_claim(self):
        return False


@pytest.fixture
def loop(monkeypatch):
    loop = Loop()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: loop)
    return loop


@pytest.mark.parametrize("num_pipelining", [0, 400])
@pytest.mark.parametrize("num_bytes", [1, MIN_COUNTED_BYTES])
def test_small_receives_with_pauses_have_no_parse_turns(loop, num_pipelining, num_bytes):
    queue = ParseQueue()
    for _ in range(num_pipelining):
        Connection(queue).pipeline()
    kept = Connection(queue)
    loop.every(0.05, lambda: kept.receive(bytes(num_bytes)))
    loop.run(20)
    assert kept.num_parsed >= 400
    assert kept.num_waits == 0


def test_fast_small_receives_have_parse_turns(loop):
    queue = ParseQueue()
    fast = Connection(queue)
    loop.every(0.001, fast.receive)
    loop.run(10)
    earned = MAX_SHARED_BYTES_PER_SECOND / 16 * 10 / RECEIVE_BYTES
    assert fast.num_waits > 500
    assert fast.num_parsed <= (fast.num_waits + 1) * (RECEIVES_PER_TURN + 1) + earned


def test_many_events_in_a_receive_have_parse_turns(loop):
    """As many chunks or frames come before a turn as in one, and at most as many in excess."""
    queue = ParseQueue()
    full, plain = Connection(queue, num_events=60), Connection(queue, num_events=1)
    for connection in (full, plain):
        loop.every(0.002, connection.receive)
    loop.run(1)
    assert full.num_parsed <= 1.4 * full.num_waits
    assert plain.num_parsed >= 5 * plain.num_waits


@pytest.mark.parametrize("num_connections", [16, 1000])
def test_all_connections_together_earn_a_bounded_number_of_bytes(loop, num_connections):
    """Whether they receive evenly or all at the same time."""
    queue, seconds = ParseQueue(), 10
    connections = [Connection(queue) for _ in range(num_connections)]
    for i, connection in enumerate(connections):
        loop.every(1 / 20, connection.receive, first_at=i % 2 * i / num_connections / 20)
    loop.run(seconds)
    num_parsed = sum(one.num_parsed for one in connections)
    if num_connections == 16:
        assert num_parsed >= 20 * seconds * num_connections
        assert not any(one.num_waits for one in connections)
        return
    num_earned = (MAX_SHARED_BYTES + MAX_SHARED_BYTES_PER_SECOND * seconds) / RECEIVE_BYTES
    num_turns = num_connections + seconds / MIN_PAUSE_SECONDS
    assert num_earned < num_parsed <= num_earned + num_turns * (RECEIVES_PER_TURN + 1)


def test_a_connection_earns_what_others_leave(loop):
    queue = ParseQueue()
    for i in range(400):
        loop.every(1.0, Connection(queue).receive, first_at=i / 400)
    kept = Connection(queue)
    loop.every(0.055, kept.receive)
    loop.run(20)
    assert kept.num_parsed >= 363
    assert kept.num_waits == 0


def test_connections_that_need_more_than_there_is_earn_equal_shares(loop):
    """One that needs less than an equal share has what it needs."""
    queue = ParseQueue()
    connections = [Connection(queue) for _ in range(400)]
    for i, connection in enumerate(connections):
        loop.every((0.05, 0.02)[i % 2], connection.receive, first_at=i / 400 * 0.05)
    slow = Connection(queue)
    loop.every(1.0, slow.receive)
    loop.run(20)
    assert slow.num_parsed >= 20
    assert slow.num_waits == 0
    even, odd = (sum(one.num_parsed for one in connections[i::2]) / 200 for i in range(2))
    assert all(one.num_waits for one in connections)
    assert even == pytest.approx(odd, rel=0.1)
