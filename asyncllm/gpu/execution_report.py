"""execution_report: how a model's steps run, and the memory bandwidth that bounds them."""

from __future__ import annotations

import statistics
import time

import torch

from asyncllm.core.execution_report import ExecutionReport
from asyncllm.core.executor import ExecutorInfo
from asyncllm.gpu.kv_cache import KVCache
from asyncllm.gpu.models.language_model import LanguageModel
from asyncllm.gpu.ops.torch_ops import TorchOps

BANDWIDTH_PROBE_BYTES = 256 * 2**20
"""Bytes to read for a measurement: more than a processor's caches hold."""


def measure_memory_bandwidth(ops: TorchOps) -> float:
    """Measures memory bandwidth in bytes per second: the median of five reads.

    Call it on the thread that runs the steps, while none runs. It takes some tenths of a second
    and ``BANDWIDTH_PROBE_BYTES`` of memory.
    """
    memory = torch.ones(BANDWIDTH_PROBE_BYTES // 8, dtype=torch.int64, device="cpu")
    rates = []
    for _ in range(5):
        began = time.perf_counter()
        ops.sum_int64(memory)
        rates.append(memory.nbytes / (time.perf_counter() - began))
    return statistics.median(rates)


def execution_report(
    decoder: LanguageModel,
    cache: KVCache,
    info: ExecutorInfo,
    num_threads: int | None,
    packed_weights: str = "",
) -> ExecutionReport:
    """Describes how a model's steps run.

    Call it on the thread that runs the steps, while none runs. On a CPU it takes some tenths of
    a second.

    Args:
        num_threads: number of threads of torch's ops; native ops have a thread pool of their own.
        packed_weights: see ExecutionReport.
    """
    ops, embedding = decoder.ops, decoder.embedding
    context = getattr(ops, "context", None)
    per_block = cache.tensor.nbytes / info.num_blocks
    return ExecutionReport(
        device=str(embedding.device),
        dtype=str(embedding.dtype).removeprefix("torch."),
        op_set=ops.name,
        attention_backend=", ".join(sorted({one.name for one in decoder.attention.values()})),
        instruction_set=None if context is None else context.isa,
        num_threads=num_threads if context is None else context.num_threads,
        weight_bytes=ops.linear_bytes,
        kv_bytes_per_token=sum(per_block / group.block_size for group in info.kv_groups),
        packed_weights=packed_weights,
        memory_bandwidth=None if embedding.device.type == "cuda" else measure_memory_bandwidth(ops),
    )
