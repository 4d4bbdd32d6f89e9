"""allowed_token_ids and bad_words, prepared once for a request."""

from __future__ import annotations

import random
import threading
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncllm import EngineOverloadedError, InvalidRequestError
from asyncllm.core import waiting_texts
from asyncllm.core.batch import StepBatch
from asyncllm.core.request import Request
from asyncllm.core.token_rules import BadWords, TokenRules
from asyncllm.runtime import input_processor
from tests.driver import packed
from tests.fakes import fake, thread_of
from tests.idle import until
from tests.structured import ByteRig

TOKENS = st.lists(st.integers(0, 3), max_size=8)
WORDS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=6)


@given(output=TOKENS, words=WORDS, allowed=st.none() | st.sets(st.integers(0, 39), min_size=1))
def test_lists_exclude_their_names(
    output: list[int], words: list[list[int]], allowed: set[int] | None
) -> None:
    rules = TokenRules.create(None if allowed is None else sorted(allowed), words, 40)
    single = {word[0] for word in words if len(word) == 1}
    several = [word for word in words if len(word) > 1]
    if rules is None:
        assert (words, allowed) == ([], None)
        return
    after = [word[-1] for word in several if output[-len(word) + 1 :] == word[:-1]]
    if rules.bad_words is None:
        assert not several
    else:
        assert sorted(rules.bad_words.excluded_tokens(output)) == sorted(after)
    if allowed is None and not single:
        assert rules.allowed_mask is None
    else:
        left = (set(range(64)) if allowed is None else allowed) - single
        assert rules.allowed_mask == packed(left, 40)


def test_ids_outside_the_vocabulary_have_no_place() -> None:
    with pytest.raises(IndexError, match="64 is out of bounds"):
        TokenRules.create([1, 64], (), 40)


class Read(list[int]):
    """A list that counts the entries that are read one by one."""

    num_read = 0

    def __getitem__(self, index: Any) -> Any:
        self.num_read += 1
        return super().__getitem__(index)


def test_a_token_costs_no_look_at_every_bad_word() -> None:
    words = BadWords.create([(i, 2000) for i in range(1024)] + [(7, 8, 9)])
    assert words is not None
    output = Read([5] * 480)
    assert words.excluded_tokens(output) == [2000]
    assert output.num_read == 2
    assert sorted(words.excluded_tokens([7, 8])) == [9, 2000]


def test_bad_words_take_the_memory_of_their_tokens() -> None:
    draw = random.Random(1)
    words = [[draw.randrange(300, 60_000) for _ in range(64)] for _ in range(1024)]
    BadWords.create([(1, 2)])
    tracemalloc.start()
    try:
        kept = BadWords.create(words)
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept is not None
    assert kept.excluded_tokens([5, *words[3][:-1]]) == [words[3][-1]]
    assert num_bytes < 1024 * (4 * 63 + 200)


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_all_outputs_of_a_request_share_them() -> None:
    rig = fake()
    assigned = []
    launch = rig.executor.launch

    def watched(batch: StepBatch) -> None:
        assigned.extend(one.token_rules for one in batch.assignments)
        launch(batch)

    rig.executor.launch = watched
    async with rig.engine() as engine:
        await engine.generate([1, 2], max_tokens=2, n=3, temperature=1.0, allowed_token_ids=[5, 6])
        await engine.generate([1, 2], max_tokens=2)
    first, *others, plain = assigned
    assert first.allowed_mask == packed([5, 6], rig.executor.info.vocab_size)
    assert all(rules is first for rules in others)
    assert (len(others), plain) == (2, None)


# --- lists that take long --------------------------------------------------------------------


async def test_long_lists_are_prepared_on_another_thread_and_once(monkeypatch):
    threads: list[str] = []
    make = input_processor.bad_words_token_ids

    def note(words: Any, *args: Any) -> Any:
        if words:
            threads.append(threading.current_thread().name)
        return make(words, *args)

    monkeypatch.setattr(input_processor, "bad_words_token_ids", note)
    words = [f"word {i}" for i in range(100)]
    async with ByteRig().engine() as engine:
        for _ in range(3):
            assert (await engine.generate("x", bad_words=list(words), max_tokens=2)).text
        assert threads == ["asyncllm-text-short"]
        await engine.generate([65, 66], bad_words=words[1:], max_tokens=2)
        assert threads == ["asyncllm-text-short"] * 2
        await engine.generate("x", bad_words=words[:2], max_tokens=2)
        assert threads == ["asyncllm-text-short"] * 2 + [threading.current_thread().name]
        del threads[:]
        for short in (words[:9], ["a" * 129, "b" * 128], words[:8]):
            await engine.generate("x", bad_words=short, max_tokens=2)
        assert threads == ["asyncllm-text-short"] * 2 + [threading.current_thread().name]
        del threads[:]
        await engine.generate("x", bad_words=[f"{i}" for i in range(400)], max_tokens=1)
        assert threads == ["asyncllm-text"]
        for i in range(20):
            await engine.generate("x", bad_words=[*words, str(i)], max_tokens=1)
        assert len(engine._require_input_processor()._cached_token_rules) == 16
        with pytest.raises(InvalidRequestError, match="bad_words"):
            await engine.generate("x", bad_words=[*words, "  "], max_tokens=1)


async def test_long_token_list_is_applied_before_first_step(monkeypatch):
    monkeypatch.setattr(Request, "drop_long_params", lambda request, short: None)
    words = [f"none of these {i}" for i in range(100)] + [chr(i) for i in range(33, 127)]
    async with ByteRig().engine() as engine:
        for prompt in ("x", [65, 66]):
            stream = engine.stream(prompt, n=3, bad_words=words, max_tokens=4)
            members = list(stream._request.group.members)
            result = await stream.result()
            assert [len(output.token_ids) for output in result.outputs] == [4] * 3
            first = members[0].token_rules
            assert first is not None
            assert first.bad_words is not None
            assert first.allowed_mask is not None
            assert not any(first.allowed_mask[i >> 3] >> (i & 7) & 1 for i in range(34, 127))
            assert all(member.token_rules is first for member in members)
            words = words[1:]  # The next list is not cached.


async def test_rules_of_waiting_requests_count_once_for_equal_lists(monkeypatch):
    def words(i: int) -> list[str]:
        return [chr(0x1F300 + i) * 15 + chr(0x1F300 + j) for j in range(1024)]

    monkeypatch.setattr(waiting_texts, "MAX_WAITING_TEXT_BYTES", 2**22)
    async with ByteRig().engine() as engine:
        await engine.generate("x", bad_words=words(0), max_tokens=1)
        await engine.pause()
        streams, num_admitted = [], []
        for make_words in (lambda _: words(0), lambda i: words(i + 1)):
            num_admitted.append(0)
            with pytest.raises(EngineOverloadedError, match="bytes of long texts"):
                for i in range(30):
                    streams.append(engine.stream("x", bad_words=make_words(i)))
                    num_admitted[-1] += 1
            for stream in streams:
                stream.abort()
            await until(lambda: not thread_of(engine).core.admission.waiting_texts)
    # A list takes 143,360 bytes, and its rules count 786,432.
    assert num_admitted == [23, 4]
