"""Ways to reach an engine from outside its process; each needs the extra ``[server]``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncllm.serving.app import create_app as create_app

__all__ = ["create_app"]


def __getattr__(name: str) -> Any:
    # Not before it is asked for: it needs the extra.
    if name == "create_app":
        from asyncllm.serving.app import create_app

        return create_app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
