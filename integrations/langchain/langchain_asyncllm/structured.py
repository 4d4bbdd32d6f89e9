"""Structured output: a schema as the engine's grammar, and the JSON that comes as values."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from copy import deepcopy
from operator import itemgetter
from typing import Any

from langchain_core.exceptions import OutputParserException
from langchain_core.messages import BaseMessage
from langchain_core.output_parsers import BaseTransformOutputParser
from langchain_core.output_parsers.openai_tools import (
    JsonOutputKeyToolsParser,
    PydanticToolsParser,
)
from langchain_core.outputs import ChatGeneration, Generation
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.json import parse_partial_json
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import BaseModel

from asyncllm.errors import InvalidOutputError
from asyncllm.structured.parse_output import parse_output
from asyncllm.structured.python_types import forbid_additional_properties

METHODS = ("json_schema", "function_calling", "json_mode")


def json_schema(schema: Any, strict: bool | None = None) -> dict[str, Any]:
    """A Pydantic class, a TypedDict, a tool's schema or a JSON schema as a JSON schema.

    Objects that name properties have no others unless they say so, which small models would fill
    with; ``strict=False`` leaves the schema as it is.
    """
    found = deepcopy(convert_to_json_schema(schema))
    return found if strict is False else forbid_additional_properties(found)


class StructuredOutputParser(BaseTransformOutputParser[Any]):
    """Values of the JSON that an output is.

    In a stream, what there is so far, each time it has become more; the last is the whole. Unlike
    LangChain's own parsers it takes no output that was cut off for a whole one.

    Attributes:
        model: a Pydantic class, of either version, to make instances of; None makes what
            ``json.loads`` makes.
    """

    model: Any = None

    def parse(self, text: str) -> Any:
        """The value of a whole output.

        Raises:
            OutputParserException: for text that is not the JSON of one.
        """
        return self._whole(text, None)

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        generation = result[0]
        finish_reason = None
        if isinstance(generation, ChatGeneration):
            finish_reason = generation.message.response_metadata.get("finish_reason")
        return self._whole(generation.text, finish_reason)

    def _transform(self, input: Iterator[str | BaseMessage]) -> Iterator[Any]:
        progress = _Progress(self)
        for chunk in input:
            yield from progress.push(chunk)
        yield from progress.finish()

    async def _atransform(self, input: AsyncIterator[str | BaseMessage]) -> AsyncIterator[Any]:
        progress = _Progress(self)
        async for chunk in input:
            for value in progress.push(chunk):
                yield value
        for value in progress.finish():
            yield value

    def _whole(self, text: str, finish_reason: str | None) -> Any:
        try:
            if self._is_pydantic:
                return parse_output(text, finish_reason, self.model)
            return self._instance(parse_output(text, finish_reason))
        # What Pydantic raises, and InvalidOutputError.
        except (InvalidOutputError, ValueError) as error:
            raise OutputParserException(str(error), llm_output=text) from error

    def _partial(self, text: str) -> Any:
        """The value that the begin of an output is; None if it is none yet."""
        try:
            value = parse_partial_json(text)
            return self.model.model_validate(value) if self._is_pydantic else self._instance(value)
        except ValueError:
            return None

    @property
    def _is_pydantic(self) -> bool:
        return isinstance(self.model, type) and issubclass(self.model, BaseModel)

    def _instance(self, value: Any) -> Any:
        return value if self.model is None else self.model.parse_obj(value)


class _Progress:
    """One stream's values."""

    def __init__(self, parser: StructuredOutputParser) -> None:
        self._parser = parser
        self._text = ""
        self._finish_reason: str | None = None
        self._last: Any = None

    def push(self, chunk: str | BaseMessage) -> Iterator[Any]:
        if isinstance(chunk, BaseMessage):
            self._finish_reason = chunk.response_metadata.get("finish_reason")
            chunk = chunk.text
        if chunk:
            self._text += chunk
            yield from self._new(self._parser._partial(self._text))

    def finish(self) -> Iterator[Any]:
        yield from self._new(self._parser._whole(self._text, self._finish_reason))

    def _new(self, value: Any) -> Iterator[Any]:
        if value is not None and value != self._last:
            self._last = value
            yield value


def parser_of(schema: Any) -> StructuredOutputParser:
    """The parser of answers that are JSON of a schema."""
    return StructuredOutputParser(model=schema if _is_model(schema) else None)


def tool_parser_of(schema: Any) -> BaseTransformOutputParser[Any]:
    """The parser of answers that call a tool whose arguments are of a schema."""
    if _is_model(schema):
        return PydanticToolsParser(tools=[schema], first_tool_only=True)
    name = convert_to_openai_tool(schema)["function"]["name"]
    return JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)


def tool_of(schema: Any, strict: bool | None = None) -> dict[str, Any]:
    """A schema as a tool. The engine takes parameters that name properties to have no others,
    unless they say so; ``strict=False`` says so."""
    tool = deepcopy(convert_to_openai_tool(schema))
    if strict is False:
        tool["function"]["parameters"].setdefault("additionalProperties", True)
    return tool


def with_parser(
    model: Runnable[Any, Any], parser: Runnable[Any, Any], include_raw: bool
) -> Runnable[Any, Any]:
    if not include_raw:
        return model | parser
    parsed = RunnablePassthrough.assign(
        parsed=itemgetter("raw") | parser, parsing_error=lambda _: None
    )
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=model) | parsed.with_fallbacks([failed], exception_key="parsing_error")


def _is_model(schema: Any) -> bool:
    return isinstance(schema, type) and is_basemodel_subclass(schema)
