"""Servers that make an engine reachable from other processes; they need the extra ``[server]``."""

from __future__ import annotations

try:
    import uvicorn as uvicorn
    import websockets as websockets

    from asyncllm.serving.app import create_app as create_app
except ModuleNotFoundError as missing:
    if (missing.name or "").partition(".")[0] == "asyncllm":
        raise
    raise ImportError(
        "asyncllm.serving needs the extra 'server': pip install 'asyncllm[server]'"
    ) from missing

__all__ = ["create_app"]
