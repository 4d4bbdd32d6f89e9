"""is_loopback: whether only this machine reaches an address."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether a bind address or host name is a loopback one."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
