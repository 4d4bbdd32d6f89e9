"""IdleCalls alone, on an inbox that the test drains."""

from __future__ import annotations

import queue

import pytest

from asyncllm.core.idle_calls import IdleCalls
from asyncllm.errors import EngineClosedError


def closed() -> EngineClosedError:
    return EngineClosedError("closed")


def open_still() -> EngineClosedError:
    raise AssertionError("an open queue does not ask how it ends")


def test_calls_run_in_order_once_they_are_drained():
    inbox = queue.SimpleQueue()
    calls, ran = IdleCalls(inbox, open_still), []

    def run(value: int) -> int:
        ran.append(value)
        return value

    futures = [calls.submit(run, (value,)) for value in (5, 7)]
    calls.run_due()
    assert (ran, len(calls)) == ([], 2)
    for _ in futures:
        inbox.get_nowait()()
    assert (len(calls.due_calls), inbox.empty()) == (2, True)
    calls.run_due()
    assert ran == [5, 7]
    assert [future.result(0) for future in futures] == [5, 7]
    assert (len(calls), len(calls.due_calls)) == (0, 0)


def test_a_call_that_raises_is_failed_with_the_others_by_close():
    inbox = queue.SimpleQueue()
    calls = IdleCalls(inbox, closed)

    def fails():
        raise ZeroDivisionError

    futures = [calls.submit(run, ()) for run in (int, fails, int)]
    while not inbox.empty():
        inbox.get_nowait()()
    with pytest.raises(ZeroDivisionError):
        calls.run_due()
    assert futures[0].result(0) == 0
    assert len(calls) == 2
    calls.close()
    assert [type(future.exception(0)) for future in futures[1:]] == [EngineClosedError] * 2
    assert len(calls) == 0


def test_a_closed_queue_fails_a_call_at_once_and_does_not_run_it():
    inbox = queue.SimpleQueue()
    calls = IdleCalls(inbox, closed)
    calls.close()
    calls.close()
    future = calls.submit(int, ())
    assert isinstance(future.exception(0), EngineClosedError)
    assert inbox.empty()
