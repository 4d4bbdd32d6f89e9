"""build_model_runner: makes a ModelRunner from a configuration and a model."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from asyncllm.checkpoint.model_config import ModelConfig
from asyncllm.checkpoint.progress import ProgressCallback
from asyncllm.config import EngineConfig
from asyncllm.core.executor import ExecutorInfo
from asyncllm.core.tracebacks import clear_frames
from asyncllm.errors import EngineError
from asyncllm.gpu.cache_sizing import choose_cache_size, largest_token_budget, make_state_cache
from asyncllm.gpu.calibration import calibrate_scheduler, load_or_calibrate
from asyncllm.gpu.decoder_loading import load_decoder
from asyncllm.gpu.devices import resolve_device, set_current_device
from asyncllm.gpu.execution_mode import (
    ExecutionMode,
    execution_mode_for,
    graph_batch_sizes,
    graph_token_counts,
)
from asyncllm.gpu.graph.graph_replay import GraphPlan
from asyncllm.gpu.kv_cache import KVCache
from asyncllm.gpu.memory import release_cached_memory
from asyncllm.gpu.model_runner import ModelRunner
from asyncllm.gpu.models.architectures import is_small_model
from asyncllm.gpu.sample.batched_processors import make_processors
from asyncllm.gpu.sample.logprobs import DEFAULT_NUM_BUFFERED_LOGPROBS
from asyncllm.gpu.state_cache import slot_bytes
from asyncllm.gpu.threads import set_thread_count
from asyncllm.gpu.transformers_model.config import TransformersConfig
from asyncllm.logger import get_logger
from asyncllm.validation import value_error

logger = get_logger(__name__)


def build_model_runner(
    config: EngineConfig,
    model: ModelConfig | TransformersConfig,
    progress: ProgressCallback | None = None,
    mode: ExecutionMode | None = None,
) -> ModelRunner:
    """Loads the model and allocates all memory that lasts as long as the engine.

    Call it on the thread that will run the steps: op thread counts and CUDA graphs belong to the
    calling thread.

    Args:
        progress: called with the bytes of weights read, the kernels warmed up and the graphs
            captured.
        mode: how steps run; None chooses it by the device.

    Raises:
        InvalidRequestError: a setting that this device or model cannot honour.
        EngineError: no such device, or too little memory on it for the weights.
        ModelLoadError: the checkpoint cannot be used.
        KVCacheTooSmallError: the KV cache's memory does not hold one sequence of the configured
            ``max_model_len``, or not one block.
    """
    if mode is None:
        device = resolve_device(config.device)
        set_current_device(device)
        mode = execution_mode_for(config, device)
    with mode.stream.context():
        try:
            return _load_runner(config, model, mode, progress)
        except BaseException as error:
            # Drop the traceback: its frames refer to the weights, which would live as long as the
            # error.
            clear_frames(error)
            if release_cached_memory(mode.device):
                mode.stream.give_back()
            raise


def pack_model(
    config: EngineConfig,
    model: ModelConfig | TransformersConfig,
    progress: ProgressCallback | None = None,
) -> Path:
    """Writes a model's packed weights beside the model, and returns the file.

    Raises:
        InvalidRequestError: as ``build_model_runner``.
        EngineError: the model's weights cannot be packed, or the file cannot be written.
        ModelLoadError: the checkpoint cannot be used.
    """
    device = resolve_device(config.device)
    threads = resolve_threads(config.num_threads, model, device)
    *_, store = load_decoder(config, model, device, threads, progress, in_model_folder=True)
    if isinstance(store, str):
        raise EngineError(f"{model.path}: {store}")
    try:
        store.write()
    except OSError as error:
        raise EngineError(f"{store.path}: cannot be written ({error})") from error
    return store.path


def _load_runner(
    config: EngineConfig,
    model: ModelConfig | TransformersConfig,
    mode: ExecutionMode,
    progress: ProgressCallback | None,
) -> ModelRunner:
    device, max_num_seqs = mode.device, config.max_num_seqs or mode.max_num_seqs
    graphs = graph_batch_sizes(config, mode, max_num_seqs)
    num_threads = resolve_threads(config.num_threads, model, device)
    decoder, groups, free_at_start, store = load_decoder(
        config, model, device, num_threads, progress
    )
    states = make_state_cache(config, decoder, max_num_seqs)
    token_budget = largest_token_budget(config, model, mode, max_num_seqs)
    size = choose_cache_size(
        config,
        mode,
        decoder,
        groups,
        states,
        free_at_start=free_at_start,
        graph_batch_sizes=graphs,
        token_budget=token_budget,
        max_num_seqs=max_num_seqs,
    )
    decoder.set_max_positions(size.max_model_len)
    dtype, ahead = decoder.embedding.dtype, config.async_scheduling
    info = ExecutorInfo(
        vocab_size=model.vocab_size,
        num_blocks=size.num_blocks,
        kv_groups=tuple(group.spec for group in groups),
        max_model_len=size.max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=token_budget,
        pipeline_depth=mode.pipeline_depth if ahead is None else 1 + ahead,
        step_timeout=mode.step_timeout,
        has_states=states is not None,
        num_state_snapshots=states.num_snapshots if states else 0,
        state_bytes=slot_bytes(decoder.states, dtype),
    )
    cache = KVCache(groups, size.num_blocks, dtype, device, states)
    limits = {"max_num_seqs": max_num_seqs, "max_model_len": size.max_model_len}
    processors = make_processors(config.with_overrides(limits), device)
    step_graphs, most = None, config.max_logprobs
    if mode.make_capturer is not None:
        token_counts = graph_token_counts(config, mode, token_budget)
        step_graphs = GraphPlan(mode.make_capturer(), graphs, token_counts)
    runner = ModelRunner(
        decoder,
        cache,
        info,
        # Give torch one thread: native ops have threads of their own, and torch's threads would
        # spin.
        num_threads=1 if decoder.ops.name == "native" else num_threads,
        stream=mode.stream,
        graphs=step_graphs,
        num_logprobs=most if most >= 0 else DEFAULT_NUM_BUFFERED_LOGPROBS,
        logits_processors=processors,
        packed=store,
    )
    tell = progress or (lambda *_, **stage: None)
    runner.warm_up(partial(tell, stage="kernels"))
    if config.cuda_graphs != "off":
        runner.capture_graphs(partial(tell, stage="graphs"))
    # Calibrate after the CUDA graphs are captured: a capture needs buffers full of padding, and
    # calibration steps leave rows in the buffers.
    if isinstance(store, str):
        calibrate_scheduler(runner, config, mode)
    else:
        store.write_in_background(load_or_calibrate(runner, config, mode, store))
    logger.info("steps run as %s", runner.execution)
    return runner


def resolve_threads(
    count: int | None, model: ModelConfig | TransformersConfig, device: torch.device
) -> int | None:
    """Set and return the number of CPU threads for the engine thread's ops.

    Returns ``count`` if it is given, else 1 for a small model; None keeps torch's default, one
    thread per core. More threads would gain a small model little even on idle cores. And if another
    process kept one core busy, each of the model's hundreds of short parallel regions would wait
    until the operating system gives the thread on that core a time slice.

    Raises:
        InvalidRequestError: the device or this build of torch cannot honour ``count``.
    """
    if device.type != "cpu" and count is not None:
        raise value_error("num_threads", count, f"None on device {device}")
    if device.type != "cpu" or (count is None and not is_small_model(model)):
        return None
    if set_thread_count(count or 1):
        return count or 1
    if count is None:
        return None
    accepted = "None: this build of torch has torch.set_num_threads alone, for all threads"
    raise value_error("num_threads", count, accepted)
