"""TokenLogprobs: packed numbers that become objects when they are read."""

from __future__ import annotations

import asyncio
import gc
import pickle

import numpy as np
import pytest
import torch

from asyncllm import AsyncLLMEngine
from asyncllm.gpu.sample.logprobs import token_logprobs
from asyncllm.outputs import Logprob, TokenLogprobs

TOP = (Logprob(7, -0.5, 1), Logprob(2, -1.25, 2))
WHOLE = TokenLogprobs(Logprob(9, -3.5, 3), TOP)


def make(count: int) -> TokenLogprobs:
    values = np.array([[-0.5, -1.25, -3.5]] * 2, dtype=np.float32)
    ids = np.array([[7, 2, 3]] * 2)
    return token_logprobs(values, ids, np.array([4, 9]), np.array([2, count]))[1]


@pytest.mark.parametrize("count", [0, 1, 2])
def test_row_has_sampled_token_and_requested_alternatives(count):
    entry = make(count)
    assert entry._num_top == count
    assert (entry.token_id, entry.logprob) == (9, -3.5)
    sampled, top = entry
    assert (sampled, top) == (Logprob(9, -3.5, 3), TOP[:count])
    assert (entry.sampled, entry.top, entry._num_top) == (sampled, top, count)


def test_no_row_gives_no_entry():
    """A request that asked for them may be sampled on the host, or have no token left."""
    values, ids = np.empty((0, 3), dtype=np.float32), np.empty((0, 3), dtype=np.int64)
    assert token_logprobs(values, ids, np.empty(0, dtype=np.int64), np.empty(0, dtype=int)) == []


def test_packed_and_given_ones_are_equal():
    assert make(2) == WHOLE
    assert hash(make(2)) == hash(WHOLE)
    assert make(1) != WHOLE
    assert repr(make(2)) == repr(WHOLE)
    assert repr(make(0)) == (
        "TokenLogprobs(sampled=Logprob(token_id=9, logprob=-3.5, rank=3), top=())"
    )
    assert pickle.loads(pickle.dumps(make(2))) == WHOLE


def test_unread_rows_are_one_gc_object():
    entry = make(2)
    assert not any(map(gc.is_tracked, gc.get_referents(entry)[:1]))
    (token_id, logprob), others = entry._ids_and_logprobs()
    assert (token_id, logprob, list(others)) == (9, -3.5, [one[:2] for one in TOP])
    assert isinstance(entry._content, bytes)


def identity(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    return logits


ASKED = [
    {"bad_words": ["a b c"]},
    {"logits_processors": [identity]},
    {"allowed_token_ids": [67], "bad_words": ["a"]},
]
"""Requests of which the device draws no token: two are sampled on the host, one has none left."""


@pytest.mark.asyncio
async def test_requests_that_the_device_draws_nothing_for_harm_no_other():
    async with AsyncLLMEngine() as engine:
        alone = await engine.generate("Tell me", seed=1, max_tokens=40, ignore_eos=True)
        for special in ASKED:
            neighbour = engine.stream("Tell me", seed=1, max_tokens=40, ignore_eos=True)
            fields = special | {
                "seed": 2,
                "max_tokens": 5,
                "ignore_eos": True,
                "request_id": "asked",
            }
            ask = engine.generate("Once", **fields)
            (without,) = await asyncio.gather(ask, return_exceptions=True)
            for count in (0, 2):
                ask = engine.generate("Once", logprobs=count, **fields)
                (found,) = await asyncio.gather(ask, return_exceptions=True)
                if isinstance(without, Exception):
                    assert repr(found) == repr(without)
                    assert "no token" in str(found)
                else:
                    assert found.token_ids == without.token_ids
                    assert [len(entry.top) for entry in found.logprobs] == [count] * 5
            assert (await neighbour.result()).token_ids == alone.token_ids
