"""Outputs: deltas of a stream, whole completions, usage and statistics."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from struct import unpack, unpack_from
from typing import Any, Literal, NamedTuple

from asyncllm.structured.parse_output import parse_output

FinishReason = Literal["stop", "length", "tool_calls", "abort"]


class Logprob(NamedTuple):
    """A candidate token at a position, with its natural log-probability.

    The log-probability is that of the model's own distribution, before temperature, penalties and
    truncation. ``rank`` counts from 1."""

    token_id: int
    logprob: float
    rank: int


class TokenLogprobs:
    """Log-probabilities at one position of the output or the prompt.

    ``top`` holds the ``logprobs=k`` or ``prompt_logprobs=k`` most likely tokens in descending
    order; ``sampled`` is the sampled token, or the prompt's own token at that position, even if it
    is among ``top`` too. ``sampled, top = entry`` unpacks both.
    """

    # ``_content`` stays packed until somebody reads it, which is rare. A Logprob object for each
    # candidate of every token would keep the garbage collector busy for longer than a step takes.
    __slots__ = ("_content",)

    _content: bytes | tuple[Logprob, tuple[Logprob, ...]]

    def __init__(self, sampled: Logprob, top: tuple[Logprob, ...]) -> None:
        self._content = (sampled, top)

    @classmethod
    def _from_packed(cls, content: bytes) -> TokenLogprobs:
        """Make a TokenLogprobs from packed 32-bit numbers. The numbers are the sampled token's id,
        rank and log-probability, then id and log-probability of each likeliest token."""
        packed = cls.__new__(cls)
        packed._content = content
        return packed

    @property
    def _num_top(self) -> int:
        content = self._content
        return len(content) // 8 - 1 if isinstance(content, bytes) else len(content[1])

    def _ids_and_logprobs(self) -> tuple[tuple[int, float], Iterable[tuple[int, float]]]:
        """Ids and log-probabilities of the sampled and the likeliest tokens, without making Logprob
        objects."""
        content = self._content
        if isinstance(content, bytes):
            numbers = unpack(f"=iif{self._num_top * 'if'}", content)
            return (numbers[0], numbers[2]), zip(numbers[3::2], numbers[4::2], strict=True)
        sampled, top = content
        return sampled[:2], [entry[:2] for entry in top]

    def _unpack_logprobs(self) -> tuple[Logprob, tuple[Logprob, ...]]:
        content = self._content
        if isinstance(content, bytes):
            (token_id, logprob), top = self._ids_and_logprobs()
            (rank,) = unpack_from("=i", content, 4)
            likeliest = tuple([Logprob(*entry, at) for at, entry in enumerate(top, 1)])
            content = self._content = Logprob(token_id, logprob, rank), likeliest
        return content

    @property
    def sampled(self) -> Logprob:
        return self._unpack_logprobs()[0]

    @property
    def top(self) -> tuple[Logprob, ...]:
        return self._unpack_logprobs()[1]

    @property
    def token_id(self) -> int:
        return self._ids_and_logprobs()[0][0]

    @property
    def logprob(self) -> float:
        return self._ids_and_logprobs()[0][1]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._unpack_logprobs())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenLogprobs):
            return NotImplemented
        return self._unpack_logprobs() == other._unpack_logprobs()

    def __hash__(self) -> int:
        return hash(self._unpack_logprobs())

    def __repr__(self) -> str:
        sampled, top = self._unpack_logprobs()
        return f"TokenLogprobs({sampled=}, {top=})"


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts and timings of a finished request. All times are in seconds.

    Attributes:
        prompt_tokens: tokens in the prompt, counted once.
        completion_tokens: tokens generated, by all outputs.
        cached_tokens: prompt tokens whose KV was in the prefix cache when the request was first
            scheduled; KV that its own outputs share is not counted.
        queue_time: from ``stream()`` to the request's first step; to its end, if it was never
            scheduled.
        ttft: from ``stream()`` to the first generated token; None if there was none.
        total_time: from ``stream()`` to the end of the request.
        longest_output: tokens of the longest output; the default is ``completion_tokens``.
        truncated_prompt_tokens: tokens cut from the prompt's start, not among ``prompt_tokens``;
            see ``SamplingParams.truncate_prompt_tokens``.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    queue_time: float
    ttft: float | None
    total_time: float
    longest_output: int = -1
    truncated_prompt_tokens: int = 0

    def __post_init__(self) -> None:
        if self.longest_output < 0:
            object.__setattr__(self, "longest_output", self.completion_tokens)

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    @property
    def inter_token_time(self) -> float | None:
        """Mean seconds between two tokens of the longest output; None if it has fewer than two
        tokens."""
        if self.ttft is None or self.longest_output < 2:
            return None
        return (self.total_time - self.ttft) / (self.longest_output - 1)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Complete call of one of the request's tools.

    Attributes:
        id: unique id of nine letters and digits, which every model's chat template accepts.
        name: name of the tool.
        arguments: a JSON object, as the model wrote it. It is not validated against the tool's
            schema unless a grammar enforced that.
    """

    id: str
    name: str
    arguments: str

    @property
    def kwargs(self) -> dict[str, Any]:
        """Parse the arguments, as keyword arguments of a Python function."""
        return json.loads(self.arguments)

    def as_dict(self) -> dict[str, Any]:
        """Convert the call to the dict that OpenAI's messages contain."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """Fragment of a tool call, as in OpenAI's protocol: the first fragment has the call's id and
    name, the following ones have more of its arguments.

    Attributes:
        index: index of the call in its output. One call is complete before the next begins.
        id, name: id of the call and name of the tool; None except in the first fragment.
        arguments: more of the JSON text.
        done: whether the call is complete. A call that is malformed or cut off by the output's end
            is never complete: all of it then comes as text, and it is not in
            ``CompletionOutput.tool_calls``.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""
    done: bool = False


@dataclass(frozen=True, slots=True)
class Delta:
    """New text and tokens of one output since its last delta; ``str(delta)`` is the text.

    ``text`` may be empty: half a character is held back, and so is text that may become a stop
    string. ``token_ids`` has the new tokens even while their text is held back. ``index`` is the
    output's, 0 to n - 1. ``finish_reason`` is set on the last delta of each output, ``usage`` on
    the last of the stream. ``stop_reason`` is the stop string or stop token id that ended the
    output, None for EOS and for ``length``.

    ``reasoning`` is new text of the model's reasoning, and ``tool_calls`` are fragments of its
    calls; neither is in ``text``. Only ``chat()`` sets them.
    """

    text: str
    token_ids: tuple[int, ...]
    index: int = 0
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    usage: Usage | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    def __str__(self) -> str:
        return self.text


class _MutableDelta:
    """Mutable twin of Delta; assigning ``__class__`` makes a Delta of it. Each step makes a delta
    per stream, and constructing a frozen dataclass takes four times as long, because it sets each
    field through ``object.__setattr__``."""

    __slots__ = tuple(field.name for field in fields(Delta))

    def __init__(
        self,
        text: str,
        token_ids: tuple[int, ...],
        index: int,
        logprobs: tuple[TokenLogprobs, ...] | None,
        finish_reason: FinishReason | None = None,
        stop_reason: str | int | None = None,
    ) -> None:
        self.text = text
        self.token_ids = token_ids
        self.index = index
        self.logprobs = logprobs
        self.finish_reason = finish_reason
        self.stop_reason = stop_reason
        self.usage = None
        self.reasoning = ""
        self.tool_calls = ()


def make_token_delta(
    token_id: int, text: str, logprobs: TokenLogprobs | None, index: int = 0
) -> Delta:
    """Make a delta of one token, the usual case."""
    delta: Any = _MutableDelta(text, (token_id,), index, None if logprobs is None else (logprobs,))
    delta.__class__ = Delta
    return delta


def make_last_delta(
    text: str,
    token_ids: tuple[int, ...],
    index: int,
    logprobs: tuple[TokenLogprobs, ...] | None,
    finish_reason: FinishReason | None,
    stop_reason: str | int | None,
) -> Delta:
    """Make the last delta of an output while other outputs of its request continue."""
    delta: Any = _MutableDelta(text, token_ids, index, logprobs, finish_reason, stop_reason)
    delta.__class__ = Delta
    return delta


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One of a request's ``n`` outputs, complete. ``reasoning`` and ``tool_calls`` are not in
    ``text``; ``token_ids`` has the tokens of all three."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def message(self) -> dict[str, Any]:
        """The answer as an assistant message, to append to the messages of a conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.as_dict() for call in self.tool_calls]
        return message

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the log-probabilities of ``token_ids`` under the model's own distribution, to rank
        outputs by. None unless ``logprobs`` was set; ``logprobs=0`` is enough."""
        if self.logprobs is None:
            return None
        return math.fsum(entry.logprob for entry in self.logprobs)

    def parsed(self, type: Any = None) -> Any:
        """Parse the text as JSON.

        Args:
            type: type of the value: a Pydantic model, a dataclass, a TypedDict or any type that
                Pydantic supports; None for plain ``json.loads``.

        Raises:
            InvalidOutputError: for text that is not JSON of this type; the error has the ``text``.
                An output that was cut off, by ``max_tokens`` for example, ends inside a value.
            InvalidRequestError: for a type that Pydantic does not support.
        """
        return parse_output(self.text, self.finish_reason, type)


@dataclass(frozen=True, slots=True)
class Completion:
    """The whole result of a request.

    ``outputs`` are in the order of their index. ``text``, ``token_ids``, ``finish_reason``,
    ``stop_reason``, ``logprobs``, ``reasoning``, ``tool_calls`` and ``message`` are those of
    ``outputs[0]``.

    ``prompt_logprobs`` has an entry for each token of the prompt, None for the first. It is None
    without ``SamplingParams.prompt_logprobs``, and for a request that ended before its prompt was
    computed.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    usage: Usage | None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None

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

    @property
    def reasoning(self) -> str:
        return self.outputs[0].reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return self.outputs[0].tool_calls

    @property
    def message(self) -> dict[str, Any]:
        return self.outputs[0].message

    def parsed(self, type: Any = None) -> Any:
        """``outputs[0].parsed(type)``: the JSON text as a value."""
        return self.outputs[0].parsed(type)

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Snapshot of the engine's counters, which count from ``start()``. A request with ``n`` outputs
    counts n times in ``num_running``, ``num_waiting``, ``num_paused``, ``num_preemptions`` and
    ``prompt_tokens``, and once in ``num_requests``, ``num_rejected``, ``num_finished``,
    ``num_aborted`` and ``num_failed``. ``dataclasses.asdict`` converts a snapshot to a dict for
    JSON.

    Attributes:
        num_running: requests in the running batch.
        num_waiting: requests accepted but not in the batch, including requests that are being
            tokenised or were preempted.
        num_paused: requests held back because their readers are late, or because the parsers of
            grammars take much memory.
        num_queued_tokens: prompt tokens of requests that wait for their first step; an estimate for
            texts that are being tokenised.
        is_paused: whether ``pause`` has stopped scheduling.
        num_blocks: KV blocks that requests can use (the null block is not counted).
        num_free_blocks: blocks that no request holds; cached ones are free as well.
        kv_cache_usage: fraction of the blocks that requests hold, 0 to 1.
        prefix_cache_queries: prompt tokens looked up in the prefix cache.
        prefix_cache_hits: prompt tokens found in the prefix cache.
        num_state_snapshots: recurrent states that can be kept for cached prefixes; 0 if the model
            has no recurrent layers or prefixes are not cached.
        num_cached_states: recurrent states that are saved now, from which a request can continue.
        state_snapshot_bytes: bytes of memory that ``num_state_snapshots`` states take.
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
        prompt_tokens_per_second: recent rate at which steps compute tokens, without the fixed time
            of each step; 0.0 while the rate is not known.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_paused: int = 0
    num_queued_tokens: int = 0
    is_paused: bool = False
    num_blocks: int = 0
    num_free_blocks: int = 0
    kv_cache_usage: float = 0.0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_state_snapshots: int = 0
    num_cached_states: int = 0
    state_snapshot_bytes: int = 0
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
    prompt_tokens_per_second: float = 0.0
