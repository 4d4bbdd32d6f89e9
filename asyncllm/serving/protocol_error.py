"""ProtocolError: what a client did wrong, or what it has to be told, as an error event."""

from __future__ import annotations

import math
from typing import Any

from asyncllm.errors import (
    AsyncLLMError,
    ContextLengthExceededError,
    DeadlineExceededError,
    EngineClosedError,
    EngineError,
    EngineOverloadedError,
    InvalidRequestError,
    RequestError,
)


class ProtocolError(Exception):
    """Answered with ``{"type": "error", "status": …, "error": {…}}``.

    Attributes:
        code: for programs.
        param: the field at fault, or None.
        status: the HTTP status of the same error.
        headers: as ``Retry-After``.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str,
        param: str | None = None,
        status: int = 400,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.param = param
        self.status = status
        self.headers = headers

    @property
    def is_clients_fault(self) -> bool:
        return self.status < 500 and self.status != 429

    def event(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.is_clients_fault else "server_error"
        error: dict[str, Any] = {
            "type": kind,
            "code": self.code,
            "message": str(self),
            "param": self.param,
        }
        if self.headers is not None:
            error["headers"] = self.headers
        return {"type": "error", "status": self.status, "error": error}


def from_engine_error(error: AsyncLLMError, names: dict[str, str]) -> ProtocolError:
    """What a client is told of an engine's exception.

    Args:
        names: the engine's parameters that the protocol calls otherwise.
    """
    message = str(error)
    if isinstance(error, InvalidRequestError):
        param = error.param
        if param in names:
            message = message.replace(param, names[param], 1)
            param = names[param]
        return ProtocolError(message, code="invalid_value", param=param)
    if isinstance(error, ContextLengthExceededError):
        return ProtocolError(message, code="context_length_exceeded", param="input")
    if isinstance(error, DeadlineExceededError):
        return ProtocolError(message, code="deadline_exceeded", status=504)
    if isinstance(error, EngineOverloadedError):
        seconds = str(max(1, math.ceil(error.retry_after)))
        return ProtocolError(
            message, code="server_overloaded", status=503, headers={"Retry-After": seconds}
        )
    if isinstance(error, EngineClosedError):
        return ProtocolError(message, code="server_shutting_down", status=503)
    if isinstance(error, (EngineError, RequestError)):
        return ProtocolError(message, code="server_error", status=500)
    return ProtocolError("the server failed", code="server_error", status=500)
