"""Chat completions over the ASGI application, on engines that answer from a script."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest

from asyncllm import RequestError
from asyncllm.foreign_names import OUR_NAMES_BY_FOREIGN_NAME
from asyncllm.serving import create_app
from asyncllm.testing import fake_engine
from tests.app_clients import RawRequest, app_client, events_of, user
from tests.idle import until

CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>'
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": None,
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "strict": False,
    },
}


async def chat(client, **fields):
    return await client.post("/v1/chat/completions", json={"messages": user("Hi"), **fields})


async def test_an_answer_is_told_whole():
    engine = fake_engine("Hello, friend!", max_model_len=200)
    async with app_client(engine) as client:
        answer = (await chat(client, model="asyncllm/demo", user="u")).json()
        cut = (await chat(client, max_completion_tokens=5)).json()
    assert (answer["object"], answer["model"]) == ("chat.completion", "asyncllm/demo")
    assert answer["id"].startswith("chatcmpl-")
    (choice,) = answer["choices"]
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)
    assert choice["message"] == {
        "role": "assistant",
        "content": "Hello, friend!",
        "refusal": None,
        "annotations": [],
    }
    usage = answer["usage"]
    assert usage["completion_tokens"] == len("Hello, friend!") + 1
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert cut["choices"][0]["message"]["content"] == "Hello"
    assert cut["choices"][0]["finish_reason"] == "length"
    assert cut["usage"]["prompt_tokens_details"]["cached_tokens"] == 16


async def test_an_answer_is_told_in_chunks_in_openais_order():
    async with app_client(fake_engine("Hé\n!")) as client:
        answer = await chat(client, stream=True)
        counted = await chat(client, stream=True, stream_options={"include_usage": True})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    *chunks, done = events_of(answer.text)
    assert done == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": "", "refusal": None}
    assert "".join(delta["content"] for delta in deltas[1:-1]) == "Hé\n!"
    assert deltas[-1] == {}
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    assert not any("usage" in chunk for chunk in chunks)
    *chunks, last, done = events_of(counted.text)
    assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], len("Hé\n!".encode()) + 1)


async def test_usage_may_come_with_each_chunk():
    """vLLM's, by which load generators count tokens."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with app_client(fake_engine("ab", max_num_seqs=1)) as client:
        said = await chat(client, stream=True, stream_options=options, n=2)
        opening, second, *chunks, last, done = events_of(said.text)
        alone = {"continuous_usage_stats": True, "include_usage": False}
        none = events_of((await chat(client, stream=True, stream_options=alone)).text)
    assert opening["usage"] is second["usage"] is None
    total = last["usage"]
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks][-1] == 6
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {total["prompt_tokens"]}
    for chunk in chunks:
        usage = chunk["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert (total["completion_tokens"], done) == (6, "[DONE]")
    assert not any("usage" in chunk for chunk in none[:-1])


async def test_several_choices():
    seen = []

    def answer(prompt):
        seen.append(prompt)
        return "even" if len(seen) % 2 else "odd"

    async with app_client(fake_engine(answer)) as client:
        whole = (await chat(client, n=2, seed=1)).json()
        streamed = await chat(client, n=2, seed=1, stream=True)
    assert [c["index"] for c in whole["choices"]] == [0, 1]
    assert sorted(c["message"]["content"] for c in whole["choices"]) == ["even", "odd"]
    texts = ["", ""]
    roles, reasons = [], []
    for chunk in events_of(streamed.text)[:-1]:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
        roles += [choice["index"]] if "role" in choice["delta"] else []
        reasons += [choice["index"]] if choice["finish_reason"] else []
    assert sorted(texts) == ["even", "odd"]
    assert (roles, sorted(reasons)) == ([0, 1], [0, 1])


def whole_of(response):
    """Content, calls, reasoning and finish reason that a stream adds up to."""
    content, calls, reasoning, finish = "", [], "", None
    for chunk in events_of(response.text)[:-1]:
        choice = chunk["choices"][0]
        delta = choice["delta"]
        content += delta.get("content") or ""
        reasoning += delta.get("reasoning_content") or ""
        calls += delta.get("tool_calls", [])
        finish = choice["finish_reason"] or finish
    return content, calls, reasoning, finish


async def test_tool_calls_whole_and_streamed():
    async with app_client(fake_engine(f"Let me see. {CALL}\n{CALL}")) as client:
        whole = (await chat(client, tools=[TOOL])).json()["choices"][0]
        content, calls, _, finish = whole_of(await chat(client, tools=[TOOL], stream=True))
        none = (await chat(client, tools=[TOOL], tool_choice="none")).json()["choices"][0]
    message = whole["message"]
    assert (message["content"], whole["finish_reason"]) == ("Let me see.", "tool_calls")
    assert (content, finish) == ("Let me see.", "tool_calls")
    assert [call["index"] for call in calls] == [0, 1]
    for found in (message["tool_calls"], calls):
        assert len({call["id"] for call in found}) == 2
        for call in found:
            assert call["type"] == "function"
            assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    assert "tool_calls" not in none["message"]


async def test_malformed_call_is_text_and_no_call_was_sent():
    broken = CALL.replace('"Oslo"}}', '"Oslo"')
    async with app_client(fake_engine(broken)) as client:
        whole = (await chat(client, tools=[TOOL])).json()["choices"][0]
        content, calls, _, finish = whole_of(await chat(client, tools=[TOOL], stream=True))
    assert (content, calls, finish) == (broken, [], "stop")
    assert whole["message"]["content"] == broken
    assert whole["finish_reason"] == "stop"


async def test_a_conversation_with_calls_goes_back():
    prompts = []
    engine = fake_engine(lambda prompt: prompts.append(prompt) or "Snow.")
    turn = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "annotations": [],
        "tool_calls": [
            {
                "id": "abcdefghi",
                "type": "function",
                "index": 0,
                "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'},
            }
        ],
    }
    tool = {"role": "tool", "tool_call_id": "abcdefghi", "content": "snow"}
    system = {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]}
    messages = [system, *user("Hi"), turn, tool]
    async with app_client(engine) as client:
        answer = (await chat(client, messages=messages, tools=[TOOL])).json()
        expected = engine.chat([{**system, "role": "system"}, *messages[1:]], tools=[TOOL])
        await expected.result()
    assert answer["choices"][0]["message"]["content"] == "Snow."
    assert answer["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)


async def test_thoughts_are_apart():
    engine = fake_engine("<think>Hm.</think>Yes.", reasoning_parser="qwen3")
    async with app_client(engine) as client:
        message = (await chat(client)).json()["choices"][0]["message"]
        content, _, reasoning, _ = whole_of(await chat(client, stream=True))
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")
    assert (reasoning, content) == ("Hm.", "Yes.")


REFUSED = [
    ({"messages": None}, "invalid_value", "messages"),
    ({"messages": []}, "invalid_value", "messages"),
    ({"messages": "Hi"}, "invalid_value", "messages"),
    ({"messages": ["Hi"]}, "invalid_value", "messages[0]"),
    ({"messages": [{"role": "king", "content": "x"}]}, "invalid_value", "messages[0].role"),
    ({"messages": [{"role": "user", "content": 3}]}, "invalid_value", "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "invalid_value",
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "user", "weight": 1}]}, "unknown_parameter", "messages[0].weight"),
    (
        {"messages": [dict.fromkeys(map(str, range(100_000)), 1)]},
        "invalid_value",
        "messages[0]",
    ),
    ({"model": 5}, "invalid_value", "model"),
    ({"model": "gpt"}, "model_not_found", "model"),
    ({"temperature": "hot"}, "invalid_value", "temperature"),
    ({"temperature": True}, "invalid_value", "temperature"),
    ({"n": 2, "temperature": 0}, "invalid_value", "n"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "invalid_value", "max_completion_tokens"),
    ({"min_tokens": 5, "max_tokens": 3}, "invalid_value", "min_tokens"),
    ({"stop": ["x"] * 250_000}, "invalid_value", "stop"),
    ({"stop": [""]}, "invalid_value", "stop[0]"),
    ({"stop": ["a", 4]}, "invalid_value", "stop[1]"),
    ({"stop": ["a", "b" * 1025]}, "invalid_value", "stop"),
    ({"bad_words": ["b" * 1025]}, "invalid_value", "bad_words"),
    ({"bad_words": ["b"] * 1025}, "invalid_value", "bad_words"),
    ({"allowed_token_ids": []}, "invalid_value", "allowed_token_ids"),
    ({"allowed_token_ids": [1, -1]}, "invalid_value", "allowed_token_ids[1]"),
    ({"stop_token_ids": list(range(129)), "min_tokens": 1}, "invalid_value", "stop_token_ids"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "invalid_value", "logit_bias"),
    ({"logit_bias": {"a": 1}}, "invalid_value", "logit_bias"),
    ({"logit_bias": {"1": 400}}, "invalid_value", "logit_bias"),
    ({"logit_bias": {"300": 1}}, "invalid_value", "logit_bias"),
    ({"logprobs": True, "top_logprobs": 21}, "invalid_value", "logprobs"),
    ({"top_logprobs": 2}, "invalid_value", "top_logprobs"),
    ({"logprobs": 5}, "invalid_value", "logprobs"),
    ({"tools": [{"type": "web_search"}]}, "invalid_value", "tools[0].type"),
    ({"tools": [TOOL, TOOL]}, "invalid_value", "tools"),
    ({"tool_choice": "required"}, "invalid_value", "tool_choice"),
    ({"tool_choice": "sometimes"}, "invalid_value", "tool_choice"),
    ({"response_format": {"type": "xml"}}, "invalid_value", "response_format"),
    ({"response_format": "json"}, "invalid_value", "response_format"),
    ({"structured_outputs": {"regex": 5}}, "invalid_value", "structured_outputs"),
    ({"reasoning_effort": "low"}, "unsupported_parameter", "reasoning_effort"),
    (
        {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
        "unsupported_parameter",
        "chat_template_kwargs.chat_template",
    ),
    ({"priority": 3}, "invalid_value", "priority"),
    ({"modalities": ["text", "audio"]}, "unsupported_parameter", "modalities"),
    ({"functions": [{"name": "f"}]}, "unsupported_parameter", "functions"),
    ({"stream_options": {"colour": 1}}, "unknown_parameter", "stream_options.colour"),
    (
        {"stream_options": {"include_obfuscation": 0}},
        "invalid_value",
        "stream_options.include_obfuscation",
    ),
    (
        {"stream_options": {"include_obfuscation": True}},
        "unsupported_parameter",
        "stream_options.include_obfuscation",
    ),
    ({"metadata": {"a": 1}}, "invalid_value", "metadata.a"),
    ({"metadata": {str(i): "" for i in range(17)}}, "invalid_value", "metadata"),
    ({"metadata": {"a": "b" * 513}}, "invalid_value", "metadata.a"),
    ({"user": "b" * 513}, "invalid_value", "user"),
    ({"safety_identifier": "b" * 513}, "invalid_value", "safety_identifier"),
    ({"prompt_cache_key": "b" * 513}, "invalid_value", "prompt_cache_key"),
    ({"extra_args": {"x": 1}}, "invalid_value", "extra_args"),
    ({"colour": "blue"}, "unknown_parameter", "colour"),
]


async def test_invalid_fields_are_refused_by_name():
    engine = fake_engine("x")
    async with app_client(engine) as client:
        for fields, code, param in REFUSED:
            for stream in (False, True):
                answer = await chat(client, **fields, stream=stream)
                status = 404 if code == "model_not_found" else 400
                assert answer.status_code == status, (fields, answer.text)
                error = answer.json()["error"]
                assert (error["code"], error["param"]) == (code, param), error
                assert error["type"] == "invalid_request_error"
                assert len(answer.text) < 1000
        assert engine.stats().num_requests == 0


async def test_the_error_for_a_field_of_vllms_names_the_one_here():
    async with app_client(fake_engine("x")) as client:
        chat_error = (await chat(client, guided_regex="[0-9]")).json()["error"]
        tokens = {"prompt": "x", "guided_regex": "[0-9]"}
        plain_error = (await client.post("/tokenize", json=tokens)).json()["error"]
        sampling_error = (await chat(client, params={})).json()["error"]
    message = "'guided_regex': no such field"
    assert chat_error["message"] == message + ', expected structured_outputs={"regex": …}'
    assert (chat_error["code"], chat_error["param"]) == ("unknown_parameter", "guided_regex")
    assert plain_error["message"] == message
    assert sampling_error["message"] == "'params': no such field"


OTHER_ENDPOINTS = [
    ("chat/completions", {"max_output_tokens": 5}, "max_completion_tokens"),
    ("chat/completions", {"input": "x"}, "messages"),
    ("chat/completions", {"prompt": "x"}, "messages"),
    ("chat/completions", {"instructions": "x"}, "a message with the role system"),
    ("chat/completions", {"text": {"format": {}}}, "response_format"),
    ("chat/completions", {"reasoning": {"effort": "low"}}, "reasoning_effort"),
    ("completions", {"messages": user("x")}, "prompt; conversations go to /v1/chat/completions"),
    ("completions", {"input": "x"}, "prompt"),
    ("completions", {"prompt": "x", "max_output_tokens": 5}, "max_tokens"),
    ("completions", {"prompt": "x", "max_completion_tokens": 5}, "max_tokens"),
    ("responses", {"max_tokens": 5}, "max_output_tokens"),
    ("responses", {"max_completion_tokens": 5}, "max_output_tokens"),
    ("responses", {"messages": user("x")}, "input"),
    ("responses", {"response_format": {"type": "text"}}, 'text={"format": …}'),
    ("responses", {"reasoning_effort": "low"}, 'reasoning={"effort": …}'),
    *(
        (path, {"extra_body": {"top_k": 5}}, OUR_NAMES_BY_FOREIGN_NAME["field"]["extra_body"])
        for path in ("chat/completions", "completions", "responses")
    ),
]
FLAT = {"type": "function", "name": "f"}
NESTED = {"type": "function", "function": {"name": "f"}}
OTHER_SHAPES = [
    ("chat/completions", {"tools": [TOOL, FLAT]}, "tools[1].name", 'function={"name": …}'),
    ("chat/completions", {"tool_choice": FLAT}, "tool_choice.name", 'function={"name": …}'),
    (
        "responses",
        {"tools": [NESTED]},
        "tools[0].function",
        "name, description and parameters, beside type",
    ),
    ("responses", {"tool_choice": NESTED}, "tool_choice.function", "name, beside type"),
]


async def test_field_of_another_endpoint_names_its_counterpart():
    cases = [(path, fields, [*fields][-1], ours) for path, fields, ours in OTHER_ENDPOINTS]
    async with app_client(fake_engine("x")) as client:
        for path, fields, param, ours in [*cases, *OTHER_SHAPES]:
            rest = {"chat/completions": {"messages": user("x")}, "responses": {"input": "x"}}
            body = fields if path == "completions" else rest[path] | fields
            error = (await client.post(f"/v1/{path}", json=body)).json()["error"]
            message = f"'{param}': no such field, expected {ours}"
            assert (error["message"], error["param"]) == (message, param)
            assert error["code"] == "unknown_parameter"


TEXT_OR = [
    ("chat/completions", {"messages": user("x"), "stop": 5}, "stop=5", "list or string"),
    ("chat/completions", {"messages": user(5)}, "messages[0].content=5", "list or string"),
    (
        "chat/completions",
        {"messages": user("x"), "tool_choice": 5},
        "tool_choice=5",
        "dictionary or string",
    ),
    ("completions", {"prompt": 5}, "prompt=5", "string or list"),
    ("responses", {"input": 5}, "input=5", "list or string"),
]


async def test_the_error_for_a_field_of_two_types_names_both():
    async with app_client(fake_engine("x")) as client:
        for path, fields, given, types in TEXT_OR:
            error = (await client.post(f"/v1/{path}", json=fields)).json()["error"]
            assert error["message"] == f"{given}: expected a valid {types}"
        one = (await chat(client, stop=["a", 4])).json()["error"]
    assert one["message"] == "stop[1]=4: expected a valid string"


async def test_neutral_values_are_accepted():
    neutral = {
        "frequency_penalty": 0,
        "function_call": "none",
        "functions": [],
        "logit_bias": {},
        "logprobs": False,
        "max_tokens": None,
        "metadata": {"run": "7"},
        "modalities": ["text"],
        "n": 1,
        "parallel_tool_calls": True,
        "presence_penalty": 0.0,
        "response_format": {"type": "text"},
        "service_tier": "auto",
        "stop": None,
        "store": True,
        "stream": False,
        "stream_options": None,
        "temperature": 1,
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1,
        "verbosity": "medium",
    }
    async with app_client(fake_engine("Yes.")) as client:
        answer = await chat(client, **neutral)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == "Yes."
    assert answer.json()["metadata"] == {"run": "7"}


async def test_unsupported_fields_can_be_ignored(caplog):
    asked = {"reasoning_effort": "low", "verbosity": "low", "audio": {"voice": "x"}}
    async with app_client(fake_engine("Yes."), ignore_unsupported=True) as client:
        for _ in range(2):
            assert (await chat(client, **asked)).status_code == 200
        response = await client.post(
            "/v1/responses",
            json={"input": "Hi", "truncation": "auto", "text": {"verbosity": "high"}},
        )
        unknown = (await chat(client, colour="blue")).json()["error"]
    assert (response.json()["truncation"], response.json()["text"]["verbosity"]) == (
        "disabled",
        "medium",
    )
    assert (unknown["code"], unknown["param"]) == ("unknown_parameter", "colour")
    lines = [record.getMessage() for record in caplog.records if "ignored" in record.msg]
    names = [line.removeprefix("ignored, now and later: ").split("=")[0] for line in lines]
    assert sorted(names) == sorted([*asked, "truncation", "text.verbosity"])


async def test_sampling_fields_reach_the_engine():
    seen = []

    class Watch:
        def on_submit(self, request, submission):
            seen.append((request.sampling, request.priority, request.cache_salt))

        def on_finish(self, request, usage, error): ...

    given = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 0.25,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.5,
        "seed": 11,
        "stop": ["END"],
        "stop_token_ids": [5],
        "ignore_eos": True,
        "min_tokens": 2,
        "allowed_token_ids": [1, 2, 3],
        "bad_words": ["no"],
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "max_tokens": 4,
        "n": 2,
    }
    engine = fake_engine("x", scheduling_policy="priority")
    engine.add_observer(Watch())
    async with app_client(engine) as client:
        answer = await chat(
            client, **given, logit_bias={"7": 3}, logprobs=True, priority=-2, cache_salt="s"
        )
    assert answer.status_code == 200, answer.text
    ((sampling, priority, salt),) = seen
    for name, value in given.items():
        found = getattr(sampling, name)
        assert (list(found) if isinstance(value, list) else found) == value, name
    assert (sampling.logit_bias, sampling.logprobs, priority, salt) == ({7: 3.0}, 0, -2, "s")


async def test_stream_error_before_first_token_has_http_status():
    async with app_client(fake_engine("x", max_model_len=5000)) as client:
        for stream in (False, True):
            # So long that it is tokenised elsewhere, and fails at the first read.
            long = await chat(client, messages=user("\u00e9" * 4200), stream=stream)
            assert (long.status_code, long.json()["error"]["param"]) == (400, "messages")
            assert long.json()["error"]["code"] == "context_length_exceeded"


async def test_an_error_in_the_middle_of_a_stream_is_an_event():
    async with app_client(fake_engine(["Hel", RequestError("no more")])) as client:
        whole = await chat(client)
        events = events_of((await chat(client, stream=True)).text)
    assert (whole.status_code, whole.json()["error"]["code"]) == (422, "request_failed")
    assert events[-1]["error"]["code"] == "request_failed"
    texts = [event["choices"][0]["delta"].get("content", "") for event in events[:-1]]
    assert "".join(texts) == "Hel"


async def test_silence_is_filled_with_comments():
    gate = threading.Semaphore(0)
    async with fake_engine("Hello", gate=gate) as engine:
        app = create_app(engine, ping_interval=0.02)
        async with RawRequest(app, {"messages": user("Hi"), "stream": True}) as request:
            await request.until(lambda text: text.count(": ping") == 2)
            gate.release(100)
            text = await request.whole()
        gate.release(100)
    assert text.startswith('data: {"object":"chat.completion.chunk"')
    chunks = [chunk["choices"][0] for chunk in events_of(text)[:-1]]
    assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == "Hello"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_aborts(stream):
    async with fake_engine("Hello" * 500, step_time=0.002) as engine:
        app = create_app(engine)
        async with RawRequest(app, {"messages": user("Hi"), "stream": stream}) as request:
            await until(lambda: engine.stats().num_running)
            if stream:
                await request.until(lambda text: text.count("content") > 5)
            request.disconnect()
        while (stats := engine.stats()).num_running:
            await asyncio.sleep(0.001)
        assert (stats.num_aborted, stats.num_finished) == (1, 0)
        assert stats.num_free_blocks == stats.num_blocks
        # Nothing is sent behind a disconnect.
        assert ("[DONE]" in request.text, bool(request.text)) == (False, stream)


async def test_a_server_that_closes_says_so():
    for stream in (False, True):
        async with fake_engine("Hello" * 500, step_time=0.002) as engine:
            app = create_app(engine)
            async with RawRequest(app, {"messages": user("Hi"), "stream": stream}) as request:
                await until(lambda: engine.stats().generation_tokens)
                await engine.aclose()
                text = await request.whole()
        assert request.status == (200 if stream else 503)
        error = events_of(text)[-1]["error"] if stream else json.loads(text)["error"]
        assert error["code"] == "server_shutting_down"


async def test_chunks_are_merged_where_there_would_be_too_many():
    async with app_client(fake_engine("x" * 60, step_time=0.001), max_frame_rate=10) as client:
        events = events_of((await chat(client, stream=True)).text)
    texts = [event["choices"][0]["delta"].get("content") for event in events[:-1]]
    assert "".join(filter(None, texts)) == "x" * 60
    assert len(list(filter(None, texts))) < 30
