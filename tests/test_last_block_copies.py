"""Outputs of one prompt, which copy its last block from the first of them."""

from __future__ import annotations

from collections import deque

import pytest

from asyncllm.core.block_pool import BlockPool
from asyncllm.core.request import Status
from tests.driver import GREEDY, Driver, outputs_of
from tests.dummy_runner import make
from tests.integrity import check_block_pool
from tests.native_library import needs_native
from tests.scheduler_rig import Rig

PROMPT = range(10, 17)  # A full block of four, and three tokens of the next.


def outputs(rig: Rig, count: int, prompt=PROMPT, max_tokens=6):
    first = rig.add(prompt, max_tokens=max_tokens)
    return [first, *(rig.add(prompt, max_tokens=max_tokens, first=first) for _ in range(count - 1))]


def copied(rig: Rig) -> int:
    step = rig.launch()
    assert step is not None
    rig.collect()
    return len(step.batch.block_copies)


def test_further_outputs_wait_for_the_prompt_and_compute_a_token_each():
    rig = Rig()
    found = outputs(rig, 3)
    assert rig.step() == {"r0": 7}
    assert rig.step() == {"r0": 1, "r1": 1, "r2": 1}
    rig.finish_all(*found)


@pytest.mark.parametrize("max_num_seqs", [1, 8])
def test_an_output_of_one_token_leaves_its_block_to_the_others(max_num_seqs):
    """Its blocks are free when the others begin, and stay cached."""
    rig = Rig(max_num_seqs=max_num_seqs)
    found = outputs(rig, 4, max_tokens=1)
    rig.step()
    assert found[0].is_finished
    assert sum(copied(rig) for _ in range(3 if max_num_seqs == 1 else 1)) == 3
    rig.finish_all(*found)


def test_a_block_that_is_full_meanwhile_can_be_copied():
    """The first output has filled it with its own tokens, and the cache has it as a full block."""
    rig = Rig(max_num_seqs=2)
    found = outputs(rig, 3, max_tokens=5)
    rig.step()
    assert [copied(rig) for _ in range(5)] == [1, 0, 0, 0, 1]
    assert len(found[0].token_ids) == 12
    rig.finish_all(*found)


@pytest.mark.parametrize(
    ("length", "steps"),
    [
        (9, [{"r0": 9, "r1": 1}]),  # The last token alone is behind the full blocks.
        (8, [{"r0": 8}, {"r0": 1, "r1": 1}]),  # The last token is that of a full block.
    ],
)
def test_prompts_that_end_with_a_full_block(length, steps):
    rig = Rig()
    found = outputs(rig, 2, prompt=range(length))
    assert [rig.step() for _ in steps] == steps
    rig.finish_all(*found)


def test_a_prompt_in_chunks_holds_up_no_other_request():
    rig = Rig(max_num_batched_tokens=4)
    found = outputs(rig, 3)
    other = rig.add([50], max_tokens=2)
    assert [rig.step() for _ in range(2)] == [{"r0": 4}, {"r0": 3, "r3": 1}]
    rig.finish_all(*found, other)


@pytest.mark.parametrize("is_in_flight", [False, True])
def test_the_first_output_ends_before_its_prompt_is_known(is_in_flight):
    rig = Rig()
    found = outputs(rig, 3)
    if is_in_flight:
        rig.launch()
    rig.scheduler.finish(found[0], "abort")
    if is_in_flight:
        rig.collect()
    assert not rig.scheduler.awaiting_prompt
    shared = 4 if is_in_flight else 0
    assert rig.step() == {"r1": 7 - shared, "r2": 3}
    rig.finish_all(*found[1:])


def test_a_waiting_output_ends_or_pauses():
    rig = Rig()
    found = outputs(rig, 4)
    rig.launch()
    rig.scheduler.finish(found[1], "abort")
    rig.scheduler.pause(found[2])
    rig.collect()
    assert rig.step() == {"r0": 1, "r3": 1}
    rig.scheduler.resume(found[2])
    assert rig.step() == {"r0": 1, "r3": 1, "r2": 1}
    rig.finish_all(found[0], *found[2:])


def test_a_first_output_that_is_preempted_keeps_the_others_waiting():
    rig = Rig(max_num_batched_tokens=4)
    found = outputs(rig, 3)
    rig.step()
    rig.scheduler.preempt(found[0])
    assert [r.status for r in found] == [Status.WAITING] * 3
    assert list(rig.scheduler.awaiting_prompt[found[0]]) == found[1:]
    rig.finish_all(*found)


def test_a_block_that_another_request_took_is_not_copied():
    rig = Rig(num_blocks=4, max_num_seqs=1, max_model_len=12)
    found = outputs(rig, 2, max_tokens=1)
    rig.step()
    rig.scheduler.pause(found[1])
    other = rig.add(range(30, 41), max_tokens=1)
    rig.step()
    rig.scheduler.resume(found[1])
    assert rig.step() == {"r1": 7}
    rig.finish_all(*found, other)


@pytest.mark.parametrize(
    "changes",
    [
        {"caching": False},
        {"block_size": (4, 2)},
        {"windows": (8,)},
        {"has_states": True},
    ],
)
def test_what_cannot_be_copied_is_computed_again(changes):
    rig = Rig(num_blocks=40, **changes)
    found = outputs(rig, 3)
    assert not rig.scheduler.awaiting_prompt
    while rig.scheduler.has_work():
        assert copied(rig) == 0
    rig.expect(*found)


def test_a_failed_step_copies_again():
    rig = Rig()
    found = outputs(rig, 3, prompt=range(6))
    rig.step()
    step = rig.launch()
    assert step is not None
    assert len(step.batch.block_copies) == 2
    rig.executor.discard()
    rig.scheduler.roll_back_steps(rig.in_flight)
    rig.in_flight.clear()
    assert copied(rig) == 2
    rig.finish_all(*found)


def test_a_block_with_two_hashes():
    pool = BlockPool(4)
    block, other = pool.allocate(2)
    pool.cache_partial_block(block, b"part")
    pool.cache_partial_block(other, b"part")
    assert (pool.find(b"part"), other.is_cached) == (block, False)
    assert pool.cache_block(block, b"full")
    pool.release([block, other])
    check_block_pool(pool)
    assert [pool.find(b"part"), pool.find(b"full")] == [block, block]
    taken = pool.allocate(3)
    assert taken[-1] is block, "it is evicted last"
    assert [pool.find(b"part"), pool.find(b"full")] == [None, None]
    check_block_pool(pool, [taken])


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("backend", ["torch", pytest.param("native", marks=needs_native)])
def test_a_block_is_copied_before_its_new_owner_clears_it(backend, depth):
    """The copy is made in a step that may begin while the one before it runs."""
    runner = make(attention_backend=backend)
    if depth > 1 and runner.can_schedule_async:
        runner.enable_async_scheduling(1)
    driver, prompt = Driver(runner), list(range(3, runner.info.block_size))
    expected = outputs_of(runner, prompt, 1, GREEDY)
    driver.free_blocks = deque([1, 3, 4])
    driver.run([driver.add(prompt, 1)])
    earlier = driver.add([9], 3)
    driver.free_blocks = deque([3, 2, 1])
    if depth > 1:
        driver.launch([(earlier, 1)])
    copy, other = driver.add(prompt, 1), driver.add([7, 8], 1)
    copy.computed = len(prompt) - 1
    driver.free_blocks = deque([2, 1])
    driver.block_copies = [(1, 2)]
    driver.launch([(copy, 1), (other, 2)])
    assert other.blocks == [[1]]
    while driver.in_flight:
        driver.collect()
    assert copy.outputs == expected
    assert other.outputs == outputs_of(make(attention_backend=backend), [7, 8], 1, GREEDY)
