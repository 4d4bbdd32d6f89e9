"""Compiling kernels for a GPU in a pool of processes that do not touch it.

Triton compiles on one core, for seconds a kernel. What the processes compile they leave in
Triton's cache folder, where the launch on the device finds it.
"""

from __future__ import annotations

import functools
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from asyncllm.gpu.ops.base import AttentionShape
from asyncllm.gpu.ops.triton.attention import TritonAttention
from asyncllm.gpu.ops.triton.tuning import Tiles
from benchmarks.gpu.paged_inputs import decode_calls, prefill_calls, shaped_inputs
from benchmarks.gpu.shapes import AttentionLoad

NO_DEVICE = torch.device("meta")


class TunedAttention(TritonAttention):
    """The backend with launch shapes of our choice.

    Args:
        tiles: of both kernels; None for the tables'.
        fixed_splits: programs per decode row and key/value head; None for the backend's rule.
    """

    def __init__(
        self,
        load: AttentionLoad,
        device: torch.device,
        *,
        tiles: Tiles | None = None,
        fixed_splits: int | None = None,
        **gpu: Any,
    ) -> None:
        shape = AttentionShape(load.heads, load.kv_heads, load.head_dim, load.head_dim**-0.5)
        super().__init__(shape, torch.bfloat16, device, **gpu)
        self.fixed_splits = fixed_splits
        if tiles is not None:
            self.decode_tiles = self.prefill_tiles = tiles

    def num_splits(self, *arguments: Any, **options: Any) -> int:
        if self.fixed_splits is not None:
            return self.fixed_splits
        return super().num_splits(*arguments, **options)


@dataclass(frozen=True, slots=True)
class CompileJob:
    """The kernels of one launch: of decode rows, split or not, or of prefill rows."""

    load: AttentionLoad
    tiles: Tiles
    splits: int = 1


@dataclass(frozen=True, slots=True)
class Compiled:
    """What became of a job.

    Attributes:
        shared: bytes of shared memory of its largest kernel.
        error: why it could not be compiled; None.
    """

    job: CompileJob
    seconds: float
    shared: int = 0
    error: str | None = None


def compile_all(
    jobs: Sequence[CompileJob], gpu: Mapping[str, int], workers: int, seconds: float
) -> Iterator[Compiled]:
    """What the jobs compile to, as they are done; those that are not done in time are left out.

    Args:
        gpu: ``capability`` and ``num_sms``, as ``TritonAttention`` has them.
        workers: processes.
    """
    deadline = time.monotonic() + seconds
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    try:
        futures = [pool.submit(compile_one, job, dict(gpu)) for job in jobs]
        for future in as_completed(futures, timeout=max(deadline - time.monotonic(), 0.0)):
            yield future.result()
    except TimeoutError:
        return
    finally:
        processes = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.terminate()


def compile_one(job: CompileJob, gpu: Mapping[str, int]) -> Compiled:
    """In a process of the pool."""
    began, shared = time.perf_counter(), [0]

    def note(kernel: Any) -> None:
        shared[0] = max(shared[0], kernel.metadata.shared)

    try:
        with compile_only(gpu["capability"], note):
            launch(job, gpu)
    except Exception as error:
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"
        return Compiled(job, time.perf_counter() - began, shared[0], reason)
    return Compiled(job, time.perf_counter() - began, shared[0])


def launch(job: CompileJob, gpu: Mapping[str, int]) -> None:
    load = job.load
    attention = TunedAttention(load, NO_DEVICE, tiles=job.tiles, fixed_splits=job.splits, **gpu)
    inputs = shaped_inputs(load, NO_DEVICE)
    if load.queries == 1:
        (call,) = decode_calls(attention, inputs, max(load.lengths))
    else:
        (call,) = prefill_calls(attention, inputs)
    call()


@contextmanager
def compile_only(capability: int, note: Callable[[Any], None]) -> Iterator[None]:
    """Launches compile, through Triton's own path, for a GPU that this process does not see, and
    nothing runs. The keys of Triton's cache are those of the launch on the device."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    run = JITFunction.run

    @functools.wraps(run)
    def warm_up(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        note(run(self, *args, grid=grid, warmup=True, **kwargs))

    stub = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
    )
    config: Any = triton.runtime.driver
    before, config._active = config._active, stub
    JITFunction.run = warm_up
    try:
        yield
    finally:
        JITFunction.run = run
        config._active = before
