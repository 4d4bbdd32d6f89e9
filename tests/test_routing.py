"""Routing and its prefix index against plain models."""

from __future__ import annotations

import itertools
import math
import pickle
import random
import statistics
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from asyncllm.errors import EngineClosedError, EngineOverloadedError, InvalidRequestError
from asyncllm.outputs import EngineStats
from asyncllm.routing import (
    TEXT_PIECE_CHARACTERS,
    Candidate,
    PrefixIndex,
    Router,
    block_hashes,
    text_hashes,
)
from benchmarks.routing import Simulation
from tests.hypothesis_settings import STEPS, examples

RATE = 1000.0


def engines(count, **stats):
    known = replace(EngineStats(prompt_tokens_per_second=RATE), **stats)
    return [Candidate(key, known) for key in range(count)]


def keys_of(router, candidates, count, num_tokens=100):
    return [router.choose(candidates, num_tokens).key for _ in range(count)]


# --- the choice --------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 5])
def test_ties_go_round(count):
    router, candidates = Router(), engines(count)
    for _ in range(3):
        routes = [router.choose(candidates, 100) for _ in range(count)]
        assert sorted(route.key for route in routes) == list(range(count))
        for route in routes:
            router.settle(route)


def test_the_expected_time_is_of_the_tokens_before():
    """By the engine's rate: of what the prompt lacks, what is queued, and who runs."""
    (one,) = engines(1, num_queued_tokens=300, num_running=2)
    one.cached_tokens = 64
    route = Router().choose([one], 100)
    assert (route.key, route.num_tokens, route.cached_tokens) == (0, 100, 64)
    assert route.seconds == pytest.approx((36 + 300 + 2 * 32) / RATE)
    one.cached_tokens = 1000
    assert Router().choose([one], 100).cached_tokens == 99
    one.missing_tokens = 20
    assert Router().choose([one], 100).seconds == pytest.approx((1 + 20 + 300 + 2 * 32) / RATE)


@pytest.mark.parametrize(
    ("busy", "idle", "cached", "chosen"),
    [
        ({"num_queued_tokens": 500}, {}, 0, 1),
        ({"num_queued_tokens": 500}, {}, 600, 0),
        ({"num_queued_tokens": 500}, {}, 499, 1),
        ({"num_running": 10}, {}, 0, 1),
        ({"num_running": 10}, {}, 321, 0),
        ({"num_running": 10}, {}, 319, 1),
        ({"prompt_tokens_per_second": RATE / 4}, {}, 0, 1),
        ({"prompt_tokens_per_second": RATE / 4}, {}, 900, 0),
        # Rates of equal engines differ by what they computed lately.
        ({"prompt_tokens_per_second": RATE / 1.2}, {}, 1, 0),
        # Unknown, and impossible ones, count as usual.
        ({"prompt_tokens_per_second": 0.0}, {}, 1, 0),
        ({"prompt_tokens_per_second": -1.0}, {"num_queued_tokens": 2}, 0, 0),
        ({"prompt_tokens_per_second": math.nan}, {"num_queued_tokens": 2}, 0, 0),
        ({"prompt_tokens_per_second": math.inf, "num_queued_tokens": 9000}, {}, 0, 1),
        ({"num_running": math.nan, "num_queued_tokens": math.nan}, {"num_running": 1}, 0, 0),
    ],
)
def test_a_prefix_weighs_as_much_as_computing_it(busy, idle, cached, chosen):
    candidates = engines(3, num_queued_tokens=5000)
    candidates[0].stats = replace(EngineStats(prompt_tokens_per_second=RATE), **busy)
    candidates[1].stats = replace(EngineStats(prompt_tokens_per_second=RATE), **idle)
    candidates[0].cached_tokens = cached
    assert Router().choose(candidates, 1000).key == chosen


def test_candidate_without_free_blocks_must_be_worth_the_wait():
    candidates = engines(2)
    candidates[0].missing_tokens = 300
    assert keys_of(Router(), candidates, 1, 1000) == [1]
    candidates[0].cached_tokens = 299
    assert keys_of(Router(), candidates, 1, 1000) == [1]
    candidates[0].cached_tokens = 301
    assert keys_of(Router(), candidates, 1, 1000) == [0]
    candidates[1].missing_tokens = 300
    candidates[0].cached_tokens = 0
    assert sorted(keys_of(Router(), candidates, 2, 1000)) == [0, 1]


def changed(**fields):
    """Two candidates, of which the second has these fields."""
    candidates = engines(2)
    candidates[1] = replace(candidates[1], **fields)
    return candidates


INDEX = PrefixIndex(10)
BAD_ARGUMENTS = {
    "num_tokens": [
        lambda bad=bad: Router().choose(engines(2), bad)
        for bad in (0, -1, 2.5, math.nan, "9", None)
    ],
    "candidates": [
        lambda: Router().choose(5, 9),
        lambda: Router().choose("ab", 9),
        lambda: Router().choose(changed(key=0), 9),
        lambda: Router().choose(changed(key=[]), 9),
    ],
    "candidates[1]": [lambda: Router().choose([*engines(1), 3], 9)],
    "candidates[1].stats": [lambda: Router().choose(changed(stats=None), 9)],
    **{
        f"candidates[1].{name}": [
            lambda name=name, bad=bad: Router().choose(changed(**{name: bad}), 9)
            for bad in (-1, math.nan, math.inf, None, "4")
        ]
        for name in ("cached_tokens", "missing_tokens", "retry_after")
    },
    "route": [lambda: Router().settle(3), lambda: Router().settle(None, 1)],
    "cached_tokens": [
        lambda bad=bad: Router().settle(Router().choose(engines(1), 9), bad)
        for bad in (-1, math.nan, "4")
    ],
    "block_size": [lambda bad=bad: block_hashes([1], bad) for bad in (0, -4, None, 2.0)],
    "token_ids": [lambda bad=bad: block_hashes(bad, 1) for bad in ([-1], [1 << 32], ["a"], 7)],
    "cache_salt": [lambda: block_hashes([1], 1, 5), lambda: text_hashes("a", b"b")],
    "text": [lambda: text_hashes(None), lambda: text_hashes(b"text")],
    "max_blocks": [lambda bad=bad: PrefixIndex(bad) for bad in (0, -1, 1.5, None)],
    "max_age": [lambda bad=bad: PrefixIndex(9, bad) for bad in (0, -1.0, math.nan, "9")],
    "hashes": [
        lambda: INDEX.find("ab", 0.0),
        lambda: INDEX.find([1], 0.0),
        lambda: INDEX.add("a", None, 0.0),
    ],
    "now": [lambda bad=bad: INDEX.add("a", [b"1"], bad) for bad in (math.nan, None, "0")],
    "sent": [lambda: INDEX.correct(None, 1), lambda: INDEX.withdraw("a")],
    "num_blocks": [
        lambda bad=bad: INDEX.correct(INDEX.add("a", [b"1"], 0.0), bad) for bad in (-1, 0.5, None)
    ],
}


@pytest.mark.parametrize("param", BAD_ARGUMENTS)
def test_an_argument_that_cannot_be_used_is_named(param):
    for call in BAD_ARGUMENTS[param]:
        with pytest.raises(InvalidRequestError) as caught:
            call()
        assert caught.value.param == param
        assert str(caught.value).startswith(param + "=")


def test_a_full_engine_is_not_chosen_while_another_has_room():
    candidates = engines(3, num_queued_tokens=9000)
    candidates[0] = Candidate(0, EngineStats(), 99, retry_after=0.25)
    candidates[1] = Candidate(1, EngineStats(), 99, retry_after=4.0)
    assert keys_of(Router(), candidates, 3) == [2, 2, 2]
    candidates[2].retry_after = 3.0
    with pytest.raises(EngineOverloadedError, match=r"3 engines are full.* 0\.25 s") as caught:
        Router().choose(candidates, 100)
    assert caught.value.retry_after == 0.25


def test_dead_and_paused_engines_are_excluded():
    candidates = engines(3)
    candidates[0].alive = False
    candidates[1].stats = replace(candidates[1].stats, is_paused=True)
    router = Router()
    assert keys_of(router, candidates, 4) == [2, 2, 2, 2]
    candidates[2].retry_after = 1.0
    with pytest.raises(EngineOverloadedError, match="1 engines"):
        router.choose(candidates, 100)
    candidates[2].alive = False
    # Nobody but the paused: its queue waits, as that of a single paused engine does.
    assert router.choose(candidates, 100).key == 1
    candidates[1].alive = False
    with pytest.raises(EngineClosedError, match="none of 3 engines accepts requests"):
        router.choose(candidates, 100)
    with pytest.raises(EngineClosedError, match="none of 0 engines"):
        router.choose([], 100)


def test_a_burst_spreads_although_the_statistics_are_old():
    router, candidates = Router(), engines(4)
    candidates[0].cached_tokens = 90
    routes = [router.choose(candidates, 100) for _ in range(400)]
    counts = Counter(route.key for route in routes)
    # Ten tokens there and a hundred elsewhere, beside 32 for each that runs.
    assert counts[0] > counts[1] > 0
    work = Counter()
    for route in routes:
        work[route.key] += route.num_tokens - route.cached_tokens + 32
    assert max(work.values()) <= 1.3 * sum(work.values()) / 4
    for route in routes:
        router.settle(route)
        router.settle(route)
    assert all(load.num_uncached == load.num_requests == 0 for load in router._loads.values())


def test_requests_in_statistics_are_not_counted_twice():
    router, (one,) = Router(), engines(1)
    first = router.choose([one], 100)
    one.stats = replace(one.stats, num_queued_tokens=100, num_running=0)
    seconds = router.choose([one], 100).seconds
    assert seconds == pytest.approx((100 + 100 + 32) / RATE)
    one.stats = replace(one.stats, num_queued_tokens=250, num_running=7)
    router.settle(first)
    assert router.choose([one], 10).seconds == pytest.approx((10 + 250 + 7 * 32) / RATE)


@given(st.integers(1, 8), st.integers(1, 3000), st.integers(1, 300))
@examples(30)
def test_a_conversation_stays_where_its_prefix_is(count, first, more):
    router, candidates = Router(), engines(count)
    home = router.choose(candidates, first)
    router.settle(home, 0)
    length = first
    for _ in range(43):
        candidates[home.key].cached_tokens = length
        length += more
        route = router.choose(candidates, length)
        assert route.key == home.key
        router.settle(route, route.cached_tokens)


@given(
    count=st.integers(2, 8),
    num_prefixes=st.integers(1, 12),
    prefix=st.integers(1, 1000),
    own=st.integers(125, 200),
    seed=st.integers(0, 99),
)
@examples(8)
def test_loads_are_even_under_skewed_prefixes(count, num_prefixes, prefix, own, seed):
    """Of requests that come one at a time, so that no queue tells them apart."""
    rng, router, candidates = random.Random(seed), Router(), engines(count)
    cached = {}
    loads = Counter()
    weights = [1 / (rank + 1) for rank in range(num_prefixes)]
    for turn in range(3000):
        (begin,) = rng.choices(range(num_prefixes), weights)
        for one in candidates:
            one.cached_tokens = cached.get((one.key, begin), 0)
        route = router.choose(candidates, prefix + own)
        router.settle(route, route.cached_tokens)
        cached[route.key, begin] = prefix
        if turn >= 1800:
            loads[route.key] += route.num_tokens - route.cached_tokens
    assert max(loads.values()) <= 1.3 * sum(loads.values()) / count


def test_claims_that_prove_false_are_believed_less():
    router, candidates = Router(), engines(2)
    candidates[0].cached_tokens = 1000
    for _ in range(40):
        route = router.choose(candidates, 1000)
        router.settle(route, 0 if route.key == 0 else route.cached_tokens)
    last = [router.choose(candidates, 1000) for _ in range(20)]
    assert Counter(route.key for route in last)[1] >= 8
    # And again once they are true.
    for route in last:
        router.settle(route)
    for _ in range(40):
        router.settle(router.choose(candidates[:1], 1000), 1000)
    assert router.choose(candidates[:1], 1000).cached_tokens >= 950


def test_a_request_without_a_token_proves_nothing():
    router, candidates = Router(), engines(1)
    candidates[0].cached_tokens = 100
    router.settle(router.choose(candidates, 100))
    assert router.choose(candidates, 200).cached_tokens == 100


def test_removed_engine_leaves_the_index():
    router, candidates = Router(), engines(1)
    lost = router.choose(candidates, 700)
    router.forget(0)
    router.forget("unknown")
    assert router.choose(candidates, 100).seconds == pytest.approx(100 / RATE)
    router.settle(lost)
    assert router._loads[0].num_uncached == 100


def test_the_weights_of_the_latest_choices_stay_numbers():
    router, candidates = Router(), engines(2)
    router._decay_weight = 999_000.0
    for _ in range(2000):
        router.settle(router.choose(candidates, 100))
    assert 1.0 <= router._decay_weight <= 1e6
    assert statistics.mean(one.recent_uncached for one in router._loads.values()) < 1e13
    assert set(keys_of(router, candidates, 2)) == {0, 1}


def test_a_candidate_can_be_pickled():
    one = Candidate("host:1", EngineStats(num_running=3), 64, 0.5, False)
    assert pickle.loads(pickle.dumps(one)) == one


# --- the choice against a plain model ----------------------------------------------------

COUNTS = st.sampled_from([0, 1, 100, 5000, 10**12])
NUMBERS = COUNTS | st.just(-7)
RATES = st.sampled_from([RATE, RATE, 1.2 * RATE, 5 * RATE, 0.0, -1.0, 1e30, math.nan, math.inf])


class RouterMachine(RuleBasedStateMachine):
    """Engines that come, go, die, pause, are full and lie in their numbers. The model keeps every
    request that was ever sent, and adds up from the first."""

    @initialize(count=st.integers(0, 4))
    def begin(self, count):
        self.router, self.new_key = Router(), itertools.count()
        self.candidates, self.under_way = [], []
        self.recent, self.trust = {}, {}
        for _ in range(count):
            self.add()

    @rule()
    def add(self):
        stats = EngineStats(prompt_tokens_per_second=RATE)
        self.candidates.append(Candidate(next(self.new_key), stats))

    def _pick(self, data):
        return data.draw(st.sampled_from(self.candidates))

    @precondition(lambda self: self.candidates)
    @rule(data=st.data())
    def remove(self, data):
        one = self._pick(data)
        self.candidates.remove(one)
        self.router.forget(one.key)
        self.recent.pop(one.key, None)

    @precondition(lambda self: self.candidates)
    @rule(data=st.data(), alive=st.booleans(), paused=st.booleans(), wait=st.floats(0, 9))
    def change(self, data, alive, paused, wait):
        one = self._pick(data)
        one.alive, one.retry_after = alive, wait if wait > 4 else 0.0
        one.stats = replace(one.stats, is_paused=paused)

    @precondition(lambda self: self.candidates)
    @rule(
        data=st.data(), queued=NUMBERS, running=NUMBERS, cached=COUNTS, missing=COUNTS, rate=RATES
    )
    def say(self, data, queued, running, cached, missing, rate):
        one = self._pick(data)
        one.cached_tokens, one.missing_tokens = cached, missing
        one.stats = replace(
            one.stats,
            num_queued_tokens=queued,
            num_running=running,
            prompt_tokens_per_second=rate,
        )

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), share=st.sampled_from([None, 0.0, 0.5, 1.0, 2.0]))
    def settle(self, data, share):
        route, claimed = data.draw(st.sampled_from(self.under_way))
        self.under_way.remove((route, claimed))
        self.router.settle(route, None if share is None else int(share * claimed))
        if share is not None and claimed > 0:
            before = self.trust.get(route.key, 1.0)
            found = min(int(share * claimed) / claimed, 1.0)
            self.trust[route.key] = before + (found - before) / 8

    @rule(num_tokens=st.sampled_from([1, 50, 4000]))
    def choose(self, num_tokens):
        living = [one for one in self.candidates if one.alive]
        running = [one for one in living if not one.stats.is_paused] or living
        ready = [one for one in running if not one.retry_after]
        if not ready:
            kind = EngineOverloadedError if living else EngineClosedError
            with pytest.raises(kind) as caught:
                self.router.choose(self.candidates, num_tokens)
            if living:
                assert caught.value.retry_after == min(one.retry_after for one in running)
            return
        known = [sum(self.recent[one.key]) for one in ready if one.key in self.recent]
        for one in ready:
            self.recent.setdefault(one.key, [statistics.mean(known) if known else 0.0])
        expected = {one.key: self._expect(one, ready, num_tokens) for one in ready}
        route = self.router.choose(self.candidates, num_tokens)
        assert route.seconds == pytest.approx(expected[route.key], rel=1e-6)
        assert route.seconds <= min(expected.values()) * (1 + 1e-6)
        (chosen,) = [one for one in ready if one.key == route.key]
        self.under_way.append((route, chosen.cached_tokens))
        for times in self.recent.values():
            times[:] = [left / (1 + 1 / (256 * len(ready))) for left in times]
        self.recent[route.key].append(num_tokens - self._hit(chosen, num_tokens))

    def _hit(self, one, num_tokens):
        trusted = int(one.cached_tokens * self.trust.get(one.key, 1.0))
        return min(trusted, num_tokens - 1)

    def _expect(self, one, ready, num_tokens):
        sent = [route for route, _ in self.under_way if route.key == one.key]
        work = num_tokens - self._hit(one, num_tokens) + one.missing_tokens
        work += sum(route.num_tokens - route.cached_tokens for route in sent)
        work += max(0, one.stats.num_queued_tokens - sum(route.num_tokens for route in sent))
        work += 32 * max(one.stats.num_running, len(sent))
        mean = statistics.mean(sum(self.recent[other.key]) for other in ready)
        work += 0.5 * max(0.0, sum(self.recent[one.key]) - mean)
        said = [other.stats.prompt_tokens_per_second for other in ready]
        known = [rate for rate in said if 0 < rate < math.inf]
        usual = statistics.median(known) if known else 1.0
        rate = one.stats.prompt_tokens_per_second
        if not rate > 0 or usual / 1.5 < rate < usual * 1.5:
            rate = usual
        return work / min(max(rate, usual / 8), usual * 8)


RouterMachine.TestCase.settings = examples(30, **STEPS)
TestRouterAgainstAPlainModel = RouterMachine.TestCase


# --- many replicas on virtual time -------------------------------------------------------


@pytest.mark.slow
def test_simulated_conversations_hit_as_with_an_oracle_router():
    """The benchmark's replicas, and few of them; their time is virtual, so figures are exact."""
    names = ("round robin", "load alone", "routed", "all-knowing")
    done = {name: Simulation(name, 12, 40, 12) for name in names}
    for simulation in done.values():
        simulation.run()
        assert len(simulation.waits) == 40 * 12
        stats = [replica.core.stats() for replica in simulation.replicas]
        assert sum(one.num_finished for one in stats) == 40 * 12
        assert sum(one.prefix_cache_hits for one in stats) == simulation.num_cached_tokens
    ours, best = done["routed"], done["all-knowing"]
    assert ours.hit_rate >= 0.9 * best.hit_rate
    assert ours.p99 <= 1.2 * best.p99
    for name in names[:2]:
        assert ours.hit_rate > 1.5 * done[name].hit_rate
        assert ours.p99 < done[name].p99
        assert statistics.median(ours.waits) < 0.5 * statistics.median(done[name].waits)


# --- hashes ------------------------------------------------------------------------------


def test_prompts_share_hashes_up_to_where_they_differ():
    one, other = block_hashes(range(10), 3), block_hashes([*range(7), 9, 9, 9], 3)
    assert len(one) == len(other) == 3
    assert one[:2] == other[:2]
    assert one[2] != other[2]
    assert block_hashes(range(2), 3) == []


@pytest.mark.parametrize("hash_it", [lambda salt: block_hashes(range(9), 3, salt),
                                     lambda salt: text_hashes("x" * 5000, salt)])  # fmt: skip
def test_salts_have_no_hash_in_common(hash_it):
    hashes = [set(hash_it(salt)) for salt in (None, "", "a", "b")]
    assert all(one and not one & other for one, other in itertools.combinations(hashes, 2))
    assert hash_it("a") == hash_it("a")
    index = PrefixIndex(10)
    index.add(0, hash_it("a"), 0.0)
    assert index.find(hash_it("a"), 0.0) == {0: len(hash_it("a"))}
    assert index.find(hash_it("b"), 0.0) == index.find(hash_it(None), 0.0) == {}


def test_text_has_a_hash_per_whole_prefix_piece():
    text = "ab" * TEXT_PIECE_CHARACTERS
    assert text_hashes("a" * (TEXT_PIECE_CHARACTERS - 1)) == []
    assert len(text_hashes(text)) == 2
    assert text_hashes(text + "more") == text_hashes(text)
    assert text_hashes(text[: TEXT_PIECE_CHARACTERS + 9])[0] == text_hashes(text)[0]
    assert text_hashes("b" + text)[0] != text_hashes(text)[0]
    assert text_hashes("x" + text[1:])[1] != text_hashes(text)[1]
    assert len(text_hashes("\ud800é" * 10**6)) == 32


# --- the index of what was sent ----------------------------------------------------------


def test_index_has_prompt_overlap_per_engine():
    index = PrefixIndex(100)
    tokens = list(range(40))
    index.add("a", block_hashes(tokens, 4), 0.0)
    index.add("b", block_hashes(tokens[:20], 4), 0.0)
    index.add("c", block_hashes([7, *tokens], 4), 0.0)
    assert index.find(block_hashes(tokens, 4), 0.0) == {"a": 10, "b": 5}
    assert index.find(block_hashes([*tokens[:15], 99], 4), 0.0) == {"a": 3, "b": 3}
    assert index.find(block_hashes([1, 2, 3, 4], 4), 0.0) == {}
    assert index.find([], 0.0) == {}
    index.forget("a")
    assert index.find(block_hashes(tokens, 4), 0.0) == {"b": 5}


def test_eviction_is_lru_and_tails_first():
    index = PrefixIndex(6)
    first, second = block_hashes(range(4), 1), block_hashes(range(10, 14), 1)
    index.add("a", first, 0.0)
    index.add("a", second, 0.0)
    assert (index.find(first, 0.0), index.find(second, 0.0)) == ({"a": 2}, {"a": 4})
    index.add("a", first[:1], 0.0)
    index.add("a", block_hashes(range(20, 25), 1), 0.0)
    assert (index.find(first, 0.0), index.find(second, 0.0)) == ({"a": 1}, {})
    long = block_hashes(range(30, 40), 1)
    index.add("a", long, 0.0)
    assert index.find(long, 0.0) == {"a": 6}
    assert len(index._keys_by_block) == 6


def test_old_entries_expire():
    index = PrefixIndex(100, max_age=10.0)
    hashes = block_hashes(range(4), 1)
    index.add("a", hashes, 0.0)
    index.add("a", hashes[:2], 6.0)
    assert index.find(hashes, 10.0) == {"a": 4}
    assert index.find(hashes, 10.5) == {"a": 2}
    assert index.find(hashes, 16.5) == {}
    index.add("a", block_hashes([9], 1), 16.5)
    assert len(index._keys_by_block) == 1


def test_missing_prefix_means_older_ones_were_evicted():
    index = PrefixIndex(100)
    hashes = [block_hashes(range(10 * i, 10 * i + 3), 1) for i in range(4)]
    for one in hashes[:3]:
        index.correct(index.add("a", one, 0.0), 0)
    index.correct(index.add("b", hashes[0], 0.0), 0)
    sent = index.add("a", hashes[1], 0.0)
    index.add("a", hashes[3], 0.0)
    index.correct(sent, 3)
    assert [index.find(one, 0.0).get("a", 0) for one in hashes] == [3, 3, 3, 3]
    index.correct(index.add("a", hashes[2], 0.0), 1)
    # The second was sent after it; the first was not, and another engine has nothing to do with it.
    assert [index.find(one, 0.0).get("a", 0) for one in hashes] == [0, 3, 3, 3]
    assert index.find(hashes[0], 0.0) == {"b": 3}


def test_prefix_being_computed_is_not_evicted():
    index = PrefixIndex(100)
    old, hashes = block_hashes(range(50, 53), 1), block_hashes(range(3), 1)
    index.correct(index.add("a", old, 0.0), 0)
    first = index.add("a", hashes, 0.0)
    index.correct(index.add("a", hashes, 0.0), 0)
    assert index.find(old, 0.0) == index.find(hashes, 0.0) == {"a": 3}
    index.correct(first, 0)
    assert index._pending_stamps == set()


def test_a_prompt_that_was_not_computed_is_withdrawn():
    index = PrefixIndex(100)
    hashes = block_hashes(range(6), 1)
    index.correct(index.add("a", hashes[:2], 0.0), 0)
    index.withdraw(index.add("a", hashes, 0.0))
    assert index.find(hashes, 0.0) == {"a": 2}
    lost = index.add("a", hashes[:4], 0.0)
    index.add("a", hashes[:3], 0.0)
    index.withdraw(lost)
    assert index.find(hashes, 0.0) == {"a": 3}
    index.forget("a")
    index.withdraw(lost)
    assert index.find(hashes, 0.0) == {}


class IndexMachine(RuleBasedStateMachine):
    """The model has, for each engine, a list of blocks in order of use, and looks at each block."""

    @initialize(size=st.integers(1, 8), age=st.sampled_from([math.inf, 3.0]))
    def begin(self, size, age):
        self.index, self.size, self.age = PrefixIndex(size, age), size, age
        self.now, self.stamp = 0.0, 0
        self.held, self.under_way = {}, []

    @rule(seconds=st.sampled_from([0.5, 2.0]))
    def wait(self, seconds):
        self.now += seconds

    @rule(key=st.integers(0, 2), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=10))
    def add(self, key, tokens):
        hashes = block_hashes(tokens, 1)[: self.size]
        held = self.held.setdefault(key, {})
        for one in [one for one, (_, at) in held.items() if self.now - at > self.age]:
            del held[one]
        self.stamp += 1
        stamps = {sent.stamp for sent, _ in self.under_way}
        known = list(itertools.takewhile(held.__contains__, hashes))
        found = [0 if held[one][0] in stamps else held[one][0] for one in known]
        for one in reversed(hashes):
            held.pop(one, None)
            held[one] = self.stamp, self.now
        for one in list(held)[: max(0, len(held) - self.size)]:
            del held[one]
        sent = self.index.add(key, block_hashes(tokens, 1), self.now)
        assert (sent.key, sent.hashes, sent.known_stamps) == (key, hashes, found)
        self.under_way.append((sent, hashes))

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), count=st.integers(0, 10))
    def correct(self, data, count):
        sent, hashes = data.draw(st.sampled_from(self.under_way))
        self.under_way.remove((sent, hashes))
        self.index.correct(sent, count)
        held = self.held.get(sent.key, {})
        if count < len(sent.known_stamps):
            for one in [one for one, (at, _) in held.items() if at <= sent.known_stamps[count]]:
                del held[one]

    @precondition(lambda self: self.under_way)
    @rule(data=st.data())
    def withdraw(self, data):
        sent, hashes = data.draw(st.sampled_from(self.under_way))
        self.under_way.remove((sent, hashes))
        self.index.withdraw(sent)
        held = self.held.get(sent.key, {})
        for one in hashes[len(sent.known_stamps) :]:
            if held.get(one, (0, 0.0))[0] == sent.stamp:
                del held[one]

    @rule(key=st.integers(0, 3))
    def forget(self, key):
        self.index.forget(key)
        self.held.pop(key, None)

    @rule(tokens=st.lists(st.integers(0, 1), max_size=10))
    def find(self, tokens):
        hashes = block_hashes(tokens, 1)
        expected = {}
        for key, held in self.held.items():
            young = {one for one, (_, at) in held.items() if self.now - at <= self.age}
            expected[key] = len(list(itertools.takewhile(young.__contains__, hashes)))
        found = self.index.find(hashes, self.now)
        assert found == {key: count for key, count in expected.items() if count}
        assert sum(map(len, self.index._keys_by_block.values())) == sum(
            map(len, self.held.values())
        )


IndexMachine.TestCase.settings = examples(40, **STEPS)
TestIndexAgainstAPlainModel = IndexMachine.TestCase


def test_joining_engine_keeps_requests_at_cached_prefixes():
    router, candidates = Router(), engines(3)
    for _ in range(300):
        router.settle(router.choose(candidates[:2], 1000))
    candidates[0].cached_tokens = 900
    assert router.choose(candidates, 1000).key == 0
