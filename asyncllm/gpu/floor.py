"""memory_bandwidth: what the threads of an op set read, the floor of a step's time."""

from __future__ import annotations

import statistics
import time

import torch

from asyncllm.gpu.ops.torch_ops import TorchOps

PROBE_BYTES = 256 * 2**20
"""Beyond the caches of processors."""
_ROUNDS = 5


def memory_bandwidth(ops: TorchOps) -> float:
    """Bytes a second, on the thread that runs the steps while none runs; the median of five.
    Takes some tenths of a second, and memory of ``PROBE_BYTES``."""
    memory = torch.ones(PROBE_BYTES // 8, dtype=torch.int64, device="cpu")
    rates = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        total = ops.read(memory)
        rates.append(memory.nbytes / (time.perf_counter() - began))
        if total != len(memory):
            raise RuntimeError(f"the sum of {len(memory)} ones is {total}")
    return statistics.median(rates)
