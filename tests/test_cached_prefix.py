"""cached_prefix: equal to an admission's hit, and free of side effects."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncllm import (
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
)
from asyncllm.core.block_hashes import PromptHashes
from asyncllm.testing import fake_engine, fake_llm
from tests.fakes import core_of
from tests.hypothesis_settings import examples
from tests.integrity import check_scheduler
from tests.scheduler_rig import Rig

KINDS = {
    "full": {"block_size": 3},
    "two groups": {"block_size": (4, 2)},
    "sliding": {"block_size": (2, 2), "windows": (None, 5)},
    "sliding first": {"block_size": (2, 4), "windows": (5, None)},
    "recurrent": {"block_size": 2, "has_states": True, "num_state_snapshots": 5},
    "recurrent, sliding": {
        "block_size": (2, 2),
        "windows": (None, 5),
        "has_states": True,
        "num_state_snapshots": 5,
    },
}


def traces(rig):
    """All that an admission would change: reference counts, hashes and the order of eviction."""
    kv = rig.scheduler.kv
    pools = [kv.pool] if kv.states is None else [kv.pool, kv.states.pool]
    return [
        (
            [block.block_id for block in (*pool._unhashed, *pool._evictable)],
            [(block.ref_count, block.hash) for block in pool.blocks],
            list(pool._by_hash),
        )
        for pool in pools
    ] + [kv.num_queried_tokens, kv.num_hit_tokens]


PROMPTS = st.tuples(
    st.lists(st.integers(0, 1), min_size=1, max_size=16), st.sampled_from([None, "a"])
)


@pytest.mark.parametrize("kind", KINDS)
@given(prompts=st.lists(PROMPTS, min_size=2, max_size=8), num_blocks=st.integers(23, 40))
@examples(25)
def test_cached_prefix_equals_admission_hit(kind, prompts, num_blocks):
    rig = Rig(num_blocks=num_blocks, max_model_len=24, **KINDS[kind])
    for prompt, salt in prompts:
        if rig.scheduler.kv.states is not None:
            rig.scheduler.kv.states.cache_saved_snapshots()
        before = traces(rig)
        asked = PromptHashes(prompt, salt)
        found = rig.scheduler.kv.num_cached_tokens(asked)
        assert rig.scheduler.kv.num_cached_tokens(asked) == found
        assert traces(rig) == before
        request = rig.add(prompt, max_tokens=4, salt=salt)
        rig.finish_all(request)
        assert request.num_cached_tokens == found


@pytest.mark.parametrize("kind", KINDS)
def test_prefix_hit_needs_all_groups_and_a_state(kind):
    """And not as far as one group alone does."""
    rig = Rig(num_blocks=60, max_model_len=64, **KINDS[kind])
    rng = random.Random(0)
    shared = [rng.randrange(9) for _ in range(12)]
    # The second saves the state where the first and the second part.
    for end in (1, 2):
        rig.finish_all(rig.add([*shared, *[end] * 8], max_tokens=1))
    size = {"full": 3}.get(kind, 4)
    found = rig.scheduler.kv.num_cached_tokens(PromptHashes([*shared, 5, 5, 5, 5]))
    assert 12 - size < found <= 12
    assert rig.scheduler.kv.num_cached_tokens(PromptHashes([*shared, 5, 5], "salt")) == 0
    assert rig.scheduler.kv.num_cached_tokens(PromptHashes(shared)) <= 11
    assert rig.scheduler.kv.num_cached_tokens(PromptHashes([])) == 0


def test_the_least_of_several_groups_counts():
    rig = Rig(num_blocks=60, max_model_len=64, block_size=(4, 2))
    rig.finish_all(rig.add(range(12), max_tokens=1))
    kv, tokens = rig.scheduler.kv, PromptHashes(range(12))
    assert kv.num_cached_tokens(tokens) == 8
    assert kv.num_cached_tokens(PromptHashes([*range(7), 99, 99])) == 4
    second = kv.groups[1]
    block = kv.pool.find(tokens.extend_hashes(2)[2] + second._hash_suffix)
    assert block is not None
    kv.pool.uncache_block(block)
    assert kv.num_cached_tokens(tokens) == 4


def test_without_a_prefix_cache_nothing_is_cached():
    rig = Rig(caching=False)
    rig.finish_all(rig.add(range(12), max_tokens=1))
    assert rig.scheduler.kv.num_cached_tokens(PromptHashes(range(12))) == 0


# --- through the engine ------------------------------------------------------------------


async def test_engine_reports_cached_prefix():
    engine = fake_engine("an answer", block_size=4)
    with pytest.raises(EngineClosedError):
        engine.cached_prefix([1, 2, 3])
    async with engine:
        prompt = list(range(40, 60))
        assert engine.cached_prefix(prompt) == 0
        steps = engine.stats().num_steps
        assert engine.stats().num_requests == 0
        await engine.generate(prompt, cache_salt="mine")
        assert engine.stats().num_steps > steps
        assert engine.cached_prefix(prompt) == engine.cached_prefix(prompt, "yours") == 0
        assert engine.cached_prefix(prompt, "mine") == 16
        assert engine.cached_prefix([*prompt, 1], cache_salt="mine") == 20
        assert engine.cached_prefix([1, *prompt], "mine") == 0
        done = await engine.generate([*prompt, 1], cache_salt="mine")
        assert done.usage.cached_tokens == 20
        assert await engine.reset_prefix_cache()
        assert engine.cached_prefix(prompt, "mine") == 0
    with pytest.raises(EngineClosedError):
        engine.cached_prefix(prompt)


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        (("a text",), "token_ids"),
        (([1, -1],), "token_ids"),
        (([1, 10**6],), "token_ids"),
        (([{"role": "user"}],), "token_ids"),
        (([1] * 5000,), "token_ids"),
        (([1], 7), "cache_salt"),
        (([1], "\ud800"), "cache_salt"),
    ],
)
async def test_bad_arguments_are_named(arguments, param):
    async with fake_engine("") as engine:
        with pytest.raises(InvalidRequestError) as caught:
            engine.cached_prefix(*arguments)
        assert caught.value.param == param
        assert engine.cached_prefix([]) == 0


async def test_a_dead_engine_has_nothing_cached():
    async with fake_engine("an answer", block_size=4, fail_at={12: OSError("gone")}) as engine:
        await engine.generate([1] * 20)
        assert engine.cached_prefix([1] * 20) == 16
        with pytest.raises(EngineDeadError):
            await engine.generate([2] * 20)
        assert engine.cached_prefix([1] * 20) == 0


def test_the_synchronous_interface_has_it_too():
    with fake_llm("an answer", block_size=4) as llm:
        llm.generate([[1] * 20])
        assert llm.cached_prefix([1] * 20) == 16
        assert llm.cached_prefix([1] * 20, "salt") == 0


async def test_threads_ask_while_the_engine_publishes_and_evicts():
    """Every answer is a length that the prompt can have, and none takes a block."""
    engine = fake_engine("x" * 20, block_size=2, num_blocks=60, max_model_len=64, max_num_seqs=4)
    prompts = [[turn % 3] * 10 + [turn] * 20 for turn in range(12)]
    answers, errors, stop = set(), [], threading.Event()

    def ask():
        try:
            while not stop.is_set():
                answers.update(engine.cached_prefix(prompt) for prompt in prompts)
        except BaseException as error:
            errors.append(error)

    async with engine:
        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(3):
            await asyncio.gather(*(engine.generate(prompt) for prompt in prompts))
        stop.set()
        for thread in threads:
            await asyncio.to_thread(thread.join)
        check_scheduler(core_of(engine).scheduler)
        assert engine.stats().num_free_blocks == engine.stats().num_blocks
    assert not errors
    assert answers <= set(range(0, 30, 2))
    assert len(answers) > 2
