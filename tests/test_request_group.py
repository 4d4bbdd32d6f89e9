"""Groups of several requests, driven through the core by hand: one id, one channel, one end."""

from __future__ import annotations

import gc

import pytest

from asyncllm import EngineOverloadedError
from asyncllm.core.batch import RowError
from asyncllm.core.channel import StreamEnd, merge_unread_tokens
from asyncllm.core.request import Request
from asyncllm.outputs import Delta
from tests.core_rig import Rig


def read(group):
    """Tokens and finish reasons by index, and the end."""
    deltas = [
        one if isinstance(one, Delta) else merge_unread_tokens(one) for one in group.channel.items
    ]
    group.channel.items.clear()
    final = group.channel.stream_end
    if isinstance(final, StreamEnd) and final.last_delta is not None:
        deltas.append(final.last_delta)
    tokens, reasons = {}, {}
    for delta in deltas:
        tokens.setdefault(delta.index, []).extend(delta.token_ids)
        if delta.finish_reason is not None:
            reasons[delta.index] = delta.finish_reason
    return tokens, reasons, final


def test_one_end_after_the_last_member():
    rig = Rig()
    group = rig.group(2, 6, 4)
    for step in range(1, 6):
        rig.steps(1)
        assert group.channel.stream_end is None
        assert rig.core.stats().num_running == 3 - (step >= 2) - (step >= 4)
        assert rig.core.admission.num_live_requests == 3 - (step >= 2) - (step >= 4)
        assert rig.core.admission.get_live_group("g") is group
    rig.steps(1)
    tokens, reasons, final = read(group)
    assert tokens == rig.reference(group)
    assert reasons == {0: "length", 2: "length"}
    assert (final.finish_reason, final.last_delta.index) == ("length", 1)
    assert (final.usage.prompt_tokens, final.usage.completion_tokens) == (4, 12)
    assert rig.core.admission.get_live_group("g") is None
    assert rig.core.admission.num_live_requests == 0
    assert rig.core.stats().num_finished == 1
    assert rig.core.stats().num_free_blocks == rig.core.stats().num_blocks


def test_deltas_of_two_members_do_not_merge():
    rig = Rig()
    group = rig.group(5, 5)
    rig.steps(3)
    found = [
        one if isinstance(one, Delta) else merge_unread_tokens(one) for one in group.channel.items
    ]
    assert [delta.index for delta in found] == [0, 1, 0, 1, 0, 1]
    alone = rig.group(1, 9, name="alone")
    rig.steps(4)
    found = [
        one if isinstance(one, Delta) else merge_unread_tokens(one) for one in alone.channel.items
    ]
    assert [(d.index, len(d.token_ids)) for d in found] == [(0, 1), (1, 4)]


def test_an_abort_ends_all():
    rig = Rig()
    group = rig.group(9, 2, 9)
    rig.steps(3)
    rig.core.abort(group)
    rig.steps(1)
    tokens, reasons, final = read(group)
    assert tokens == {i: t[:3] for i, t in rig.reference(group).items()}
    assert reasons == {0: "abort", 1: "length"}
    assert (final.finish_reason, final.usage.completion_tokens) == ("abort", 8)
    assert all(member.is_finished for member in rig.members["g"])
    assert rig.core.stats().num_aborted == 1
    assert rig.core.stats().num_free_blocks == rig.core.stats().num_blocks


def test_an_abort_that_overtakes_the_arrival_ends_all():
    rig = Rig()
    group = rig.group(9, 9)
    group.cancelled = True
    rig.core.step()
    assert group.channel.stream_end.finish_reason == "abort"
    assert rig.core.stats().num_steps == 0
    assert rig.core.admission.num_live_requests == 0


def test_a_deadline_ends_all():
    rig = Rig()
    group = rig.group(9, 9, deadline=5.0)
    rig.steps(2)
    rig.now = 5.0
    rig.steps(1)
    tokens, reasons, final = read(group)
    assert (tokens, reasons) == ({i: t[:2] for i, t in rig.reference(group).items()}, {})
    assert "passed its deadline while running" in str(final)
    assert [list(one.token_ids) for one in final.partial.outputs] == [tokens[0], tokens[1]]
    assert [one.index for one in final.partial.outputs] == [0, 1]
    assert rig.core.stats().num_failed == 1
    assert not rig.scheduler.has_work()


def test_a_member_that_fails_fails_the_group():
    rig = Rig()
    group = rig.group(9, 9)
    rig.steps(2)
    rig.executor.faults[2] = lambda result: fail_row(result, 1)
    rig.steps(1)
    tokens, _, final = read(group)
    expected = rig.reference(group)
    assert tokens == {0: expected[0][:3], 1: expected[1][:2]}
    assert "on purpose" in str(final)
    assert rig.core.admission.num_live_requests == 0
    rig.steps(1)
    assert rig.core.stats().num_failed == 1
    assert rig.core.stats().num_free_blocks == rig.core.stats().num_blocks


def fail_row(result, row):
    result.errors[row] = RowError.of(ZeroDivisionError("on purpose"))
    del result.token_ids[row]
    result.counts[row] = 0
    return result


def test_limits_count_members():
    rig = Rig(max_queued_requests=5, max_num_seqs=2)
    rig.group(4, 4, 4)
    with pytest.raises(EngineOverloadedError, match="3 requests are queued, max_queued_requests=5"):
        rig.group(4, 4, 4, name="h")
    rig.group(4, 4, name="h")
    rig.steps(1)
    stats = rig.core.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_requests) == (2, 3, 2)
    assert len(rig.core.admission.queued_requests) == 3

    rig = Rig(max_queued_tokens=15)
    rig.group(4, 4, 4)
    with pytest.raises(EngineOverloadedError, match="12 prompt tokens are queued and 8 more"):
        rig.group(4, 4, name="h")
    rig = Rig(max_queued_tokens=7)
    rig.group(4, 4)  # as a single request that is too long is, alone in the queue


def test_members_share_the_prompt_in_the_prefix_cache():
    rig = Rig(block_size=2)
    group = rig.group(3, 3)
    rig.steps(3)
    assert [member.num_cached_tokens for member in rig.members["g"]] == [0, 2]
    assert read(group)[0] == rig.reference(group)


def test_observers_are_told_once_by_the_first_member():
    rig, seen = Rig(), []

    class Watch:
        def on_submit(self, request, submission):
            seen.append(("submit", request.index))

        def on_first_token(self, request):
            seen.append(("first", request.index, request.first_token_at))

        def on_finish(self, request, usage, error):
            seen.append(("finish", request.index, usage.completion_tokens))

    rig.observers.add(Watch())
    rig.group(2, 5)
    rig.steps(5)
    assert seen == [("submit", 0), ("first", 0, 0.0), ("finish", 0, 7)]


def test_an_ended_group_waits_for_no_garbage_collection():
    gc.collect()
    gc.disable()
    try:
        others = [one for one in gc.get_objects() if type(one) is Request]
        rig = Rig()
        rig.group(2, 3, name="ends")
        rig.core.abort(rig.group(9, name="is aborted"))
        rig.steps(5)
        rig.group(9, name="runs")
        rig.steps(2)
        rig.members.clear()
        requests = [one for one in gc.get_objects() if type(one) is Request]
        mine = [one for one in requests if not any(one is other for other in others)]
        assert [one.request_id for one in mine] == ["runs"]
    finally:
        gc.enable()
