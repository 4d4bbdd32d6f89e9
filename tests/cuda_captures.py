"""What torch keeps of CUDA graph captures in a process, as CUDAGraph.cpp and the caching allocator
(2.11) keep it, without CUDA."""

from __future__ import annotations

import functools
import gc
import itertools
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

ILLEGAL = "CUDA error: operation not permitted when stream is capturing"
Pool = tuple[int, int]


class Captures:
    """The process's state; ``install`` puts it in place of torch's.

    Attributes:
        fails: where captures fail: "" nowhere, "capture_begin", "capture_end" or "instantiate",
            each time but the one that follows a failure (with ``error``), or in an op of this
            name, which invalidates the capture.
        begun: how many captures began, those of ``scratch`` included.
        recording: pools that the allocator records into.
        references: of pools. One whose last reference has gone is never captured into again.
        captured_into: how many captures into a pool began.
        filters: by pool, the graph that torch's allocator of pinned memory goes on asking which
            streams it captures.
        freed: a graph was freed that is still asked.
        generator: whether the default generator believes that it is captured.
        collecting: whether garbage collection was on in any capture.
        overlapped: two threads captured at once.
        debugging: a graph's debug mode was enabled, which is the process's and cannot be disabled.
    """

    def __init__(self, fails: str = "", error: Exception | None = None) -> None:
        self.fails = fails
        self.error = RuntimeError(ILLEGAL) if error is None else error
        self.begun = 0
        self._failed_last = False
        self.recording: set[Pool] = set()
        self.references: Counter[Pool] = Counter()
        self.captured_into: Counter[Pool] = Counter()
        self.filters: dict[Pool, int] = {}
        self.freed = False
        self.generator = self.collecting = self.overlapped = self.debugging = False
        self.pools = itertools.count(1)
        self.threads: set[int] = set()

    def install(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, next(self.pools)))
        patch.setattr(torch.cuda, "CUDAGraph", functools.partial(Graph, self))
        patch.setattr(torch.cuda, "memory_snapshot", self.snapshot)
        patch.setattr(torch._C, "_cuda_endAllocateToPool", self.end_allocate, raising=False)
        patch.setattr(torch._C, "_cuda_releasePool", self.release, raising=False)

    def fails_at(self, place: str) -> bool:
        if self.fails == place:
            self._failed_last = not self._failed_last
        return self.fails == place and self._failed_last

    def snapshot(self, pool: Pool) -> list[dict[str, int]]:
        """Segments of a pool on two devices, one for each capture into it that has begun."""
        count = self.captured_into[pool]
        return [{"device": 0, "total_size": 2**20}] * count + [{"device": 1, "total_size": 7}]

    def end_allocate(self, device: int, pool: Pool) -> None:
        if pool not in self.recording:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.recording.discard(pool)

    def release(self, device: int, pool: Pool) -> None:
        self.references[pool] -= 1
        assert self.references[pool] >= 0

    def check_clean(self) -> None:
        """Nothing of a capture is left: the application can allocate, draw and capture."""
        assert not self.recording
        assert not self.generator
        assert not self.threads
        assert not self.collecting
        assert not self.overlapped
        assert not self.freed


class Graph:
    """In place of ``torch.cuda.CUDAGraph``. What it captures runs, on the CPU.

    Attributes:
        nodes: the ops of a graph that is kept; None where ``capture_end`` has dropped it.
    """

    def __init__(self, captures: Captures, keep_graph: bool = False) -> None:
        self._captures, self._keep_graph = captures, keep_graph
        self._invalid: Illegal | None = None
        self._ended = False
        self.nodes: int | None = None
        self.replays = 0

    def __del__(self) -> None:
        """A graph that has ended gives up its pool."""
        captures = self._captures
        captures.freed |= id(self) in captures.filters.values()
        if self._ended:
            captures.release(0, self._pool)

    def capture_begin(self, *, pool: Pool | None = None, capture_error_mode: str) -> None:
        captures = self._captures
        assert capture_error_mode == "thread_local"
        pool = torch.cuda.graph_pool_handle() if pool is None else pool
        if pool in captures.recording:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        captures.begun += 1
        captures.overlapped |= bool(captures.threads)
        captures.collecting |= gc.isenabled()
        captures.generator = True
        if pool in captures.references and not captures.references[pool]:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        self._pool = pool
        captures.recording.add(pool)
        captures.references[pool] += 1
        captures.captured_into[pool] += 1
        captures.filters[pool] = id(self)
        if captures.fails_at("capture_begin"):
            raise captures.error
        captures.threads.add(threading.get_ident())
        self._invalid = Illegal(captures.fails, captures.error)
        self._invalid.__enter__()

    def capture_end(self) -> None:
        captures = self._captures
        if self._invalid is None:
            raise RuntimeError("CUDA error: operation not permitted: the stream captures nothing")
        self._invalid.__exit__(None, None, None)
        captures.threads.discard(threading.get_ident())
        failed = self._invalid.failed or captures.fails_at("capture_end")
        nodes, self._invalid = self._invalid.ops, None
        if failed:
            raise RuntimeError("CUDA error: operation failed due to a previous error")
        captures.end_allocate(0, self._pool)
        del captures.filters[self._pool]
        captures.generator = False
        self._ended = True
        self.nodes = nodes if self._keep_graph else None
        if captures.fails_at("instantiate"):
            raise captures.error

    def replay(self) -> None:
        self.replays += 1

    def enable_debug_mode(self) -> None:
        self._captures.debugging = True

    def debug_dump(self, debug_path: str) -> None:
        """Writes nothing, and says nothing, where there is no graph."""
        if self.nodes is not None:
            names = (f'"graph_1_node_{number}"[label="KERNEL"];' for number in range(self.nodes))
            Path(debug_path).write_text("\n".join(("digraph dot {", *names, "}")))


class Illegal(TorchDispatchMode):
    """Counts ops, and refuses one, which invalidates the capture."""

    def __init__(self, name: str, error: Exception) -> None:
        super().__init__()
        self.name, self.error, self.failed, self.ops = name, error, False, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name == self.name:
            self.failed = True
            raise self.error
        self.ops += 1
        return func(*args, **(kwargs or {}))
