"""SamplingFields: sampling fields that all request bodies share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NotRequired, TypeVar

from pydantic import AfterValidator, Discriminator, Field, Tag, WithJsonSchema
from typing_extensions import TypedDict

from asyncllm.engine import AsyncLLMEngine
from asyncllm.sampling_params import (
    INTEGER_FIELD_BOUNDS,
    LOGIT_BIAS_RANGE,
    MAX_BAD_WORD_LENGTH,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    MAX_STOP_STRING_CHARACTERS,
    MAX_STOP_STRINGS,
    NUMBER_FIELD_BOUNDS,
    SamplingParams,
)
from asyncllm.serving.request_body import (
    AcceptedValues,
    Label,
    LimitedObject,
    RequestBody,
    limit_entries,
)
from asyncllm.stream import TokenStream
from asyncllm.validation import MAX_INTEGER, MAX_LIST_ITEMS


def _get_text_or_list_tag(value: Any) -> str:
    return "#text" if isinstance(value, str) else "#list"


TextT = TypeVar("TextT")
OtherT = TypeVar("OtherT")
TextOr = Annotated[
    Annotated[TextT, Tag("#text")] | Annotated[OtherT, Tag("#list")],
    Discriminator(_get_text_or_list_tag),
]
"""Union of a text and of a list or object. Without tags, pydantic would report the errors of both
alternatives."""


# SamplingParams enforces the bounds; ``json_schema_extra`` only describes them.
StopString = Annotated[
    str, Field(min_length=1, json_schema_extra={"maxLength": MAX_STOP_STRING_CHARACTERS})
]
StopStrings = Annotated[
    list[StopString], Field(fail_fast=True, json_schema_extra={"maxItems": MAX_STOP_STRINGS})
]
Stop = TextOr[StopString, StopStrings]
BadWord = Annotated[str, Field(min_length=1, json_schema_extra={"maxLength": MAX_BAD_WORD_LENGTH})]
BadWords = Annotated[
    list[BadWord], Field(fail_fast=True, json_schema_extra={"maxItems": MAX_BAD_WORDS})
]
TokenId = Annotated[int, Field(ge=0, le=MAX_INTEGER)]
TokenIds = Annotated[list[TokenId], Field(max_length=MAX_LIST_ITEMS, fail_fast=True)]


def _parse_logit_bias(biases: dict[str, Any]) -> dict[int, Any]:
    """Convert the keys of ``logit_bias`` to integers: JSON keys are strings."""
    if not all(key.isdecimal() and key.isascii() and len(key) <= 10 for key in biases):
        raise ValueError("token ids, 0 or more, for keys")
    return {int(key): bias for key, bias in biases.items()}


Bias = Annotated[
    dict[str, Any],
    limit_entries(MAX_LOGIT_BIASES, "token ids"),
    AfterValidator(_parse_logit_bias),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "maxProperties": MAX_LOGIT_BIASES,
            "additionalProperties": {
                "type": "number",
                "minimum": LOGIT_BIAS_RANGE[0],
                "maximum": LOGIT_BIAS_RANGE[1],
            },
        }
    ),
]

OBFUSCATION_VALUES: AcceptedValues = {"stream_options.include_obfuscation": (False,)}
"""Accepted values of OpenAI's option that pads events against traffic analysis."""


def bounded_number_field(name: str) -> Any:
    """Make an optional number field whose schema has the bounds of SamplingParams."""
    low, high = {**INTEGER_FIELD_BOUNDS, **NUMBER_FIELD_BOUNDS}[name]
    minimum_key = "exclusiveMinimum" if name == "top_p" else "minimum"
    return Field(default=None, json_schema_extra={minimum_key: low, "maximum": high})


class SamplingFields(RequestBody):
    """Fields for sampling and scheduling. ``SamplingParams`` and ``AsyncLLMEngine.stream`` document
    their meanings and neutral values."""

    model: str | None = None
    temperature: float | None = bounded_number_field("temperature")
    top_p: float | None = bounded_number_field("top_p")
    top_k: int | None = bounded_number_field("top_k")
    min_p: float | None = bounded_number_field("min_p")
    presence_penalty: float | None = bounded_number_field("presence_penalty")
    frequency_penalty: float | None = bounded_number_field("frequency_penalty")
    repetition_penalty: float | None = bounded_number_field("repetition_penalty")
    seed: int | None = bounded_number_field("seed")
    stop: Stop | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = bounded_number_field("min_tokens")
    truncate_prompt_tokens: int | None = bounded_number_field("truncate_prompt_tokens")
    logit_bias: Bias | None = None
    allowed_token_ids: Annotated[TokenIds, Field(json_schema_extra={"minItems": 1})] | None = None
    bad_words: BadWords | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    structured_outputs: dict[str, Any] | None = None
    extra_args: dict[str, Any] | None = None
    priority: Annotated[int, Field(ge=-MAX_INTEGER, le=MAX_INTEGER)] | None = None
    cache_salt: str | None = None
    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None

    def sampling_params(self, **param_overrides: Any) -> SamplingParams:
        """Convert the fields to SamplingParams, before anything is submitted.

        Args:
            param_overrides: sampling parameters by name, used instead of the body's fields of
                the same names.

        Raises:
            InvalidRequestError: for a value that SamplingParams refuses.
        """
        shared_names = SamplingParams.__dataclass_fields__.keys() - param_overrides.keys()
        return SamplingParams(**self.present_values(shared_names), **param_overrides)

    @property
    def num_logprobs(self) -> int | None:
        """Number of alternatives per token; None without log-probabilities.

        Raises:
            ProtocolError, InvalidRequestError: for fields that contradict each other.
        """
        raise NotImplementedError

    def max_logprobs_tokens(self, max_model_len: int) -> int:
        """Maximum number of tokens that have log-probabilities in the answer.

        Args:
            max_model_len: longest sequence in tokens.
        """
        raise NotImplementedError

    @property
    def scheduling_options(self) -> dict[str, Any]:
        """Arguments of ``AsyncLLMEngine.stream`` and ``chat`` for scheduling."""
        return self.present_values(("priority", "cache_salt"))


class StreamOptions(TypedDict):
    include_usage: NotRequired[bool | None]
    continuous_usage_stats: NotRequired[bool | None]
    include_obfuscation: NotRequired[bool | None]


class ChoicesRequest(SamplingFields):
    """Fields of completions and chat completions, whose answers have ``choices``."""

    ACCEPTED_SUBFIELD_VALUES: ClassVar[AcceptedValues] = OBFUSCATION_VALUES

    n: int | None = bounded_number_field("n")
    stream: bool | None = None
    stream_options: LimitedObject[StreamOptions] | None = None

    @property
    def num_prompts(self) -> int:
        return 1

    @property
    def num_outputs(self) -> int:
        """Number of outputs for each prompt."""
        return 1 if self.n is None else self.n

    @property
    def num_echoed_bytes(self) -> int:
        """Approximate number of bytes of the prompts that the answer repeats."""
        return 0

    @property
    def chunks_with_usage(self) -> Literal["none", "end", "each chunk"]:
        """Which chunks of a stream have ``usage``."""
        options = self.stream_options
        if not options or not options.get("include_usage"):
            return "none"
        return "each chunk" if options.get("continuous_usage_stats") else "end"

    def submit(self, engine: AsyncLLMEngine, options: Mapping[str, Any]) -> Sequence[TokenStream]:
        """Submit the request; returns the streams of the answer.

        Args:
            options: the server's own arguments, as from ``ServingContext.request_options``.

        Raises:
            ProtocolError: for fields that contradict each other.
            AsyncLLMError: if the engine refuses a prompt; all prompts are aborted then.
        """
        raise NotImplementedError
