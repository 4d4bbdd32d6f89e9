"""Outputs: deltas of a stream, whole completions, usage and statistics."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

FinishReason = Literal["stop", "length", "tool_calls", "abort"]


class Logprob(NamedTuple):
    """One candidate of one position: natural log-probability under the model's own
    distribution, before temperature, penalties and truncation. ``rank`` counts from 1."""

    token_id: int
    logprob: float
    rank: int


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one output position.

    ``top`` holds the ``logprobs=k`` most likely tokens in descending order; the sampled
    token is in ``sampled`` whether it is among them or not.
    """

    sampled: Logprob
    top: tuple[Logprob, ...]

    @property
    def token_id(self) -> int:
        return self.sampled.token_id

    @property
    def logprob(self) -> float:
        return self.sampled.logprob


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts and timings of a finished request. All times are in seconds.

    Attributes:
        prompt_tokens: tokens in the prompt.
        completion_tokens: tokens generated.
        cached_tokens: prompt tokens whose KV came from the prefix cache.
        queue_time: from ``stream()`` to the first step that computes a token of it; for a
            request that was never scheduled, to its end.
        ttft: from ``stream()`` to the first generated token; None if there was none.
        total_time: from ``stream()`` to the end of the request.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    queue_time: float
    ttft: float | None
    total_time: float

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    @property
    def inter_token_time(self) -> float | None:
        """Mean seconds between two output tokens; None with fewer than two."""
        if self.ttft is None or self.completion_tokens < 2:
            return None
        return (self.total_time - self.ttft) / (self.completion_tokens - 1)


@dataclass(frozen=True, slots=True)
class Delta:
    """New text and tokens since the last delta of this stream; ``str(delta)`` is the text.

    ``text`` may be empty: half a character is never handed out, nor is text that may yet
    become a stop string. ``token_ids`` are the new tokens whether their text is out or not.
    ``finish_reason`` and ``usage`` are set on the last delta only; ``stop_reason`` is the
    stop string or stop token id that ended the request, None for EOS and for ``length``.
    """

    text: str
    token_ids: tuple[int, ...]
    index: int = 0
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    usage: Usage | None = None
    tool_calls: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return self.text


class _DeltaOfOneToken:
    """Mutable twin of Delta, turned into one by assigning ``__class__``. A frozen dataclass sets
    each field through ``object.__setattr__``, which takes four times as long, and a step makes
    as many as it has streams."""

    __slots__ = tuple(field.name for field in fields(Delta))

    def __init__(
        self, token_id: int, text: str, logprobs: TokenLogprobs | None, index: int
    ) -> None:
        self.text = text
        self.token_ids = (token_id,)
        self.index = index
        self.logprobs = None if logprobs is None else (logprobs,)
        self.finish_reason = None
        self.stop_reason = None
        self.usage = None
        self.tool_calls = ()


def make_token_delta(
    token_id: int, text: str, logprobs: TokenLogprobs | None, index: int = 0
) -> Delta:
    """The usual delta: not the last one, of a reader that keeps up."""
    delta: Any = _DeltaOfOneToken(token_id, text, logprobs, index)
    delta.__class__ = Delta
    return delta


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One of a request's ``n`` outputs, whole."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    tool_calls: tuple[Any, ...] = ()

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the sampled tokens' log-probabilities; None without ``logprobs``."""
        if self.logprobs is None:
            return None
        return sum(one.logprob for one in self.logprobs)


@dataclass(frozen=True, slots=True)
class Completion:
    """The whole result of a request.

    ``text``, ``token_ids``, ``finish_reason``, ``stop_reason`` and ``logprobs`` are those of
    ``outputs[0]``.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    usage: Usage | None

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.outputs[0].finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        return self.outputs[0].stop_reason

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        return self.outputs[0].logprobs

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of the engine; counters count since ``start()``.

    Attributes:
        num_running: requests in the running batch.
        num_waiting: requests accepted and not yet in the batch, those being tokenised and
            those that were preempted included.
        num_paused: requests held back because their readers are late.
        num_blocks: KV blocks that requests can use (the null block is not counted).
        num_free_blocks: blocks that no request holds; cached ones are free as well.
        kv_cache_usage: share of the blocks that requests hold, 0 to 1.
        prefix_cache_queries: prompt tokens looked up in the prefix cache.
        prefix_cache_hits: of these, tokens found.
        num_preemptions: times a request lost its blocks to another.
        prompt_tokens: prompt tokens of the requests that were scheduled.
        generation_tokens: output tokens; grows with every step.
        num_steps: steps whose results came back.
        num_requests: requests accepted.
        num_rejected: requests refused with EngineOverloadedError; not among ``num_requests``.
        num_finished: requests that ended with ``stop``, ``length`` or ``tool_calls``.
        num_aborted: requests that were aborted.
        num_failed: requests that ended with an exception.
        last_step_time: seconds from the launch to the result of the latest step.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_paused: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    kv_cache_usage: float = 0.0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_steps: int = 0
    num_requests: int = 0
    num_rejected: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_failed: int = 0
    last_step_time: float = 0.0
