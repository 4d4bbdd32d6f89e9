"""ProtocolError: errors of the protocol, and their conversion from engine errors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

from asyncllm.core.deadlines import DeadlineExceededError
from asyncllm.errors import (
    AsyncLLMError,
    ContextLengthExceededError,
    EngineClosedError,
    EngineDeadError,
    EngineOverloadedError,
    InvalidRequestError,
    RequestError,
)
from asyncllm.serving.answers import ErrorInfo, ErrorResponse

_CODES_BY_ERROR: tuple[tuple[type[AsyncLLMError], str, int], ...] = (
    (DeadlineExceededError, "deadline_exceeded", 504),
    # 422: the request is well-formed but failed, and would fail again.
    (RequestError, "request_failed", 422),
    (EngineOverloadedError, "server_overloaded", 429),
    (EngineClosedError, "server_shutting_down", 503),
    (EngineDeadError, "server_error", 503),
    (AsyncLLMError, "server_error", 500),
)


@dataclass(eq=False, repr=False)
class ProtocolError(Exception):
    """Error that is sent as ``{"error": {…}}`` over HTTP, or as an event ``{"type": "error",
    "status": …, "error": {…}}``.

    Attributes:
        code: machine-readable code.
        param: the field at fault, or None.
        status: the HTTP status; an event has it as a field.
        headers: HTTP headers, such as ``Retry-After``.
    """

    message: str
    _: KW_ONLY
    code: str
    param: str | None = None
    status: int = 400
    headers: dict[str, str] | None = None

    @property
    def is_client_error(self) -> bool:
        return self.status < 500 and self.status != 429

    def body(self) -> ErrorResponse:
        """Body of an HTTP error, as in OpenAI's protocol."""
        kind = "invalid_request_error" if self.is_client_error else "server_error"
        if self.status == 429:
            kind = "rate_limit_error"
        error = ErrorInfo(message=str(self), type=kind, param=self.param, code=self.code)
        return {"error": error}

    def event(self) -> dict[str, Any]:
        error: dict[str, Any] = {**self.body()["error"]}
        if self.headers is not None:
            error["headers"] = self.headers
        return {"type": "error", "status": self.status, "error": error}


def to_protocol_error(
    error: ProtocolError | AsyncLLMError, field_by_engine_param: Mapping[str, str]
) -> ProtocolError:
    """Convert an exception of the engine to a protocol error; return a protocol error as it is.

    Either loses its traceback and context: their frames refer to the whole request, and the client
    may read the error slowly.

    Args:
        field_by_engine_param: map from engine parameters to the protocol's fields, where the names
            differ.
    """
    error.__traceback__ = error.__context__ = None
    if isinstance(error, ProtocolError):
        return error
    message = str(error)
    if isinstance(error, (InvalidRequestError, ContextLengthExceededError)):
        is_too_long = isinstance(error, ContextLengthExceededError)
        code = "context_length_exceeded" if is_too_long else "invalid_value"
        param = "prompt" if is_too_long else error.param
        if param is not None and param in field_by_engine_param:
            message = message.replace(param, field_by_engine_param[param], 1)
            param = field_by_engine_param[param]
        return ProtocolError(message, code=code, param=param)
    headers = None
    if isinstance(error, EngineOverloadedError):
        headers = {"Retry-After": str(max(1, math.ceil(error.retry_after)))}
    if isinstance(error, EngineDeadError):
        # The cause goes to the log, not to clients.
        message = "the engine has failed"
    code, status = next((c, s) for kind, c, s in _CODES_BY_ERROR if isinstance(error, kind))
    return ProtocolError(message, code=code, status=status, headers=headers)
