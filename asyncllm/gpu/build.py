"""build_model_runner: a ModelRunner from a configuration and a model."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch

from asyncllm.checkpoint.model_config import ModelConfig
from asyncllm.checkpoint.progress import Progress
from asyncllm.config import EngineConfig
from asyncllm.core.batch import RequestAssignment, StepBatch
from asyncllm.core.executor import ExecutorInfo
from asyncllm.core.tracebacks import clear_frames
from asyncllm.errors import InvalidRequestError
from asyncllm.gpu.devices import resolve_device, resolve_dtype, set_current_device
from asyncllm.gpu.execution_mode import (
    ExecutionMode,
    execution_mode_for,
    graph_reserve,
    graph_sizes,
)
from asyncllm.gpu.graph.decode_runner import DecodeRunner
from asyncllm.gpu.huge_pages import warn_without_huge_pages
from asyncllm.gpu.kv_cache import (
    KVCache,
    KVGroup,
    block_bytes,
    cpu_cache_bytes,
    min_cache_bytes,
    size_cache,
)
from asyncllm.gpu.memory import (
    check_cache,
    check_states,
    check_weights,
    cuda_cache_bytes,
    release,
)
from asyncllm.gpu.model_runner import ModelRunner
from asyncllm.gpu.models.architectures import is_small
from asyncllm.gpu.models.dense import attention_kinds, build_decoder, kv_groups
from asyncllm.gpu.models.language_model import LanguageModel
from asyncllm.gpu.models.layers import AttentionKind
from asyncllm.gpu.ops.backend import AttentionRequest
from asyncllm.gpu.ops.base import Attention, AttentionShape
from asyncllm.gpu.ops.quantise import Conversion
from asyncllm.gpu.ops.registry import make_attention, make_ops
from asyncllm.gpu.ops.torch_ops import TorchOps
from asyncllm.gpu.profile import profile_run, recorded_bytes
from asyncllm.gpu.sample.batched_processors import make_processors
from asyncllm.gpu.sample.logprobs import DEFAULT_FUSED, MAX_FUSED
from asyncllm.gpu.state_cache import StateCache, slot_bytes
from asyncllm.gpu.state_sizing import choose_checkpoints
from asyncllm.gpu.threads import available_cpus, set_thread_count
from asyncllm.gpu.token_budget import (
    GPU_TARGET_SECONDS,
    HIGHEST,
    ahead_from,
    calibrate_token_budget,
)
from asyncllm.gpu.transformers_model.build import (
    Plan,
    build_transformers_decoder,
    experts_name,
)
from asyncllm.gpu.transformers_model.check import Reference
from asyncllm.gpu.transformers_model.config import TransformersConfig
from asyncllm.gpu.transformers_model.decoder import TransformersDecoder
from asyncllm.gpu.transformers_model.families import is_tested
from asyncllm.gpu.transformers_model.interface import NAME
from asyncllm.gpu.transformers_model.weights import dummy_modules, load_modules
from asyncllm.gpu.weights import dummy_weights, load_weights, weights_bytes
from asyncllm.logger import get_logger
from asyncllm.sampling_params import SamplingParams
from asyncllm.validation import invalid

logger = get_logger(__name__)

UNUSED_BLOCK_SIZE = 256
"""Tokens per block where no layer attends to any: the blocks count tokens, and say where a prefix
ends whose state is kept."""


def build_model_runner(
    config: EngineConfig,
    model: ModelConfig | TransformersConfig,
    progress: Progress | None = None,
    mode: ExecutionMode | None = None,
) -> ModelRunner:
    """Loads the model and makes all that is fixed while the engine runs.

    Call it on the thread that will run the steps: thread counts and CUDA graphs are that
    thread's.

    Args:
        progress: called with the bytes of weights that are read, and the graphs captured.
        mode: how steps run; the device's own unless given.

    Raises:
        InvalidRequestError: a setting that this device or model cannot honour.
        EngineError: no such device, or too little memory on it for the weights.
        ModelLoadError: the checkpoint cannot be used.
        KVCacheTooSmallError: the KV cache cannot hold what is asked for.
    """
    if mode is None:
        device = resolve_device(config.device)
        set_current_device(device)
        mode = execution_mode_for(config, device)
    with mode.stream.context():
        try:
            return _create(config, model, mode, progress)
        except BaseException as error:
            # An exception that is kept would keep the weights, which its frames refer to.
            clear_frames(error)
            release(mode.device)
            raise


def _create(
    config: EngineConfig,
    model: ModelConfig | TransformersConfig,
    mode: ExecutionMode,
    progress: Progress | None,
) -> ModelRunner:
    device = mode.device
    max_num_seqs = config.max_num_seqs or mode.max_num_seqs
    sizes = graph_sizes(config, mode, max_num_seqs)
    num_threads = resolve_threads(config.num_threads, model, device)
    decoder, groups, free_at_start = _load(config, model, device, num_threads, progress)
    dtype = decoder.embedding.dtype
    states = make_states(config, decoder, max_num_seqs)
    token_budget = largest_token_budget(config, model, mode, max_num_seqs)
    available = available_cache_bytes(
        config,
        decoder,
        groups,
        states=states,
        free_at_start=free_at_start,
        graph_reserve=graph_reserve(sizes, max_num_seqs, model.vocab_size, dtype.itemsize),
        token_budget=token_budget,
        max_num_seqs=max_num_seqs,
    )
    size = size_cache(
        config,
        model,
        groups,
        dtype,
        max_num_seqs=max_num_seqs,
        step_tokens=token_budget,
        available=available,
        cache_tokens=mode.cache_tokens,
    )
    if device.type == "cuda":
        check_cache(config, device, size.num_blocks * block_bytes(groups, dtype))
    decoder.set_max_positions(size.max_model_len)
    ahead = config.async_scheduling
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
        num_state_checkpoints=states.num_checkpoints if states else 0,
        state_bytes=slot_bytes(decoder.states, dtype),
    )
    limits = {"max_num_seqs": max_num_seqs, "max_model_len": size.max_model_len}
    processors = make_processors(config.with_overrides(limits), device)
    cache = KVCache(groups, size.num_blocks, dtype, device, states)
    decode, most = None, config.max_logprobs
    num_logprobs = min(most, MAX_FUSED) if most >= 0 else DEFAULT_FUSED
    if mode.make_capturer is not None:
        decode = DecodeRunner(decoder, cache, info, mode.make_capturer(), sizes, num_logprobs)
    runner = ModelRunner(
        decoder,
        cache,
        info,
        # Native ops have threads of their own, and torch's would spin beside them.
        num_threads=1 if decoder.ops.name == "native" else num_threads,
        stream=mode.stream,
        decode=decode,
        num_logprobs=num_logprobs,
        logits_processors=processors,
    )
    tell = progress or (lambda *_, **stage: None)
    runner.warm_up(partial(tell, stage="kernels"))
    calibrate(runner, config, mode)
    logger.info("steps run as %s", runner.execution)
    if config.cuda_graphs == "startup":
        runner.capture_graphs(partial(tell, stage="graphs"))
    return runner


def largest_token_budget(
    config: EngineConfig,
    model: ModelConfig | TransformersConfig,
    mode: ExecutionMode,
    max_num_seqs: int,
) -> int:
    """Tokens of the largest step that memory has to be kept for."""
    budget = config.max_num_batched_tokens
    if budget == "auto":
        # On a CPU at most HIGHEST is found when the runner's steps are timed.
        return mode.token_budget if mode.stream.is_async else min(mode.token_budget, HIGHEST)
    # What no step can have needs no memory.
    context = model.max_position_embeddings
    return min(budget, max_num_seqs * min(config.max_model_len or context, context))


def calibrate(runner: ModelRunner, config: EngineConfig, mode: ExecutionMode) -> None:
    """Times steps, for the token budget where the configuration leaves it open, and for run-ahead
    on a CPU. Kernels are compiled before."""
    known: dict[int, float] = {}

    def time_step(count: int) -> float:
        known[count] = seconds = time_prefill(runner, count)
        return seconds

    if config.max_num_batched_tokens == "auto":
        options: dict[str, Any] = {}
        if mode.stream.is_async:
            most = runner.info.max_num_batched_tokens
            options = {"target": GPU_TARGET_SECONDS, "highest": most, "repeats": 2}
        measured = calibrate_token_budget(time_step, **options)
        runner.set_token_budget(measured)
        logger.info("a step has at most %d tokens", measured)
    if config.async_scheduling is None and runner.can_run_ahead:
        most = min(runner.info.max_num_seqs, runner.info.max_num_batched_tokens)
        found = ahead_from(time_step, most, known)
        if found is not None:
            runner.run_ahead(found)


def make_states(
    config: EngineConfig, decoder: LanguageModel, max_num_seqs: int
) -> StateCache | None:
    """The slots of recurrent states, before the KV cache gets what is left; None for a model
    without any.

    Raises:
        InvalidRequestError: checkpoints were asked for that nothing would use.
        EngineError: they do not fit the memory.
    """
    specs, residence = decoder.states, decoder.embedding
    if not specs:
        if config.num_state_checkpoints != "auto":
            accepted = '"auto": the model has no recurrent layers'
            raise invalid("num_state_checkpoints", config.num_state_checkpoints, accepted)
        return None
    sizes = max_num_seqs, slot_bytes(specs, residence.dtype)
    check_states(residence.device, *sizes)
    count = choose_checkpoints(config, residence.device, *sizes)
    states = StateCache(specs, max_num_seqs, residence.dtype, residence.device, count)
    logger.info(
        "recurrent states take %d bytes, in a slot for each of max_num_seqs=%d; %s",
        states.num_bytes, max_num_seqs,
        f"{count} more are for those of cached prefixes" if count else "prefixes are not cached",
    )  # fmt: skip
    return states


def _load(
    config: EngineConfig,
    model: ModelConfig | TransformersConfig,
    device: torch.device,
    num_threads: int | None,
    progress: Progress | None,
) -> tuple[LanguageModel, list[KVGroup], int]:
    """The model with its weights, its KV groups, and on a GPU the bytes that were free
    before."""
    dtype = resolve_dtype(config.dtype, model, device, config.attention_backend)
    if isinstance(model, TransformersConfig):
        return _load_transformers(config, model, dtype, device, num_threads, progress)
    kinds = attention_kinds(model)
    attention, block_size = _make_attention(config, kinds, dtype, device, num_threads)
    ops = make_ops(device, next(iter(attention.values())))
    groups = kv_groups(model, attention, block_size)
    free_at_start = 0
    if device.type == "cuda":
        free_at_start = check_weights(config, device, weights_bytes(model, dtype))
    convert = quantisation(config, model, device, ops)
    if ops.packs_linear:
        warn_without_huge_pages()
        if model.quantization is None:
            # Its own threads pack; torch's would spin beside them behind every copy.
            set_thread_count(1)
    if config.load_format == "dummy":
        weights = dummy_weights(model, dtype, device, progress)
    else:
        takes = ops.takes if ops.schemes != {"plain"} else None
        weights = load_weights(model, dtype, device, progress, takes=takes, lend=ops.packs_linear)
    return build_decoder(model, ops, attention, weights, convert, dtype), groups, free_at_start


def _load_transformers(
    config: EngineConfig,
    model: TransformersConfig,
    dtype: torch.dtype,
    device: torch.device,
    num_threads: int | None,
    progress: Progress | None,
) -> tuple[TransformersDecoder, list[KVGroup], int]:
    """As ``_load``, through transformers' modules."""
    plan = Plan.of(model)
    if not plan.kinds:
        _refuse_without_attention(config)
    attention, block_size = _make_attention(config, plan.kinds, dtype, device, num_threads)
    ops = make_ops(device, next(iter(attention.values()), None))
    groups = plan.kv_groups(attention, block_size)
    free_at_start = 0
    if device.type == "cuda":
        free_at_start = check_weights(config, device, model_bytes(model, dtype))
    convert = quantisation(config, model, device, ops)
    load = dummy_modules if config.load_format == "dummy" else load_modules
    modules, owner = load(
        model, dtype, device, attention=NAME, experts=experts_name(device), progress=progress
    )
    reference = None
    if not is_tested(model):
        if convert is not None:
            raise invalid(
                "quantization", config.quantization,
                f"None for {model.architecture}, which is not among the tested architectures: "
                "rounded weights cannot be compared with the model's own results",
            )  # fmt: skip
        reference = Reference.of(modules, model, dtype, device)
    decoder = build_transformers_decoder(
        model, plan, ops, attention, modules, owner, dtype, convert
    )
    if reference is not None:
        reference.check(decoder, groups)
    return decoder, groups, free_at_start


def _refuse_without_attention(config: EngineConfig) -> None:
    """Raises InvalidRequestError for settings that mean nothing to a model without attention."""
    accepted = {"attention_backend": ("auto", "torch"), "kv_cache_memory": (None,)}
    for name, values in accepted.items():
        if getattr(config, name) not in values:
            choices = " or ".join(map(repr, values))
            raise invalid(name, getattr(config, name), f"{choices}: the model has no attention")


def model_bytes(model: ModelConfig | TransformersConfig, dtype: torch.dtype) -> int:
    """Bytes of all parameters on the device."""
    if isinstance(model, TransformersConfig):
        return model.num_parameters * dtype.itemsize
    return weights_bytes(model, dtype)


def _make_attention(
    config: EngineConfig,
    kinds: Iterable[AttentionKind],
    dtype: torch.dtype,
    device: torch.device,
    num_threads: int | None,
) -> tuple[dict[AttentionKind, Attention], int]:
    """The attention of each kind, and the tokens per KV block."""
    attention: dict[AttentionKind, Attention] = {}
    alike: dict[tuple[AttentionShape, int | None], Attention] = {}
    block_size = config.block_size
    for kind in dict.fromkeys(kinds):
        if (kind.shape, kind.window) in alike:
            # Of another KV group: they share what an attention keeps beside its plans.
            attention[kind] = alike[kind.shape, kind.window]
            continue
        windows = frozenset({kind.window})
        request = AttentionRequest(
            kind.shape,
            dtype,
            device,
            block_size,
            windows,
            num_threads=num_threads or available_cpus(),
            peer=next(iter(attention.values()), None),
        )
        attention[kind], block_size = make_attention(config.attention_backend, request)
        alike[kind.shape, kind.window] = attention[kind]
    return attention, block_size or UNUSED_BLOCK_SIZE


def quantisation(
    config: EngineConfig,
    model: ModelConfig | TransformersConfig,
    device: torch.device,
    ops: TorchOps,
) -> Conversion | None:
    """What ``config.quantization`` makes of the weights of linear layers; None for nothing.

    Raises:
        InvalidRequestError: the checkpoint is quantised already, or the device or its op set does
            not compute with such weights.
    """
    name = config.quantization
    if name is None:
        return None
    if model.quantization is not None:
        accepted = f"None: the checkpoint's weights are quantised already ({model.quantization})"
        raise invalid("quantization", name, accepted)
    if device.type != "cpu" or name not in ops.conversions:
        found = f"device {device}" if device.type != "cpu" else f"the op set {ops.name!r}"
        raise InvalidRequestError(
            f"quantization={name!r}: expected None, or a CPU with native ops "
            f'(attention_backend="native"), and this is {found}',
            param="quantization",
        )
    return ops.conversions[name]


def resolve_threads(
    count: int | None, model: ModelConfig | TransformersConfig, device: torch.device
) -> int | None:
    """CPU threads for the engine thread's ops; None leaves torch's own number, one per core.

    A small model runs on one: it gains little from more while the cores are idle, and a
    single busy neighbour makes each of its hundreds of short parallel regions wait for a
    time slice of the operating system.

    Raises:
        InvalidRequestError: a number was asked for that cannot be honoured here.
    """
    if device.type != "cpu" and count is not None:
        raise invalid("num_threads", count, f"None on device {device}")
    if device.type != "cpu" or (count is None and not is_small(model)):
        return None
    if set_thread_count(count or 1):
        return count or 1
    if count is None:
        return None
    accepted = "None: this build of torch has torch.set_num_threads alone, for all threads"
    raise invalid("num_threads", count, accepted)


def available_cache_bytes(
    config: EngineConfig,
    decoder: LanguageModel,
    groups: Sequence[KVGroup],
    *,
    states: StateCache | None = None,
    free_at_start: int,
    graph_reserve: int,
    token_budget: int,
    max_num_seqs: int,
) -> int:
    """Bytes for the KV cache beside the weights and ``states``; 0, with nothing measured, where the
    configuration sets its size."""
    if config.num_blocks is not None or config.kv_cache_memory is not None:
        return 0
    model, weight = decoder.model, decoder.embedding
    if weight.device.type == "cpu":
        largest = {"max_num_batched_tokens": token_budget, "max_num_seqs": max_num_seqs}
        reserve = recorded_bytes(decoder, groups, states=states, **largest)
        return cpu_cache_bytes(reserve + (states.num_bytes if states else 0))
    context = model.max_position_embeddings
    longest = min(config.max_model_len or context, context)
    decoder.set_max_positions(longest)

    profile = partial(profile_run, decoder, groups, states=states, max_model_len=longest)
    # Memory that libraries allocate at their first call and keep is not a step's.
    profile(max_num_batched_tokens=1, max_num_seqs=1)
    return cuda_cache_bytes(
        config,
        weight.device,
        free_at_start=free_at_start,
        weights_bytes=model_bytes(model, weight.dtype) + (states.num_bytes if states else 0),
        profile_run=partial(
            profile, max_num_batched_tokens=token_budget, max_num_seqs=max_num_seqs
        ),
        graph_reserve=graph_reserve,
        least=min_cache_bytes(config, groups, weight.dtype, token_budget),
    )


def time_prefill(runner: ModelRunner, num_tokens: int) -> float:
    """Seconds of one step that prefills ``num_tokens``, in rows of full length at most.

    All rows write the same blocks, which are not read afterwards.
    """
    info = runner.info
    rows = -(-num_tokens // info.max_model_len)
    count = num_tokens // rows
    blocks = tuple(list(range(1, -(-count // g.block_size) + 1)) for g in info.kv_groups)
    sampling = SamplingParams(temperature=0.0, seed=0).resolve({}, {}, lambda: 0)
    rows = min(rows, info.max_num_seqs)
    batch = StepBatch(
        step=0,
        req_indices=list(range(rows)),
        starts=[0] * rows,
        counts=[count] * rows,
        samples=[True] * rows,
        num_tokens=rows * count,
        assignments=[
            RequestAssignment(req_index, "warm-up", [0] * count, count, blocks, sampling)
            for req_index in range(rows)
        ],
    )
    start = time.perf_counter()
    runner.launch(batch)
    runner.collect()
    return time.perf_counter() - start
