"""Loads of the packaged model, and the thread that reads its tokenizer."""

from __future__ import annotations

import threading
from typing import Any

from asyncllm import EngineConfig
from asyncllm.runtime.loading import LoadedModel, load_model


def load(progress: Any = lambda *_: None, **fields: Any) -> LoadedModel:
    settings = {"device": "cpu", "num_blocks": 16, "max_num_batched_tokens": 64}
    return load_model(EngineConfig(**(settings | fields)), progress)


def reading_thread() -> threading.Thread | None:
    found = [t for t in threading.enumerate() if t.name == "asyncllm-tokenizer-load"]
    return found[0] if found else None
