"""AccessRules: which clients may send requests."""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Sequence
from contextlib import suppress
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from asyncllm.serving.loopback import is_loopback
from asyncllm.serving.protocol_error import ProtocolError

WEBSOCKET_SUBPROTOCOL = "asyncllm"
"""WebSocket subprotocol that the server accepts."""

TOKEN_SUBPROTOCOL_PREFIX = "bearer."
"""Prefix of the subprotocol by which a browser's page sends its token."""


class AccessRules:
    """Rules of access: allowed origins, hosts and bearer tokens.

    Args:
        tokens: accepted values of ``Authorization: Bearer …``; None accepts every client. A
            browser's WebSockets cannot send this header: they offer the subprotocols ``asyncllm``
            and ``bearer.`` + base64url of the token.
        origins: origins whose pages may connect, such as "https://app.example"; "*" is any. None
            allows only pages of this server. Clients other than browsers send no origin and may
            connect.
        local: require a loopback address in the Host header, for a server that listens on one.
            Prevents DNS rebinding by web pages.
    """

    def __init__(
        self, *, tokens: Sequence[str] | None, origins: Sequence[str] | None, local: bool
    ) -> None:
        self._tokens = None if tokens is None else [token.encode() for token in tokens]
        self._origins = None if origins is None else frozenset(origins)
        self._requires_loopback = local

    def check(self, headers: Headers, subprotocols: Sequence[str]) -> str:
        """Check a request's headers; returns its owner: a digest of the client's token, safe to
        store and compare, or "" if no token is required.

        Raises:
            ProtocolError: if the client may not connect, or a header is sent twice.
        """
        hosts, origins, authorizations = map(headers.getlist, ("host", "origin", "authorization"))
        if len(hosts) != 1 or len(origins) > 1 or len(authorizations) > 1:
            reason = "expected one Host, and at most one Origin and Authorization"
            raise ProtocolError(reason, code="invalid_header")
        if self._requires_loopback and not is_loopback(_host_name(hosts[0])):
            reason = "the Host header names no loopback address"
            raise ProtocolError(reason, code="forbidden", status=403)
        if origins and not self._is_allowed_origin(origins[0], hosts[0]):
            reason = "pages of this origin may not connect"
            raise ProtocolError(reason, code="forbidden", status=403)
        if self._tokens is None:
            return ""
        client_token = _client_token(authorizations, subprotocols)
        # Compare with every token, so that timing reveals nothing about the tokens.
        if not sum(hmac.compare_digest(client_token, token) for token in self._tokens):
            raise ProtocolError(
                "expected Authorization: Bearer with the right token",
                code="invalid_api_key",
                status=401,
                headers={"WWW-Authenticate": "Bearer"},
            )
        return hashlib.sha256(client_token).hexdigest()

    def _is_allowed_origin(self, origin: str, host: str) -> bool:
        if self._origins is None:
            with suppress(ValueError):
                return urlsplit(origin).netloc.lower() == host.lower()
            return False
        return "*" in self._origins or origin in self._origins


def _client_token(authorizations: Sequence[str], subprotocols: Sequence[str]) -> bytes:
    """Bearer token of a client's request; empty if it has none."""
    for header in authorizations:
        scheme, _, rest = header.partition(" ")
        # Restore the client's bytes, which may be UTF-8: Starlette decoded them as Latin-1.
        return rest.strip().encode("latin-1") if scheme.lower() == "bearer" else b""
    for name in subprotocols:
        if name.startswith(TOKEN_SUBPROTOCOL_PREFIX):
            return _decode_base64(name[len(TOKEN_SUBPROTOCOL_PREFIX) :])
    return b""


def _host_name(header: str) -> str:
    try:
        return urlsplit("//" + header).hostname or ""
    except ValueError:
        return ""


def _decode_base64(text: str) -> bytes:
    try:
        return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except ValueError:
        return b""
