"""The exception tree.

    AsyncLLMError
    ├── RequestError                           this request alone is affected
    │   ├── InvalidRequestError (ValueError)   .param names the argument at fault
    │   ├── InvalidOutputError (ValueError)    .text is an output that cannot be parsed
    │   ├── ContextLengthExceededError         the prompt leaves no room for one token
    │   └── DeadlineExceededError (TimeoutError)   .partial holds what was generated
    ├── EngineOverloadedError                  .retry_after: seconds until a place is likely
    └── EngineError                            the engine as a whole
        ├── EngineClosedError                  not started yet, or closed
        ├── EngineDeadError                    __cause__ is what killed it
        ├── KVCacheTooSmallError               not enough KV memory, with the numbers
        └── ModelLoadError                     the model's files cannot be used

DeadlineExceededError is defined in ``core/deadlines.py``, because it refers to outputs.

Every message names the field, its value and the accepted values.
"""

from __future__ import annotations

import copyreg
from copy import copy
from typing import Any, TypeVar

ErrorT = TypeVar("ErrorT", bound=BaseException)


class AsyncLLMError(Exception):
    """Base of every exception that asyncllm raises on purpose. Each survives pickle and copy."""

    def __reduce__(self) -> tuple[Any, ...]:
        # ``Exception.__reduce__`` would call the type with ``args`` alone, without keyword-only
        # arguments.
        make = copyreg.__newobj__  # pyright: ignore[reportAttributeAccessIssue]
        return make, (type(self),), {**vars(self), "args": self.args}


def copy_for_raise(error: BaseException) -> BaseException:
    """Copy an exception that a stream stores; the stream's reader gets the copy. Raising the stored
    exception would make a cycle: its traceback refers to the reader's frames, and the frames refer
    to the stream. An application's exception that cannot be copied is returned as it is."""
    try:
        copied = copy(error).with_traceback(error.__traceback__)
        copied.__cause__, copied.__context__ = error.__cause__, error.__context__
        copied.__suppress_context__ = error.__suppress_context__
    except Exception:
        return error
    return copied


def with_cause(error: ErrorT, cause: BaseException | None) -> ErrorT:
    """Set the ``__cause__`` of an exception that is stored, as ``raise … from`` does for one that
    is raised; returns the exception."""
    error.__cause__ = cause
    return error


class RequestError(AsyncLLMError):
    """One request failed; the engine and every other request go on."""


class InvalidRequestError(RequestError, ValueError):
    """A request or a configuration is invalid.

    Attributes:
        param: name of the argument at fault; None if no single argument is.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidOutputError(RequestError, ValueError):
    """``parsed()`` cannot parse the output: it is cut off, or not of the requested form.

    Attributes:
        text: the output, possibly cut off.
        finish_reason: the output's finish reason; "length" means that it was cut off.
    """

    def __init__(self, message: str, *, text: str, finish_reason: str | None) -> None:
        super().__init__(message)
        self.text = text
        self.finish_reason = finish_reason


class ContextLengthExceededError(RequestError):
    """The prompt leaves no room for a single output token in ``max_model_len``."""


class EngineOverloadedError(AsyncLLMError):
    """The queue is full; the request was refused and no state of it is left.

    Attributes:
        retry_after: seconds after which a place is likely to be free, estimated from the recent
            rate at which requests left the queue.
    """

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineError(AsyncLLMError):
    """The engine as a whole failed, or refused a call."""


class EngineClosedError(EngineError):
    """The engine was not started yet, is closed, or belongs to another process."""


class EngineDeadError(EngineError):
    """The model or the engine failed; ``__cause__`` is the fatal error."""


class KVCacheTooSmallError(EngineError):
    """The KV cache is too small for the configuration or for a request."""


class ModelLoadError(EngineError):
    """The model's files are missing, damaged, or of a kind that is not supported."""
