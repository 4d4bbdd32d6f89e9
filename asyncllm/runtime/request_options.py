"""RequestOptions: scheduling and delivery of a request; request_ids: ids given to a call."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, get_args

from asyncllm import validation as check
from asyncllm.core.channel import OnSlow

_MAX_OWNER_LENGTH = 256


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Scheduling and delivery of a request; see ``AsyncLLMEngine.stream``.

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
        check.field(self, check.string, "request_id")
        check.field(self, check.integer, "priority", -check.MAX_INTEGER)
        check.field(self, check.seconds, "timeout", above=True)
        check.field(self, check.integer, "max_unread", 1)
        check.field(self, check.choice, "on_slow", get_args(OnSlow))
        check.field(self, check.string, "cache_salt", empty=True)
        check.field(self, check.string, "owner")
        if self.owner is not None and len(self.owner) > _MAX_OWNER_LENGTH:
            accepted = f"at most {_MAX_OWNER_LENGTH} characters; a digest of a longer name"
            raise check.invalid("owner", self.owner, accepted)


def request_ids(given: Any) -> list[str]:
    """One id or several, as plain strings.

    Raises:
        InvalidRequestError: for anything but a string, or strings.
    """
    accepted = "a string, or several"
    ids: Iterable[Any] = (given,)
    if given is not None and not isinstance(given, str):
        ids = check.items("request_id", given, accepted)
    found = []
    for one in ids:
        text = check.plain_text(one)
        if text is None:
            raise check.invalid("request_id", one, accepted)
        found.append(text)
    return found
