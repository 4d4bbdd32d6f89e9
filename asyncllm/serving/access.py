"""AccessRules: decides which clients may open a connection."""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

TOKEN_PROTOCOL = "bearer."
PROTOCOL = "asyncllm"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Status and reason for refusing a connection."""

    status: int
    reason: str


class AccessRules:
    """Origin allow-list and bearer token.

    Args:
        token: accepted value or values of ``Authorization: Bearer …``; None accepts every client. A
            browser's WebSockets cannot send this header: they offer the subprotocols ``asyncllm``
            and ``bearer.`` + base64url of the token.
        origins: origins whose pages may connect, such as "https://app.example"; "*" is any. None
            allows only pages of this server. Clients other than browsers send no origin and may
            connect.
        local: the server is bound to a loopback address. The Host header must name one then, which
            prevents DNS rebinding by web pages.
    """

    def __init__(
        self, *, token: str | Sequence[str] | None, origins: Sequence[str] | None, local: bool
    ) -> None:
        tokens = (token,) if isinstance(token, str) else token
        self._tokens = None if tokens is None else tuple(one.encode() for one in tokens)
        self._origins = None if origins is None else frozenset(origins)
        self._local = local

    def check(
        self,
        *,
        hosts: Sequence[str],
        origins: Sequence[str],
        authorizations: Sequence[str],
        protocols: Iterable[str],
    ) -> Refusal | None:
        """Check the headers of a connection; None if it may be opened. Each argument has all
        headers of that name: duplicates are refused."""
        if len(hosts) != 1 or len(origins) > 1 or len(authorizations) > 1:
            return Refusal(400, "expected one Host, and at most one Origin and Authorization")
        if self._local and not is_loopback(_host_name(hosts[0])):
            return Refusal(403, "the Host header names no loopback address")
        if origins and not self._is_allowed(origins[0], hosts[0]):
            return Refusal(403, "pages of this origin may not connect")
        if self._tokens is not None and not self._accepts_token(
            _offered(authorizations, protocols)
        ):
            return Refusal(401, "expected Authorization: Bearer with the right token")
        return None

    def _is_allowed(self, origin: str, host: str) -> bool:
        if self._origins is None:
            return urlsplit(origin).netloc.lower() == host.lower()
        return "*" in self._origins or origin in self._origins

    def owner(self, authorizations: Sequence[str], protocols: Iterable[str]) -> str:
        """Digest of the client's token, safe to store and compare; empty if no token is
        required."""
        offered = b"" if self._tokens is None else _offered(authorizations, protocols)
        return hashlib.sha256(offered).hexdigest() if offered else ""

    def _accepts_token(self, offered: bytes) -> bool:
        assert self._tokens is not None
        # Compares with every token, so that timing reveals nothing.
        return sum(hmac.compare_digest(offered, token) for token in self._tokens) > 0


def _offered(authorizations: Sequence[str], protocols: Iterable[str]) -> bytes:
    offered = b""
    for header in authorizations:
        scheme, _, rest = header.partition(" ")
        if scheme.lower() == "bearer":
            offered = _header_bytes(rest.strip())
    if not authorizations:
        for name in protocols:
            if name.startswith(TOKEN_PROTOCOL):
                offered = _decode(name[len(TOKEN_PROTOCOL) :])
    return offered


def _header_bytes(text: str) -> bytes:
    """Bytes of a header. It was decoded as ISO-8859-1, but clients send UTF-8."""
    try:
        return text.encode("latin-1")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogateescape")


def is_loopback(host: str) -> bool:
    """Whether a bind address or host name is a loopback one."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _host_name(header: str) -> str:
    try:
        return urlsplit("//" + header).hostname or ""
    except ValueError:
        return ""


def _decode(text: str) -> bytes:
    try:
        return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except ValueError:
        return b""
