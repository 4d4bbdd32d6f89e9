"""Engines on the packaged model with the interface of a fake."""

from __future__ import annotations

import dataclasses
import threading
from collections import deque
from functools import partial
from typing import Any

from asyncllm import LLM, EngineConfig, EngineGroup
from asyncllm.core.batch import RowError, StepBatch, StepResult
from asyncllm.runtime.loading import LoadedModel, load_model
from tests.fakes import engine_with

SETTINGS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_threads": 1}


class Watched:
    """The packaged model's executor, with the attributes of FakeExecutor that tests use.

    Args:
        gate: how many steps may end before its ``release``; None for all.
        has_eos: whether the model's EOS tokens end a request.
    """

    def __init__(
        self,
        references: dict[tuple[int, ...], list[int]],
        gate: int | None,
        has_eos: bool,
    ) -> None:
        self.batches: list[StepBatch] = []
        self.row_errors: dict[str, Exception] = {}
        self.gate = None if gate is None else threading.Semaphore(gate)
        self.closed = False
        self._references = references
        self._has_eos = has_eos
        self._launched: deque[StepBatch] = deque()
        self._ids: dict[int, str] = {}

    def reference(self, prompt: list[int], count: int) -> list[int]:
        """Greedy tokens of an engine by itself."""
        return self._references[tuple(prompt)][:count]

    def load(self, config: EngineConfig, progress: Any) -> LoadedModel:
        loaded = load_model(config, progress)
        executor: Any = loaded.executor
        launch, collect, close = executor.launch, executor.collect, executor.close

        def watched_launch(batch: StepBatch) -> None:
            self.batches.append(batch)
            self._launched.append(batch)
            self._ids |= {one.req_index: one.request_id for one in batch.assignments}
            launch(batch)

        def watched_collect() -> StepResult:
            if self.gate is not None:
                self.gate.acquire()
            return self._with_errors(self._launched.popleft(), collect())

        def watched_close() -> None:
            self.closed = True
            close()

        executor.launch, executor.collect = watched_launch, watched_collect
        executor.close = watched_close
        changed: dict[str, Any] = {"generation_defaults": {"temperature": 0.0}}
        if not self._has_eos:
            changed["eos_token_ids"] = ()
        model = dataclasses.replace(loaded.model_config, **changed)
        return dataclasses.replace(loaded, model_config=model)

    def _with_errors(self, batch: StepBatch, result: StepResult) -> StepResult:
        counts, tokens, errors = list(result.counts), [], dict(result.errors)
        left = iter(result.token_ids)
        for row, count in enumerate(result.counts):
            sampled = [next(left) for _ in range(count)]
            error = self.row_errors.get(self._ids[batch.req_indices[row]])
            if error is not None and count:
                counts[row], errors[row] = 0, RowError.of(error)
            else:
                tokens += sampled
        return dataclasses.replace(result, counts=counts, token_ids=tokens, errors=errors)


class PackagedGroup:
    """A group of two engines on the packaged model; arguments as for ``tests.fakes.fake``, of which
    those that have no meaning here are left out."""

    def __init__(
        self,
        references: dict[tuple[int, ...], list[int]],
        *,
        num_blocks: int = 65,
        block_size: int = 4,
        max_model_len: int | None = None,
        max_num_seqs: int = 16,
        gate: int | None = None,
        pipeline_depth: int = 1,
        eos_token_ids: tuple[int, ...] = (),
        **_: Any,
    ) -> None:
        has_eos = bool(eos_token_ids)
        self.executors = [Watched(references, gate, has_eos) for _ in range(2)]
        self.executor = self.executors[0]
        self._limits = {
            "num_blocks": num_blocks - 1,
            "block_size": block_size,
            "max_model_len": max_model_len or (num_blocks - 1) * block_size,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": 64,
            "async_scheduling": pipeline_depth > 1,
        }

    def engine(self, **overrides: Any) -> EngineGroup:
        settings = {**SETTINGS, **self._limits, **overrides}
        return EngineGroup([engine_with(one.load, **settings) for one in self.executors])


def references(prompts: list[list[int]], count: int) -> dict[tuple[int, ...], list[int]]:
    """Greedy tokens of prompts, each by an engine without company."""
    with LLM(**SETTINGS, max_num_seqs=1, enable_prefix_caching=False, max_model_len=256) as llm:
        found = [
            llm.generate(one, temperature=0.0, max_tokens=count, ignore_eos=True) for one in prompts
        ]
    return {
        tuple(one): list(completion.token_ids)
        for one, completion in zip(prompts, found, strict=True)
    }


def packaged_group(prompts: list[list[int]], count: int) -> Any:
    """A function like ``tests.fakes.fake``, whose ``reference`` knows these prompts."""
    return partial(PackagedGroup, references(prompts, count))
