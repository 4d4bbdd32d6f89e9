"""An engine whose device computes nothing: what is left is the engine itself."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from asyncllm import AsyncLLMEngine, EngineConfig
from asyncllm.checkpoint.model_config import ModelConfig
from asyncllm.checkpoint.model_files import resolve_model
from asyncllm.core.batch import GrammarMask, StepBatch, StepResult
from asyncllm.core.executor import ExecutorInfo
from asyncllm.core.kv_cache_spec import KVCacheSpec
from asyncllm.runtime.loading import LoadedModel
from asyncllm.text.tokenizer import Tokenizer


class NullDevice:
    """Samples token after token from a short list, after a fixed time without the GIL.

    Attributes:
        cpu_times: the engine thread's CPU time at each ``collect``.
    """

    def __init__(self, info: ExecutorInfo, step_time: float) -> None:
        self.info = info
        self.cpu_times: list[float] = []
        self._step_time = step_time
        self._queue: deque[StepBatch] = deque()

    def launch(self, batch: StepBatch) -> None:
        self._queue.append(batch)

    def sample(self, masks: GrammarMask) -> None:
        pass

    def collect(self) -> StepResult:
        batch = self._queue.popleft()
        self.cpu_times.append(time.thread_time())
        time.sleep(self._step_time)
        counts = [int(samples) for samples in batch.samples]
        token_ids = [300 + (batch.step + row) % 1000 for row in range(sum(counts))]
        return StepResult(batch.step, token_ids, counts)

    def discard(self) -> None:
        self._queue.clear()

    def close(self) -> None:
        self._queue.clear()


@asynccontextmanager
async def null_engine(
    *, max_num_seqs: int, step_time: float
) -> AsyncIterator[tuple[AsyncLLMEngine, NullDevice]]:
    """A started engine with the packaged model's tokenizer and a null device."""
    engine, device = make_engine(max_num_seqs, step_time)
    async with engine:
        yield engine, device


def make_engine(max_num_seqs: int, step_time: float) -> tuple[AsyncLLMEngine, NullDevice]:
    """``null_engine``, new."""
    path = resolve_model(None, None)
    model_config = ModelConfig.from_directory(path)
    info = ExecutorInfo(
        vocab_size=model_config.vocab_size,
        num_blocks=20_000,
        kv_groups=(KVCacheSpec((0,), 16),),
        max_model_len=4096,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=8192,
    )
    device = NullDevice(info, step_time)

    def load(config: EngineConfig, progress: Any) -> LoadedModel:
        return LoadedModel(device, Tokenizer.from_directory(path), model_config)

    return AsyncLLMEngine._with_loader(load), device
