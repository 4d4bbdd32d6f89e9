"""Tokens of a group of engines on the packaged model."""

from __future__ import annotations

import asyncio

import pytest

from asyncllm import AsyncLLMEngine, EngineGroup, beam_search
from tests.packaged_group import SETTINGS

pytestmark = pytest.mark.asyncio(loop_factories=["asyncio"])

TEXTS = ["Mia has a boat.", "The cat", "Once upon a time there was", "Tom and Mia"]
WAYS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "seed": 5},
    "several": {"temperature": 1.0, "seed": 5, "n": 3},
    "logprobs": {"temperature": 0.8, "seed": 6, "logprobs": 2},
}


def tokens(completion):
    return [output.token_ids for output in completion.outputs]


async def test_tokens_are_equal_on_any_engine_and_batch():
    async with EngineGroup([AsyncLLMEngine(**SETTINGS) for _ in range(2)]) as group:
        alone = {
            (number, text, way): tokens(await engine.generate(text, max_tokens=12, **options))
            for number, engine in group.engines.items()
            for text in TEXTS
            for way, options in WAYS.items()
        }
        streams = {
            (text, way): group.stream(text, max_tokens=12, **options)
            for text in TEXTS
            for way, options in WAYS.items()
        }
        assert {stream._group.engine for stream in streams.values()} == {0, 1}
        for (text, way), stream in streams.items():
            found = tokens(await stream.result())
            assert found == alone[0, text, way] == alone[1, text, way]
        assert group.stats().num_finished == 3 * len(TEXTS) * len(WAYS)


async def test_group_chat_and_beams_equal_an_engines():
    messages = [{"role": "user", "content": "Tell me a story about Mia."}]
    async with EngineGroup([AsyncLLMEngine(**SETTINGS) for _ in range(2)]) as group:
        engine = group.engines[0]
        chats = [group.chat(messages, max_tokens=9, temperature=0.0) for _ in range(4)]
        expected = await engine.chat(messages, max_tokens=9, temperature=0.0)
        for found in await asyncio.gather(*[chat.result() for chat in chats]):
            assert found.text == expected.text
        found, expected = [
            await beam_search(one, "Tom", beam_width=3, max_tokens=6) for one in (group, engine)
        ]
        assert [one.token_ids for one in found.outputs] == [
            one.token_ids for one in expected.outputs
        ]
