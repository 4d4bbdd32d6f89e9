"""A client's streams keep the promises of an engine's."""

from __future__ import annotations

import asyncio
import gc
import pickle
import threading
from typing import Any

import pytest
from asyncllm_ray import Client
from asyncllm_ray.remote import translate
from asyncllm_ray.wire import check_plain
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from replicas import stats, until, until_idle

from asyncllm import (
    LLM,
    ContextLengthExceededError,
    DeadlineExceededError,
    EngineClosedError,
    EngineDeadError,
    EngineOverloadedError,
    InvalidRequestError,
    ModelLoadError,
    RequestError,
    SamplingParams,
)

PROMPT = "Mia has a boat."
ENDLESS: dict[str, Any] = {"max_tokens": 480, "ignore_eos": True}


@pytest.mark.parametrize("seed", [1, 2])
async def test_a_seed_gives_the_local_engines_tokens(client: Client, llm: LLM, seed: int) -> None:
    params = SamplingParams(max_tokens=60, temperature=1.2, seed=seed, logprobs=2)
    found = await client.generate(PROMPT, params)
    expected = llm.generate(PROMPT, params)
    assert found.token_ids == expected.token_ids
    assert found.text == expected.text
    assert found.prompt_token_ids == expected.prompt_token_ids
    assert found.finish_reason == expected.finish_reason
    assert [one.token_id for one in found.logprobs or ()] == list(found.token_ids)
    assert found.usage is not None
    assert found.usage.completion_tokens == len(found.token_ids)


async def test_several_outputs_and_prompt_logprobs(client: Client, llm: LLM) -> None:
    params = SamplingParams(n=3, max_tokens=20, seed=5, temperature=1.0, prompt_logprobs=1)
    found = await client.generate(PROMPT, params)
    expected = llm.generate(PROMPT, params)
    assert [one.token_ids for one in found.outputs] == [one.token_ids for one in expected.outputs]
    expected_reasons = [one.finish_reason for one in expected.outputs]
    assert [one.finish_reason for one in found.outputs] == expected_reasons
    assert found.prompt_logprobs is not None
    assert expected.prompt_logprobs is not None
    assert len(found.prompt_logprobs) == len(expected.prompt_logprobs)


async def test_deltas_are_the_completion(client: Client) -> None:
    stream = client.stream(PROMPT, max_tokens=100, seed=3, ignore_eos=True)
    deltas = [delta async for delta in stream]
    completion = await stream
    assert "".join(delta.text for delta in deltas) == completion.text
    assert sum((delta.token_ids for delta in deltas), ()) == completion.token_ids
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason == stream.finish_reason == "length"
    assert deltas[-1].usage == stream.usage
    assert len(completion.token_ids) == 100


async def test_conversations_have_their_calls(client: Client, llm: LLM) -> None:
    tool = {
        "type": "function",
        "function": {
            "name": "sail",
            "parameters": {
                "type": "object",
                "properties": {"far": {"type": "boolean"}},
                "required": ["far"],
                "additionalProperties": False,
            },
        },
    }
    messages = [{"role": "user", "content": "Sail!"}]
    options: Any = {"tools": [tool], "tool_choice": "required", "seed": 4, "max_tokens": 60}
    found = await client.chat(messages, **options)
    expected = llm.chat(messages, **options)
    assert [call.name for call in found.tool_calls] == ["sail"]
    assert [call.kwargs for call in found.tool_calls] == [
        call.kwargs for call in expected.tool_calls
    ]
    assert found.finish_reason == expected.finish_reason == "tool_calls"
    assert found.text == expected.text


async def test_a_lost_reference_aborts(client: Client, handle: Any) -> None:
    stream = client.stream(PROMPT, **ENDLESS)
    await anext(stream)
    del stream
    gc.collect()
    await until_idle(handle)


async def test_break_aborts(client: Client, handle: Any) -> None:
    async for _ in client.stream(PROMPT, **ENDLESS):
        break
    gc.collect()
    await until_idle(handle)


async def test_aclose_aborts(client: Client, handle: Any) -> None:
    before = (await stats(handle))[0]["num_aborted"]
    async with client.stream(PROMPT, on_slow="pause", **ENDLESS) as stream:
        await anext(stream)
    assert [delta async for delta in stream] == []
    await until_idle(handle)
    assert (await stats(handle))[0]["num_aborted"] == before + 1


async def test_a_cancelled_read_aborts(client: Client, handle: Any) -> None:
    stream = client.stream(PROMPT, on_slow="pause", **ENDLESS)
    await anext(stream)
    read = asyncio.create_task(stream.result())
    await asyncio.sleep(0)
    read.cancel()
    with pytest.raises(asyncio.CancelledError):
        await read
    await until_idle(handle)
    with pytest.raises(RequestError, match="read of its stream was cancelled"):
        await stream


async def test_abort_leaves_what_was_generated(client: Client, handle: Any) -> None:
    stream = client.stream(PROMPT, request_id="mine", on_slow="pause", max_unread=16, **ENDLESS)
    first = await anext(stream)
    client.abort("mine")
    completion = await stream
    assert completion.finish_reason == "abort"
    assert completion.token_ids[: len(first.token_ids)] == first.token_ids
    assert len(completion.token_ids) < 64
    await until_idle(handle)


@pytest.mark.parametrize("max_unread", [1, 8, 32])
async def test_a_reader_that_stops_pauses_the_replica(
    client: Client, handle: Any, max_unread: int
) -> None:
    before = (await stats(handle))[0]["generation_tokens"]
    params = SamplingParams(max_tokens=120, ignore_eos=True, seed=6)
    stream = client.stream(PROMPT, params, on_slow="pause", max_unread=max_unread)
    await anext(stream)

    async def is_paused() -> bool:
        return (await stats(handle))[0]["num_paused"] == 1

    await until(is_paused)
    found = (await stats(handle))[0]
    assert found["generation_tokens"] - before <= 2 * max_unread + 2
    assert found["num_streams"] == 1
    completion = await stream
    assert len(completion.token_ids) == 120
    expected = await client.generate(PROMPT, params)
    assert completion.token_ids == expected.token_ids


async def test_credit_needs_no_heartbeat(handle: Any) -> None:
    client = Client(handle, heartbeat=60.0)
    stream = client.stream(PROMPT, on_slow="pause", max_unread=32, max_tokens=100, ignore_eos=True)
    completion = await stream  # Without credit the lease of 2 s ends it.
    assert len(completion.token_ids) == 100
    client.close()


async def test_a_late_reader_gets_merged_deltas(client: Client, handle: Any) -> None:
    stream = client.stream(PROMPT, n=8, max_unread=32, **ENDLESS)
    await anext(stream)

    async def is_behind() -> bool:
        return client.stats().pauses >= 1

    await until(is_behind)
    assert not stream._channel.ended
    assert stream._channel.num_unread <= 64
    await until_idle(handle)
    deltas = [delta async for delta in stream]
    assert max(len(delta.token_ids) for delta in deltas) <= 32
    assert [len(one.token_ids) for one in (await stream).outputs] == [480] * 8


async def test_a_client_that_is_not_heard_loses_its_stream(handle: Any) -> None:
    client = Client(handle, heartbeat=600.0)
    before = (await stats(handle))[0]["num_expired"]
    stream = client.stream(PROMPT, on_slow="pause", max_unread=8, **ENDLESS)
    await anext(stream)
    await asyncio.sleep(3.0)
    await until_idle(handle)
    assert (await stats(handle))[0]["num_expired"] == before + 1
    with pytest.raises(EngineDeadError, match="not heard from for 2"):
        await stream
    client.close()


async def test_heartbeats_keep_a_paused_stream(client: Client, handle: Any) -> None:
    stream = client.stream(PROMPT, on_slow="pause", max_unread=8, max_tokens=60, ignore_eos=True)
    await anext(stream)
    await asyncio.sleep(3.0)
    assert len((await stream).token_ids) == 60


async def test_errors_are_the_engines(client: Client) -> None:
    with pytest.raises(ContextLengthExceededError, match="max_model_len=512"):
        await client.generate(list(range(600)), max_tokens=1)
    with pytest.raises(InvalidRequestError) as caught:
        await client.generate(PROMPT, allowed_token_ids=[999_999])
    assert caught.value.param == "allowed_token_ids"
    with pytest.raises(InvalidRequestError) as caught:
        await client.generate(None)  # pyright: ignore[reportArgumentType]
    assert caught.value.param == "prompt"
    stream = client.stream(PROMPT, timeout=1.0, on_slow="pause", max_unread=2, **ENDLESS)
    await asyncio.sleep(1.2)
    with pytest.raises(DeadlineExceededError) as expired:
        await stream
    assert expired.value.partial is not None


async def test_a_full_queue_says_when_to_retry(client: Client, handle: Any) -> None:
    """The replica takes 16 requests, Serve queues 8, and may be routing some more; none ends,
    because nobody reads on."""
    streams = [client.stream(PROMPT, on_slow="pause", **ENDLESS) for _ in range(32)]
    reads = [asyncio.ensure_future(anext(one)) for one in streams]
    refused: list[EngineOverloadedError] = []
    async with asyncio.timeout(60):
        for read in asyncio.as_completed(reads):
            try:
                await read
            except EngineOverloadedError as error:
                refused.append(error)
            if len(refused) == 4:
                break
    assert all(error.retry_after > 0 for error in refused)
    for stream, one in zip(streams, reads, strict=True):
        one.cancel()
        stream.close()
    await asyncio.gather(*reads, return_exceptions=True)
    await until_idle(handle)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logits_processors", (lambda *_: None,)),
        ("max_unread", 0),
        ("sampling_params", {"temperature": 1}),
        ("nonsense", 1),
    ],
)
async def test_arguments_are_refused_by_name(client: Client, name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        client.stream(PROMPT, **{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize("messages", [None, 5, "hi", [], [5], {}])
async def test_messages_are_refused_as_an_engine_does(
    client: Client, llm: LLM, messages: Any
) -> None:
    with pytest.raises(InvalidRequestError) as expected:
        llm.engine.chat(messages)
    with pytest.raises(InvalidRequestError) as caught:
        await client.chat(messages)
    assert (str(caught.value), caught.value.param) == (str(expected.value), "messages")


async def test_an_unknown_field_is_refused_as_an_engine_does(client: Client, llm: LLM) -> None:
    with pytest.raises(InvalidRequestError) as expected:
        llm.engine.stream(PROMPT, nonsense=1)
    with pytest.raises(InvalidRequestError) as caught:
        client.stream(PROMPT, nonsense=1)
    assert str(caught.value) == str(expected.value)


def test_a_deployment_that_is_gone_says_the_remedy() -> None:
    error: Any = DeploymentUnavailableError("engine")  # pyright: ignore[reportArgumentType]
    with pytest.raises(EngineClosedError, match=r"deleted(.*)deploy it again with run"):
        raise translate(error)


@pytest.mark.parametrize("name", ["tools", "response_format"])
async def test_callables_of_a_conversation_are_refused(client: Client, name: str) -> None:
    with pytest.raises(InvalidRequestError, match="plain data") as caught:
        client.chat([{"role": "user", "content": "Hi"}], **{name: [print]})
    assert caught.value.param == name


class EndsItsReader:
    """Ends the process that unpickles it."""

    def __reduce__(self) -> Any:
        return exit, ()


@pytest.mark.parametrize("prompt", [EndsItsReader(), [EndsItsReader()], (n for n in [1])])
async def test_what_would_end_a_replica_is_not_sent(client: Client, prompt: Any) -> None:
    with pytest.raises(InvalidRequestError, match="plain data") as caught:
        client.stream(prompt)
    assert caught.value.param == "prompt"
    with pytest.raises(InvalidRequestError) as caught:
        client.chat([{"role": "user", "content": prompt}])
    assert caught.value.param == "messages"


def test_plain_data_is_bounded_in_depth() -> None:
    nested: list[Any] = []
    for _ in range(10_000):
        nested = [nested]
    with pytest.raises(InvalidRequestError, match="plain data"):
        check_plain("tools", nested)
    check_plain("tools", [{"type": "function", "function": {"parameters": {"a": [1, None, 0.5]}}}])


async def test_a_request_id_is_unique(client: Client) -> None:
    stream = client.stream(PROMPT, request_id="one", on_slow="pause", **ENDLESS)
    with pytest.raises(InvalidRequestError) as caught:
        client.stream(PROMPT, request_id="one")
    assert caught.value.param == "request_id"
    stream.close()


def test_threads_read_streams(client: Client, llm: LLM) -> None:
    params = SamplingParams(max_tokens=50, seed=8, temperature=1.0)
    found: dict[int, tuple[int, ...]] = {}

    def read(number: int) -> None:
        stream = client.blocking(client.stream(PROMPT, params))
        found[number] = sum((delta.token_ids for delta in stream), ())

    threads = [threading.Thread(target=read, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == dict.fromkeys(range(3), llm.generate(PROMPT, params).token_ids)


async def test_a_closed_client_aborts_and_refuses(handle: Any) -> None:
    client = Client(handle)
    stream = client.stream(PROMPT, on_slow="pause", **ENDLESS)
    await anext(stream)
    client.close()
    assert (await stream).finish_reason == "abort"
    with pytest.raises(EngineClosedError, match="closed"):
        client.stream(PROMPT)
    await until_idle(handle)


async def test_a_stream_cannot_be_pickled(client: Client) -> None:
    with pytest.raises(TypeError, match="neither copied nor pickled"):
        pickle.dumps(client.stream(PROMPT, max_tokens=1))


async def test_instant_cancels_leave_nothing(client: Client, handle: Any) -> None:
    for _ in range(20):
        client.stream(PROMPT, **ENDLESS).close()
    await until_idle(handle)
    assert len((await client.generate(PROMPT, max_tokens=5, ignore_eos=True)).token_ids) == 5


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ActorDiedError(None), EngineDeadError),
        (ActorUnavailableError("away", None), EngineDeadError),
        (BackPressureError(1, 1), EngineOverloadedError),
        (RayTaskError("stream", "", ModelLoadError("no model")), ModelLoadError),
        (DeploymentUnavailableError("engine"), EngineClosedError),  # pyright: ignore[reportArgumentType]
        (RuntimeError("broken"), RequestError),
        (EngineOverloadedError("full", retry_after=3.0), EngineOverloadedError),
    ],
)
def test_no_error_arrives_as_rays(error: Exception, expected: type[Exception]) -> None:
    found = translate(error)
    assert type(found) is expected
    assert found is error or found is getattr(error, "cause", None) or found.__cause__ is error
    if isinstance(found, EngineOverloadedError):
        assert found.retry_after > 0
    assert type(pickle.loads(pickle.dumps(found))) is expected
