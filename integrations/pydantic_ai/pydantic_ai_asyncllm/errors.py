"""The engine's exceptions as those of Pydantic AI, by which FallbackModel and retries decide."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pydantic_ai.exceptions import (
    ModelAPIError,
    ModelContextWindowExceededError,
    ModelOverloadedError,
    ModelRequestRejectedError,
    ModelServerError,
    ModelTimeoutError,
    ModelUnavailableError,
)

from asyncllm import DeadlineExceededError
from asyncllm.errors import (
    AsyncLLMError,
    ContextLengthExceededError,
    EngineError,
    EngineOverloadedError,
    InvalidRequestError,
)

# The first that fits counts.
_ERRORS: tuple[tuple[type[AsyncLLMError], type[ModelAPIError]], ...] = (
    (ContextLengthExceededError, ModelContextWindowExceededError),
    (InvalidRequestError, ModelRequestRejectedError),
    (DeadlineExceededError, ModelTimeoutError),
    (EngineOverloadedError, ModelOverloadedError),
    (EngineError, ModelUnavailableError),
    (AsyncLLMError, ModelServerError),
)


@contextmanager
def as_model_errors(model_name: str, *, in_stream: bool = False) -> Iterator[None]:
    try:
        yield
    except AsyncLLMError as error:
        kind = next(found for known, found in _ERRORS if isinstance(error, known))
        raise kind(
            model_name,
            str(error),
            retry_after=getattr(error, "retry_after", None),
            in_stream=in_stream,
        ) from error
