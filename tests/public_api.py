"""The public names and signatures, as text: what an application may import and call.

    python -m tests.public_api > tests/public_api.txt

writes it anew, for a change that is meant.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import asyncllm

# Documented modules beside the package itself, and the names in them that the docs use.
MODULES = {
    "asyncllm.callbacks": ("CallbackStream", "stream_with_callbacks"),
    "asyncllm.metrics": ("EngineMetrics",),
    "asyncllm.serving": ("create_app",),
    "asyncllm.serving.app": ("ServerApp",),
    "asyncllm.serving.http_server": ("ConnectionLimits", "HttpServer"),
    "asyncllm.serving.websocket": ("EngineServer", "serve"),
    "asyncllm.tracing": ("EngineTracing", "trace_engine"),
    "asyncllm.gpu.ops.backend": ("AttentionBackend", "AttentionRequest", "Constraints"),
    "asyncllm.llm": ("LLMStream",),
    "asyncllm.routing": (
        "Candidate",
        "PrefixIndex",
        "Route",
        "Router",
        "block_hashes",
        "text_hashes",
    ),
    "asyncllm.testing": ("FakeExecutor", "byte_tokenizer", "fake_engine", "fake_llm"),
}

MADE_FOR_THE_CALLER = {
    "CallbackStream",
    "EngineServer",
    "LLMStream",
    "RowStream",
    "ServerApp",
    "TokenStream",
}
"""Classes whose constructors are no part of the API."""


def lines() -> Iterator[str]:
    for name in asyncllm.__all__:
        yield from _describe(f"asyncllm.{name}", getattr(asyncllm, name))
    for module, names in MODULES.items():
        for name in names:
            yield from _describe(f"{module}.{name}", getattr(importlib.import_module(module), name))


def _describe(path: str, value: Any) -> Iterator[str]:
    if not inspect.isclass(value):
        yield f"{path}{inspect.signature(value) if callable(value) else f' = {value}'}"
        return
    bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
    yield f"class {path}({bases})"
    if value.__name__ in MADE_FOR_THE_CALLER:
        pass
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            if field.name.startswith("_"):
                continue
            default = "" if field.default is dataclasses.MISSING else f" = {field.default!r}"
            yield f"    {field.name}: {field.type}{default}"
    elif "__init__" in vars(value):
        yield f"    __init__{inspect.signature(value.__init__)}"
    for name, member in sorted(_members(value)):
        if isinstance(member, property):
            yield f"    property {name}"
        elif isinstance(member, (classmethod, staticmethod)):
            yield f"    {type(member).__name__} {name}{inspect.signature(member.__func__)}"
        elif inspect.isfunction(member):
            prefix = "async " if inspect.iscoroutinefunction(member) else ""
            yield f"    {prefix}{name}{inspect.signature(member)}"


def _members(cls: type) -> Iterator[tuple[str, Any]]:
    seen = set()
    for base in cls.__mro__:
        if base.__module__.split(".")[0] != "asyncllm":
            continue
        for name, member in vars(base).items():
            if not name.startswith("_") and name not in seen:
                seen.add(name)
                yield name, member


if __name__ == "__main__":
    print("\n".join(lines()))
