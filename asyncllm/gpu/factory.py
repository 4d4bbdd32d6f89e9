"""create_executor: from a configuration and a model to a runner on a device."""

from __future__ import annotations

import dataclasses
import logging
import time

import torch

from asyncllm.config import EngineConfig
from asyncllm.core.batch import SlotAssignment, StepBatch
from asyncllm.core.executor import ExecutorInfo
from asyncllm.errors import EngineError, InvalidRequestError
from asyncllm.gpu.kv_cache import KVCache, cpu_cache_bytes, size_cache
from asyncllm.gpu.model_runner import ModelRunner
from asyncllm.gpu.models.architectures import count_parameters, find_architecture
from asyncllm.gpu.models.decoder import Decoder, attention_shape, attention_windows
from asyncllm.gpu.ops.backend import AttentionRequest
from asyncllm.gpu.ops.registry import make_attention, make_ops
from asyncllm.gpu.threads import set_thread_count
from asyncllm.gpu.token_budget import measure_token_budget
from asyncllm.gpu.weights import Progress, dummy_weights, load_weights
from asyncllm.model_config import ModelConfig
from asyncllm.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

SMALL_MODEL = 32_000_000
"""Parameters below which a model is bound by the number of ops."""


def create_executor(
    config: EngineConfig, model: ModelConfig, progress: Progress | None = None
) -> ModelRunner:
    """Loads the model and makes everything that is fixed while the engine runs.

    Call it on the thread that will run the steps: thread counts are that thread's.

    Args:
        progress: called with (bytes done, bytes in all) while the weights are read.

    Raises:
        InvalidRequestError: a setting that this device or model cannot honour.
        EngineError: no such device.
        ModelLoadError: the checkpoint cannot be used.
        KVCacheTooSmallError: the KV cache cannot hold what is asked for.
    """
    find_architecture(model)
    device = resolve_device(config.device)
    check_graphs(config, device)
    dtype = resolve_dtype(config.dtype, model, device)
    num_threads = resolve_threads(config.num_threads, model, device)
    windows = frozenset(attention_windows(model))
    needed = AttentionRequest(attention_shape(model), dtype, device, config.block_size, windows)
    attention, block_size = make_attention(config.attention_backend, needed)
    load = dummy_weights if config.load_format == "dummy" else load_weights
    ops = make_ops(device, attention)
    decoder = Decoder(model, ops, attention, load(model, dtype, device, progress))
    max_num_seqs = config.max_num_seqs or (64 if device.type == "cpu" else 256)
    size = size_cache(
        config,
        model,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        dtype=dtype,
        available=available_cache_bytes(config, device),
    )
    decoder.set_max_positions(size.max_model_len)
    budget = config.max_num_batched_tokens
    info = ExecutorInfo(
        vocab_size=model.vocab_size,
        num_blocks=size.num_blocks,
        block_size=block_size,
        max_model_len=size.max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=8192 if budget == "auto" else budget,
        pipeline_depth=2 if config.async_scheduling else 1,
    )
    cache = KVCache(model, size, dtype, device)
    runner = ModelRunner(decoder, cache, info, num_threads=num_threads)
    if budget == "auto" and device.type == "cpu":
        measured = measure_token_budget(lambda count: time_prefill(runner, count))
        runner.info = dataclasses.replace(info, max_num_batched_tokens=measured)
    return runner


def resolve_device(name: str) -> torch.device:
    """ "auto" is CUDA where torch has it.

    Raises:
        EngineError: CUDA is asked for, but not there.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    device = torch.device("cuda" if name == "auto" else name)
    if not torch.cuda.is_available():
        raise EngineError(
            f'device={name!r}: torch {torch.__version__} finds no CUDA here; device="cpu" runs '
            "everywhere"
        )
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise EngineError(
            f"device={name!r}: there are {torch.cuda.device_count()} CUDA devices; "
            'device="cpu" runs everywhere'
        )
    return device


def check_graphs(config: EngineConfig, device: torch.device) -> None:
    """Raises InvalidRequestError for CUDA graphs that this runner does not capture."""
    if config.cuda_graphs in ("startup", "lazy"):
        name, value, accepted = "cuda_graphs", config.cuda_graphs, '"auto" or "off"'
    elif config.cuda_graph_sizes is not None:
        name, value, accepted = "cuda_graph_sizes", config.cuda_graph_sizes, "None"
    else:
        return
    raise InvalidRequestError(
        f"{name}={value!r}: expected {accepted}: steps run eagerly on device {device}",
        param=name,
    )


def resolve_dtype(name: str, model: ModelConfig, device: torch.device) -> torch.dtype:
    """Of weights and KV. "auto" is the checkpoint's on a GPU. On a CPU it is bfloat16 for a
    16-bit checkpoint where the processor computes in it and the model is not small, because
    a small one spends its time on conversions then; else float32.

    Raises:
        InvalidRequestError: the device cannot compute in it.
    """
    if name != "auto":
        if name == "float16" and device.type == "cpu":
            raise InvalidRequestError(
                'dtype="float16": a CPU computes in "float32" or "bfloat16"', param="dtype"
            )
        if (
            name == "bfloat16"
            and device.type == "cuda"
            and not torch.cuda.is_bf16_supported(including_emulation=False)
        ):
            raise InvalidRequestError(
                f'dtype="bfloat16": {torch.cuda.get_device_name(device)} computes in "float16" '
                'or "float32"',
                param="dtype",
            )
        return getattr(torch, name)
    if device.type != "cpu":
        return getattr(torch, model.dtype)
    half = model.dtype in ("bfloat16", "float16")
    if half and computes_in_bfloat16() and not is_small(model):
        return torch.bfloat16
    return torch.float32


def is_small(model: ModelConfig) -> bool:
    """Whether the number of ops decides the speed, and not their arithmetic."""
    return count_parameters(model) < SMALL_MODEL


def resolve_threads(count: int | None, model: ModelConfig, device: torch.device) -> int | None:
    """CPU threads for the engine thread's ops; None leaves torch's own number, one per core.

    A small model runs on one: it gains little from more while the cores are idle, and a
    single busy neighbour makes each of its hundreds of short parallel regions wait for a
    time slice of the operating system.

    Raises:
        InvalidRequestError: a number was asked for that cannot be honoured here.
    """
    if device.type != "cpu" or (count is None and not is_small(model)):
        return None
    if set_thread_count(count or 1):
        return count or 1
    if count is None:
        return None
    raise InvalidRequestError(
        f"num_threads={count}: this build of torch has no thread count per thread; expected "
        "None, and torch.set_num_threads in the application",
        param="num_threads",
    )


def computes_in_bfloat16() -> bool:
    """Whether the processor has dot products in bfloat16 (AVX512_BF16 or AMX)."""
    return any(
        probe is not None and probe()
        for probe in (
            getattr(torch.cpu, "_is_avx512_bf16_supported", None),
            getattr(torch.cpu, "_is_amx_tile_supported", None),
        )
    )


def available_cache_bytes(config: EngineConfig, device: torch.device) -> int:
    """Bytes for the KV cache where neither its size nor its blocks are configured.

    On a GPU that is all that ``gpu_memory_utilization`` leaves; what a step needs beside has
    to fit in the rest.
    """
    if device.type == "cpu":
        return cpu_cache_bytes()
    free, total = torch.cuda.mem_get_info(device)
    return max(0, int(total * config.gpu_memory_utilization) - (total - free))


def time_prefill(runner: ModelRunner, num_tokens: int) -> float:
    """Seconds of one step that prefills ``num_tokens``, in rows of full length at most.

    All rows write the same blocks, which nobody reads afterwards.
    """
    info = runner.info
    rows = -(-num_tokens // info.max_model_len)
    count = num_tokens // rows
    blocks = list(range(1, -(-count // info.block_size) + 1))
    sampling = SamplingParams(temperature=0.0, seed=0).resolve({}, {}, lambda: 0)
    rows = min(rows, info.max_num_seqs)
    batch = StepBatch(
        step=0,
        slots=list(range(rows)),
        starts=[0] * rows,
        counts=[count] * rows,
        samples=[True] * rows,
        num_tokens=rows * count,
        assignments=[
            SlotAssignment(slot, "warm-up", [0] * count, count, blocks, sampling)
            for slot in range(rows)
        ],
    )
    start = time.perf_counter()
    runner.launch(batch)
    runner.collect()
    return time.perf_counter() - start
