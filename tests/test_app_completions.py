"""Completions and tokenising over the ASGI application."""

from __future__ import annotations

import asyncio
import math

from asyncllm import AsyncLLMEngine
from asyncllm.testing import fake_engine
from tests.app_clients import app_client, events_of, user


async def complete(client, prompt="abc", **fields):
    return await client.post("/v1/completions", json={"prompt": prompt, **fields})


def texts_of(response, num_choices):
    texts, finish = [""] * num_choices, [None] * num_choices
    for chunk in events_of(response.text)[:-1]:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
            finish[choice["index"]] = choice["finish_reason"] or finish[choice["index"]]
    return texts, finish


async def test_prompts_of_every_kind():
    async with app_client(fake_engine(str.upper)) as client:
        for prompt, expected in (
            ("abc", ["ABC"]),
            ([97, 98], ["AB"]),
            (["ab", "cde"], ["AB", "CDE"]),
            ([[97], [98, 99]], ["A", "BC"]),
        ):
            answer = (await complete(client, prompt)).json()
            assert answer["object"] == "text_completion"
            assert [choice["text"] for choice in answer["choices"]] == expected
            assert [choice["index"] for choice in answer["choices"]] == [*range(len(expected))]
            assert {choice["finish_reason"] for choice in answer["choices"]} == {"stop"}
            streamed = await complete(client, prompt, stream=True)
            assert texts_of(streamed, len(expected)) == (expected, ["stop"] * len(expected))
            lengths = [len(one) if isinstance(one, (str, list)) else 1 for one in prompt]
            num_tokens = sum(lengths)
            assert answer["usage"]["prompt_tokens"] == num_tokens
        sixteen = (await complete(client, "x" * 30)).json()["choices"][0]
        assert (sixteen["text"], sixteen["finish_reason"]) == ("X" * 16, "length")
        several = await complete(client, ["a", "b"], n=2, stream=True, echo=True)
        assert texts_of(several, 4)[0] == ["aA", "aA", "bB", "bB"]


async def test_usage_of_several_prompts_is_their_sum():
    async with app_client(fake_engine(str.upper)) as client:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        *chunks, last, done = events_of((await complete(client, ["ab", "c"], **options)).text)
    assert (done, last["choices"]) == ("[DONE]", [])
    assert {chunk["usage"] for chunk in chunks} == {None}
    assert last["usage"]["prompt_tokens"] == 3
    assert last["usage"]["completion_tokens"] == 3 + 2


async def test_usage_may_come_with_each_chunk():
    async with app_client(fake_engine(str.upper)) as client:
        usage = {"include_usage": True, "continuous_usage_stats": True}
        options = {"stream": True, "stream_options": usage}
        *chunks, last, _ = events_of((await complete(client, ["ab", "c"], **options)).text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    final = {key: last["usage"][key] for key in chunks[-1]["usage"]}
    assert chunks[-1]["usage"] == final
    assert (final["prompt_tokens"], final["total_tokens"]) == (3, 8)


async def test_unservable_prompt_of_a_batch_leaves_none_running():
    engine = fake_engine("x" * 400, max_model_len=500, step_time=0.001)
    async with app_client(engine) as client:
        refused = await complete(client, ["a", "b" * 600])
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
        while (stats := engine.stats()).num_running or stats.num_waiting:
            await asyncio.sleep(0.001)
        # The text is refused when it has been tokenised, and the other prompt does not run on.
        assert (stats.num_requests, stats.num_aborted) == (2, 1)


async def test_scores_of_prompt_and_continuation():
    engine = AsyncLLMEngine(num_blocks=64)
    async with app_client(engine) as client:
        prompt = "Once upon a time"
        fields = {"max_tokens": 4, "logprobs": 2, "temperature": 0}
        answer = (await complete(client, prompt, echo=True, **fields)).json()
        (choice,) = answer["choices"]
        plain = await engine.generate(
            prompt, max_tokens=4, logprobs=2, prompt_logprobs=2, temperature=0
        )
        streamed = await complete(client, prompt, echo=True, stream=True, **fields)
        scored = (await complete(client, prompt, echo=True, max_tokens=0, logprobs=0)).json()
        alone = (await complete(client, prompt, **fields)).json()["choices"][0]["logprobs"]
    assert choice["text"] == prompt + plain.text
    logprobs = choice["logprobs"]
    num_prompt = len(plain.prompt_token_ids)
    expected = [*(entry and entry.logprob for entry in plain.prompt_logprobs)]
    expected += [entry.logprob for entry in plain.logprobs]
    assert logprobs["token_logprobs"][0] is expected[0] is None
    # A prompt whose prefix is cached and one that is not round differently.
    for found, other in zip(logprobs["token_logprobs"][1:], expected[1:], strict=True):
        assert math.isclose(found, other, abs_tol=1e-3)
    assert "".join(logprobs["tokens"]) == choice["text"]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(token)
    assert logprobs["top_logprobs"][0] is None
    assert all(2 <= len(top) <= 3 for top in logprobs["top_logprobs"][1:])
    parts = [c["logprobs"] for e in events_of(streamed.text)[:-1] for c in e["choices"]]
    for name in ("tokens", "text_offset"):
        assert [one for part in parts for one in part[name]] == logprobs[name]
    (only,) = scored["choices"]
    assert (only["text"], scored["usage"]["completion_tokens"]) == (prompt, 0)
    assert only["logprobs"]["tokens"] == logprobs["tokens"][:num_prompt]
    assert alone["tokens"] == logprobs["tokens"][num_prompt:]


REFUSED = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt[0]"),
    ({"prompt": ["a", ""]}, "prompt[1]"),
    ({"prompt": ["a", 5]}, "prompt[1]"),
    ({"prompt": [1, "a"]}, "prompt[1]"),
    ({"prompt": [-1]}, "prompt[0]"),
    ({"prompt": [2**80]}, "prompt[0]"),
    ({"prompt": [1000]}, "prompt"),
    ({"prompt": [1] * 100_000}, "prompt"),
    ({"prompt": ["a"] * 257}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": ["a", "b"], "n": 10**400}, "n"),
    ({"best_of": 3}, "best_of"),
    ({"suffix": "end"}, "suffix"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0, "min_tokens": 1}, "min_tokens"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"echo": "yes"}, "echo"),
    ({"messages": []}, "messages"),
]


async def test_invalid_fields_are_refused_by_name():
    engine = fake_engine("x")
    async with app_client(engine) as client:
        for fields, param in REFUSED:
            answer = await client.post("/v1/completions", json={"prompt": "a", **fields})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), (
                answer.text
            )
            assert len(answer.text) < 1000
        assert engine.stats().num_running == 0


async def test_tokens_and_back():
    engine = fake_engine("x")
    async with app_client(engine) as client:

        async def post(path, **body):
            return await client.post(path, json=body)

        found = (await post("/tokenize", prompt="Hé", return_token_strs=True)).json()
        assert found["tokens"] == [72, 195, 169]
        assert (found["count"], found["token_strs"][0]) == (3, "H")
        assert (await post("/detokenize", tokens=found["tokens"])).json() == {"prompt": "Hé"}
        chat = (await post("/tokenize", messages=user("Hi"))).json()["tokens"]
        stream = engine.chat(user("Hi"))
        assert chat == list(stream.prompt_token_ids)
        await stream.aclose()
        shorter = await post("/tokenize", messages=user("Hi"), add_generation_prompt=False)
        assert shorter.json()["tokens"] == chat[: shorter.json()["count"]] != chat
        tool = {"type": "function", "function": {"name": "f"}}
        offered = (await post("/tokenize", messages=user("Hi"), tools=[tool])).json()["tokens"]
        with_tools = engine.chat(user("Hi"), tools=[tool])
        assert offered == list(with_tools.prompt_token_ids) != chat
        await with_tools.aclose()
        assert (await post("/tokenize", prompt="")).json()["tokens"] == []
        long = "Hé" * 1300
        found = (await post("/tokenize", prompt=long)).json()["tokens"]
        assert (await post("/detokenize", tokens=found)).json() == {"prompt": long}
        for path, body, param in (
            ("/tokenize", {}, "prompt"),
            ("/tokenize", {"prompt": "a", "messages": user("Hi")}, "prompt"),
            ("/tokenize", {"prompt": 5}, "prompt"),
            ("/tokenize", {"prompt": "a", "tools": [tool]}, "tools"),
            ("/tokenize", {"prompt": "a", "add_generation_prompt": False}, "add_generation_prompt"),
            (
                "/tokenize",
                {"messages": user("a"), "add_special_tokens": True},
                "add_special_tokens",
            ),
            ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
            ("/detokenize", {"tokens": [2**32]}, "tokens[0]"),
            ("/detokenize", {"tokens": "abc"}, "tokens"),
            ("/detokenize", {}, "tokens"),
        ):
            refused = await post(path, **body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
