"""EngineModel: the fields that both models have, and how they become a request."""

from __future__ import annotations

import asyncio
import time
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator

from asyncllm import LLM, AsyncLLMEngine, Delta, EngineOverloadedError, InvalidRequestError, Usage
from asyncllm.llm import LLMStream
from asyncllm.stream import TokenStream

T = TypeVar("T")

_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_tokens",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logprobs",
)


CONFIG = ConfigDict(arbitrary_types_allowed=True, extra="forbid")
"""An argument that means nothing to a model is refused, as the engine refuses it."""


class EngineModel(BaseModel):
    """Settings of a model over an engine. None leaves a value to the engine, that is to the
    model's own generation settings. Every one of them, and every other
    argument of ``AsyncLLMEngine.chat``, can be given per call as well (``model.invoke(…, top_k=5)``
    or ``model.bind(top_k=5)``)."""

    model_config = CONFIG

    engine: AsyncLLMEngine = Field(exclude=True)
    """A started engine, or an ``asyncllm.LLM``; it is borrowed, never closed."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    """Tokens generated at most; None goes up to the context."""
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logprobs: int | None = None
    """Alternatives to report for each token; they are in ``response_metadata``."""
    stop: list[str] | None = None
    timeout: float | None = None
    """Seconds after which a request fails with ``DeadlineExceededError``."""
    max_retries: int = 2
    """How often a request that the full queue refused is submitted again, after as long as
    the engine asks for. Nothing else is retried: it would fail again."""
    chunk_interval: float = 0.02
    """Seconds between two chunks of a stream at least. LangChain spends some 20 to 50 µs on
    each chunk, on the event loop; tokens that come faster are merged. 0 merges only unread
    tokens."""

    @field_validator("engine", mode="before")
    @classmethod
    def _unwrap(cls, value: Any) -> Any:
        return value.engine if isinstance(value, LLM) else value

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """A copy that borrows the same engine."""
        return super().__deepcopy__({id(self.engine): self.engine, **(memo or {})})

    @property
    def model_name(self) -> str:
        """The engine's model."""
        return self.engine.config.model_name

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids that the engine makes of a plain prompt: its special tokens are among
        them. ``custom_get_token_ids`` comes first, as in every model."""
        # A field of LangChain's own model, the other base.
        own = self.custom_get_token_ids  # pyright: ignore[reportAttributeAccessIssue]
        encode = own or self.engine.tokenizer.encode
        return encode(text)

    def request_options(self, stop: list[str] | None, given: dict[str, Any]) -> dict[str, Any]:
        """Keyword arguments for the engine: the fields, and over them what a call gave."""
        options = {name: getattr(self, name) for name in _SAMPLING}
        options["timeout"] = self.timeout
        options["stop"] = self.stop if stop is None else stop
        options = {name: value for name, value in options.items() if value is not None}
        options.update(given)
        # The base class has acted on it already.
        options.pop("stream", None)
        model = options.pop("model", self.model_name)
        if model != self.model_name:
            raise InvalidRequestError(
                f"model={model!r}: expected {self.model_name!r}, the engine's only one",
                param="model",
            )
        return options

    def submit(self, request: Callable[[], T]) -> T:
        """``request()``, again after a while if the queue is full."""
        if _has_running_loop():
            warnings.warn(
                "invoke, batch and stream block the running event loop; await ainvoke, abatch or "
                "astream there",
                RuntimeWarning,
                stacklevel=2,
            )
        for _ in range(self.max_retries):
            try:
                return request()
            except EngineOverloadedError as error:
                time.sleep(error.retry_after)
        return request()

    async def asubmit(self, request: Callable[[], T]) -> T:
        """``submit`` that blocks no event loop."""
        for _ in range(self.max_retries):
            try:
                return request()
            except EngineOverloadedError as error:
                await asyncio.sleep(error.retry_after)
        return request()

    def blocking(self) -> LLM:
        """The engine for a thread that waits."""
        return LLM(engine=self.engine)

    def paced(self, stream: LLMStream) -> Iterator[Delta]:
        """Deltas, not closer to each other than ``chunk_interval``; the first at once."""
        with stream:
            for delta in stream:
                read_at = time.monotonic()
                yield delta
                if delta.finish_reason is None:
                    time.sleep(max(0.0, read_at + self.chunk_interval - time.monotonic()))

    async def apaced(self, stream: TokenStream) -> AsyncIterator[Delta]:
        """``paced`` for an event loop."""
        async with stream:
            async for delta in stream:
                read_at = time.monotonic()
                yield delta
                rest = read_at + self.chunk_interval - time.monotonic()
                if delta.finish_reason is None and rest > 0:
                    await asyncio.sleep(rest)

    def token_logprobs(self, logprobs: Any) -> dict[str, Any]:
        """``{"logprobs": …}`` for the metadata, in the form LangChain users know; empty if
        there are none."""
        if not logprobs:
            return {}
        content = [
            {
                **self._logprob(item.token_id, item.logprob),
                "top_logprobs": [self._logprob(one.token_id, one.logprob) for one in item.top],
            }
            for item in logprobs
        ]
        return {"logprobs": {"content": content}}

    def _logprob(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self.engine.tokenizer.decode([token_id])
        return {"token": text, "bytes": list(text.encode()), "logprob": logprob}


def refuse_several(options: dict[str, Any]) -> None:
    """Of a stream with several outputs LangChain would merge the chunks into one message."""
    if options.get("n", 1) != 1:
        raise InvalidRequestError(
            f"n={options['n']!r}: expected 1 when streaming; generate() returns several",
            param="n",
        )


def finish_metadata(finish_reason: str | None, stop_reason: Any, model_name: str) -> dict[str, Any]:
    """What the last chunk says about the end; empty before."""
    if finish_reason is None:
        return {}
    metadata: dict[str, Any] = {"finish_reason": finish_reason, "model_name": model_name}
    if stop_reason is not None:
        metadata["stop_reason"] = stop_reason
    return metadata


def token_usage(usage: Usage | None) -> dict[str, int]:
    """Counts under the names that ``llm_output`` has them by."""
    if usage is None:
        return {}
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
    }


def _has_running_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
