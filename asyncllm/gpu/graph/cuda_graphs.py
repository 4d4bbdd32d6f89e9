"""StepGraphs: CUDA graphs of decode steps, their batch-size buckets, capture and replay."""

from __future__ import annotations

import enum
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from asyncllm.gpu.batch.sampling_inputs import Stages
from asyncllm.logger import get_logger

logger = get_logger("asyncllm")

RETRY_STEPS = 3
"""Steps of a key after which it is captured again, to the power of its failed captures."""


class Part(enum.Enum):
    """The part of a step that a graph holds: of a decode step all of it or a half, and of a mixed
    one the layers' body. A decode step is cut in two where sampling does more than the draw, or
    waits for masks."""

    STEP = enum.auto()
    FORWARD = enum.auto()
    SAMPLE = enum.auto()
    BODY = enum.auto()


@dataclass(frozen=True, slots=True)
class GraphKey:
    """Constants of a graph that differ between the graphs of one engine.

    Addresses, the block size, the longest sequence and the number of splits that attention
    chooses for (bucket, longest sequence) are fixed while the engine lives.

    Attributes:
        bucket: rows, or tokens of a body, padding included.
        part: a forward pass ends with the logits, where sampling begins.
        stages: of sampling.
        balanced: of a forward pass, see StepInputs.
    """

    bucket: int
    part: Part = Part.STEP
    stages: Stages = Stages.NONE
    balanced: bool = False


@dataclass(frozen=True, slots=True)
class CaptureStats:
    """Cost of a graph: seconds to capture, and bytes by which the pool that all share grew."""

    key: GraphKey
    seconds: float
    num_bytes: int


class GraphCapturer(Protocol):
    """Captures a function over static tensors into a replayable callable."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None] | None:
        """Runs ``run`` once, and returns a function that repeats it; None where it could not be
        captured, which is no reason for the step that has run to fail."""
        ...

    def cut(self, work: Callable[[], None]) -> None:
        """Called within ``run``: calls ``work``. In a capture the graph ends there and another one
        begins; ``work`` is no part of either, and is called between them at each replay."""
        ...

    def memory(self) -> int:
        """Bytes that the graphs' pool has taken from the device."""
        ...


class EagerCapturer:
    """No graphs: every step runs eagerly."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        return run

    def cut(self, work: Callable[[], None]) -> None:
        work()

    def memory(self) -> int:
        return 0


@dataclass(slots=True)
class _Failed:
    """Failed captures of a key, and its steps since the last of them."""

    captures: int = 0
    steps: int = 0


class StepGraphs:
    """One graph per key, captured at start or when a batch first needs it.

    Of the graphs that differ in the bucket alone the largest comes first in either case, so that
    the others fit into its memory.

    A capture can fail for what another thread of the application does at that moment, which no
    error tells from what the step does. So a key without a graph runs eagerly, and is captured
    again at its third next step, after another failure at the ninth next, and so on: a step that
    cannot be captured at all costs ever less, and no graph is given up for good.

    Not thread-safe: captured and replayed on the engine thread.

    Args:
        run: the part of a decode step that a key names, on tensors that stay where they are.
        sizes: batch sizes to capture.

    Attributes:
        buckets: ``sizes`` in ascending order.
        captured: the cost of each graph, in the order of capture.
    """

    def __init__(
        self, run: Callable[[GraphKey], None], capturer: GraphCapturer, sizes: Sequence[int]
    ) -> None:
        self.buckets = tuple(sorted(set(sizes)))
        self.captured: list[CaptureStats] = []
        self._run = run
        self._capturer = capturer
        self._graphs: dict[GraphKey, Callable[[], None]] = {}
        self._failed: dict[GraphKey, _Failed] = {}

    def bucket(self, num_rows: int) -> int | None:
        """The smallest bucket that holds so many rows, or None."""
        index = bisect_left(self.buckets, num_rows)
        return self.buckets[index] if index < len(self.buckets) else None

    def run(
        self,
        num_rows: int,
        part: Part = Part.STEP,
        stages: Stages = Stages.NONE,
        *,
        balanced: bool = False,
    ) -> None:
        """Runs a step of ``num_rows``, or a part: by graph, or eagerly above all buckets."""
        bucket = self.bucket(num_rows)
        if bucket is None:
            self._run(GraphKey(num_rows, part, stages, balanced))
            return
        key = GraphKey(bucket, part, stages, balanced)
        graph = self._graphs.get(key)
        if graph is not None:
            graph()
            return
        largest = replace(key, bucket=self.buckets[-1])
        if largest not in self._graphs and largest not in self._failed:
            key = largest
        if self._is_due(key):
            self._capture(key)
        else:
            self._run(key)

    def capture_all(self, part: Part = Part.STEP) -> Iterator[None]:
        """Captures every bucket, the largest first, one at each step of the iterator.

        Each capture runs the part on the rows in its buffers: all of them have to be padding. The
        graphs of halves, and of balanced attention, are captured when a batch needs them.
        """
        for bucket in reversed(self.buckets):
            self._capture(GraphKey(bucket, part))
            yield

    def close(self) -> None:
        """Drops the graphs, and with them the function that they run: it refers to the tensors
        of the step, whose owner refers to the graphs."""
        self._graphs.clear()
        self._run = _closed

    def _is_due(self, key: GraphKey) -> bool:
        """Whether a step of a key without a graph is to be captured; counts it."""
        failed = self._failed.get(key)
        if failed is None:
            return True
        failed.steps += 1
        return failed.steps >= RETRY_STEPS**failed.captures

    def _capture(self, key: GraphKey) -> None:
        """Runs the step, and keeps its graph."""
        began, before = time.perf_counter(), self._capturer.memory()
        run = partial(self._run, key)
        graph = self._capturer.capture(run)
        if graph is None:
            failed = self._failed.setdefault(key, _Failed())
            failed.captures, failed.steps = failed.captures + 1, 0
            return
        self._graphs[key] = graph
        self.captured.append(
            CaptureStats(key, time.perf_counter() - began, self._capturer.memory() - before)
        )


def _closed(key: GraphKey) -> None:
    raise RuntimeError("the graphs are closed")


def default_token_sizes(most: int) -> tuple[int, ...]:
    """Powers of two from 32 to 2,048 and, from 96 on, the numbers half-way between, up to
    ``most``."""
    sizes = {2**power for power in range(5, 12)} | {3 * 2**power for power in range(5, 10)}
    return tuple(sorted(size for size in sizes if size <= most))


def default_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, steps of 8 to 256, of 16 to 512, and ``max_num_seqs``."""
    sizes = {1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), max_num_seqs}
    return tuple(sorted(size for size in sizes if size <= max_num_seqs))
