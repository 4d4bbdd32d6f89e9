"""Device memory: the budget of the KV cache, and the release of memory when an engine closes.

On a GPU the weights are loaded first. Then one step of the largest size is run to measure its
memory beside the weights, and the KV cache gets the rest of the engine's share. The tensors
of steps, weights and cache come from torch's own caching allocator, like the application's.
"""

from __future__ import annotations

import ctypes
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from asyncllm.config import EngineConfig
from asyncllm.errors import EngineError, KVCacheTooSmallError
from asyncllm.gpu.graph.captures import CAPTURE_GUARD
from asyncllm.logger import get_logger
from asyncllm.validation import describe_error

logger = get_logger(__name__)

SEGMENT_BYTES = 2 * 2**20
"""Granularity in which torch takes large allocations from the device."""

RELEASE_TIMEOUT_SECONDS = 5.0
"""Timeout in seconds of each of the two waits of ``release_cached_memory``: for the lock that the
process's engines share, and for the device to finish."""

_OUT_OF_MEMORY_TEXTS = (
    "out of memory",
    "not enough memory",
    "DefaultCPUAllocator",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
"""Substrings of error messages for exhausted memory: torch's ("CUDA out of memory", "CUDA error:
out of memory"), Triton's ("Triton Error [CUDA]: out of memory"), and those of CPU allocators and
NVIDIA's libraries."""


class MemoryProbe:
    """torch's view of an NVIDIA GPU's memory; tests replace it with a simulated device."""

    def free_and_total_bytes(self, device: torch.device) -> tuple[int, int]:
        """Free and total bytes of the device."""
        return torch.cuda.mem_get_info(device)

    def has_private_pools(self) -> bool:
        """Whether ``private_pool`` works with the allocator that the process has chosen."""
        return torch.cuda.get_allocator_backend() == "native"

    @contextmanager
    def private_pool(self, device: torch.device) -> Iterator[Callable[[], int]]:
        """Context manager: the calling thread allocates from a private memory pool in it.

        Yields a function that returns the bytes that the pool has taken from the device; the pool
        never shrinks within the context. Until the context ends, no other engine captures a graph
        or empties torch's cache.

        The pool has no owner once the context ends, so that ``empty_cache`` may empty it. It is not
        a ``torch.cuda.MemPool``, whose C++ destructor empties the pool and aborts the process if
        that fails: up to torch 2.12 emptying fails while any thread is inside ``use_mem_pool``, in
        later versions while any thread captures a CUDA graph.
        """
        # A stand-in for a MemPool suffices, because ``use_mem_pool`` reads only its ``id``.
        handle: Any = SimpleNamespace(id=torch.cuda.graph_pool_handle())
        with CAPTURE_GUARD.capture_lock(), torch.cuda.use_mem_pool(handle, device):
            yield partial(pool_bytes, handle.id, device)

    def synchronize(self, device: torch.device, timeout: float) -> bool:
        """Waits for the current stream's work; False after ``timeout`` seconds.

        Raises:
            RuntimeError: the device has failed.
        """
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        deadline = time.monotonic() + timeout
        while not event.query():
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.001)
        return True

    def empty_cache(self, device: torch.device, timeout: float = -1) -> None:
        """Returns torch's cached and unused blocks to the device.

        Args:
            timeout: longest wait in seconds for other engines of the process; -1 for no limit.

        Raises:
            TimeoutError: another engine's capture takes longer than ``timeout``.
        """
        with CAPTURE_GUARD.capture_lock(timeout):
            torch.cuda.empty_cache()


GPU_MEMORY_PROBE = MemoryProbe()


def pool_bytes(pool: tuple[int, int], device: torch.device) -> int:
    """Bytes that a private pool of torch has taken from the device."""
    segments = torch.cuda.memory_snapshot(pool)
    return sum(each["total_size"] for each in segments if each["device"] == device.index)


def cuda_cache_bytes(
    config: EngineConfig,
    device: torch.device,
    *,
    free_at_start: int,
    weights_bytes: int,
    profile_run: Callable[[], None],
    graph_reserve_bytes: int,
    captured_step_fraction: float = 0.0,
    min_bytes: int,
) -> int:
    """Measures the bytes left for a KV cache whose size is not configured.

    Runs the largest step once in a memory pool of its own, and takes the pool's size as the step's
    peak: torch's peak statistics belong to the application, and are neither read nor reset. torch's
    cache, including the application's cached blocks, is emptied before the step, because torch does
    not empty it for an allocation in a pool when the device is full. It is emptied again after the
    step, so that the pool's memory can go to the KV cache.

    Args:
        free_at_start: bytes that were free before the engine took any.
        weights_bytes: bytes of the weights, which are on the device now.
        profile_run: runs the largest step; weights and RoPE tables are on the device.
        graph_reserve_bytes: memory to keep for CUDA graphs, without the activations of captured
            mixed steps.
        captured_step_fraction: number of tokens of the largest captured mixed step, whose
            activations the graphs keep, divided by that of the largest step.
        min_bytes: bytes of the smallest usable cache.

    Raises:
        KVCacheTooSmallError: less than ``min_bytes`` is left.
        EngineError: the step does not fit beside the weights, or the process uses an allocator
            without pools, in which a step cannot be measured.
    """
    if not GPU_MEMORY_PROBE.has_private_pools():
        raise EngineError(
            "what a step takes can be measured only in torch's native allocator, and the process "
            "has another: set kv_cache_memory or num_blocks"
        )
    GPU_MEMORY_PROBE.empty_cache(device)
    peak, failure = _measure_peak_bytes(profile_run, device)
    GPU_MEMORY_PROBE.empty_cache(device)
    free, total = GPU_MEMORY_PROBE.free_and_total_bytes(device)
    allowed = int(config.gpu_memory_utilization * total)
    reserve = graph_reserve_bytes + math.ceil(captured_step_fraction * peak)
    division = (
        f"of {total} bytes on the GPU, {free_at_start} were free at start and "
        f"gpu_memory_utilization={config.gpu_memory_utilization:g} allows {allowed}; "
        f"weights take {weights_bytes}, the largest step {peak}, CUDA graphs "
        f"{reserve}, and {free} are free now"
    )
    smaller_step = "lower max_num_batched_tokens, max_num_seqs or max_model_len"
    if failure is not None:
        raise EngineError(
            f"the largest step does not fit beside the weights ({division}): {smaller_step}"
        ) from failure
    # Memory that other processes or the driver have taken since the start is missing in ``free``.
    left = min(min(allowed, free_at_start) - weights_bytes, free) - reserve - peak
    available = left // SEGMENT_BYTES * SEGMENT_BYTES
    if available < min_bytes:
        is_limited = allowed < free_at_start
        remedy = "raise gpu_memory_utilization" if is_limited else "free memory on the GPU"
        raise KVCacheTooSmallError(
            f"{max(available, 0)} bytes are left for the KV cache, the smallest needs "
            f"{min_bytes} ({division}): {remedy}, or {smaller_step}"
        )
    logger.info("%d bytes for the KV cache: %s", available, division)
    return available


def _measure_peak_bytes(
    run: Callable[[], None], device: torch.device
) -> tuple[int, Exception | None]:
    """Returns the peak bytes of ``run``, and its error if it ran out of memory."""
    with GPU_MEMORY_PROBE.private_pool(device) as reserved:
        try:
            run()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            # The traceback's frames hold the step's tensors, which would still count as in use.
            return reserved(), error.with_traceback(None)
        return reserved(), None


def check_weights_fit(config: EngineConfig, device: torch.device, weights_bytes: int) -> int:
    """Checks that the weights will fit, before gigabytes of them are read.

    torch's cache is emptied first, because the application's freed tensors leave blocks there.
    ``gpu_memory_utilization`` limits the weights only if no setting fixes the KV cache's size.

    Returns:
        Bytes that are free now.

    Raises:
        EngineError: the weights will not fit.
    """
    GPU_MEMORY_PROBE.empty_cache(device)
    free, total = GPU_MEMORY_PROBE.free_and_total_bytes(device)
    measured = config.num_blocks is None and config.kv_cache_memory is None
    share = int(config.gpu_memory_utilization * total) if measured else total
    if weights_bytes <= min(share, free):
        return free
    if share < min(free, total):
        limit = f"gpu_memory_utilization={config.gpu_memory_utilization:g} allows {share}"
        remedy = "raise it, or take a smaller model or dtype"
    else:
        limit = f"{free} are free"
        remedy = "free memory on it, or take another device, or a smaller model or dtype"
    raise EngineError(
        f"the weights take {weights_bytes} bytes; of {total} on {device}, {limit}: {remedy}"
    )


def free_and_total_bytes(device: torch.device) -> tuple[int, int]:
    """Free bytes and total bytes of a device. A CPU's total is given as 0."""
    if device.type != "cuda":
        return available_memory(), 0
    return GPU_MEMORY_PROBE.free_and_total_bytes(device)


def available_memory() -> int:
    """Bytes that the process may still allocate.

    It is the smaller of the kernel's MemAvailable and the room in the process's cgroup.
    """
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        available = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        available = _memory_without_procfs()
    return min(available, _cgroup_available(available))


def _memory_without_procfs() -> int:
    """Memory that systems without ``/proc`` let a process use: on Windows the available memory,
    elsewhere half of the physical memory.

    On Windows the available memory is the fourth field of the structure MEMORYSTATUSEX. Its first
    two fields have 32 bits each, and the first is the structure's length; the other seven have 64.
    """
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    status = (ctypes.c_uint64 * 8)(64)
    ctypes.windll.kernel32.GlobalMemoryStatusEx(status)  # pyright: ignore[reportAttributeAccessIssue]
    return status[2]


def _cgroup_available(fallback_bytes: int) -> int:
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        used = int((group / "memory.current").read_text(encoding="ascii"))
        return fallback_bytes if limit == "max" else max(0, int(limit) - used)
    except (OSError, ValueError):
        return fallback_bytes


def check_states_fit(device: torch.device, max_num_seqs: int, slot_bytes: int) -> None:
    """Checks that recurrent states fit beside the weights.

    Raises:
        EngineError: a slot for each of ``max_num_seqs`` requests, and one for padded rows, need
            more memory than is free.
    """
    free, _ = free_and_total_bytes(device)
    needed = (max_num_seqs + 1) * slot_bytes
    if needed > free:
        raise EngineError(
            f"max_num_seqs={max_num_seqs} needs {needed} bytes for recurrent states, {slot_bytes} "
            f"a slot; {free} are free beside the weights: lower max_num_seqs to "
            f"{max(free // slot_bytes - 1, 0)} at most"
        )


def check_cache_fits(config: EngineConfig, device: torch.device, num_bytes: int) -> None:
    """Checks that a KV cache of configured size fits the device.

    Raises:
        KVCacheTooSmallError: less than ``num_bytes`` is free.
    """
    if config.num_blocks is None and config.kv_cache_memory is None:
        return
    free, total = GPU_MEMORY_PROBE.free_and_total_bytes(device)
    if num_bytes > free:
        knob = "kv_cache_memory" if config.num_blocks is None else "num_blocks"
        value = getattr(config, knob)
        raise KVCacheTooSmallError(
            f"{knob}={value} is a KV cache of {num_bytes} bytes; of {total} on {device}, {free} "
            f"are free beside the weights: lower {knob}"
        )


def release_cached_memory(device: torch.device) -> bool:
    """Returns the memory of freed tensors to the device.

    Call it last, on the thread and stream that ran the steps. It never raises, and waits for at
    most twice ``RELEASE_TIMEOUT_SECONDS``. If the device has failed or hangs, it only logs a
    warning.

    It empties torch's whole cache, the application's cached blocks included, which torch allocates
    again when they are needed. A private pool for the engine would spare the application's blocks,
    but when the device is full, torch does not empty its cache and retry for an allocation in a
    pool. The CUDA context and cuBLAS's workspaces, one per handle and stream, stay with the
    process: the next engine uses them again, and a CUDA graph of the application may hold addresses
    in a workspace.

    Returns:
        Whether the work of the current stream has ended, and the memory was given back.
    """
    if device.type != "cuda":
        return True
    try:
        if GPU_MEMORY_PROBE.synchronize(device, RELEASE_TIMEOUT_SECONDS):
            GPU_MEMORY_PROBE.empty_cache(device, RELEASE_TIMEOUT_SECONDS)
            return True
        logger.warning(
            "%s was still busy after %g s: the engine's memory stays in torch's cache until "
            "torch.cuda.empty_cache()",
            device,
            RELEASE_TIMEOUT_SECONDS,
        )
    except Exception as error:
        logger.warning("the memory of %s could not be given back: %s", device, error)
    return False


def is_device_failure(error: BaseException) -> bool:
    """Whether an error concerns the whole device, and so every request on it."""
    return is_out_of_memory(error) or isinstance(error, torch.AcceleratorError)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a step ran out of memory, so that a smaller one may succeed."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    message = describe_error(error)
    return isinstance(error, RuntimeError) and any(text in message for text in _OUT_OF_MEMORY_TEXTS)
