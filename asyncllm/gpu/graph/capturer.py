"""CudaGraphCapturer: captures CUDA graphs through torch, and survives failed captures."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from asyncllm.gpu.graph.captures import CAPTURE_GUARD
from asyncllm.gpu.graph.cuda_graphs import GraphCapturer
from asyncllm.gpu.memory import is_out_of_memory, pool_bytes
from asyncllm.logger import get_logger
from asyncllm.validation import describe_error

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

logger = get_logger("asyncllm")


class CudaGraphCapturer(GraphCapturer):
    """Captures CUDA graphs on the current stream, all in one memory pool.

    ``torch.cuda.graph`` would synchronise the device, collect garbage and empty the caching
    allocator of the whole process, so this class calls the graph's own methods. The capture mode is
    "thread_local": other threads of the application may launch and allocate meanwhile. docs/gpu.md
    says what they may not do, and what happens if they do.

    A failed capture yields no graph and has no other effect, because the step has already run
    eagerly. Each reason is logged once. Python's garbage collection is off during a capture: a
    finaliser of the application that frees device memory on this thread would invalidate the
    capture.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._logged_reasons: set[str] = set()
        self._recording: _Recording | None = None

    def capture(self, run: Callable[[], None]) -> Callable[[], None] | None:
        # Run eagerly first: that compiles kernels and allocates libraries' workspaces, which a
        # capture forbids.
        run()
        with CAPTURE_GUARD.capture_lock(), _no_garbage_collection():
            try:
                return self._record_graph(run, self._pool)
            except Exception as error:
                reason, is_memory_error = describe_error(error), is_out_of_memory(error)
            self._reset_generator()
        if reason not in self._logged_reasons:
            self._logged_reasons.add(reason)
            remedy = ": lower gpu_memory_utilization or kv_cache_memory" if is_memory_error else ""
            logger.warning(
                "a CUDA graph could not be captured, its steps run eagerly and are tried again "
                "later%s (%s)",
                remedy,
                reason,
            )
        return None

    def break_graph(self, run_eagerly: Callable[[], None]) -> None:
        if self._recording is None:
            run_eagerly()
        else:
            self._recording.break_graph(run_eagerly)

    def pool_bytes(self) -> int:
        return pool_bytes(self._pool, self.device)

    def _record_graph(self, run: Callable[[], object], pool: _POOL_HANDLE) -> Callable[[], None]:
        recording = self._recording = _Recording(pool)
        try:
            recording.begin()
            run()
            recording.end()
        except BaseException:
            if not recording.is_ended:
                # End the failed capture, so that the stream does not stay in capture mode.
                with contextlib.suppress(RuntimeError):
                    recording.graph.capture_end()
            self._end_pool_recording(recording.graph, pool)
            raise
        finally:
            self._recording = None
        return recording.replay

    def _end_pool_recording(self, graph: torch.cuda.CUDAGraph, pool: _POOL_HANDLE) -> None:
        """Ends the allocator's recording into the pool, after an invalidated capture.

        ``capture_begin`` starts the recording. After an invalidated capture ``capture_end`` raises
        before it reaches the call that ends the recording (CUDAGraph.cpp).
        """
        self._pool = torch.cuda.graph_pool_handle()
        # torch raises an error if it has already ended the recording.
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self.device.index, pool)
            CAPTURE_GUARD.keep_failed_graph(graph)
            torch._C._cuda_releasePool(self.device.index, pool)

    def _reset_generator(self) -> None:
        """Captures a trivial graph, to take torch's default generator out of capture mode.

        In torch 2.11 only the end of a successful capture takes the generator out of that mode.
        After a failed capture the application's next random number on the device would raise an
        error.

        The trivial graph has a pool of its own, because it is dropped at once, and torch never
        captures again into the pool of a dropped graph.
        """
        with contextlib.suppress(Exception):
            scratch = torch.zeros(1, device=self.device)
            self._record_graph(scratch.zero_, torch.cuda.graph_pool_handle())


class _Recording:
    """A capture that may be broken into several graphs, with eager calls between them.

    Attributes:
        graph: the graph being captured.
        is_ended: whether ``capture_end`` has been called for ``graph``.
    """

    def __init__(self, pool: _POOL_HANDLE) -> None:
        self._pool = pool
        self._replay_calls: list[Callable[[], None]] = []

    def begin(self) -> None:
        self.graph, self.is_ended = torch.cuda.CUDAGraph(), False
        self.graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> None:
        self.is_ended = True
        self.graph.capture_end()
        self._replay_calls.append(self.graph.replay)

    def break_graph(self, run_eagerly: Callable[[], None]) -> None:
        self.end()
        self._replay_calls.append(run_eagerly)
        self.begin()

    def replay(self) -> None:
        for piece in self._replay_calls:
            piece()


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Turns off the process's garbage collection; hold ``CAPTURE_GUARD.capture_lock`` meanwhile."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
