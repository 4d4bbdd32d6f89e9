"""KVCache: the keys and values of all layers in one allocation, and its size."""

from __future__ import annotations

import ctypes
import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from asyncllm.checkpoint.model_config import ModelConfig
from asyncllm.config import EngineConfig
from asyncllm.core.kv_cache_spec import KVCacheSpec
from asyncllm.errors import KVCacheTooSmallError
from asyncllm.gpu.h2d import copy_to_device, lazy_zeros
from asyncllm.gpu.ops.base import BlockLayout
from asyncllm.gpu.state_cache import StateCache
from asyncllm.gpu.transformers_model.config import TransformersConfig
from asyncllm.logger import get_logger
from asyncllm.validation import invalid

logger = get_logger(__name__)

MAX_CPU_CACHE_BYTES = 4 * 2**30
CPU_CACHE_DIVISOR = 4


@dataclass(frozen=True, slots=True)
class KVGroup:
    """A KV group: its KVCacheSpec and the block layouts of its layers.

    Attributes:
        layout: block layout of all layers; the largest one if layers differ.
        layouts: block layout of each layer if layers differ; else empty. A block takes the same
            bytes in every layer, and smaller layouts leave the rest unused.
    """

    spec: KVCacheSpec
    layout: BlockLayout
    layouts: tuple[BlockLayout, ...] = ()

    def views(self, memory: Tensor, num_blocks: int) -> Sequence[Tensor]:
        """Views ``memory [layers, size]`` as one cache per layer."""
        if not self.layouts:
            return list(self.layout.view(memory[: len(self.spec.layers)], num_blocks))
        return [
            layout.view(memory[i : i + 1, : num_blocks * layout.num_elements], num_blocks)[0]
            for i, layout in enumerate(self.layouts)
        ]


@dataclass(frozen=True, slots=True)
class KVCacheSize:
    """Size of the KV cache.

    Attributes:
        num_blocks: number of blocks, including the null block 0.
        max_model_len: longest sequence that the cache holds, in tokens.
    """

    num_blocks: int
    max_model_len: int


class KVCache:
    """Keys and values of all layers: one allocation, viewed as a tensor per layer.

    All KV groups allocate from the same pool of blocks: layer i of each group lies in part i of the
    allocation, and a block belongs to one group at a time. A group with fewer layers than another
    leaves the last parts of its blocks unused.

    The part is the first dimension because on a CPU torch gathers blocks 40 times faster from a
    contiguous layer than from a strided layer.

    On a CPU the operating system zeroes the allocation page by page as it is first touched, so that
    an unused cache costs no memory.

    Attributes:
        tensor: the whole cache, ``[parts, ...]`` in the layout of the first group; ``[parts,
            size]`` if layouts differ by layer.
        layers: a view per layer, see BlockLayout.
        states: recurrent states; None for a model without recurrent layers.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        states: StateCache | None = None,
    ) -> None:
        self.states = states
        depth = _layers_per_block(groups)
        size = num_blocks * block_bytes(groups, dtype) // (depth * dtype.itemsize)
        try:
            memory = lazy_zeros((depth, size), dtype, device)
        except (MemoryError, ValueError) as error:
            raise KVCacheTooSmallError(
                f"a KV cache of {depth * size * dtype.itemsize} bytes cannot be allocated: lower "
                "kv_cache_memory or num_blocks"
            ) from error
        self._layouts_differ = bool(groups[0].layouts)
        if len(groups) > 1 and any(group.layouts for group in groups):
            raise ValueError("layers of different layouts: expected one KV group of all of them")
        views = [group.views(memory, num_blocks) for group in groups]
        self.tensor = memory if self._layouts_differ else groups[0].layout.view(memory, num_blocks)
        parts = {
            layer: part
            for group, view in zip(groups, views, strict=True)
            for layer, part in zip(group.spec.layers, view, strict=True)
        }
        self.layers: list[Tensor] = [parts[layer] for layer in sorted(parts)]

    def clear(self, block_ids: np.ndarray) -> None:
        """Zeroes blocks before a new owner writes them.

        Attention in plain torch reads whole blocks and gives positions beyond a sequence the weight
        0, and 0 times a NaN that a failed request left there would be NaN.
        """
        index = copy_to_device(block_ids, self.tensor.device)
        if not self._layouts_differ:
            self.tensor.index_fill_(2, index, 0.0)
            return
        for layer in self.layers:
            layer.index_fill_(1, index, 0.0)


def block_bytes(groups: Sequence[KVGroup], dtype: torch.dtype) -> int:
    """Bytes of one block, over all layers of the group that it belongs to.

    Raises:
        ValueError: blocks of different groups differ in size or outer dimensions.
    """
    sizes = {group.layout.num_elements for group in groups}
    if len(sizes) > 1 or len({group.layout.order[:2] for group in groups}) > 1:
        raise ValueError(
            f"KV groups {groups}: expected the same size of a block and order of its outer "
            "dimensions in all of them"
        )
    return _layers_per_block(groups) * sizes.pop() * dtype.itemsize


def _layers_per_block(groups: Sequence[KVGroup]) -> int:
    """Number of layers for which a block has room."""
    return max(len(group.spec.layers) for group in groups)


def blocks_per_seq(groups: Sequence[KVGroup], num_tokens: int, step_tokens: int) -> int:
    """Maximum number of blocks that a sequence holds at once, over all groups.

    Args:
        step_tokens: maximum number of tokens of a sequence in one step.
    """
    return sum(group.spec.max_blocks(num_tokens, step_tokens) for group in groups)


def min_cache_bytes(
    config: EngineConfig, groups: Sequence[KVGroup], dtype: torch.dtype, step_tokens: int
) -> int:
    """Bytes of the smallest usable cache.

    It has the null block and the blocks of one sequence, whose length is the configured
    ``max_model_len``, or one token if that is not set.
    """
    blocks_for = blocks_per_seq(groups, config.max_model_len or 1, step_tokens)
    return (blocks_for + 1) * block_bytes(groups, dtype)


def size_cache(
    config: EngineConfig,
    model: ModelConfig | TransformersConfig,
    groups: Sequence[KVGroup],
    dtype: torch.dtype,
    *,
    max_num_seqs: int,
    step_tokens: int,
    available: int,
    shares_memory: bool = False,
) -> KVCacheSize:
    """Chooses the number of blocks and the longest sequence.

    The configuration's ``num_blocks`` decides, else its ``kv_cache_memory``. If neither is set, the
    cache takes ``available`` bytes, but at most twice the bytes that ``max_num_seqs`` sequences of
    full length need. With ``shares_memory`` it takes half of ``available``, but at most the bytes
    of ``max_num_seqs`` such sequences, and at least those of one.

    Args:
        step_tokens: maximum number of tokens of a sequence in one step.
        available: number of bytes for the cache if the configuration sets no size.
        shares_memory: whether ``available`` is all free memory, which the application uses too.

    Raises:
        InvalidRequestError: ``max_model_len`` exceeds the model's context.
        KVCacheTooSmallError: the cache holds no block, or not one sequence of the configured
            ``max_model_len``.
    """
    context = model.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > context:
        raise invalid("max_model_len", config.max_model_len, f"at most the model's {context}")
    per_block, longest = block_bytes(groups, dtype), config.max_model_len or context

    def blocks_for(num_tokens: int) -> int:
        return blocks_per_seq(groups, num_tokens, step_tokens)

    if config.num_blocks is not None:
        num_usable, setting = config.num_blocks, "num_blocks"
    elif config.kv_cache_memory is not None:
        num_usable, setting = int(config.kv_cache_memory) // per_block - 1, "kv_cache_memory"
    else:
        full, most = blocks_for(longest), available // per_block - 1
        if shares_memory:
            useful = max(full, min(max_num_seqs * full, available // 2 // per_block - 1))
        else:
            useful = 2 * max_num_seqs * full
        num_usable, setting = min(most, useful), "kv_cache_memory"
    if num_usable < blocks_for(config.max_model_len or 1):
        raise _too_small_error(
            config.max_model_len, num_usable, groups, step_tokens, per_block, setting
        )
    max_model_len = bisect_right(range(1, longest + 1), num_usable, key=blocks_for)
    if max_model_len < longest:
        logger.warning(
            "max_model_len is %d of the model's %d tokens: the KV cache holds %d blocks of "
            "%s tokens, one sequence of full length %s; raise %s for more",
            max_model_len,
            longest,
            num_usable,
            _block_sizes(groups),
            _describe_blocks(groups, longest, step_tokens),
            setting,
        )
    return KVCacheSize(num_usable + 1, max_model_len)


def _block_sizes(groups: Sequence[KVGroup]) -> str:
    return " or ".join(str(size) for size in sorted({group.spec.block_size for group in groups}))


def _describe_blocks(groups: Sequence[KVGroup], num_tokens: int, step_tokens: int) -> str:
    """Describes the number of blocks that a sequence needs, by group if there are several."""
    counts = [group.spec.max_blocks(num_tokens, step_tokens) for group in groups]
    if len(counts) == 1:
        return str(counts[0])
    parts = [
        f"{count} of {'all tokens' if group.spec.window is None else 'its window'}"
        for count, group in zip(counts, groups, strict=True)
    ]
    return f"{sum(counts)} ({' + '.join(parts)})"


def _too_small_error(
    max_model_len: int | None,
    num_usable: int,
    groups: Sequence[KVGroup],
    step_tokens: int,
    per_block: int,
    setting: str,
) -> KVCacheTooSmallError:
    """Makes the error for a cache with too few usable blocks.

    A remedy in bytes counts the null block; a remedy in blocks does not.
    """
    needed = blocks_per_seq(groups, max_model_len or 1, step_tokens)
    if max_model_len is None:
        purpose = "the smallest needs one block" + (" of every KV group" if needed > 1 else "")
        remedy = ""
    else:
        purpose = f"max_model_len={max_model_len} needs {needed} blocks"
        remedy = ", or lower max_model_len"
        if any(group.spec.window is not None for group in groups):
            purpose += f", {_describe_blocks(groups, max_model_len, step_tokens)}"
            remedy += " or max_num_batched_tokens"
    least = needed if setting == "num_blocks" else (needed + 1) * per_block
    return KVCacheTooSmallError(
        f"the KV cache holds {max(num_usable, 0)} blocks of {_block_sizes(groups)} tokens "
        f"({per_block} bytes each), but {purpose}, {needed * per_block} bytes: raise {setting} "
        f"to at least {least}{remedy}"
    )


def cpu_cache_bytes(reserve: int = 0) -> int:
    """Bytes for a KV cache on a CPU: a quarter of the available memory, at most 4 GiB.

    Args:
        reserve: bytes to leave free for later allocations.
    """
    return min(max(0, available_memory() - reserve) // CPU_CACHE_DIVISOR, MAX_CPU_CACHE_BYTES)


def available_memory() -> int:
    """Bytes that the process may still allocate: the kernel's estimate, within its cgroup."""
    try:
        available = _meminfo_available()
    except (OSError, KeyError, ValueError):
        available = _memory_without_procfs()
    return min(available, _cgroup_available(available))


def _meminfo_available() -> int:
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024


def _memory_without_procfs() -> int:
    """Memory that systems without ``/proc`` let a process use: on Windows the available memory,
    elsewhere half of the physical memory.

    On Windows the structure MEMORYSTATUSEX has it in the fourth field. The first two fields have 32
    bits, of which the first is the structure's length; the other seven have 64.
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
