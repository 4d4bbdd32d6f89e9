"""StepGraphs: CUDA graphs of steps by size, their capture and replay."""

from __future__ import annotations

import enum
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from asyncllm.gpu.batch.sampling_inputs import SamplingStages
from asyncllm.logger import get_logger

logger = get_logger("asyncllm")

CAPTURE_BACKOFF_BASE = 3
"""Base of the exponential back-off: after n failed captures of a key, the next attempt is made at
the key's (CAPTURE_BACKOFF_BASE**n)-th step since the last failure."""


class StepPart(enum.Enum):
    """The part of a step that a graph holds.

    STEP is a whole decode step. If logits are processed before sampling, or the step waits for
    masks, FORWARD and SAMPLE are the two halves of a decode step. ALL_BUT_LAST_LAYER is a mixed
    step's layers except the last layer.
    """

    STEP = enum.auto()
    FORWARD = enum.auto()
    SAMPLE = enum.auto()
    ALL_BUT_LAST_LAYER = enum.auto()


@dataclass(frozen=True, slots=True)
class GraphKey:
    """Key of a graph: what distinguishes the graphs of one engine.

    The key leaves out what is fixed while the engine lives: addresses, the block size, the longest
    sequence, and the number of splits that attention chooses for a bucket at that length.

    Attributes:
        bucket: padded number of rows of a decode step; of tokens for ALL_BUT_LAST_LAYER.
        part: part of the step that the graph holds.
        stages: stages of sampling in the graph.
        has_balanced_splits: see StepInputs; False for a part without attention.
    """

    bucket: int
    part: StepPart = StepPart.STEP
    stages: SamplingStages = SamplingStages.NONE
    has_balanced_splits: bool = False


@dataclass(frozen=True, slots=True)
class CaptureStats:
    """Cost of a graph: seconds that its capture took, and bytes by which the shared pool grew."""

    key: GraphKey
    seconds: float
    num_bytes: int


class GraphCapturer:
    """Capturer of functions over static tensors; this base class captures nothing and runs every
    step eagerly."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None] | None:
        """Calls ``run`` once, and returns a function that repeats its work.

        Returns None if the capture failed; ``run`` has been called all the same.
        """
        run()
        return run

    def break_graph(self, run_eagerly: Callable[[], None]) -> None:
        """Ends the graph being captured, calls ``run_eagerly``, and begins the next graph.

        Called by the function under capture. ``run_eagerly`` is not captured: each replay calls it
        between the two graphs.
        """
        run_eagerly()

    def pool_bytes(self) -> int:
        """Bytes that the graphs' pool has taken from the device."""
        return 0


@dataclass(slots=True)
class _FailedCaptures:
    """Number of a key's failed captures, and number of its steps since the last failure."""

    captures: int = 0
    steps: int = 0


class StepGraphs:
    """CUDA graphs, one per key, captured at start or when a batch first needs it.

    Of graphs that differ only in the bucket, the largest is captured first, so that the smaller
    graphs fit into its memory.

    A capture can fail because of another thread of the application, and its error does not tell
    whether the step is at fault. So steps of a key without a graph run eagerly, and the capture is
    tried again: at the third step after the first failure, at the ninth after the second, and so
    on. A step that can never be captured thus costs ever less, and no graph is given up for good.

    Not thread-safe: graphs are captured and replayed on the engine thread.

    Args:
        run: runs the part of a step that a key names, on tensors at fixed addresses.
        sizes: the buckets: batch sizes, or numbers of tokens.

    Attributes:
        buckets: ``sizes`` in ascending order.
        capture_stats: the cost of each graph, in the order of capture.
    """

    def __init__(
        self, run: Callable[[GraphKey], None], capturer: GraphCapturer, sizes: Sequence[int]
    ) -> None:
        self.buckets = tuple(sorted(set(sizes)))
        self.capture_stats: list[CaptureStats] = []
        self._run = run
        self._capturer = capturer
        self._graphs: dict[GraphKey, Callable[[], None]] = {}
        self._failed_captures: dict[GraphKey, _FailedCaptures] = {}

    def bucket(self, num_rows: int) -> int | None:
        """The smallest bucket of at least ``num_rows`` rows; None if all buckets are smaller."""
        index = bisect_left(self.buckets, num_rows)
        return self.buckets[index] if index < len(self.buckets) else None

    def run(self, key: GraphKey) -> None:
        """Runs a part of a step from its graph, which is captured first if there is none yet.

        The part runs eagerly if it exceeds the largest bucket, or if its capture has failed.

        Args:
            key: its ``bucket`` is the number of rows, and is rounded up to the next bucket.
        """
        bucket = self.bucket(key.bucket)
        if bucket is None:
            self._run(key)
            return
        key = replace(key, bucket=bucket)
        graph = self._graphs.get(key)
        if graph is not None:
            graph()
            return
        largest = replace(key, bucket=self.buckets[-1])
        if largest not in self._graphs and largest not in self._failed_captures:
            key = largest
        failed = self._failed_captures.get(key)
        if failed is not None:
            failed.steps += 1
        if failed is None or failed.steps >= CAPTURE_BACKOFF_BASE**failed.captures:
            self._capture_graph(key)
        else:
            self._run(key)

    def capture_all(self, part: StepPart = StepPart.STEP) -> Iterator[None]:
        """Captures one bucket per iteration of the caller's loop, the largest first.

        A capture runs the step's ``part`` on the rows in its buffers, which all have to be padding.
        Graphs of the other parts, and graphs with balanced splits, are captured when a batch needs
        them.
        """
        for bucket in reversed(self.buckets):
            self._capture_graph(GraphKey(bucket, part))
            yield

    def close(self) -> None:
        """Drops the graphs and the function that they run, which refer to the step's tensors."""
        self._graphs.clear()
        del self._run

    def _capture_graph(self, key: GraphKey) -> None:
        """Runs the key's part of a step, and keeps its graph or counts the failed capture."""
        began, before = time.perf_counter(), self._capturer.pool_bytes()
        graph = self._capturer.capture(partial(self._run, key))
        if graph is None:
            failed = self._failed_captures.setdefault(key, _FailedCaptures())
            failed.captures, failed.steps = failed.captures + 1, 0
            return
        self._graphs[key] = graph
        self.capture_stats.append(
            CaptureStats(key, time.perf_counter() - began, self._capturer.pool_bytes() - before)
        )


def default_token_counts(max_tokens: int) -> tuple[int, ...]:
    """Default token counts: powers of two from 32 to 2,048, and above 64 the numbers half-way
    between.

    Args:
        max_tokens: upper bound of the token counts.
    """
    sizes = {2**power for power in range(5, 12)} | {3 * 2**power for power in range(5, 10)}
    return tuple(sorted(size for size in sizes if size <= max_tokens))


def default_batch_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Default batch sizes: 1, 2, 4; multiples of 8 up to 256, of 16 from there to 512; and
    ``max_num_seqs``."""
    sizes = {1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), max_num_seqs}
    return tuple(sorted(size for size in sizes if size <= max_num_seqs))
