"""Large request bodies and answers of the application."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import struct
import threading
import tracemalloc
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from asyncllm import AsyncLLMEngine
from asyncllm.outputs import Completion, CompletionOutput, TokenLogprobs, Usage
from asyncllm.sampling_params import MAX_LOGIT_BIASES
from asyncllm.serving import create_app
from asyncllm.serving.chat_request import ChatRequest
from asyncllm.serving.chat_writer import ChatWriter
from asyncllm.serving.completion_request import CompletionRequest
from asyncllm.serving.completion_writer import CompletionWriter
from asyncllm.serving.openapi import _BODY_TYPES
from asyncllm.serving.request_body import (
    MAX_ERROR_PARAM_CHARACTERS,
    MAX_OBJECT_FIELDS,
    RequestBody,
    UnsupportedFieldPolicy,
)
from asyncllm.serving.response_events import ResponseEvents
from asyncllm.serving.response_input import _get_item_tag
from asyncllm.serving.response_request import ResponseRequest
from asyncllm.serving.token_logprobs import LegacyLogprobFormatter, LogprobFormatter
from asyncllm.testing import fake_engine
from asyncllm.text.tokenizer import Tokenizer
from tests.app_clients import RawRequest, app_client
from tests.idle import until
from tests.websocket_clients import ENDS, client_of, served

pytestmark = pytest.mark.asyncio

LONG = "a" * 5000
BODIES = {
    "/v1/completions": lambda text: {"prompt": text},
    "/v1/chat/completions": lambda text: {"messages": [{"role": "user", "content": text}]},
    "/v1/responses": lambda text: {"input": text},
    "/tokenize": lambda text: {"prompt": text},
    "/detokenize": lambda text: {"tokens": [97] * (len(text) // 3)},
}


def plain_function(call, method):
    """A function, so that it binds to its object, that passes ``method`` to ``call``."""
    return lambda *args, **options: call(method, *args, **options)


@pytest.fixture
def threads_of(monkeypatch):
    """Function that records the threads, and the most calls at once, of an object's methods."""

    def record(owner, *names):
        found = {"threads": set(), "most": 0, "now": 0}

        def recorded(method, *args, **options):
            found["threads"].add(threading.get_ident())
            found["now"] += 1
            found["most"] = max(found["most"], found["now"])
            try:
                return method(*args, **options)
            finally:
                found["now"] -= 1

        for name in names:
            monkeypatch.setattr(owner, name, plain_function(recorded, getattr(owner, name)))
        return found

    return record


@pytest.mark.parametrize("path", BODIES)
async def test_long_bodies_parse_on_a_thread_and_short_ones_inline(path, monkeypatch):
    here, found, now = threading.get_ident(), [], []
    parse = RequestBody.parse.__func__

    def recorded(cls, *given):
        now.append(None)
        found.append((threading.get_ident(), len(now)))
        parsed = parse(cls, *given)
        now.pop()
        return parsed

    monkeypatch.setattr(RequestBody, "parse", classmethod(recorded))
    engine = fake_engine("x", max_model_len=9000, num_blocks=2000)
    async with app_client(engine) as client:
        assert (await client.post(path, json=BODIES[path]("a" * 99))).status_code == 200
        assert found == [(here, 1)]
        found.clear()
        answers = [client.post(path, json=BODIES[path](LONG)) for _ in range(8)]
        assert {one.status_code for one in await asyncio.gather(*answers)} == {200}
    assert len(found) == 8
    assert {most for _, most in found} == {1}
    assert here not in {thread for thread, _ in found}


async def test_short_request_after_long_conversation_is_checked_on_thread(threads_of):
    submits, here = threads_of(ResponseRequest, "submit"), threading.get_ident()
    engine = fake_engine("x", max_model_len=40_000, num_blocks=3000)
    async with app_client(engine) as client:
        for count, is_here in ((100, True), (1000, False)):
            items = [{"role": "user", "content": "a"}] * count
            first = await client.post("/v1/responses", json={"input": items})
            submits["threads"].clear()
            body = {"input": "b", "previous_response_id": first.json()["id"]}
            assert (await client.post("/v1/responses", json=body)).status_code == 200
            assert (submits["threads"] == {here}) is is_here


@contextlib.contextmanager
def held_by(count):
    """Yields a function: the memory held per request since the block began, in bytes."""

    def held():
        gc.collect()
        return tracemalloc.get_traced_memory()[0] / count

    gc.collect()
    tracemalloc.start()
    try:
        yield held
    finally:
        tracemalloc.stop()


PADDED = " " * 1_000_000
"""As part of a body, memory that nothing but the body itself takes."""


async def check_memory_of_six(engine, path, body, num_waiting, max_bytes):
    """Six requests hold at most ``max_bytes`` each until their answers are made."""
    app = create_app(engine)
    async with engine, contextlib.AsyncExitStack() as stack:
        await engine.pause()
        with held_by(6) as held:
            requests = [
                await stack.enter_async_context(RawRequest(app, body.encode(), path))
                for _ in range(6)
            ]
            try:
                await until(lambda: engine.stats().num_waiting == num_waiting)
                await until(lambda: held() < max_bytes, 5.0)
            finally:
                await engine.resume()
        for one in requests:
            await one.whole()
            assert one.status == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
async def test_a_body_is_not_held_while_its_answer_is_made(path):
    body = json.dumps(BODIES[path]("a")) + PADDED
    await check_memory_of_six(fake_engine("x"), path, body, 6, 200_000)


@pytest.mark.parametrize(
    ("prompt", "n", "num_outputs"),
    [([*range(250)] * 1000, 2, 2), ([[*range(250)] * 62] * 16, 1, 16)],
    ids=["one", "16"],
)
async def test_truncated_prompts_are_not_held_while_their_answer_is_made(prompt, n, num_outputs):
    body = json.dumps({"prompt": prompt, "truncate_prompt_tokens": 4, "stream": True, "n": n})
    await check_memory_of_six(fake_engine("x"), "/v1/completions", body, 6 * num_outputs, 200_000)


@pytest.mark.parametrize(
    ("num_prompts", "n", "padding", "is_here"),
    [
        (1, 64, 0, False),
        (1, 15, 0, True),
        (15, 1, 0, True),
        (16, 1, 0, False),
        (2, 8, 0, False),
        (2, 1, 4096, False),
    ],
)
async def test_a_list_of_prompts_is_submitted_on_the_thread(
    threads_of, num_prompts, n, padding, is_here
):
    submitted, here = threads_of(CompletionRequest, "submit"), threading.get_ident()
    async with app_client(fake_engine("x")) as client:
        body = {"prompt": [[1]] * num_prompts, "n": n, "max_tokens": 1}
        content = json.dumps(body) + " " * padding
        answer = (await client.post("/v1/completions", content=content)).json()
        assert len(answer["choices"]) == num_prompts * n
        body["prompt"][-1] = [999_999]
        refused = await client.post("/v1/completions", content=json.dumps(body) + " " * padding)
        assert refused.json()["error"]["param"] == "prompt"
    assert (here in submitted["threads"]) is is_here


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_a_wide_character_makes_no_request_take_four_times_its_bytes(path):
    """Tools: an answer of ``/v1/responses`` repeats them in each of its first events."""
    function = {"name": "f", "parameters": {"description": "\U0001f600" + "x" * 500_000}}
    is_chat = path == "/v1/chat/completions"
    tool = {"type": "function", **({"function": function} if is_chat else function)}
    limit = "max_tokens" if is_chat else "max_output_tokens"
    body = json.dumps(BODIES[path]("a") | {"tools": [tool], "stream": True, limit: 2})
    max_bytes = 100_000 if is_chat else 1_800_000
    await check_memory_of_six(AsyncLLMEngine(num_blocks=64), path, body, 6, max_bytes)


async def test_a_message_is_not_held_once_it_is_answered():
    async with served(fake_engine("x"), max_message_size=1 << 21) as server:
        async with contextlib.AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(client_of(server)) for _ in range(6)]
            for one in clients:
                await one.ask("a")
            with held_by(6) as held:
                for one in clients:
                    body = json.dumps({"type": "response.create", "input": "a"})
                    await one.connection.send(body + PADDED)
                    assert (await one.until(*ENDS))[-1]["type"] == "response.completed"
                del body
                await until(lambda: held() < 200_000, 5.0)


@pytest.mark.parametrize("size", [10_000, 50_000])
@pytest.mark.parametrize("kept", [5, None])
async def test_a_long_response_is_written_on_the_thread(threads_of, size, kept):
    written, here = threads_of(ResponseEvents, "_response_object"), threading.get_ident()
    fields = {"instructions": "b" * size, "truncate_prompt_tokens": kept}
    engine = fake_engine("x", max_model_len=5000, num_blocks=2000)
    async with served(engine) as server, client_of(server) as client:
        end = (await client.ask("a", **fields))["status"]
    assert end == ("failed" if kept is None else "completed")
    assert (here in written["threads"]) is (size == 10_000)


async def test_tokenize_refuses_too_long_text_before_work(threads_of):
    calls = threads_of(Tokenizer, "encode")
    async with app_client(fake_engine("x", max_model_len=1000)) as client:
        for body in ({"prompt": "a" * 200_000}, BODIES["/v1/chat/completions"]("a" * 200_000)):
            answer = await client.post("/tokenize", json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
            assert "at least" in error["message"]
        assert calls["most"] == 0
        assert (await client.post("/tokenize", json={"prompt": "a" * 900})).json()["count"] == 900
    assert calls["most"] == 1


async def test_long_texts_are_tokenised_one_at_a_time(threads_of):
    found = threads_of(Tokenizer, "encode", "decode")
    engine = fake_engine("x", max_model_len=9000, num_blocks=2000)
    async with app_client(engine) as client:
        await asyncio.gather(
            *[engine.tokenize(LONG) for _ in range(6)],
            *[engine.detokenize([97] * 5000) for _ in range(6)],
            *[client.post("/tokenize", json={"prompt": LONG}) for _ in range(6)],
            *[client.post("/detokenize", json={"tokens": [97] * 5000}) for _ in range(6)],
        )
    # The thread ends when it has nothing to do, so there may be several, one after the other.
    assert found["most"] == 1
    assert threading.get_ident() not in found["threads"]


async def test_many_log_probabilities_are_written_on_the_thread(threads_of):
    legacy, chat = (
        threads_of(LegacyLogprobFormatter, "format"),
        threads_of(LogprobFormatter, "format"),
    )
    here, engine = threading.get_ident(), AsyncLLMEngine(num_blocks=64, max_num_seqs=4)
    async with app_client(engine) as client:

        async def tokens_of(prompt, stream):
            fields = {"logprobs": 5, "echo": True, "max_tokens": 2, "n": 2, "ignore_eos": True}
            legacy["threads"].clear()
            body = {"prompt": prompt, "stream": stream, "seed": 1, **fields}
            text = (await client.post("/v1/completions", json=body)).text
            found: dict[int, list[str]] = {0: [], 1: []}
            for part in text.split("\n\n")[:-2] if stream else [text]:
                for choice in json.loads(part.removeprefix("data: "))["choices"]:
                    found[choice["index"]] += choice["logprobs"]["tokens"]
            return found

        short, long = [5] * 3, [5] * 300
        assert await tokens_of(short, False) == await tokens_of(short, True)
        assert legacy["threads"] == {here}
        whole = await tokens_of(long, False)
        assert here not in legacy["threads"]
        assert await tokens_of(long, True) == whole
        # Behind the echo, a stream's chunks are short again.
        assert legacy["threads"] - {here}
        assert [len(tokens) for tokens in whole.values()] == [302, 302]
        for num_tokens, is_here in ((2, True), (100, False)):
            chat["threads"].clear()
            options = {"logprobs": True, "top_logprobs": 5, "ignore_eos": True}
            options["max_tokens"] = num_tokens
            body = BODIES["/v1/chat/completions"]("Hi") | options
            await client.post("/v1/chat/completions", json=body)
            assert (chat["threads"] == {here}) == is_here


@pytest.mark.parametrize(
    ("writer_type", "path", "fields"),
    [
        (ChatWriter, "/v1/chat/completions", {"logprobs": True, "top_logprobs": 20}),
        (CompletionWriter, "/v1/completions", {"logprobs": 20}),
    ],
)
async def test_a_whole_answer_is_written_in_twice_its_memory(writer_type, path, fields):
    """As Python objects, the log-probabilities would take six times the memory of their JSON."""
    numbers = [number for i in range(20) for number in (32 + i, -1 / (3 + i))]
    entry = TokenLogprobs._from_packed(struct.pack("=iif" + 20 * "if", 32, 1, -1 / 3, *numbers))
    outputs = tuple(
        CompletionOutput(index, "", (), "length", logprobs=(entry,) * 200) for index in range(4)
    )
    completion = Completion("", (1,), outputs, Usage(1, 800, 0, 0.0, 0.1, 1.0))
    request_type = ChatRequest if writer_type is ChatWriter else CompletionRequest
    request = request_type.parse(BODIES[path]("a") | fields | {"n": 4}, UnsupportedFieldPolicy())

    def text_and_bytes(token_id):
        return chr(token_id) * 4, [token_id] * 4

    writer = writer_type("x", request, SimpleNamespace(id_to_text_and_bytes=text_and_bytes))
    b"".join(writer.full_answer([completion]))
    tracemalloc.start()
    try:
        answer = b"".join(writer.full_answer([completion]))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(json.loads(answer)["choices"]) == 4
    assert len(answer) > 4 * 200 * 21 * 25
    assert peak < 2.5 * len(answer)


async def test_oversized_logit_bias_is_refused_before_reading_keys():
    bias = {f"no number {i}": 1 for i in range(MAX_LOGIT_BIASES + 1)}
    async with app_client(fake_engine("x")) as client:
        answer = await client.post("/v1/completions", json={"prompt": "a", "logit_bias": bias})
    assert answer.status_code == 400
    assert "expected at most 1024 token ids" in answer.json()["error"]["message"]


def values_with_mistakes(schema, definitions):
    """Values of a JSON schema, each with one list or object that has 1000 mistakes. Only fields
    that choose an alternative of a union are filled in."""
    if "$ref" in schema:
        schema = definitions[schema["$ref"].removeprefix("#/$defs/")]
    for alternative in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from values_with_mistakes(alternative, definitions)
    wrong_items = (None, 0, -1, "", [], {})
    if schema.get("type") == "array":
        yield from ([item] * 1000 for item in wrong_items)
        for item in values_with_mistakes(schema.get("items", {}), definitions):
            yield [item]
    if schema.get("type") == "object":
        fields = schema.get("properties", {})
        tags = {name: field["const"] for name, field in fields.items() if "const" in field}
        yield from (tags | {f"x{i}": item for i in range(1000)} for item in wrong_items)
        for name, field in fields.items():
            for value in values_with_mistakes(field, definitions):
                yield tags | {name: value}


@pytest.mark.parametrize("body_type", _BODY_TYPES)
async def test_many_mistakes_in_one_value_make_few_errors(body_type):
    """pydantic's errors take a kilobyte each."""
    schema, counts = body_type.model_json_schema(), []
    for name, field in schema["properties"].items():
        for value in values_with_mistakes(field, schema.get("$defs", {})):
            try:
                body_type.model_validate({name: value})
            except ValidationError as error:
                counts.append(error.error_count())
                assert counts[-1] < MAX_OBJECT_FIELDS, (name, value)
    assert counts


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", ("stream_options",), "stream_options"),
        ("/v1/chat/completions", ("tool_choice", "function"), "tool_choice.function"),
        ("/v1/responses", ("text",), "text"),
        ("/v1/responses", ("reasoning",), "reasoning"),
    ],
)
async def test_an_object_of_too_many_fields_is_named(path, fields, param):
    value = {f"x{i}": 0 for i in range(MAX_OBJECT_FIELDS + 1)}
    for name in reversed(fields):
        value = {name: value, **({"type": "function"} if name == "function" else {})}
    async with app_client(fake_engine("x")) as client:
        answer = await client.post(path, json=BODIES[path]("a") | value)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert error["message"].endswith(f"expected at most {MAX_OBJECT_FIELDS} fields")


async def test_long_names_and_types_of_a_refused_value_are_not_copied(monkeypatch):
    assert _get_item_tag({"type": [0] * 1000}) == _get_item_tag({"type": None}) == "#"
    lengths = []

    def equivalent_field(cls, param):
        lengths.append(len(param))
        return ""

    monkeypatch.setattr(RequestBody, "_equivalent_field", classmethod(equivalent_field))
    async with app_client(fake_engine("x")) as client:
        body = {"prompt": "a", "stream_options": {"x" * 1000: 0}}
        answer = await client.post("/v1/completions", json=body)
    assert answer.json()["error"]["code"] == "unknown_parameter"
    assert max(lengths) == MAX_ERROR_PARAM_CHARACTERS


async def test_deltas_of_several_outputs_are_one_write():
    """With a pause behind each delta, 240 deltas would take 24 seconds."""
    fields = {"prompt": "a", "n": 4, "temperature": 1, "max_tokens": 60, "stream": True}
    engine = fake_engine("x" * 60, step_time=0.001)
    async with app_client(engine, max_frame_rate=10) as client:
        async with asyncio.timeout(10):
            text = (await client.post("/v1/completions", json=fields)).text
    texts, counts = [""] * 4, [0] * 4
    for event in text.split("\n\n")[:-2]:
        (choice,) = json.loads(event.removeprefix("data: "))["choices"]
        texts[choice["index"]] += choice["text"]
        counts[choice["index"]] += 1
    assert texts == ["x" * 60] * 4
    assert max(counts) < 20


async def test_prompts_of_a_list_share_a_number_of_frames():
    """Eight streams are the first that pause, for 8 ms of 1 ms steps."""
    fields = {"prompt": list("abcdefgh"), "max_tokens": 60, "stream": True}
    async with app_client(fake_engine("x" * 60, step_time=0.001)) as client:
        text = (await client.post("/v1/completions", json=fields)).text
        assert client._transport.app._server_context.frame_pacer.pause_seconds == 0
    texts, num_chunks = [""] * 8, 0
    for event in text.split("\n\n")[:-2]:
        (choice,) = json.loads(event.removeprefix("data: "))["choices"]
        texts[choice["index"]] += choice["text"]
        num_chunks += 1
    assert texts == ["x" * 60] * 8
    assert num_chunks < 8 * 40


async def test_log_probabilities_of_a_stream_spell_each_token_once(monkeypatch):
    spelled: list[int] = []
    engine = AsyncLLMEngine(num_blocks=64, max_num_seqs=4)
    async with app_client(engine) as client:
        id_to_bytes = engine.tokenizer.id_to_bytes

        def note(token_id: int) -> bytes:
            spelled.append(token_id)
            return id_to_bytes(token_id)

        engine.tokenizer.__dict__["id_to_bytes"] = note
        engine.tokenizer.__dict__.pop("id_to_text_and_bytes", None)
        body = {"stream": True, "max_tokens": 20, "ignore_eos": True, "seed": 1}
        asked = {"prompt": "Once", "logprobs": 5, **body}
        first = await client.post("/v1/completions", json=asked)
        content = [{"role": "user", "content": "Once"}]
        asked = {"messages": content, "logprobs": True, "top_logprobs": 5, **body}
        second = await client.post("/v1/chat/completions", json=asked)
        assert "top_logprobs" in first.text
        entries = [
            entry
            for part in second.text.split("\n\n")[:-2]
            for choice in json.loads(part.removeprefix("data: "))["choices"]
            for entry in (choice["logprobs"] or {}).get("content", ())
        ]
        assert len(entries) == 20
        for entry in entries:
            assert entry["token"] == bytes(entry["bytes"]).decode(errors="replace")
            assert len(entry["top_logprobs"]) == 5
    assert len(spelled) == len(set(spelled)) > 20
