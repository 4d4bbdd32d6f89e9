"""Which replica gets a prompt."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from asyncllm_ray.placement import Placement
from asyncllm_ray.prompts import prompt_hashes
from asyncllm_ray.router import PrefixRouter
from asyncllm_ray.wire import Call
from hypothesis import given
from hypothesis import strategies as st

from asyncllm import SamplingParams, Usage

IDLE = {"num_blocks": 1024, "accepts": True, "prompt_tokens_per_second": 1000.0}
STORY = "Once upon a time there was a boat, and in the boat there was Mia. " * 20


def make_call(prompt: Any, salt: str | None = None) -> Call:
    hashes, num_tokens = prompt_hashes(prompt, salt)
    return Call("", prompt, SamplingParams(), {}, 256, False, {}, False, num_tokens, hashes)


def usage(call: Call, cached: int = 0) -> Usage:
    return Usage(call.num_tokens, 1, cached, 0.0, 0.01, 0.02)


def send(placement: Placement, prompt: Any, replicas: dict[Any, Any], salt: Any = None) -> Any:
    call = make_call(prompt, salt)
    key = placement.choose(call, replicas)
    if call.placed is not None:
        call.placed.answered()
        call.placed.end(usage(call))
    return key


@pytest.mark.parametrize("prompt", [STORY, list(range(400)), [{"role": "user", "content": STORY}]])
def test_the_next_turn_goes_where_its_prefix_is(prompt: Any) -> None:
    placement, replicas = Placement(), dict.fromkeys("abcd", IDLE)
    first = send(placement, prompt, replicas)
    for number in range(3):
        send(placement, f"{number} something else", replicas)
    if isinstance(prompt, str):
        turn: Any = prompt + "And then?"
    elif isinstance(prompt[0], int):
        turn = [*prompt, 7, 8, 9]
    else:
        turn = [*prompt, {"role": "assistant", "content": "Yes."}]
    assert send(placement, turn, replicas) == first


def test_another_salt_is_no_hit() -> None:
    placement = Placement()
    call = make_call(STORY, "one")
    placement.choose(call, {"a": IDLE})
    assert call.placed is not None
    call.placed.end(usage(call))
    other = make_call(STORY, "two")
    placement.choose(other, {"a": IDLE})
    assert other.placed is not None
    assert other.placed._route.cached_tokens == 0


def test_load_outweighs_a_prefix() -> None:
    placement, replicas = Placement(), {"a": IDLE, "b": IDLE}
    first = send(placement, STORY, replicas)
    other = "b" if first == "a" else "a"
    replicas[first] = IDLE | {"num_queued_tokens": 5000}
    assert send(placement, STORY + "x", replicas) == other


def test_a_burst_spreads_although_statistics_are_old() -> None:
    placement, replicas = Placement(), dict.fromkeys("abcd", IDLE)
    calls = [make_call(f"{number} {STORY}") for number in range(8)]
    keys = [placement.choose(call, replicas) for call in calls]
    assert sorted(keys) == sorted("abcd" * 2)


def test_a_replica_that_is_gone_is_forgotten() -> None:
    placement = Placement()
    first = send(placement, STORY, {"a": IDLE, "b": IDLE})
    other = "b" if first == "a" else "a"
    assert send(placement, STORY, {other: IDLE}) == other
    assert send(placement, STORY + "x", {"a": IDLE, "b": IDLE}) == other


@given(st.lists(st.booleans(), min_size=1, max_size=6), st.integers(0, 5))
def test_a_replica_that_drains_is_never_chosen(open_ones: list[bool], turns: int) -> None:
    placement = Placement()
    replicas = {key: IDLE | {"accepts": is_open} for key, is_open in enumerate(open_ones)}
    for _ in range(turns + 1):
        key = send(placement, STORY, replicas)
        assert key is None if not any(open_ones) else open_ones[key]


async def test_the_router_ranks_the_chosen_first_and_leaves_out_those_that_drain() -> None:
    router = PrefixRouter.__new__(PrefixRouter)
    router.initialize_state()
    replicas: Any = [
        SimpleNamespace(replica_id=name, routing_stats=IDLE | {"accepts": name != "drains"})
        for name in ("drains", "one", "two")
    ]
    call = make_call(STORY)
    ranks = await router.choose_replicas(replicas, SimpleNamespace(args=[call]))  # pyright: ignore[reportArgumentType]
    assert call.placed is not None
    assert [[one.replica_id for one in rank] for rank in ranks] == [
        [call.placed.key],
        [({"one", "two"} - {call.placed.key}).pop()],
    ]
    other = SimpleNamespace(args=[SimpleNamespace()])
    [all_ranks] = await router.choose_replicas(replicas, other)  # pyright: ignore[reportArgumentType]
    assert {one.replica_id for one in all_ranks} == {"one", "two"}


def test_a_call_that_serve_sends_elsewhere_is_not_counted() -> None:
    router = PrefixRouter.__new__(PrefixRouter)
    router.initialize_state()
    call = make_call(STORY)
    key = router._placement.choose(call, {"a": IDLE, "b": IDLE})
    other: Any = "b" if key == "a" else "a"
    pending: Any = SimpleNamespace(args=[call])
    router.on_request_routed(pending, other, None)
    assert call.placed is None
    assert router._placement._index.find(call.hashes, 0.0) == {}


async def test_a_call_crosses_without_the_routers_record() -> None:
    import pickle

    call = make_call(STORY)
    Placement().choose(call, {"a": IDLE})
    assert call.placed is not None
    found = pickle.loads(pickle.dumps(call))
    assert (found.prompt, found.placed, found.hashes) == (STORY, None, ())
