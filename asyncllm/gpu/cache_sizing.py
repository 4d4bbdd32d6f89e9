"""choose_cache_size, make_state_cache: memory for the KV cache and for recurrent states."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from asyncllm.checkpoint.model_config import ModelConfig
from asyncllm.config import EngineConfig
from asyncllm.errors import EngineError, KVCacheTooSmallError
from asyncllm.gpu.decoder_loading import model_bytes
from asyncllm.gpu.execution_mode import ExecutionMode, graph_reserve_bytes, graph_token_counts
from asyncllm.gpu.kv_cache import KVGroup, block_bytes
from asyncllm.gpu.memory import (
    available_memory,
    check_cache_fits,
    check_states_fit,
    cuda_cache_bytes,
    free_and_total_bytes,
)
from asyncllm.gpu.models.language_model import LanguageModel
from asyncllm.gpu.profile import profile_run, recorded_activation_bytes
from asyncllm.gpu.state_cache import StateCache, slot_bytes
from asyncllm.gpu.transformers_model.config import TransformersConfig
from asyncllm.logger import get_logger
from asyncllm.validation import value_error

logger = get_logger(__name__)

SNAPSHOTS_PER_SEQ = 4
"""Snapshots of recurrent states per running request: one each for its shared prefix, its prompt and
its output, and one for an ended request whose conversation may continue."""

SNAPSHOT_FREE_MEMORY_DIVISOR = 8
"""Snapshots take at most the memory that the weights leave, divided by this number."""

MAX_CPU_KV_CACHE_BYTES = 4 * 2**30
"""Largest KV cache on a CPU if no setting fixes its size."""

CPU_KV_CACHE_MEMORY_DIVISOR = 4
"""A KV cache on a CPU takes at most the available memory divided by this number."""

MAX_CPU_SNAPSHOT_BYTES = MAX_CPU_KV_CACHE_BYTES // 4


@dataclass(frozen=True, slots=True)
class KVCacheSize:
    """Size of the KV cache.

    Attributes:
        num_blocks: number of blocks, including the null block 0.
        max_model_len: longest sequence that the cache holds, in tokens.
    """

    num_blocks: int
    max_model_len: int


def choose_cache_size(
    config: EngineConfig,
    mode: ExecutionMode,
    decoder: LanguageModel,
    groups: Sequence[KVGroup],
    states: StateCache | None,
    *,
    free_at_start: int,
    graph_batch_sizes: tuple[int, ...],
    token_budget: int,
    max_num_seqs: int,
) -> KVCacheSize:
    """Chooses the number of KV blocks and the longest sequence that they hold.

    No memory is measured if the configuration sets the cache's size.

    Args:
        free_at_start: bytes that were free on a GPU before the weights were loaded.
        graph_batch_sizes: batch sizes for which decode steps have a CUDA graph.
        token_budget: tokens of the largest step.

    Raises:
        KVCacheTooSmallError: the cache cannot hold a sequence of the configured ``max_model_len``
            or has no block, or it does not fit the device.
        EngineError: the largest step does not fit beside the weights, or cannot be measured.
    """
    model, weight = decoder.model, decoder.embedding
    dtype, state_bytes = weight.dtype, states.num_bytes if states else 0
    context = model.max_position_embeddings
    longest = min(config.max_model_len or context, context)
    largest = {"max_num_batched_tokens": token_budget, "max_num_seqs": max_num_seqs}
    if config.num_blocks is not None or config.kv_cache_memory is not None:
        available = 0
    elif weight.device.type == "cpu":
        reserve = recorded_activation_bytes(decoder, groups, states=states, **largest)
        available = cpu_cache_bytes(reserve + state_bytes)
    else:
        decoder.set_max_positions(longest)
        profile = partial(profile_run, decoder, groups, states=states, max_model_len=longest)
        # Run a small step first: libraries allocate workspaces at first use and keep them, which
        # must not be measured as memory of the largest step.
        profile(max_num_batched_tokens=1, max_num_seqs=1)
        captured = max(graph_token_counts(config, mode, token_budget), default=0)
        available = cuda_cache_bytes(
            config,
            weight.device,
            free_at_start=free_at_start,
            weights_bytes=model_bytes(model, dtype) + state_bytes,
            profile_run=partial(profile, **largest),
            graph_reserve_bytes=graph_reserve_bytes(
                graph_batch_sizes, max_num_seqs, model.vocab_size, dtype.itemsize
            ),
            captured_step_fraction=captured / token_budget,
            min_bytes=min_cache_bytes(config, groups, dtype, token_budget),
        )
    size = size_cache(
        config,
        model,
        groups,
        dtype,
        max_num_seqs=max_num_seqs,
        step_tokens=token_budget,
        available_bytes=available,
        shares_memory=mode.shares_memory,
    )
    if mode.device.type == "cuda":
        check_cache_fits(config, mode.device, size.num_blocks * block_bytes(groups, dtype))
    return size


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
    blocks = blocks_per_seq(groups, config.max_model_len or 1, step_tokens)
    return (blocks + 1) * block_bytes(groups, dtype)


def size_cache(
    config: EngineConfig,
    model: ModelConfig | TransformersConfig,
    groups: Sequence[KVGroup],
    dtype: torch.dtype,
    *,
    max_num_seqs: int,
    step_tokens: int,
    available_bytes: int,
    shares_memory: bool = False,
) -> KVCacheSize:
    """Chooses the number of blocks and the longest sequence.

    The configuration's ``num_blocks`` decides, else its ``kv_cache_memory``. If neither is set, the
    cache takes ``available_bytes``, but at most twice the bytes that ``max_num_seqs`` sequences of
    full length need. With ``shares_memory`` it takes half of ``available_bytes``, but at most the
    bytes of ``max_num_seqs`` sequences of full length, and at least the bytes of one.

    Args:
        step_tokens: maximum number of tokens of a sequence in one step.
        available_bytes: number of bytes for the cache if the configuration sets no size.
        shares_memory: whether ``available_bytes`` is all free memory, shared with the application.

    Raises:
        InvalidRequestError: ``max_model_len`` exceeds the model's context.
        KVCacheTooSmallError: the cache holds no block, or not one sequence of the configured
            ``max_model_len``.
    """
    context = model.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > context:
        raise value_error("max_model_len", config.max_model_len, f"at most the model's {context}")
    bytes_per_block, longest = block_bytes(groups, dtype), config.max_model_len or context

    def blocks_for(num_tokens: int) -> int:
        return blocks_per_seq(groups, num_tokens, step_tokens)

    setting_name = "kv_cache_memory" if config.num_blocks is None else "num_blocks"
    if config.num_blocks is not None:
        num_usable = config.num_blocks
    elif config.kv_cache_memory is not None:
        num_usable = int(config.kv_cache_memory) // bytes_per_block - 1
    else:
        full, most = blocks_for(longest), available_bytes // bytes_per_block - 1
        if shares_memory:
            useful = max(
                full, min(max_num_seqs * full, available_bytes // 2 // bytes_per_block - 1)
            )
        else:
            useful = 2 * max_num_seqs * full
        num_usable = min(most, useful)
    if num_usable < blocks_for(config.max_model_len or 1):
        raise _too_small_error(
            config.max_model_len, num_usable, groups, step_tokens, bytes_per_block, setting_name
        )
    max_model_len = bisect_right(range(1, longest + 1), num_usable, key=blocks_for)
    if max_model_len < longest:
        logger.warning(
            "max_model_len is %d of the model's %d tokens: the KV cache holds %d blocks of "
            "%s tokens, one sequence of full length %s; raise %s for more",
            max_model_len,
            longest,
            num_usable,
            _format_block_sizes(groups),
            _describe_blocks(groups, longest, step_tokens),
            setting_name,
        )
    return KVCacheSize(num_usable + 1, max_model_len)


def _format_block_sizes(groups: Sequence[KVGroup]) -> str:
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
    bytes_per_block: int,
    setting_name: str,
) -> KVCacheTooSmallError:
    """Makes the error for a cache with too few usable blocks.

    The message names the smallest usable size: in bytes with the null block, or in blocks without
    the null block.
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
    least = needed if setting_name == "num_blocks" else (needed + 1) * bytes_per_block
    return KVCacheTooSmallError(
        f"the KV cache holds {max(num_usable, 0)} blocks of {_format_block_sizes(groups)} tokens "
        f"({bytes_per_block} bytes each), but {purpose}, {needed * bytes_per_block} bytes: raise "
        f"{setting_name} to at least {least}{remedy}"
    )


def cpu_cache_bytes(reserved_bytes: int = 0) -> int:
    """Bytes for a KV cache on a CPU: a quarter of the available memory, at most 4 GiB.

    Args:
        reserved_bytes: bytes to leave free for later allocations.
    """
    return min(
        max(0, available_memory() - reserved_bytes) // CPU_KV_CACHE_MEMORY_DIVISOR,
        MAX_CPU_KV_CACHE_BYTES,
    )


def make_state_cache(
    config: EngineConfig, decoder: LanguageModel, max_num_seqs: int
) -> StateCache | None:
    """Allocates the slots of recurrent states; None for a model without recurrent layers.

    Call it before the KV cache is sized: the KV cache gets the remaining memory.

    Raises:
        InvalidRequestError: ``num_state_snapshots`` is set, but the model has no recurrent layers
            or prefix caching is off.
        EngineError: the states do not fit the memory.
    """
    specs, embedding = decoder.states, decoder.embedding
    if not specs:
        if config.num_state_snapshots != "auto":
            accepted = '"auto": the model has no recurrent layers'
            raise value_error("num_state_snapshots", config.num_state_snapshots, accepted)
        return None
    sizes = max_num_seqs, slot_bytes(specs, embedding.dtype)
    check_states_fit(embedding.device, *sizes)
    count = choose_num_state_snapshots(config, embedding.device, *sizes)
    states = StateCache(specs, max_num_seqs, embedding.dtype, embedding.device, count)
    logger.info(
        "recurrent states take %d bytes, in a slot for each of max_num_seqs=%d; %s",
        states.num_bytes, max_num_seqs,
        f"{count} more are for those of cached prefixes" if count else "prefixes are not cached",
    )  # fmt: skip
    return states


def largest_token_budget(
    config: EngineConfig,
    model: ModelConfig | TransformersConfig,
    mode: ExecutionMode,
    max_num_seqs: int,
) -> int:
    """Number of tokens of the largest step that may run; cache sizing leaves memory for it."""
    budget = config.max_num_batched_tokens
    if budget == "auto":
        return mode.token_budget
    # No step has more tokens than max_num_seqs sequences of full length.
    context = model.max_position_embeddings
    return min(budget, max_num_seqs * min(config.max_model_len or context, context))


def choose_num_state_snapshots(
    config: EngineConfig, device: torch.device, max_num_seqs: int, slot_bytes: int
) -> int:
    """Chooses the number of snapshots of recurrent states; 0 if prefixes are not cached.

    Args:
        slot_bytes: bytes of one slot. The slots of ``max_num_seqs`` requests and of padded rows
            are not allocated yet; the caller has checked that they fit.

    Raises:
        InvalidRequestError: snapshots are configured, but prefix caching is off.
        EngineError: the configured number of snapshots does not fit beside the weights and the
            requests' states, or prefix caching is configured but not one snapshot fits.
    """
    asked = config.num_state_snapshots
    if config.enable_prefix_caching is False:
        if asked != "auto":
            accepted = '"auto" with enable_prefix_caching=False'
            raise value_error("num_state_snapshots", asked, accepted)
        return 0
    free, total = free_and_total_bytes(device)
    spared = int((1 - config.gpu_memory_utilization) * total)
    left = max(0, free - (max_num_seqs + 1) * slot_bytes)
    if asked != "auto":
        if asked * slot_bytes > left:
            raise EngineError(
                f"num_state_snapshots={asked} needs {asked * slot_bytes} bytes, {slot_bytes} a "
                f"state; {left} are free beside the weights and the states of "
                f"max_num_seqs={max_num_seqs}: lower it to {left // slot_bytes} at most"
            )
        return asked
    share = max(0, left - spared - int(config.kv_cache_memory or 0)) // SNAPSHOT_FREE_MEMORY_DIVISOR
    if device.type != "cuda":
        share = min(share, MAX_CPU_SNAPSHOT_BYTES)
    found = min(SNAPSHOTS_PER_SEQ * max_num_seqs, share // slot_bytes)
    if not found and config.enable_prefix_caching:
        raise EngineError(
            "enable_prefix_caching=True: the model has recurrent layers, a state of a prefix takes "
            f"{slot_bytes} bytes, and {share} are for them, an eighth of what is free beside the "
            "weights: set num_state_snapshots, or lower max_num_seqs"
        )
    return found
