"""SamplingFields: what every kind of request can ask of sampling, under the engine's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag, WithJsonSchema

from asyncllm.sampling_params import (
    MAX_BAD_WORDS,
    MAX_OUTPUTS,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    SamplingParams,
)
from asyncllm.serving.request_body import RequestBody, invalid
from asyncllm.validation import MAX_INTEGER, MAX_ITEMS


def text_or_list(value: Any) -> str:
    """Tag of a union of a text and a list. A union that is tried one by one would report the
    errors of all its alternatives."""
    return "#text" if isinstance(value, str) else "#list"


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
Stop = Annotated[
    Annotated[StopString, Tag("#text")]
    | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True), Tag("#list")],
    Discriminator(text_or_list),
]
TokenId = Annotated[int, Field(ge=0, le=MAX_INTEGER)]
TokenIds = Annotated[list[TokenId], Field(max_length=MAX_ITEMS, fail_fast=True)]
Bias = Annotated[
    dict[str, Any],
    # Read by ``_bias``, which ends at the first item that is wrong.
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        }
    ),
]

ENGINE_FIELDS = (
    "temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty seed stop "
    "stop_token_ids ignore_eos min_tokens truncate_prompt_tokens allowed_token_ids bad_words "
    "skip_special_tokens include_stop_str_in_output structured_outputs extra_args"
).split()
"""Fields that are SamplingParams' of the same name."""


class SamplingFields(RequestBody):
    """Sampling and scheduling. What a field means, and its neutral value, is said in
    ``SamplingParams`` and ``AsyncLLMEngine.stream``."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_INTEGER)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    stop: Stop | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_INTEGER)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MAX_INTEGER)] | None = None
    logit_bias: Bias | None = None
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1)] | None = None
    bad_words: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=1024)]],
            Field(max_length=MAX_BAD_WORDS, fail_fast=True),
        ]
        | None
    ) = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    structured_outputs: dict[str, Any] | None = None
    extra_args: dict[str, Any] | None = None
    priority: Annotated[int, Field(ge=-MAX_INTEGER, le=MAX_INTEGER)] | None = None
    cache_salt: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def sampling_params(self, more: Mapping[str, Any]) -> SamplingParams:
        """The engine's parameters. Made here, so that a bad one is told before anything is
        submitted.

        Args:
            more: fields that the protocol calls otherwise.
        """
        given = self.given({name: name for name in ENGINE_FIELDS})
        if self.logit_bias is not None:
            given["logit_bias"] = _bias(self.logit_bias)
        return SamplingParams(**given, **more)

    @property
    def options(self) -> dict[str, Any]:
        """Scheduling: arguments of ``AsyncLLMEngine.stream`` and ``chat``."""
        return self.given({"priority": "priority", "cache_salt": "cache_salt"})


def _bias(given: Mapping[str, Any]) -> dict[int, Any]:
    """JSON has texts alone for keys."""
    for key in given:
        if not (key.isdecimal() and key.isascii() and len(key) <= 10):
            raise invalid("logit_bias", key, "token ids, 0 or more, for keys")
    return {int(key): bias for key, bias in given.items()}


class Choices(SamplingFields):
    """The fields of the two protocols whose answers have ``choices``."""

    n: Annotated[int, Field(ge=1, le=MAX_OUTPUTS)] | None = None
    stream: bool | None = None
