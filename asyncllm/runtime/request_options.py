"""Options of a call, for the scheduling and delivery of its request and for its conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar, get_args

from asyncllm import validation as check
from asyncllm.core.channel import OnSlow

T = TypeVar("T")

_MAX_NAME_LENGTH = 256
"""Maximum number of characters of ``request_id``, ``cache_salt`` and ``owner``."""


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Options for scheduling and delivering a request; see ``AsyncLLMEngine.stream``.

    Raises:
        InvalidRequestError: for an invalid value, with ``param`` set.
    """

    request_id: str | None = None
    priority: int = 0
    timeout: float | None = None
    max_unread: int = 256
    on_slow: OnSlow = "coalesce"
    cache_salt: str | None = None
    owner: str | None = None

    def __post_init__(self) -> None:
        for name in ("request_id", "cache_salt", "owner"):
            value = getattr(self, name)
            # Encoding a long text, to check it, would take a millisecond for each megabyte.
            if isinstance(value, str) and str.__len__(value) > _MAX_NAME_LENGTH:
                accepted = f"at most {_MAX_NAME_LENGTH} characters; a digest of a longer one"
                raise check.value_error(name, value, accepted)
            check.validate_field(self, check.string, name, allow_empty=name == "cache_salt")
        check.validate_field(self, check.integer, "priority", -check.MAX_INTEGER)
        check.validate_field(self, check.seconds, "timeout", exclusive_low=True)
        check.validate_field(self, check.integer, "max_unread", 1)
        check.validate_field(self, check.choice, "on_slow", get_args(OnSlow))


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """Options for rendering a conversation; see ``AsyncLLMEngine.chat``.

    Raises:
        InvalidRequestError: for an invalid value, with ``param`` set.
    """

    tools: Sequence[Any] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    split_special_tokens: bool = True

    def __post_init__(self) -> None:
        check.validate_field(self, check.string, "chat_template")
        check.validate_field(self, check.boolean, "split_special_tokens")


@dataclass(frozen=True, slots=True)
class ChatOptions(TemplateOptions):
    """Options for rendering and answering a conversation; see ``AsyncLLMEngine.chat``."""

    tool_choice: str | dict[str, Any] | None = "auto"
    parallel_tool_calls: bool = True
    response_format: Any = None


def pop_fields(options_class: type[T], options: dict[str, Any]) -> T:
    """Move the fields of a dataclass out of ``options`` into a new instance."""
    names: Any = [option.name for option in fields(options_class)]  # pyright: ignore[reportArgumentType]
    return options_class(**{name: options.pop(name) for name in names if name in options})


def normalized_request_ids(value: Any) -> list[str]:
    """Normalise one request id or several to plain strings.

    Raises:
        InvalidRequestError: for anything but a string, or strings.
    """
    accepted = "a string, or several"
    is_one = value is None or isinstance(value, str)
    ids: Any = (value,) if is_one else check.bounded_tuple("request_id", value, accepted)
    for request_id in ids:
        if not isinstance(request_id, str):
            raise check.value_error("request_id", request_id, accepted)
    return list(map(str.__str__, ids))  # A subclass of str may override its methods.
