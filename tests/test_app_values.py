"""Out-of-range values in each field of an HTTP request."""

from __future__ import annotations

import json

import pytest

from asyncllm.serving.chat_request import ChatRequest
from asyncllm.serving.completion_request import CompletionRequest
from asyncllm.serving.response_request import ResponseRequest
from asyncllm.testing import fake_engine
from tests.app_clients import BODY, CHAT, app_client

pytestmark = pytest.mark.asyncio(loop_factories=["asyncio"])
DEEP = "x"
for _ in range(150):
    DEEP = [DEEP]
VALUES = [
    10**400,
    -(2**63) - 1,
    2**64,
    1e308,
    -1e-320,
    "\x00\uffff\U0010ffff\u202e",
    [2**63, -1],
    ["", "\x00"] * 40,
    {"\x00": 10**400, "type": "\x00"},
    DEEP,
]


@pytest.mark.parametrize(
    ("path", "kind", "given"),
    [
        (CHAT, ChatRequest, BODY),
        ("/v1/completions", CompletionRequest, {"prompt": "Hi"}),
        ("/v1/responses", ResponseRequest, {"input": "Hi"}),
    ],
)
async def test_no_value_of_a_field_is_a_failure_of_the_server(path, kind, given):
    engine = fake_engine("x", max_model_len=64)
    async with app_client(engine) as client:
        for field in sorted({*kind.model_fields, *kind.ACCEPTED_VALUES} - {"generate"}):
            for value in VALUES:
                answer = await client.post(path, content=json.dumps({**given, field: value}))
                assert answer.status_code in (200, 400, 404), (field, value, answer.text)
                if answer.status_code != 200:
                    assert len(answer.content) < 2000
                    param = answer.json()["error"]["param"]
                    assert param.startswith(field) or field in ("suffix", "echo"), (value, param)
        assert (await client.post(path, json=given)).status_code == 200


async def test_a_million_stop_strings():
    async with app_client(fake_engine("x")) as client:
        for number, status, code in (
            (1_000_000, 413, "request_too_large"),
            (200_000, 400, "invalid_value"),
            (5, 400, "invalid_value"),
        ):
            stop = [""] * 5 if number == 5 else ["a"] * number
            content = json.dumps({**BODY, "stop": stop}, separators=(",", ":"))
            answer = await client.post(CHAT, content=content)
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
            assert len(answer.content) < 1000
