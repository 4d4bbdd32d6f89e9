"""An asyncio streaming LLM engine that lives inside the application.

    async with AsyncLLMEngine() as engine:
        async for delta in engine.stream("Tell me a story."):
            print(delta, end="", flush=True)

Importing the package loads neither torch nor transformers: a public name is imported on first
use, and the heavy libraries are loaded when an engine starts.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

from asyncllm.version import VERSION

if TYPE_CHECKING:
    from asyncllm.beams import BeamOutput as BeamOutput
    from asyncllm.beams import beam_search as beam_search
    from asyncllm.config import EngineConfig as EngineConfig
    from asyncllm.core.deadlines import DeadlineExceededError as DeadlineExceededError
    from asyncllm.core.execution_report import ExecutionReport as ExecutionReport
    from asyncllm.engine import AsyncLLMEngine as AsyncLLMEngine
    from asyncllm.errors import AsyncLLMError as AsyncLLMError
    from asyncllm.errors import ContextLengthExceededError as ContextLengthExceededError
    from asyncllm.errors import EngineClosedError as EngineClosedError
    from asyncllm.errors import EngineDeadError as EngineDeadError
    from asyncllm.errors import EngineError as EngineError
    from asyncllm.errors import EngineOverloadedError as EngineOverloadedError
    from asyncllm.errors import InvalidOutputError as InvalidOutputError
    from asyncllm.errors import InvalidRequestError as InvalidRequestError
    from asyncllm.errors import KVCacheTooSmallError as KVCacheTooSmallError
    from asyncllm.errors import ModelLoadError as ModelLoadError
    from asyncllm.errors import RequestError as RequestError
    from asyncllm.group import EngineGroup as EngineGroup
    from asyncllm.group import GroupStats as GroupStats
    from asyncllm.llm import LLM as LLM
    from asyncllm.logits_processor import BatchUpdate as BatchUpdate
    from asyncllm.logits_processor import LogitsProcessor as LogitsProcessor
    from asyncllm.observer import Observer as Observer
    from asyncllm.outputs import Completion as Completion
    from asyncllm.outputs import CompletionOutput as CompletionOutput
    from asyncllm.outputs import Delta as Delta
    from asyncllm.outputs import EngineStats as EngineStats
    from asyncllm.outputs import FinishReason as FinishReason
    from asyncllm.outputs import Logprob as Logprob
    from asyncllm.outputs import TokenLogprobs as TokenLogprobs
    from asyncllm.outputs import ToolCall as ToolCall
    from asyncllm.outputs import ToolCallDelta as ToolCallDelta
    from asyncllm.outputs import Usage as Usage
    from asyncllm.rows import RowResult as RowResult
    from asyncllm.rows import RowStream as RowStream
    from asyncllm.sampling_params import SamplingParams as SamplingParams
    from asyncllm.stream import TokenStream as TokenStream

__version__ = VERSION

# Silent by default: without this handler, Python would print warnings to standard error in an
# application that has no logging set up.
logging.getLogger("asyncllm").addHandler(logging.NullHandler())

_NAMES_BY_MODULE = {
    "asyncllm.beams": "BeamOutput beam_search",
    "asyncllm.config": "EngineConfig",
    "asyncllm.core.deadlines": "DeadlineExceededError",
    "asyncllm.core.execution_report": "ExecutionReport",
    "asyncllm.observer": "Observer",
    "asyncllm.engine": "AsyncLLMEngine",
    "asyncllm.errors": "AsyncLLMError ContextLengthExceededError EngineClosedError "
    "EngineDeadError EngineError EngineOverloadedError InvalidOutputError InvalidRequestError "
    "KVCacheTooSmallError ModelLoadError RequestError",
    "asyncllm.group": "EngineGroup GroupStats",
    "asyncllm.llm": "LLM",
    "asyncllm.logits_processor": "BatchUpdate LogitsProcessor",
    "asyncllm.outputs": "Completion CompletionOutput Delta EngineStats FinishReason Logprob "
    "TokenLogprobs ToolCall ToolCallDelta Usage",
    "asyncllm.rows": "RowResult RowStream",
    "asyncllm.sampling_params": "SamplingParams",
    "asyncllm.stream": "TokenStream",
}
_MODULE_BY_NAME = {
    name: module for module, names in _NAMES_BY_MODULE.items() for name in names.split()
}

__all__ = sorted(_MODULE_BY_NAME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    module = _MODULE_BY_NAME.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_BY_NAME})
