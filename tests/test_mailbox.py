"""Mailboxes: one call into a loop for all readers."""

from __future__ import annotations

import asyncio
import threading

import pytest
import trio

from asyncllm.core.channel import Channel
from asyncllm.runtime.mailbox import LoopMailbox, MailboxRegistry, ThreadMailbox
from tests.channels import Host, Waiter


class Loop(Host):
    """A host that may be closed."""

    closed = False

    def is_closed(self):
        return self.closed

    def post(self, callback):
        if self.closed:
            raise RuntimeError("closed")
        super().post(callback)


def waiting():
    channel = Channel()
    channel.waiter = Waiter()
    return channel


def test_one_loop_call_wakes_all_announced_readers():
    loop = Loop()
    mailbox = LoopMailbox(loop)
    channels = [waiting() for _ in range(4)]
    gone = Channel()  # its reader went away meanwhile
    assert mailbox.notify([gone, *channels[:2]]) is True
    assert mailbox.notify(channels[2:3]) is True
    assert len(loop.posted) == 1
    loop.run_posted()
    assert [channel.waiter.woken for channel in channels] == [True, True, True, False]
    assert mailbox.notify(channels[3:]) is True
    assert len(loop.posted) == 1
    loop.run_posted()
    assert channels[3].waiter.woken


def test_closed_loop_is_reported_with_or_without_outstanding_call():
    loop = Loop()
    outstanding, idle = LoopMailbox(loop), LoopMailbox(loop)
    assert outstanding.notify([waiting()])
    assert not outstanding.is_closed()
    loop.closed = True
    assert outstanding.is_closed()
    assert outstanding.notify([waiting()]) is False
    assert idle.notify([waiting()]) is False


def test_idle_thread_calls_watchdog_until_woken():
    looked = []
    mailbox = ThreadMailbox(0.001, lambda: looked.append(threading.get_ident()))
    channel = Channel()
    channel.waiter = threading.Event()
    mailbox.wait(channel.waiter)
    assert looked == [threading.get_ident()]
    assert mailbox.notify([Channel(), channel]) is True
    # One that was woken before it waits does not wait.
    ThreadMailbox(threading.TIMEOUT_MAX, lambda: None).wait(channel.waiter)
    assert mailbox.is_closed() is False


def test_one_mailbox_per_loop_and_closed_loops_are_dropped():
    registry = MailboxRegistry()

    async def look():
        return registry.of_running_loop(), registry.of_running_loop()

    loops = [asyncio.new_event_loop() for _ in range(2)]
    (first, again), (other, _) = (loop.run_until_complete(look()) for loop in loops)
    assert first is again
    assert first is not other
    assert first.backend is not other.backend
    loops[0].close()
    in_trio, same = trio.run(look)
    assert in_trio is same
    # Looked through when a loop is new: the one that was closed before is gone, trio's is there.
    assert set(registry._mailbox_by_loop.values()) == {other, in_trio}
    loops[1].close()
    latest, _ = asyncio.run(look())
    assert set(registry._mailbox_by_loop.values()) == {latest}
    registry.clear()
    assert not registry._mailbox_by_loop


def test_without_a_loop_there_is_no_mailbox():
    with pytest.raises(RuntimeError):
        MailboxRegistry().of_running_loop()
