"""choose_snapshots: the number of snapshots of recurrent states."""

from __future__ import annotations

import torch

from asyncllm.config import EngineConfig
from asyncllm.errors import EngineError
from asyncllm.gpu.kv_cache import CPU_CACHE_LIMIT, available_memory
from asyncllm.gpu.memory import GPU_MEMORY, MemoryProbe
from asyncllm.validation import invalid

SNAPSHOTS_PER_SEQ = 4
"""Snapshots per running request: of its shared prefix, its prompt and its output, and one of an
ended request whose conversation may go on."""

SNAPSHOT_SHARE = 8
"""Snapshots take at most an eighth of the memory beside the weights."""

CPU_SNAPSHOT_LIMIT = CPU_CACHE_LIMIT // 4


def choose_snapshots(
    config: EngineConfig,
    device: torch.device,
    max_num_seqs: int,
    slot_bytes: int,
    probe: MemoryProbe = GPU_MEMORY,
) -> int:
    """Chooses the number of snapshots of recurrent states; 0 where prefixes are not cached.

    Args:
        slot_bytes: bytes of one slot. The slots of ``max_num_seqs`` requests and of padded rows
            are not allocated yet, and fit.

    Raises:
        InvalidRequestError: snapshots are configured, but prefix caching is off.
        EngineError: they do not fit beside the weights and the requests' states, or prefix caching
            is on by configuration and there is no room for any.
    """
    asked = config.num_state_snapshots
    if config.enable_prefix_caching is False:
        if asked != "auto":
            accepted = '"auto" with enable_prefix_caching=False'
            raise invalid("num_state_snapshots", asked, accepted)
        return 0
    held = (max_num_seqs + 1) * slot_bytes
    if device.type == "cuda":
        free, total = probe.info(device)
        spared = int((1 - config.gpu_memory_utilization) * total)
    else:
        free, spared = available_memory(), 0
    left = max(0, free - held)
    if asked != "auto":
        if asked * slot_bytes > left:
            raise EngineError(
                f"num_state_snapshots={asked} needs {asked * slot_bytes} bytes, {slot_bytes} a "
                f"state; {left} are free beside the weights and the states of "
                f"max_num_seqs={max_num_seqs}: lower it to {left // slot_bytes} at most"
            )
        return asked
    share = max(0, left - spared - int(config.kv_cache_memory or 0)) // SNAPSHOT_SHARE
    if device.type != "cuda":
        share = min(share, CPU_SNAPSHOT_LIMIT)
    found = min(SNAPSHOTS_PER_SEQ * max_num_seqs, share // slot_bytes)
    if not found and config.enable_prefix_caching:
        raise EngineError(
            "enable_prefix_caching=True: the model has recurrent layers, a state of a prefix takes "
            f"{slot_bytes} bytes, and {share} are for them, an eighth of what is free beside the "
            "weights: set num_state_snapshots, or lower max_num_seqs"
        )
    return found
