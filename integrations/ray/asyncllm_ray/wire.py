"""Messages between clients and replicas."""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ray import cloudpickle

from asyncllm import AsyncLLMError, Delta, RequestError, SamplingParams
from asyncllm import validation as check
from asyncllm.outputs import TokenLogprobs

if TYPE_CHECKING:
    from asyncllm_ray.placement import Placed


_LEAST_TIMEOUT = 1e-6
"""Seconds that a replica gets for a call whose time is up: an engine takes no timeout of 0."""


@dataclass(slots=True, eq=False)
class Call:
    """One attempt of a request, from a client to a replica.

    Attributes:
        key: name of the attempt, unique in the cluster.
        prompt: text, token ids, or messages if ``is_chat``.
        options: arguments of ``AsyncLLMEngine.stream``, or ``chat``. A replica gets what is left of
            their ``timeout`` when the call is sent to it.
        window: tokens that the replica sends ahead of what the client has read.
        is_aborted: the request was aborted before the call was sent.
        num_tokens: tokens of the prompt; an estimate for a text.
        trace: context of the caller's span, as OpenTelemetry's headers; empty without one.
        hashes: hashes of the prompt's blocks, for the router.
        placed: the router's record of this attempt; it stays with the client.
        deadline: end of ``timeout`` by the client's monotonic clock, in seconds; it stays there.
    """

    key: str
    prompt: Any
    params: SamplingParams
    options: dict[str, Any]
    window: int
    is_chat: bool
    trace: dict[str, str] = field(default_factory=dict)
    is_aborted: bool = False
    num_tokens: int = 1
    hashes: Sequence[bytes] = ()
    placed: Placed | None = field(default=None, repr=False)
    deadline: float = math.inf

    def __reduce__(self) -> tuple[Any, ...]:
        options = self.options
        if self.deadline < math.inf:
            left = max(self.deadline - time.monotonic(), _LEAST_TIMEOUT)
            options = options | {"timeout": left}
        sent = (self.key, self.prompt, self.params, options, self.window, self.is_chat)
        return Call, (*sent, self.trace, self.is_aborted)


class Batch(NamedTuple):
    """Item of a replica's answer.

    Attributes:
        deltas: output generated since the last item.
        error: why the request failed; the item is then the last.
        replica: handle of the replica's actor, in the first item.
        prompt_token_ids: the prompt's tokens, in one of the first items.
        prompt_logprobs: log-probabilities of the prompt after its first token, before the first
            delta, if they were asked for.
    """

    deltas: tuple[Delta, ...] = ()
    error: Exception | None = None
    replica: Any = None
    prompt_token_ids: Sequence[int] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()


class Heard(NamedTuple):
    """Client's message about an attempt, which renews the attempt's lease.

    Attributes:
        key: key of the attempt.
        num_read: number of output tokens that the client's reader has read.
        is_aborted: whether to end the request.
    """

    key: str
    num_read: int
    is_aborted: bool = False


_SCALARS = {str, int, float, bool, type(None)}
_MAX_DEPTH = 100


def check_plain(name: str, value: Any, depth: int = 0) -> None:
    """Raise InvalidRequestError, with ``param`` set, for anything but data as in JSON.

    Unpickling of other objects runs their code, which may end the replica.
    """
    if type(value) in _SCALARS:
        return
    if depth <= _MAX_DEPTH and type(value) in (list, tuple, dict):
        if set(map(type, value)) <= _SCALARS and type(value) is not dict:
            return
        for part in [*value.keys(), *value.values()] if isinstance(value, dict) else value:
            check_plain(name, part, depth + 1)
        return
    accepted = "plain data that can be sent to a replica: texts, numbers, lists, dicts and None"
    raise check.value_error(name, value, accepted)


def check_sendable(name: str, value: Any) -> None:
    """Raise InvalidRequestError, with ``param`` set, for a value that cannot be pickled."""
    try:
        cloudpickle.dumps(value)  # pyright: ignore[reportPrivateImportUsage]
    except Exception as error:
        accepted = f"a value that can be sent to a replica ({error})"
        raise check.value_error(name, value, accepted) from error


def portable(error: Exception) -> Exception:
    """The exception itself if it can be sent, else a RequestError that describes it."""
    error.__traceback__ = None
    if not isinstance(error, AsyncLLMError):
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            return RequestError(f"the replica raised {type(error).__name__}: {error}")
    return error
