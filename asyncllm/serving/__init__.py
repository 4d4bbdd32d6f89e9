"""Servers that make an engine reachable from other processes; they need the extra ``[server]``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncllm.serving.app import create_app as create_app

__all__ = ["create_app"]


def __getattr__(name: str) -> Any:
    # Import ``create_app`` at its first use: it needs the extra.
    if name == "create_app":
        from asyncllm.serving.app import create_app

        return create_app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
