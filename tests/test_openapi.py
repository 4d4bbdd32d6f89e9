"""The OpenAPI description of the application."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest
from pydantic import TypeAdapter

from asyncllm import AsyncLLMEngine
from asyncllm.sampling_params import INTEGER_FIELD_BOUNDS, NUMBER_FIELD_BOUNDS
from asyncllm.serving.openapi import _ANSWER_TYPES, _BODY_TYPES, openapi
from asyncllm.testing import fake_engine
from tests.app_clients import app_client, user

DOCUMENT = openapi(needs_bearer_token=True)
SCHEMAS = DOCUMENT["components"]["schemas"]


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for one in value.values():
            yield from references(one)
    elif isinstance(value, list):
        for one in value:
            yield from references(one)


def test_schema_references_are_complete_and_used() -> None:
    found = set(references(DOCUMENT))
    assert found == {f"#/components/schemas/{name}" for name in SCHEMAS}


@pytest.mark.parametrize("name", ["ChatRequest", "CompletionRequest", "ResponseRequest"])
def test_the_bounds_of_sampling_parameters_are_described(name: str) -> None:
    described = SCHEMAS[name]["properties"]
    for field, (low, high) in {**INTEGER_FIELD_BOUNDS, **NUMBER_FIELD_BOUNDS}.items():
        # These fields are the protocol's: booleans, or with a meaning of their own.
        if field in described and field not in ("logprobs", "max_tokens"):
            least = "exclusiveMinimum" if field == "top_p" else "minimum"
            assert (described[field][least], described[field]["maximum"]) == (low, high), field
    bias = described["logit_bias"]["anyOf"][0]
    assert (bias["maxProperties"], bias["additionalProperties"]["maximum"]) == (1024, 100)
    words = described["bad_words"]["anyOf"][0]
    assert (words["maxItems"], words["items"]["maxLength"]) == (1024, 1024)


def test_a_field_of_the_protocols_keeps_its_own_bounds() -> None:
    chat, legacy = (SCHEMAS[name]["properties"] for name in ("ChatRequest", "CompletionRequest"))
    assert chat["max_tokens"]["minimum"] == 1
    assert legacy["max_tokens"]["anyOf"][0]["minimum"] == 0
    assert "minimum" not in legacy["max_tokens"]
    assert "minimum" not in chat["logprobs"]


def test_no_two_schemas_have_one_name() -> None:
    made: dict[str, Any] = {}
    for kind in (*_BODY_TYPES, *_ANSWER_TYPES):
        schema = TypeAdapter(kind).json_schema(ref_template="#/components/schemas/{model}")
        for name, part in schema.pop("$defs", {}).items():
            assert made.setdefault(name, part) == part, name
        made.setdefault(kind.__name__, None)


def check(path: str, answer: httpx.Response, method: str = "post") -> None:
    """Asserts that an answer is of the schema that the document has for it."""
    described = DOCUMENT["paths"][path][method]["responses"][str(answer.status_code)]
    schema = described["content"]["application/json"]["schema"]
    root = {"components": DOCUMENT["components"], **schema}
    jsonschema.Draft202012Validator(root).validate(answer.json())


async def test_answers_are_as_they_are_described() -> None:
    call = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    engine = fake_engine(
        lambda question: call if question == "Call." else "<think>Hm.</think>Yes.",
        reasoning_parser="qwen3",
    )
    async with app_client(engine) as client:

        async def post(path: str, status: int = 200, **body: Any) -> Any:
            answer = await client.post(path, json=body)
            assert answer.status_code == status, answer.text
            check(path, answer)
            return answer.json()

        async def get(path: str, url: str, status: int = 200) -> None:
            answer = await client.get(url)
            assert answer.status_code == status
            check(path, answer, "get")

        chat = "/v1/chat/completions"
        thought = await post(chat, messages=user("Hi"))
        message = thought["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")
        called = await post(chat, messages=user("Call."), tools=[tool])
        assert called["choices"][0]["message"]["tool_calls"]
        await post(chat, 400, messages=user("Hi"), temperature=-1)
        await post("/v1/completions", prompt="Hi", echo=True)
        response = await post("/v1/responses", input="Hi")
        await get("/v1/responses/{response_id}", f"/v1/responses/{response['id']}")
        deleted = await client.delete(f"/v1/responses/{response['id']}")
        check("/v1/responses/{response_id}", deleted, "delete")
        await get("/v1/responses/{response_id}", f"/v1/responses/{response['id']}", 404)
        await post("/tokenize", prompt="Hi", return_token_strs=True)
        await post("/tokenize", prompt="Hi")
        await post("/detokenize", tokens=[72, 105])
        await get("/v1/models", "/v1/models")
        await get("/v1/models/{model}", f"/v1/models/{thought['model']}")
        await get("/v1/models/{model}", "/v1/models/none", 404)
        for path in ("/health", "/health/live", "/health/ready"):
            await get(path, path)


async def test_log_probabilities_are_as_they_are_described() -> None:
    async with app_client(AsyncLLMEngine(kv_cache_memory="16MiB", device="cpu")) as client:
        asked = {"messages": user("Hi"), "logprobs": True, "top_logprobs": 2, "max_tokens": 3}
        told = await client.post("/v1/chat/completions", json=asked)
        check("/v1/chat/completions", told)
        tokens = told.json()["choices"][0]["logprobs"]["content"]
        assert [len(token["top_logprobs"]) for token in tokens] == [2, 2, 2]
        asked = {"prompt": "Once upon", "logprobs": 1, "echo": True, "max_tokens": 2}
        legacy = await client.post("/v1/completions", json=asked)
        check("/v1/completions", legacy)
        found = legacy.json()["choices"][0]["logprobs"]
        assert found["token_logprobs"][0] is None
        assert len(found["tokens"]) == len(found["top_logprobs"]) > 2
