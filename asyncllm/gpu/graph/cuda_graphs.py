"""StepGraphs: CUDA graphs of decode steps, their batch-size buckets, capture and replay."""

from __future__ import annotations

import contextlib
import enum
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from asyncllm.gpu.batch.sampling_inputs import Stages
from asyncllm.gpu.memory import is_out_of_memory
from asyncllm.logger import get_logger

logger = get_logger("asyncllm")


class Part(enum.Enum):
    """What of a decode step a graph holds: all of it, or one of its halves. A step is cut in
    two where sampling does more than the draw, or waits for masks."""

    STEP = enum.auto()
    FORWARD = enum.auto()
    SAMPLE = enum.auto()


@dataclass(frozen=True, slots=True)
class GraphKey:
    """Constants of a graph that differ between the graphs of one engine.

    Addresses, the block size, the longest sequence and the number of splits that attention
    chooses for (bucket, longest sequence) are fixed while the engine lives.

    Attributes:
        bucket: rows, padding included.
        part: a forward pass ends with the logits, where sampling begins.
        stages: of sampling.
    """

    bucket: int
    part: Part = Part.STEP
    stages: Stages = Stages.NONE


@dataclass(frozen=True, slots=True)
class CaptureStats:
    """Cost of a graph: seconds to capture, and bytes that the process took for it."""

    key: GraphKey
    seconds: float
    num_bytes: int


class GraphCapturer(Protocol):
    """Captures a function over static tensors into a replayable callable."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Runs ``run`` once, and returns a function that repeats it."""
        ...

    def memory(self) -> int:
        """Bytes that the process holds on the device."""
        ...


class EagerCapturer:
    """No graphs: every step runs eagerly."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        return run

    def memory(self) -> int:
        return 0


class CudaGraphCapturer:
    """Captures on the current stream, all graphs into one memory pool.

    ``torch.cuda.graph`` would synchronise the device, collect garbage and empty the caching
    allocator of the whole process, so the graph's own methods are called. The capture is
    "thread_local": CUDA then lets other threads of the application work meanwhile. torch 2.11
    does not let them do everything: see docs/gpu.md.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        # Kernels are compiled and libraries make their workspaces at the first run, which a
        # capture does not allow.
        run()
        try:
            return self._capture(run)
        except RuntimeError as error:
            # The driver instantiates the graph, with an error of its own where memory is short.
            if not is_out_of_memory(error):
                raise
            logger.warning(
                "there is no memory for another CUDA graph, its steps run eagerly: lower "
                "gpu_memory_utilization or kv_cache_memory (%s)",
                error,
            )
            return run

    def _capture(self, run: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            run()
        except BaseException:
            # The stream must not stay in capture; that the capture failed is known already.
            with contextlib.suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
        return graph.replay

    def memory(self) -> int:
        return torch.cuda.memory_reserved(self.device)


class StepGraphs:
    """One graph per key, captured when it is first needed or all at start; the largest comes
    first in either case, so that the others fit into its memory.

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

    def bucket(self, num_rows: int) -> int | None:
        """The smallest bucket that holds so many rows, or None."""
        index = bisect_left(self.buckets, num_rows)
        return self.buckets[index] if index < len(self.buckets) else None

    def run(self, num_rows: int, part: Part = Part.STEP, stages: Stages = Stages.NONE) -> None:
        """Runs a step of ``num_rows``, or a part: by graph, or eagerly above all buckets."""
        bucket = self.bucket(num_rows)
        if bucket is None:
            self._run(GraphKey(num_rows, part, stages))
            return
        key = GraphKey(bucket, part, stages)
        graph = self._graphs.get(key)
        if graph is not None:
            graph()
        elif self._graphs:
            self._capture(key)
        else:
            # The largest bucket first, so that later graphs fit into the shared graph pool.
            self._capture(GraphKey(self.buckets[-1], part, stages))

    def capture_all(self, progress: Callable[[int, int], None]) -> None:
        """Captures every bucket, the largest first.

        Each capture runs the step on the rows in its buffers: all of them have to be padding. The
        graphs of halves are captured when a batch needs them.

        Args:
            progress: called with (graphs captured, graphs in all).
        """
        progress(0, len(self.buckets))
        for done, bucket in enumerate(reversed(self.buckets), 1):
            self._capture(GraphKey(bucket))
            progress(done, len(self.buckets))
        logger.info(
            "captured %d CUDA graphs in %.2f s, %.1f MiB",
            len(self.captured),
            sum(capture.seconds for capture in self.captured),
            sum(capture.num_bytes for capture in self.captured) / 2**20,
        )

    def close(self) -> None:
        """Drops the graphs, and with them the function that they run: it refers to the tensors
        of the step, whose owner refers to the graphs."""
        self._graphs.clear()
        self._run = _closed

    def _capture(self, key: GraphKey) -> None:
        """Runs the step, and keeps its graph."""
        began, before = time.perf_counter(), self._capturer.memory()
        self._graphs[key] = self._capturer.capture(partial(self._run, key))
        self.captured.append(
            CaptureStats(key, time.perf_counter() - began, self._capturer.memory() - before)
        )


def _closed(key: GraphKey) -> None:
    raise RuntimeError("the graphs are closed")


def default_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, steps of 8 to 256, of 16 to 512, and ``max_num_seqs``."""
    sizes = {1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), max_num_seqs}
    return tuple(sorted(size for size in sizes if size <= max_num_seqs))
