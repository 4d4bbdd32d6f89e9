"""Requests that no validator expects, beside well-behaved ones, whose tokens must not change.

Each odd request ends in exactly one way: refused with the argument's name, finished, aborted by
its reader, or failed by an error of its own. The engine lives on.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, fields
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from asyncllm import AsyncLLMEngine, InvalidRequestError, RequestError, SamplingParams
from asyncllm.serving.response_request import ResponseRequest
from asyncllm.stream import TokenStream
from tests.fakes import fake
from tests.hypothesis_settings import examples
from tests.idle import idle
from tests.websocket_clients import ENDS, Client, client_of, served

# On the engine thread too: the filters are the process's.
pytestmark = pytest.mark.filterwarnings("error")

SAMPLING_FIELDS = [one.name for one in fields(SamplingParams)]
OPTIONS = "request_id priority timeout max_unread on_slow cache_salt sampling_params".split()
CHAT_OPTIONS = "tools tool_choice response_format chat_template chat_template_kwargs".split()


class Unprintable(Exception):
    def __repr__(self) -> str:
        raise ValueError("on purpose")

    __str__ = __repr__


def raising(error: BaseException) -> Callable[..., Any]:
    def processor(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits[:] = torch.nan
        raise error

    return processor


def returning(make: Callable[[torch.Tensor], Any]) -> Callable[..., Any]:
    return lambda output, logits: make(logits)


LARGE = [2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, 10**20, 10**400, 10**5000]
INTEGER_BOUNDS = st.integers() | st.sampled_from(LARGE) | st.sampled_from([-n for n in LARGE])
FLOATS = st.floats() | st.sampled_from([1e300, -0.0, 5e-324, math.nan, math.inf, 1e-5, 3.4e38])
NUMPY_SCALARS = st.sampled_from(
    [np.int8(-1), np.int64(2**63 - 1), np.uint64(2**64 - 1), np.float16(1), np.float32("nan")]
) | st.sampled_from([np.float64(1e300), np.longdouble("1e400"), np.bool_(True)])
ARRAYS = st.sampled_from(
    [np.array(3), np.zeros((2, 2)), np.array([1.5]), np.array(["x"]), torch.tensor([1, 2])]
)
NUMBER_BOUNDS = st.one_of(
    INTEGER_BOUNDS,
    FLOATS,
    NUMPY_SCALARS,
    ARRAYS,
    st.sampled_from([Decimal("0.5"), Decimal("NaN"), Fraction(1, 3), Fraction(10**400), 1j, True]),
)
TEXTS = st.text() | st.sampled_from(
    ["", "\ud800", "\0", "auto", "none", "x" * 5000, "<|im_end|>", "1 2", "\U0001f600" * 9]
)
SCALARS = NUMBER_BOUNDS | TEXTS | st.none() | st.sampled_from([b"\xff", object(), ..., type, len])
VALUES = st.one_of(
    SCALARS,
    st.lists(SCALARS, max_size=3),
    st.dictionaries(st.integers(-1, 2000) | TEXTS, SCALARS, max_size=2),
    st.lists(st.lists(NUMBER_BOUNDS, max_size=2), max_size=2),
)
PROCESSORS = st.lists(
    st.sampled_from(
        [
            *map(raising, (SystemExit(3), KeyboardInterrupt(), GeneratorExit(), MemoryError())),
            *map(raising, (asyncio.CancelledError(), StopIteration(), Unprintable())),
            *map(returning, (lambda x: None, lambda x: x * torch.nan, lambda x: x[:-1])),
            *map(returning, (lambda x: x.to(torch.complex64), lambda x: x + torch.inf, len)),
            *map(returning, (lambda x: x.to("meta"), lambda x: x.long(), lambda x: x.double())),
        ]
    ),
    max_size=2,
)


def requests(fields: list[str]) -> st.SearchStrategy[dict[str, Any]]:
    """One to three fields with odd values."""
    return st.lists(st.sampled_from(fields), min_size=1, max_size=3, unique=True).flatmap(
        lambda names: st.fixed_dictionaries(
            {name: VALUES | PROCESSORS if name == "logits_processors" else VALUES for name in names}
        )
    )


@dataclass
class Street:
    """An engine on a loop of its own, and its well-behaved residents."""

    engine: AsyncLLMEngine
    residents: list[dict[str, Any]]
    expected: list[tuple[int, ...]] = field(default_factory=list)
    runner: asyncio.Runner = field(default_factory=asyncio.Runner)
    client: Client = field(init=False)

    def live_through(self, odd: Callable[[], Any]) -> None:
        self.runner.run(self._live_through(odd))

    async def _live_through(self, odd: Callable[[], Any]) -> None:
        async with asyncio.timeout(30):
            streams = self._residents()
            await odd()
            found = [(await stream.result()).token_ids for stream in streams]
        assert found == self.expected
        await idle(self.engine)

    def _residents(self) -> list[TokenStream]:
        return [self.engine.stream(**asked) for asked in self.residents]

    async def open(self, stack: AsyncExitStack) -> None:
        server = await stack.enter_async_context(served(self.engine))
        self.client = await stack.enter_async_context(client_of(server))
        for stream in self._residents():
            self.expected.append((await stream.result()).token_ids)


def on_the_fake() -> Street:
    engine = fake(num_blocks=257, pipeline_depth=2).engine(scheduling_policy="priority")
    return Street(
        engine,
        [
            {"prompt": [1, 2, 3], "max_tokens": 6},
            {"prompt": [4, 5], "max_tokens": 9, "priority": -5},
        ],
    )


def on_the_model() -> Street:
    engine = AsyncLLMEngine(
        scheduling_policy="priority", kv_cache_memory="16MiB", device="cpu", async_scheduling=True
    )
    drawn = {"seed": 5, "temperature": 0.8, "repetition_penalty": 1.1, "logprobs": 1}
    return Street(
        engine,
        [
            {"prompt": "Tell me a story about", "max_tokens": 5, "temperature": 0},
            {"prompt": "What is the capital of", "max_tokens": 6, **drawn},
        ],
    )


@pytest.fixture(scope="module", params=[on_the_fake, on_the_model])
def street(request: pytest.FixtureRequest) -> Iterator[Street]:
    street = request.param()
    stack = AsyncExitStack()
    with street.runner:
        street.runner.run(street.open(stack))
        yield street
        street.runner.run(stack.aclose())


async def read(submit: Callable[[], TokenStream], names: set[str]) -> None:
    """Sends a request and reads a few tokens of it. Every end but the allowed ones raises."""
    told: RequestError | None = None
    try:
        async with submit() as stream:
            count = 0
            async for delta in stream:
                count += len(delta.token_ids)
                if count >= 4:
                    stream.abort()
        assert stream.finish_reason in ("stop", "length", "abort")
    except RequestError as error:
        told = error
    if told is not None:
        assert len(str(told)) < 1000
    if isinstance(told, InvalidRequestError):
        assert told.param in names


EXAMPLES = examples(20)


@EXAMPLES
@given(fields=requests([*SAMPLING_FIELDS, *OPTIONS]))
@example({"top_k": 2**63})
@example({"temperature": 1e300})
@example({"repetition_penalty": 1e300})
@example({"timeout": 10**400})
@example({"seed": 10**5000})
@example({"cache_salt": "\ud800"})
@example({"logits_processors": [raising(SystemExit())]})
@example({"logits_processors": [raising(KeyboardInterrupt())]})
@example({"logits_processors": [raising(Unprintable())]})
def test_odd_fields_of_a_stream(street: Street, fields: dict[str, Any]) -> None:
    async def odd() -> None:
        asked = {"max_tokens": 4} | fields
        await read(lambda: street.engine.stream([7, 8, 9], **asked), {*fields})

    street.live_through(odd)


@EXAMPLES
@given(prompt=VALUES)
@example([10**400])
@example([2**63])
@example([True])
def test_odd_prompts(street: Street, prompt: Any) -> None:
    async def odd() -> None:
        await read(lambda: street.engine.stream(prompt, max_tokens=4), {"prompt"})

    street.live_through(odd)


@EXAMPLES
@given(fields=requests([*CHAT_OPTIONS, *SAMPLING_FIELDS, *OPTIONS]))
@example({"tool_choice": np.zeros(2)})
@example({"response_format": {"type": np.zeros(2)}})
def test_odd_fields_of_a_chat(street: Street, fields: dict[str, Any]) -> None:
    async def odd() -> None:
        asked = {"messages": [{"role": "user", "content": "1 2"}], "max_tokens": 4} | fields
        await read(lambda: street.engine.chat(**asked), {*asked})

    street.live_through(odd)


JSON_SCALARS = st.one_of(
    st.integers().map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    TEXTS.map(json.dumps),
    st.sampled_from(["1e400", "-1e400", "-0.0", "5e-324", "NaN", "1e300", str(2**63), str(2**64)]),
    st.sampled_from(["1" + "0" * 400, "9" * 4300, "9" * 4301]),
    st.sampled_from(["true", "false", "null", "[]", "{}", '""', "[[1]]"]),
)
JSON_VALUES = JSON_SCALARS | st.lists(JSON_SCALARS, max_size=3).map(lambda v: f"[{','.join(v)}]")
JSON_FIELDS = sorted(
    {*ResponseRequest.model_fields, *ResponseRequest.ACCEPTED_VALUES, "type", "anything"}
)


@EXAMPLES
@given(
    fields=st.dictionaries(st.sampled_from(JSON_FIELDS), JSON_VALUES, min_size=1, max_size=3),
)
@example({"top_k": str(2**63)})
@example({"temperature": "1e300"})
@example({"temperature": "1" + "0" * 400})
@example({"top_p": "9" * 4300})
@example({"priority": "9" * 400})
@example({"repetition_penalty": "1e300"})
@example({"input": json.dumps("x" * 5000)})
def test_odd_messages(street: Street, fields: dict[str, str]) -> None:
    plain = {"type": '"response.create"', "input": '"1 2"', "max_output_tokens": "4"}
    message = ",".join(f'"{name}":{value}' for name, value in (plain | fields).items())

    async def odd() -> None:
        await street.client.connection.send("{" + message + "}")
        end = (await street.client.until(*ENDS))[-1]
        if end["type"] == "response.failed":
            # A long text is accepted before it is tokenised.
            faults = "context_length_exceeded", "invalid_prompt"
            assert end["response"]["error"]["code"] in faults
            return
        assert end["type"] in ("response.completed", "response.incomplete", "error"), end
        if end["type"] == "error":
            assert (end["error"]["type"], end["status"] < 500) == ("invalid_request_error", True)
            # A refused message does not count against the next ones.
            assert (await street.client.ask("1 2", max_output_tokens=1))["status"] == "incomplete"

    street.live_through(odd)
