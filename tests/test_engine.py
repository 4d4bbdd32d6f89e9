"""The public API on the fake executor: requests, results, errors, lifecycle."""

from __future__ import annotations

import asyncio
import copy
import gc
import itertools
import math
import pickle
import threading
from typing import Any

import numpy as np
import pytest

from asyncllm import (
    LLM,
    AsyncLLMEngine,
    Completion,
    ContextLengthExceededError,
    DeadlineExceededError,
    EngineClosedError,
    EngineConfig,
    EngineDeadError,
    EngineError,
    EngineOverloadedError,
    InvalidRequestError,
    ModelLoadError,
    RequestError,
    SamplingParams,
)
from asyncllm import validation as check
from asyncllm.callbacks import stream_with_callbacks
from asyncllm.llm import LLMStream
from asyncllm.testing import fake_engine
from tests.fakes import VOCAB_SIZE, core_of, entered, fake, text_of, thread_of


async def test_deltas_add_up_to_the_whole():
    rig = fake()
    expected = rig.executor.reference([1, 2, 3], 6)
    async with rig.engine() as engine:
        stream = engine.stream([1, 2, 3], max_tokens=6)
        deltas = [delta async for delta in stream]
    assert [t for d in deltas for t in d.token_ids] == expected
    assert "".join(map(str, deltas)) == text_of(expected)
    assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)
    last = deltas[-1]
    assert (last.finish_reason, last.stop_reason, last.index) == ("length", None, 0)
    assert last.usage is not None
    assert last.usage is stream.usage
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (3, 6)
    assert stream.finish_reason == "length"
    assert stream.prompt_token_ids == (1, 2, 3)


async def test_text_prompts_and_chat_are_tokenised():
    rig = fake()
    async with rig.engine() as engine:
        one = await engine.generate("7 8 9", max_tokens=3)
        # A stream that is awaited is its result.
        two = await engine.chat([{"role": "user", "content": "7 8 9"}], max_tokens=3)
    assert one.prompt_token_ids == two.prompt_token_ids == (7, 8, 9)
    assert list(one.token_ids) == list(two.token_ids) == rig.executor.reference([7, 8, 9], 3)


async def test_streams_made_one_after_the_other_run_as_one_batch():
    rig = fake(record=True)
    async with rig.engine() as engine:
        await engine.pause()
        streams = [engine.stream([i], max_tokens=4) for i in range(8)]
        await engine.resume()
        results = [await stream.result() for stream in streams]
    for i, result in enumerate(results):
        assert list(result.token_ids) == rig.executor.reference([i], 4)
    assert [len(batch) for batch in rig.executor.batches] == [8, 8, 8, 8]


async def test_stop_token_ends_without_its_text():
    rig = fake()
    tokens = rig.executor.reference([4, 4], 5)
    assert tokens.index(tokens[2]) == 2
    async with rig.engine() as engine:
        result = await engine.generate([4, 4], stop_token_ids=[tokens[2]])
        kept = await engine.generate(
            [4, 4], stop_token_ids=[tokens[2]], include_stop_str_in_output=True
        )
        late = await engine.generate(
            [4, 4], stop_token_ids=[tokens[0], tokens[3]], min_tokens=3, max_tokens=9
        )
    assert list(result.token_ids) == tokens[:3]
    assert result.text == text_of(tokens[:2])
    assert (result.finish_reason, result.stop_reason) == ("stop", tokens[2])
    assert kept.text == text_of(tokens[:3])
    assert list(late.token_ids) == tokens[:4]


async def test_eos_stops_unless_ignored_and_has_no_stop_reason():
    tokens = fake().executor.reference([4, 4], 5)
    async with fake(eos_token_ids=(tokens[2],)).engine() as engine:
        result = await engine.generate([4, 4])
        ignoring = await engine.generate([4, 4], ignore_eos=True, max_tokens=5)
    assert list(result.token_ids) == tokens[:3]
    assert (result.finish_reason, result.stop_reason) == ("stop", None)
    assert list(ignoring.token_ids) == tokens
    assert ignoring.finish_reason == "length"


async def test_stop_string_may_span_tokens_and_end_inside_one():
    rig = fake()
    tokens = rig.executor.reference([4, 4], 6)
    whole = text_of(tokens)
    cut = whole.index(str(tokens[2])) - 2
    stop = whole[cut : cut + 4]
    assert whole.index(stop) == cut
    async with rig.engine() as engine:
        stream = engine.stream([4, 4], stop=stop, max_tokens=6)
        deltas = [delta async for delta in stream]
        kept = await engine.generate(
            [4, 4], stop=stop, max_tokens=6, include_stop_str_in_output=True
        )
        held = await engine.generate([4, 4], stop=["never", whole[-1] + "x"], max_tokens=6)
    assert "".join(map(str, deltas)) == whole[:cut]
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", stop)
    assert [t for d in deltas for t in d.token_ids] == tokens[:3]
    assert kept.text == whole[:cut] + stop
    # What was held back as a possible stop string comes out at the end.
    assert held.text == whole


async def test_cached_tokens_are_reported_and_salted():
    prompt = list(range(20))
    async with fake(block_size=4).engine() as engine:
        usages = [
            (await engine.generate(prompt, max_tokens=1, cache_salt=salt)).usage
            for salt in (None, None, "a", "a")
        ]
        assert [u.cached_tokens for u in usages] == [0, 16, 0, 16]
        assert await engine.reset_prefix_cache()
        again = await engine.generate(prompt, max_tokens=1)
        assert again.usage.cached_tokens == 0
        stats = engine.stats()
    assert stats.num_blocks == stats.num_free_blocks == 64
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (100, 32)
    assert (stats.generation_tokens, stats.num_finished, stats.num_requests) == (5, 5, 5)


async def test_requests_without_a_seed_draw_one_from_the_engine():
    seeds = []
    for seed in (5, 5, None):
        rig = fake(record=True)
        async with rig.engine(seed=seed) as engine:
            await asyncio.gather(*(engine.generate([i], max_tokens=1) for i in range(4)))
        seeds.append([a.sampling.seed for b in rig.executor.batches for a in b.assignments])
    assert seeds[0] == seeds[1]
    assert len({*seeds[0], *seeds[2]}) == 8
    assert all(0 <= s < 2**64 for row in seeds for s in row)


async def test_unset_sampling_fields_take_the_models_defaults():
    rig = fake(record=True)
    rig.model_config.generation_defaults = {"temperature": 0.6, "top_k": 20}
    async with rig.engine() as engine:
        await engine.generate([1], max_tokens=1)
        await engine.generate([1], SamplingParams(temperature=0.9, max_tokens=1), top_k=3)
    first, second = (b.assignments[0].sampling for b in rig.executor.batches)
    assert (first.temperature, first.top_k, first.top_p) == (0.6, 20, 1.0)
    assert (second.temperature, second.top_k, second.min_p) == (0.9, 3, 0.0)


async def test_policy_orders_requests_by_priority():
    rig = fake(max_num_seqs=1, record=True)
    async with rig.engine(scheduling_policy="priority") as engine:
        await engine.pause()
        streams = [engine.stream([p], max_tokens=2, priority=p) for p in (3, 1, 2)]
        await engine.resume()
        for stream in streams:
            await stream.result()
    assert entered(rig) == [1, 2, 3]


@pytest.mark.parametrize(
    ("prompt", "options", "param", "says"),
    [
        ("", {}, "prompt", "not empty"),
        ([], {}, "prompt", "at least one"),
        ("   ", {}, "prompt", "at least one"),
        ([1, VOCAB_SIZE], {}, "prompt", "prompt=1000: expected token ids, integers from 0 to 999"),
        ([-1], {}, "prompt", "prompt=-1: expected token ids"),
        ([1.5], {}, "prompt", "prompt=1.5: expected token ids"),
        ([True], {}, "prompt", "prompt=True"),
        (None, {}, "prompt", "text or token ids"),
        (b"bytes", {}, "prompt", "bytes"),
        ([1], {"temperature": math.nan}, "temperature", "nan"),
        ([1], {"temperature": -0.5}, "temperature", "-0.5"),
        ([1], {"top_p": 0.0}, "top_p", "0.0"),
        ([1], {"top_p": math.inf}, "top_p", "inf"),
        ([1], {"top_k": -2}, "top_k", "-2"),
        ([1], {"top_k": 1.0}, "top_k", "1.0"),
        ([1], {"min_p": 1.5}, "min_p", "1.5"),
        ([1], {"presence_penalty": math.nan}, "presence_penalty", "nan"),
        ([1], {"frequency_penalty": 2.5}, "frequency_penalty", "2.5"),
        ([1], {"repetition_penalty": 0.0}, "repetition_penalty", "0.0"),
        ([1], {"max_tokens": 0}, "max_tokens", "0"),
        ([1], {"min_tokens": -1}, "min_tokens", "-1"),
        ([1], {"min_tokens": 5, "max_tokens": 4}, "min_tokens", "at most max_tokens=4"),
        ([1], {"logprobs": 21}, "logprobs", "21"),
        ([1], {"logprobs": -1}, "logprobs", "0 to 20"),
        ([1], {"seed": 2**64}, "seed", "integer"),
        ([1], {"stop": [""]}, "stop", "non-empty"),
        ([1], {"stop_token_ids": [1000]}, "stop_token_ids", "1000"),
        ([1], {"logit_bias": {1000: 1.0}}, "logit_bias", "1000"),
        ([1], {"logit_bias": {1: math.nan}}, "logit_bias", "nan"),
        ([1], {"logit_bias": dict.fromkeys(range(1025), 0.0)}, "logit_bias", "at most 1024"),
        (
            [1],
            {"stop_token_ids": range(129), "min_tokens": 1},
            "stop_token_ids",
            "at most 128 token ids with min_tokens",
        ),
        ([1], {"allowed_token_ids": []}, "allowed_token_ids", "at least one"),
        ([1], {"logits_processors": [3]}, "logits_processors", "callables"),
        (["a", "b"], {}, "prompt", "several prompts are a call each"),
        ([[1], [2]], {}, "prompt", "several prompts are a call each"),
        ([{"role": "user", "content": "a"}], {}, "prompt", r"messages are for chat\(\)"),
        ({"role": "user"}, {}, "prompt", r"messages are for chat\(\)"),
        ([1], {"n": 0}, "n", "from 1 to 256"),
        ([1], {"n": 257}, "n", "from 1 to 256"),
        ([1], {"n": 2, "temperature": 0}, "n", "1 with temperature=0"),
        ([1], {"prompt_logprobs": 21}, "prompt_logprobs", "0 to 20"),
        ([1], {"prompt_logprobs": -2}, "prompt_logprobs", "-1"),
        ([1], {"bad_words": ["9", " "]}, "bad_words", "white space alone"),
        ([1], {"bad_words": "9"}, "bad_words", "strings"),
        ([1], {"structured_outputs": {}}, "structured_outputs", "exactly one of json"),
        ([1], {"best_of": 2}, "best_of", "no such sampling parameter"),
        ([1], {"timeout": 0}, "timeout", "seconds above 0"),
        ([1], {"timeout": math.nan}, "timeout", "seconds above 0"),
        ([1], {"max_unread": 0}, "max_unread", "from 1"),
        ([1], {"on_slow": "wait"}, "on_slow", "coalesce"),
        ([1], {"priority": 1}, "priority", "fcfs"),
        ("1 1000", {}, "prompt", "tokens that the model has, 0 to 999"),
        ([1], {"priority": 10**400}, "priority", "integer"),
        ([1], {"timeout": 10**400}, "timeout", "seconds above 0"),
        ([1], {"timeout": 10**5000}, "timeout", "seconds above 0"),
        ([1], {"max_unread": 2**63}, "max_unread", "integer"),
        # The engine thread would be the first to find that this cannot be hashed.
        ([1], {"cache_salt": "\ud800"}, "cache_salt", "string"),
        ([1], {"priority": 1.5}, "priority", "integer"),
        ([1], {"request_id": ""}, "request_id", "non-empty"),
        ([1], {"cache_salt": 5}, "cache_salt", "string"),
        *(
            ([1], {name: "a" * 257}, name, "at most 256 characters; a digest of a longer one")
            for name in ("request_id", "cache_salt", "owner")
        ),
        ([1], {"sampling_params": {"n": 1}}, "sampling_params", "SamplingParams"),
    ],
    ids=check.describe,
)
async def test_bad_requests_raise_at_once_and_leave_no_trace(prompt, options, param, says):
    async with fake().engine() as engine:
        with pytest.raises(InvalidRequestError, match=says) as caught:
            engine.stream(prompt, **options)
        assert caught.value.param == param
        assert isinstance(caught.value, ValueError)
        assert engine.stats().num_requests == 0
        assert (await engine.generate([1], max_tokens=1)).finish_reason == "length"


async def test_min_tokens_bans_model_eos_tokens():
    async with fake(eos_token_ids=(990, 991)).engine() as engine:
        given: dict[str, Any] = {"stop_token_ids": list(range(127)), "max_tokens": 1}
        says = "at most 126 token ids with min_tokens beside the model's 2 of its own"
        with pytest.raises(InvalidRequestError, match=says) as caught:
            engine.stream([1], min_tokens=1, **given)
        assert caught.value.param == "stop_token_ids"
        for fits in ({"min_tokens": 0}, {"min_tokens": 1, "ignore_eos": True}):
            assert len((await engine.generate([1], **given, **fits)).token_ids) == 1
        given["stop_token_ids"] = range(126)
        assert len((await engine.generate([1], **given, min_tokens=1)).token_ids) == 1


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": np.zeros(2)}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
    ],
)
async def test_invalid_chat_options_are_refused(options, param):
    async with fake().engine() as engine:
        with pytest.raises(InvalidRequestError) as caught:
            engine.chat([{"role": "user", "content": "1"}], **options)
        assert caught.value.param == param


async def test_neutral_arguments_and_numpy_values_are_accepted():
    rig = fake()
    async with rig.engine() as engine:
        message = {"role": "user", "content": "1 2 3"}
        for tools in ([], (), None):
            for choice in ("auto", "none", None):
                stream = engine.chat(
                    [message],
                    tools=tools,
                    tool_choice=choice,
                    response_format={"type": "text"},
                    max_tokens=np.int64(2),
                    temperature=np.float32(0.5),
                    n=np.int64(1),
                    stop=None,
                    stop_token_ids=None,
                    bad_words=[],
                    timeout=np.float64(60),
                    max_unread=np.int32(3),
                    priority=np.int8(0),
                )
                assert len((await stream.result()).token_ids) == 2
        for prompt in (np.array([1, 2, 3]), np.array([1, 2, 3], np.uint8)):
            result = await engine.generate(prompt, max_tokens=4)
            assert list(result.token_ids) == rig.executor.reference([1, 2, 3], 4)
            assert {type(token) for token in result.prompt_token_ids} == {int}


async def test_prompt_that_fills_the_context_is_refused():
    async with fake(max_model_len=10).engine() as engine:
        with pytest.raises(ContextLengthExceededError, match="has 10 tokens, expected at most 9"):
            engine.stream([1] * 10)
        result = await engine.generate([1] * 9, max_tokens=5)
    assert (len(result.token_ids), result.finish_reason) == (1, "length")


async def test_duplicate_id_is_refused_while_the_first_lives():
    rig = fake(step_time=0.001)
    async with rig.engine() as engine:
        first = engine.stream([1], request_id="a", max_tokens=100)
        with pytest.raises(InvalidRequestError, match="live request") as caught:
            engine.stream([1], request_id="a")
        assert caught.value.param == "request_id"
        first.abort()
        second = engine.stream([2], request_id="a", max_tokens=3)
        assert list((await second.result()).token_ids) == rig.executor.reference([2], 3)
        assert (await first.result()).finish_reason == "abort"
        third = engine.stream([3], request_id="a", max_tokens=1)
        await third.result()


class Panic(BaseException):
    """As that of a tokenizer's Rust, which is no Exception."""


@pytest.mark.parametrize("kind", [ValueError, Panic])
async def test_undecodable_text_fails_request_after_earlier_text(kind):
    rig = fake()
    tokens = rig.executor.reference([6], 5)
    rig.tokenizer.failing_tokens[tokens[3]] = kind
    async with rig.engine() as engine:
        got = []
        stream = engine.stream([6], max_tokens=5)
        with pytest.raises(RequestError, match="has no text"):
            async for delta in stream:
                got += delta.token_ids
        assert got == tokens[:3]
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        with pytest.raises(RequestError, match="has no text"):
            await stream.result()


async def test_a_deadline_passes_though_the_text_cannot_be_decoded():
    """What it carries as partial is decoded on the engine thread."""
    rig = fake(step_time=0.002)

    def decode(token_ids, skip_special_tokens=True):
        raise ValueError("on purpose")

    rig.tokenizer.decode = decode
    async with rig.engine() as engine:
        with pytest.raises(DeadlineExceededError) as caught:
            await engine.generate([1], max_tokens=250, timeout=0.05)
        assert caught.value.partial is not None
        assert caught.value.partial.text == ""
        assert len(caught.value.partial.token_ids) > 0
        result = await engine.generate([1], max_tokens=3)
        assert list(result.token_ids) == rig.executor.reference([1], 3)


async def test_long_text_is_tokenised_elsewhere_and_keeps_its_rank():
    rig = fake(num_blocks=3001, max_num_seqs=1, max_num_batched_tokens=4096)
    rig.tokenizer.gate = threading.Event()
    text = " ".join(["5"] * 3000)
    async with rig.engine() as engine:
        blocker = engine.stream([9], max_tokens=4)
        long = engine.stream(text, max_tokens=2)
        assert long.prompt_token_ids is None
        short = engine.stream([8], max_tokens=2)
        # It holds up no other request.
        assert (await short.result()).finish_reason == "length"
        await blocker.result()
        rig.tokenizer.gate.set()
        result = await long.result()
        assert list(result.token_ids) == rig.executor.reference([5] * 3000, 2)
        assert len(long.prompt_token_ids) == 3000


async def test_a_text_that_takes_longer_than_a_step_leaves_the_caller_s_thread(monkeypatch):
    """From 513 characters on; and it waits for no text of 4,096, which another thread tokenises."""
    rig, threads = fake(num_blocks=3001), []
    encode = rig.tokenizer.encode

    def recorded(text, *args, **options):
        threads.append((len(text), threading.current_thread().name))
        return encode(text, *args, **options)

    monkeypatch.setattr(rig.tokenizer, "encode", recorded)
    async with rig.engine() as engine:
        texts, go = engine._submitter._tokenizer_threads, threading.Event()
        texts.long_thread.submit(go.wait)
        long = engine.stream("5 " * 2048, max_tokens=1)
        here = engine.stream("5 " * 256, max_tokens=1)
        assert len(here.prompt_token_ids) == 256
        there = engine.stream("5 " * 256 + "5", max_tokens=1)
        assert there.prompt_token_ids is None
        assert (await there.result()).usage.prompt_tokens == 257
        assert long.prompt_token_ids is None
        go.set()
        await long.result()
    own = threading.current_thread().name
    assert threads == [(512, own), (513, "asyncllm-text-short"), (4096, "asyncllm-text")]


async def test_bad_long_text_raises_at_the_first_read():
    async with fake(num_blocks=3001).engine() as engine:
        stream = engine.stream("5 " * 3000 + "oops")
        with pytest.raises(InvalidRequestError, match="oops"):
            await anext(stream)
        assert engine.stats().num_waiting == 0


async def test_too_long_text_raises_at_once():
    async with fake(max_model_len=100).engine() as engine:
        with pytest.raises(ContextLengthExceededError, match="at least"):
            engine.stream("1 " * 4000)


async def test_abort_overtakes_its_own_add():
    rig = fake(num_blocks=3001)
    rig.tokenizer.gate = threading.Event()
    async with rig.engine() as engine:
        stream = engine.stream("5 " * 3000, request_id="x")
        engine.abort("x")
        assert (await stream.result()).finish_reason == "abort"
        again = engine.stream([1], request_id="x", max_tokens=1)
        await again.result()
        rig.tokenizer.gate.set()
        await asyncio.sleep(0.05)
        stats = engine.stats()
        assert stats.num_free_blocks == stats.num_blocks
        assert stats.prompt_tokens == 1


async def test_queue_is_bounded_by_requests_and_by_tokens():
    async with fake(max_num_seqs=1).engine(max_queued_requests=3, max_queued_tokens=20) as engine:
        await engine.pause()
        streams = [engine.stream([i], max_tokens=1) for i in range(3)]
        with pytest.raises(EngineOverloadedError, match="max_queued_requests=3") as caught:
            engine.stream([9])
        assert caught.value.retry_after > 0
        streams.pop().abort()
        await engine.resume()
        for stream in streams:
            await stream.result()
        await engine.pause()
        held = engine.stream([1] * 15, max_tokens=1)
        with pytest.raises(EngineOverloadedError, match="max_queued_tokens=20"):
            engine.stream([1] * 6)
        fits = engine.stream([1] * 5, max_tokens=1)
        await engine.resume()
        await asyncio.gather(held.result(), fits.result())
        # A prompt larger than the bound is let in alone, or it could never be served.
        assert (await engine.generate([1] * 30, max_tokens=1)).finish_reason == "length"


async def test_calls_before_start_and_after_close():
    rig = fake()
    engine = rig.engine()
    for call in (
        lambda: engine.stream([1]),
        lambda: engine.chat([]),
        lambda: engine.abort("x"),
        engine.stats,
        lambda: engine.tokenizer,
        lambda: engine.model_config,
    ):
        with pytest.raises(EngineClosedError, match="is new; expected a started one"):
            call()
    await engine.start()
    with pytest.raises(EngineError, match="expected a new engine"):
        await engine.start()
    await engine.aclose()
    await engine.aclose()
    for call in (lambda: engine.stream([1]), lambda: engine.abort("x"), engine.stats):
        with pytest.raises(EngineClosedError):
            call()
    with pytest.raises(EngineClosedError):
        await engine.start()
    with pytest.raises(EngineClosedError):
        await engine.pause()
    assert rig.executor.closed


async def test_closing_leaves_no_task():
    before = asyncio.all_tasks()
    async with fake().engine() as engine:
        await engine.generate([1], max_tokens=1)
        assert {task.get_name() for task in asyncio.all_tasks() - before} == {"asyncllm-engine"}
    assert asyncio.all_tasks() == before


@pytest.mark.parametrize("drain", [-1, math.nan, "soon", math.inf, 10**400], ids=check.describe)
async def test_bad_drain(drain):
    async with fake().engine() as engine:
        with pytest.raises(InvalidRequestError):
            await engine.aclose(drain=drain)


async def test_failed_start_says_why_and_can_be_tried_again():
    rig = fake()
    rig.load_error = ModelLoadError("weights are missing")
    engine = rig.engine()
    with pytest.raises(ModelLoadError, match="weights are missing"):
        await engine.start()
    rig.load_error = OSError("disk")
    with pytest.raises(EngineError, match="OSError: disk") as caught:
        await engine.start()
    assert isinstance(caught.value.__cause__, OSError)
    rig.load_error = None
    async with engine:
        assert (await engine.generate([1], max_tokens=1)).finish_reason == "length"


async def test_an_engine_that_dies_while_it_closes_is_dead():
    rig = fake()
    rig.executor.faults[3] = RuntimeError("device lost")
    async with rig.engine() as engine:
        await engine.pause()
        stream = engine.stream([1], max_tokens=50)
        thread_of(engine).close(30.0, "the loop has ended")
        with pytest.raises(EngineClosedError, match="the loop has ended"):
            engine.stream([2])
        assert engine.state == "closed"
        core_of(engine).send(core_of(engine).set_suspended, False)
        with pytest.raises(EngineDeadError, match="device lost"):
            await stream.result()
        assert engine.state == "dead"
        with pytest.raises(EngineDeadError, match="device lost"):
            engine.stream([3])
        assert engine.stats().num_failed == 1


BAD_SETTINGS = {
    "dtype": ["int8"],
    "device": ["tpu"],
    "scheduling_policy": ["lifo"],
    "max_num_seqs": [0],
    "max_model_len": [-1],
    "max_num_batched_tokens": ["many"],
    "kv_cache_memory": ["4 gallons", 0],
    "gpu_memory_utilization": [1.5, math.nan],
    "cuda_graphs": ["yes"],
    "cudagraph_capture_sizes": [(0,)],
    "load_format": ["pickle"],
    "generation_config": ["vllm"],
    "hf_overrides": [5, [1], {"a": object()}, {1: 2}, {"a": math.nan}, {"a": "x" * 2**16}],
    "chat_template": ["", 5, "a\0b"],
    "served_model_name": ["", (), ["a", 5], ["a"] * 65, "a" * 1025],
    "quantization": ["int3"],
    "enable_prefix_caching": ["no"],
    "num_state_snapshots": [0, "few"],
    "max_queued_requests": [0],
    "step_timeout": [math.inf],
    "num_threads": [0],
    "model": ["", 5],
    "seed": [-1],
}


@pytest.mark.parametrize("field", BAD_SETTINGS)
def test_bad_configuration_names_the_field(field):
    for value in BAD_SETTINGS[field]:
        with pytest.raises(InvalidRequestError, match=field) as caught:
            AsyncLLMEngine(**{field: value})
        assert caught.value.param == field


async def test_unknown_setting_and_overrides():
    with pytest.raises(InvalidRequestError, match="no such setting"):
        AsyncLLMEngine(max_sequences=3)
    config = EngineConfig(max_num_seqs=3, kv_cache_memory="2 GiB")
    engine = AsyncLLMEngine("some/model", config=config, max_num_seqs=7)
    assert (engine.config.model, engine.config.max_num_seqs) == ("some/model", 7)
    assert engine.config.kv_cache_memory == 2 * 2**30
    assert config.max_num_seqs == 3


async def test_abort_names_the_field_that_is_no_id():
    async with fake(step_time=0.001).engine() as engine:
        stream = engine.stream([1], request_id="x", max_tokens=5)
        for wrong in (5, None, ["x", 5], [["x"]], b"x", {"x": 1}):
            with pytest.raises(InvalidRequestError, match="expected a string, or") as one:
                engine.abort(wrong)
            assert one.value.param == "request_id"
        engine.abort(iter(["unknown", ""]))
        assert (await stream.result()).finish_reason == "length"


@pytest.mark.parametrize("ways", [copy.copy, copy.deepcopy, pickle.dumps])
async def test_handles_cannot_be_copied(ways):
    async with fake().engine() as engine:
        stream = engine.stream([1], max_tokens=4)
        told = stream_with_callbacks(engine, [1], max_tokens=4)
        for handle in (engine, stream, told, LLM(engine=engine), LLMStream(stream, None)):
            with pytest.raises(TypeError, match="neither copied nor pickled"):
                ways(handle)
        gc.collect()
        assert len((await stream.result()).token_ids) == 4
        assert len((await told.result()).token_ids) == 4


ERRORS = [
    InvalidRequestError("n=2: …", param="n"),
    ContextLengthExceededError("long"),
    DeadlineExceededError("late", partial=Completion("r", (1,), (), None)),
    EngineOverloadedError("full", retry_after=1.5),
    EngineDeadError("dead", 2),
    ModelLoadError("no file"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("protocol", [0, 2, 5])
async def test_errors_survive_pickle_and_copy(error, protocol):
    error.add_note("of the caller")
    for found in (
        pickle.loads(pickle.dumps(error, protocol)),
        copy.copy(error),
        copy.deepcopy(error),
    ):
        assert type(found) is type(error)
        assert (str(found), found.args, vars(found)) == (str(error), error.args, vars(error))


async def test_a_prompt_of_any_length_is_refused_before_it_is_read():
    async with fake().engine() as engine:
        with pytest.raises(ContextLengthExceededError, match="1000000000000 tokens"):
            engine.stream(range(10**12))
        for prompt in (itertools.repeat(1), range(10**30)):
            with pytest.raises(InvalidRequestError, match="at most"):
                engine.stream(prompt)


async def test_the_report_of_the_execution():
    async with AsyncLLMEngine(dtype="float32", device="cpu", attention_backend="torch") as engine:
        stream = engine.stream("Tell me a story.", max_tokens=12, temperature=0.0)
        await anext(stream)
        report = await engine.execution_report()
        assert (report.device, report.dtype) == ("cpu", "float32")
        assert (report.attention_backend, report.instruction_set) == ("torch", None)
        config = engine.model_config
        kv_heads = config.num_layers * config.num_kv_heads * config.head_dim
        assert report.kv_bytes_per_token == 2 * kv_heads * 4
        assert report.weight_bytes > config.vocab_size * config.hidden_size * 4
        assert report.memory_bandwidth is not None
        floor = (report.weight_bytes + 7 * report.kv_bytes_per_token) / report.memory_bandwidth
        assert report.floor(7) == pytest.approx(floor)
        assert (await stream.result()).finish_reason in ("stop", "length")
    with pytest.raises(EngineClosedError):
        await engine.execution_report()


async def test_a_report_that_fails_is_its_callers_alone():
    def report():
        raise MemoryError("no room to measure in")

    async with fake_engine("an answer") as engine:
        with pytest.raises(EngineError, match="a ScriptedExecutor has no report of its execution"):
            await engine.execution_report()
        core_of(engine).executor.report = report
        with pytest.raises(EngineError, match=r"cannot be measured: .*no room to measure in"):
            await engine.execution_report()
        assert (await engine.generate("hello")).text == "an answer"


async def test_a_bad_word_that_the_tokenizer_refuses_is_named():
    async with fake().engine() as engine:
        with pytest.raises(InvalidRequestError, match=r"bad_words=.*'x'.*literal") as caught:
            await engine.generate("1 2", max_tokens=1, bad_words=["x"])
        assert caught.value.param == "bad_words"
