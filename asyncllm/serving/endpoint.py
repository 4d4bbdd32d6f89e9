"""Endpoint: checks a path's requests, answers errors, and writes the access log."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from starlette.types import Receive, Scope, Send

from asyncllm.errors import AsyncLLMError
from asyncllm.serving.access import AccessRules
from asyncllm.serving.client import DISCONNECT_ERRORS
from asyncllm.serving.exchange import CLOSE_HEADERS, Exchange
from asyncllm.serving.protocol_error import ProtocolError
from asyncllm.serving.serving import ServingContext

logger = logging.getLogger(__name__)

Handler = Callable[[ServingContext, Exchange], Awaitable[None]]


@dataclass(eq=False, repr=False)
class Endpoint:
    """ASGI application that serves one path.

    Args:
        server_context: passed to the handlers.
        handlers: handlers by HTTP method; "WEBSOCKET" for WebSockets.
        access_rules: rules of access; None admits every request, also while draining.
        field_by_engine_param: map from engine parameters to the protocol's fields, where the names
            differ; for errors.
    """

    _server_context: ServingContext
    _handlers: Mapping[str, Handler]
    _access_rules: AccessRules | None
    _field_by_engine_param: Mapping[str, str]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(self._server_context, scope, receive, send, self._field_by_engine_param)
        try:
            self._check_request(exchange)
            await self._find_handler(scope)(self._server_context, exchange)
        # Catch these before DISCONNECT_ERRORS: DeadlineExceededError is an OSError too.
        except (ProtocolError, AsyncLLMError) as error:
            await exchange.send_error(error)
        except DISCONNECT_ERRORS:
            return
        except Exception:
            logger.exception("a request to %s failed", scope["path"])
            if exchange.has_begun_answer:
                raise  # The answer is incomplete: let the server close the connection.
            await exchange.send_error(
                ProtocolError("internal error", code="server_error", status=500)
            )
        finally:
            exchange.release_body()
            exchange.log()

    def _check_request(self, exchange: Exchange) -> None:
        # If a body has two lengths, a proxy might end it at another byte than this server.
        if {"content-length", "transfer-encoding"} <= set(exchange.headers):
            raise ProtocolError(
                "header: has Content-Length and Transfer-Encoding, expected one of them",
                code="invalid_header",
                headers=CLOSE_HEADERS,
            )
        if self._access_rules is not None:
            subprotocols = exchange.scope.get("subprotocols", ())
            exchange.owner = self._access_rules.check(exchange.headers, subprotocols)
            self._server_context.check_not_draining()

    def _find_handler(self, scope: Scope) -> Handler:
        method = scope.get("method", "WEBSOCKET")
        handler = self._handlers.get("GET" if method == "HEAD" else method)
        if handler is None:
            allowed = ", ".join(self._handlers)
            raise ProtocolError(
                f"method {method[:20]} is not allowed here, expected {allowed}",
                code="method_not_allowed",
                status=405,
                headers={"Allow": allowed},
            )
        return handler
