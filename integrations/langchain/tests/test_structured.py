"""with_structured_output: values of a schema, whole or not at all."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from langchain_asyncllm import AsyncLLM, ChatAsyncLLM
from langchain_core.exceptions import OutputParserException
from pydantic import BaseModel
from pydantic.v1 import BaseModel as BaseModelV1
from typing_extensions import TypedDict

from asyncllm import LLM, InvalidRequestError
from asyncllm.testing import fake_llm


class Trip(BaseModel):
    """A trip."""

    by: Literal["boat", "train"]
    days: Literal[1, 2, 3]


class TripDict(TypedDict):
    """A trip."""

    by: Literal["boat", "train"]
    days: Literal[1, 2, 3]


class TripV1(BaseModelV1):
    """A trip."""

    by: Literal["boat", "train"]
    days: int


ASK = "Plan a trip."
OPEN = {
    "title": "Trip",
    "type": "object",
    "properties": {"by": {"enum": ["boat", "train"]}},
    "required": ["by"],
}


def as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else dict(value)


@pytest.mark.parametrize(
    ("schema", "kind"),
    [(Trip, Trip), (TripDict, dict), (TripV1, TripV1), (OPEN, dict)],
    ids=["pydantic", "typed_dict", "pydantic_v1", "json_schema"],
)
@pytest.mark.parametrize("model", [ChatAsyncLLM, AsyncLLM])
async def test_what_comes_is_of_the_schema(llm: LLM, model: Any, schema: Any, kind: type) -> None:
    bound = model(engine=llm, temperature=0, max_tokens=60).with_structured_output(schema)
    value = await bound.ainvoke(ASK)
    assert isinstance(value, kind)
    assert as_dict(value)["by"] in ("boat", "train")
    assert as_dict(value).keys() <= {"by", "days"}
    assert bound.invoke(ASK) == value
    parts = [part async for part in bound.astream(ASK)]
    assert parts[-1] == value
    assert all(isinstance(part, kind) for part in parts)
    assert list(bound.stream(ASK))[-1] == value


def test_objects_are_closed_unless_strict_is_false() -> None:
    with fake_llm('{"by": "boat", "more": 1}') as llm:
        model = ChatAsyncLLM(engine=llm, max_tokens=100)
        assert set(model.with_structured_output(OPEN).invoke(ASK)) == {"by"}
        loose = model.with_structured_output(OPEN, strict=False)
        assert loose.invoke(ASK) == {"by": "boat", "more": 1}
    called = '{"name": "Trip", "arguments": {"by": "boat", "more": 1}}'
    with fake_llm(f"<tool_call>\n{called}\n</tool_call>") as llm:
        model = ChatAsyncLLM(engine=llm, max_tokens=100)
        loose = model.with_structured_output(OPEN, method="function_calling", strict=False)
        assert loose.invoke(ASK) == {"by": "boat", "more": 1}


@pytest.mark.parametrize("model", [ChatAsyncLLM, AsyncLLM])
@pytest.mark.parametrize("schema", [Trip, TripDict])
async def test_what_is_cut_off_is_no_value(llm: LLM, model: Any, schema: Any) -> None:
    """LangChain's own parsers take the begin of an object for the object."""
    short = model(engine=llm, temperature=0, max_tokens=6)
    bound = short.with_structured_output(schema)
    with pytest.raises(OutputParserException, match="output"):
        await bound.ainvoke(ASK)
    with pytest.raises(OutputParserException, match="output"):
        async for _ in bound.astream(ASK):
            pass
    with pytest.raises(OutputParserException, match="output"):
        list(bound.stream(ASK))
    raw = await short.with_structured_output(schema, include_raw=True).ainvoke(ASK)
    assert raw["parsed"] is None
    assert isinstance(raw["parsing_error"], OutputParserException)
    assert raw["raw"]


async def test_include_raw_has_the_message_and_the_value(llm: LLM) -> None:
    model = ChatAsyncLLM(engine=llm, temperature=0, max_tokens=60)
    raw = await model.with_structured_output(Trip, include_raw=True).ainvoke(ASK)
    assert raw["parsed"] == Trip.model_validate_json(raw["raw"].text)
    assert raw["parsing_error"] is None
    assert raw["raw"].usage_metadata["output_tokens"] > 0


async def test_other_methods() -> None:
    with fake_llm('{"by": "train", "days": 2}') as llm:
        model = ChatAsyncLLM(engine=llm, max_tokens=200)
        value = await model.with_structured_output(Trip, method="json_mode").ainvoke(ASK)
        assert value == Trip(by="train", days=2)
        with pytest.raises(ValueError, match="method='yaml': expected one of json_schema"):
            model.with_structured_output(Trip, method="yaml")
        with pytest.raises(ValueError, match="strict=True: expected None"):
            model.with_structured_output(Trip, method="json_mode", strict=True)
        recursive = {"title": "X", "type": "object", "properties": {"a": {"minlength": 3}}}
        with pytest.raises(InvalidRequestError, match="minlength"):
            await model.with_structured_output(recursive).ainvoke(ASK)
    called = '<tool_call>\n{"name": "Trip", "arguments": {"by": "boat", "days": 3}}\n</tool_call>'
    with fake_llm(called) as llm:
        model = ChatAsyncLLM(engine=llm, max_tokens=200)
        bound = model.with_structured_output(Trip, method="function_calling")
        assert await bound.ainvoke(ASK) == Trip(by="boat", days=3)
