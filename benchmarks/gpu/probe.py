"""Probe: an executor that notes what each step of another one took, on the engine's thread."""

from __future__ import annotations

import dataclasses
import itertools
import re
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from asyncllm import AsyncLLMEngine, EngineConfig
from asyncllm.core.batch import GrammarMask, StepBatch, StepResult
from asyncllm.core.executor import Executor, ExecutorInfo
from asyncllm.gpu.graph.cuda_graphs import GraphKey
from asyncllm.gpu.graph.graph_replay import GraphReplay
from asyncllm.gpu.model_runner import ModelRunner
from asyncllm.runtime.loading import LoadedModel, load_model


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step whose result came back.

    Attributes:
        rows: of its batch; ``tokens`` of them all.
        context: tokens that its rows see, summed over them.
        returned_at: when its result was there, in seconds of ``time.perf_counter``.
        cpu_time: seconds of CPU that the engine's thread had used by then.
        launched_at: when it was launched.
    """

    rows: int
    tokens: int
    context: int
    returned_at: float
    cpu_time: float
    launched_at: float = 0.0


class Probe:
    """Passes everything on.

    Attributes:
        inner: the executor.
        records: one per step, in order.
    """

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self.records: list[StepRecord] = []
        self._launched: deque[tuple[StepBatch, float]] = deque()

    @property
    def info(self) -> ExecutorInfo:
        return self.inner.info

    def launch(self, batch: StepBatch) -> None:
        began = time.perf_counter()
        self.inner.launch(batch)
        self._launched.append((batch, began))

    def sample(self, masks: GrammarMask) -> None:
        self.inner.sample(masks)

    def collect(self) -> StepResult:
        result = self.inner.collect()
        batch, began = self._launched.popleft()
        context = sum(batch.starts) + batch.num_tokens
        now, cpu_time = time.perf_counter(), time.thread_time()
        record = StepRecord(len(batch), batch.num_tokens, context, now, cpu_time, began)
        self.records.append(record)
        return result

    def discard(self) -> None:
        self._launched.clear()
        self.inner.discard()

    def close(self) -> None:
        self.inner.close()


def probed_engine(**settings: Any) -> AsyncLLMEngine:
    """An engine that is loaded as any other, with a probe in front of its runner."""

    def load(config: EngineConfig, progress: Any) -> LoadedModel:
        loaded = load_model(config, progress)
        return dataclasses.replace(loaded, executor=Probe(loaded.executor))

    return AsyncLLMEngine._with_loader(load, **settings)


def probe_of(engine: AsyncLLMEngine) -> Probe:
    """The probe of a started engine."""
    assert engine._thread is not None
    probe = engine._thread.loaded_model.executor
    assert isinstance(probe, Probe)
    return probe


@dataclass(frozen=True, slots=True)
class GraphCost:
    """One captured graph: its batch size, what of a step it holds, seconds and bytes it took."""

    bucket: int
    part: str
    seconds: float
    num_bytes: int


def graph_costs(engine: AsyncLLMEngine) -> tuple[tuple[int, ...], list[GraphCost]] | None:
    """Batch sizes that a started engine captures, and what it has captured so far; None if it
    captures nothing. All that the benchmarks know of the runner's graphs is here."""
    graphs = getattr(probe_of(engine).inner, "graphs", None)
    if graphs is None or not graphs.buckets:
        return None
    costs = [
        GraphCost(record.key.bucket, record.key.part.name.lower(), record.seconds, record.num_bytes)
        for record in graphs.capture_stats
    ]
    return tuple(graphs.buckets), costs


def count_nodes(runner: ModelRunner, rows: int) -> int:
    """Nodes of the graph of a decode step of ``rows`` rows, as CUDA writes it down."""
    replay = runner._require_runner().forward_pass
    assert isinstance(replay, GraphReplay)
    # Without ``keep_graph`` the end of a capture drops what is to be written down.
    key, graph = GraphKey(rows), torch.cuda.CUDAGraph(keep_graph=True)
    with torch.inference_mode(), runner._stream.context():
        replay.run_padded_rows(key)
        torch.cuda.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            replay.run_padded_rows(key)
        finally:
            graph.capture_end()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "graph.dot"
        graph.debug_dump(str(path))
        return nodes_of_dump(path.read_text(encoding="utf-8", errors="replace"))


def nodes_of_dump(text: str) -> int:
    """Nodes in what ``cudaGraphDebugDotPrint`` writes, where each has a name of its own.

    Raises:
        ValueError: it names them otherwise.
    """
    found = set(re.findall(r"graph_\d+_node_\d+", text))
    if not found:
        raise ValueError(f"no names of nodes in the dump of a graph, which begins {text[:120]!r}")
    return len(found)


@dataclass(frozen=True, slots=True)
class SteadyStep:
    """A decode step that followed another of the same rows.

    Attributes:
        seconds: from the result before to its own.
        cpu_time: seconds of CPU of the engine's thread in that time: all of its Python.
    """

    seconds: float
    cpu_time: float
    context: int


def steady_steps(records: Sequence[StepRecord], rows: int) -> list[SteadyStep]:
    """The steps in which ``rows`` sequences decode and nothing else happens."""
    return [
        SteadyStep(
            after.returned_at - before.returned_at,
            after.cpu_time - before.cpu_time,
            after.context,
        )
        for before, after in itertools.pairwise(records)
        if before.rows == before.tokens == rows == after.rows == after.tokens
    ]
