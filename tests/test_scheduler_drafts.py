"""Several tokens of a row in one step (speculative decoding)."""

from __future__ import annotations

import asyncio
import math

import pytest

from asyncllm.core.block_pool import NULL_BLOCK_ID
from tests.fakes import fake
from tests.integrity import check_scheduler
from tests.scheduler_rig import Rig, info

PROMPT = [7, 7]


def yields(k: int, prompt=PROMPT, length: int = 40, **limits) -> list[int]:
    """How many tokens each step yields, with nothing that ends the request early."""
    rig = Rig(max_tokens_per_row=k, num_blocks=40, **limits)
    request = rig.add(prompt, max_tokens=length)
    found = []
    while rig.scheduler.has_work():
        before = request.num_output_tokens
        rig.step()
        found.append(request.num_output_tokens - before)
    rig.expect(request)
    return found


def middle(k: int) -> int:
    """Output tokens up to one that has others of its step before and behind it."""
    counts = yields(k)
    step = next(i for i, count in enumerate(counts[:-1]) if count >= 3)
    return sum(counts[:step]) + 2


def test_steps_yield_one_to_k_tokens():
    assert set(yields(1)) == {1}
    assert set(yields(4)[:-1]) == {1, 2, 3, 4}


def test_a_stop_token_in_the_middle_drops_the_later_ones():
    rig = Rig(max_tokens_per_row=4)
    count = middle(4)
    tokens = rig.executor.reference(PROMPT, count)
    assert tokens[-1] not in tokens[:-1]
    request = rig.add(PROMPT, max_tokens=40, eos=(tokens[-1],))
    rig.finish_all()
    assert (request.finish_reason, request.output_token_ids) == ("stop", tokens)
    assert rig.scheduler.num_generated_tokens == count
    assert rig.scheduler.kv.pool.num_free == 16


@pytest.mark.parametrize("max_model_len", range(5, 24))
def test_the_context_ends_in_the_middle(max_model_len):
    rig = Rig(max_tokens_per_row=4, max_model_len=max_model_len, num_blocks=7)
    request = rig.add(PROMPT, max_tokens=None)
    while rig.scheduler.has_work():
        rig.step()
        blocks = math.ceil(max_model_len / 4)
        assert all(len(table) <= blocks for table in request.blocks)
    assert (request.finish_reason, len(request.token_ids)) == ("length", max_model_len)
    rig.expect(request)


def test_blocks_are_reserved_for_every_draft():
    """The step writes KV behind the last known token before the scheduler knows how far."""
    rig = Rig(max_tokens_per_row=4, block_size=1, num_blocks=40)
    request = rig.add(PROMPT, max_tokens=20)
    while rig.scheduler.has_work():
        step = rig.launch()
        assert step is not None
        end = step.batch.starts[0] + step.batch.counts[0]
        assert len(request.blocks[0]) >= end + 3
        assert NULL_BLOCK_ID not in [block.block_id for block in request.blocks[0]]
        rig.collect()
        if not request.is_finished:
            assert request.num_computed_tokens == len(request.token_ids) - 1
        check_scheduler(rig.scheduler)
    rig.expect(request)


def test_request_ended_by_caller_drops_later_row_tokens():
    rig = Rig(max_tokens_per_row=4)
    request = rig.add(PROMPT, max_tokens=40)
    while True:
        step = rig.launch()
        assert step is not None
        result = rig.executor.collect()
        known = request.num_output_tokens
        if result.counts[0] >= 3:
            break
        list(rig.scheduler.update(rig.in_flight.pop(0), result))
    events = rig.scheduler.update(step, result)
    next(events)
    rig.scheduler.finish(request, "stop")
    assert list(events) == []
    assert request.num_output_tokens == known + 1
    check_scheduler(rig.scheduler)


def test_run_ahead_with_several_tokens_per_row_is_refused():
    with pytest.raises(ValueError, match="max_tokens_per_row=2 with pipeline_depth=2"):
        info(max_tokens_per_row=2, pipeline_depth=2)


def drafting(**limits):
    return fake(max_tokens_per_row=4, **limits)


async def test_a_stop_string_in_the_middle_of_several_tokens():
    rig = drafting()
    tokens = rig.executor.reference(PROMPT, 40)
    for end in range(2, 41):
        if tokens[end - 1] in tokens[: end - 1]:
            continue
        async with drafting().engine() as engine:
            result = await engine.generate(PROMPT, max_tokens=40, stop=f" {tokens[end - 1]} ")
            assert list(result.token_ids) == tokens[:end]
            assert result.text == " ".join(map(str, tokens[: end - 1]))
            assert (result.finish_reason, result.usage.completion_tokens) == ("stop", end)
            assert engine.stats().generation_tokens == end
            assert engine.stats().num_free_blocks == engine.stats().num_blocks


async def test_a_token_without_text_in_the_middle_fails_the_request():
    rig = drafting()
    tokens = rig.executor.reference(PROMPT, 12)
    rig.tokenizer.failing_tokens[tokens[10]] = ZeroDivisionError
    async with rig.engine() as engine:
        stream = engine.stream(PROMPT, max_tokens=40)
        with pytest.raises(Exception, match=r"token \d+ has no text"):
            await stream.result()
        assert list(stream._make_outputs()[0].token_ids) == tokens[:10]
        assert engine.stats().num_free_blocks == engine.stats().num_blocks


@pytest.mark.parametrize("max_unread", [1, 2, 3, 5])
async def test_backpressure_in_the_middle_of_several_tokens(max_unread):
    rig = drafting()
    async with rig.engine() as engine:
        options = {"max_tokens": 40, "max_unread": max_unread}
        cut = engine.stream(PROMPT, on_slow="abort", **options)
        merged = engine.stream(PROMPT, on_slow="coalesce", **options)
        held = engine.stream(PROMPT, on_slow="pause", **options)
        while engine.stats().num_paused == 0:
            assert engine.state == "running"
            await asyncio.sleep(0.001)
        tokens = rig.executor.reference(PROMPT, 40)
        result = await cut.result()
        assert (result.finish_reason, list(result.token_ids)) == ("abort", tokens[:max_unread])
        deltas = [delta.token_ids async for delta in merged]
        assert [token for delta in deltas for token in delta] == tokens
        assert max(map(len, deltas)) == max_unread
        assert [delta.token_ids async for delta in held] == [(token,) for token in tokens]
