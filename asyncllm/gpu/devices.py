"""resolve_device, resolve_dtype: device and data type of an engine."""

from __future__ import annotations

from typing import Any

import torch

from asyncllm.checkpoint.model_config import ModelConfig
from asyncllm.errors import EngineError, InvalidRequestError
from asyncllm.gpu.models.architectures import is_small_model
from asyncllm.gpu.ops.backend import capability_text
from asyncllm.gpu.ops.registry import choose_native_ops
from asyncllm.gpu.transformers_model.config import TransformersConfig
from asyncllm.logger import get_logger

logger = get_logger(__name__)

MIN_CAPABILITY = (8, 0)
"""Lowest supported compute capability: the first with bfloat16, which the kernels need."""

_NO_GPU_MESSAGES = ("Found no NVIDIA driver", "No CUDA GPUs are available")
"""Beginnings of torch's error messages for a missing driver or GPU (c10/cuda/CUDAFunctions.cpp)."""


class _CudaProblemError(Exception):
    """Error with the reason why CUDA cannot be used; ``has_gpu`` is False if no GPU was found."""

    def __init__(self, reason: str, *, has_gpu: bool = True) -> None:
        super().__init__(reason)
        self.has_gpu = has_gpu


def resolve_device(name: str, cuda_module: Any = torch.cuda) -> torch.device:
    """Resolves ``EngineConfig.device``; a CUDA device always has its index.

    "cuda" is the thread's current CUDA device, which on an engine's own thread is the first.
    "auto" is the same device if it can be used, else the CPU, with a warning if there is a GPU
    that cannot be used.

    Args:
        cuda_module: torch's access to CUDA; tests pass a simulated machine.

    Raises:
        EngineError: "cuda" or "cuda:N" cannot be used: torch was built without CUDA, there is
            no driver or GPU, the driver is too old for this torch or fails, there is no device
            N, or the device's compute capability is below 8.0. The message has torch's own
            reason, and torch's exception is the cause.
    """
    if name == "cpu":
        return torch.device("cpu")
    try:
        return torch.device("cuda", _cuda_device_index(name, cuda_module))
    except _CudaProblemError as problem:
        if name != "auto":
            message = f'device={name!r}: {problem}; device="cpu" runs everywhere'
            raise EngineError(message) from problem.__cause__
        if problem.has_gpu:
            logger.warning('device="auto" is the CPU: %s', problem)
    return torch.device("cpu")


def _cuda_device_index(name: str, cuda_module: Any) -> int:
    """Initialises CUDA, and returns the index of the device that ``name`` selects."""
    if not torch.backends.cuda.is_built():
        reason = f"torch {torch.__version__} was built without CUDA"
        raise _CudaProblemError(reason, has_gpu=False)
    try:
        # ``torch.cuda.is_available()`` would only return False, with a Python warning if the driver
        # is too old.
        cuda_module.init()
    except (RuntimeError, torch.cuda.DeferredCudaCallError) as error:
        has_gpu = not str(error).startswith(_NO_GPU_MESSAGES)
        raise _CudaProblemError(f"CUDA cannot be used: {error}", has_gpu=has_gpu) from error
    wanted = None if name == "auto" else torch.device(name).index
    index = cuda_module.current_device() if wanted is None else wanted
    count = cuda_module.device_count()
    if index >= count:
        raise _CudaProblemError(f"there are {count} CUDA devices, numbered from 0")
    found = cuda_module.get_device_capability(index)
    if found < MIN_CAPABILITY:
        raise _CudaProblemError(
            f"{cuda_module.get_device_name(index)} has compute capability "
            f"{capability_text(found)}, expected {capability_text(MIN_CAPABILITY)} or higher"
        )
    return index


def set_current_device(device: torch.device) -> None:
    """Makes a CUDA device the calling thread's current device.

    Triton launches kernels on the current device, wherever their arguments are.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


def resolve_dtype(
    name: str, model: ModelConfig | TransformersConfig, device: torch.device, backend: str = "auto"
) -> torch.dtype:
    """Resolves the dtype of weights and KV.

    On a GPU "auto" is the checkpoint's dtype. On a CPU it is bfloat16 for a 16-bit checkpoint if
    native ops run or the processor computes in bfloat16, and float32 otherwise. A small model is
    float32 too: in bfloat16 it would spend its time on conversions.

    Args:
        backend: the configured attention backend; "native" selects native ops too.

    Raises:
        InvalidRequestError: the device cannot compute in ``name``.
    """
    if name != "auto":
        # A GPU that ``resolve_device`` accepts has every dtype that EngineConfig accepts.
        if name == "float16" and device.type == "cpu":
            raise InvalidRequestError(
                'dtype="float16": a CPU computes in "float32" or "bfloat16"', param="dtype"
            )
        return getattr(torch, name)
    if device.type != "cpu":
        return getattr(torch, model.dtype)
    if model.dtype not in ("bfloat16", "float16") or is_small_model(model):
        return torch.float32
    # The native GEMM reads 16-bit weights and multiplies in float32 on every processor that it is
    # compiled for: a memory-bound step takes half the time that it takes with float32 weights.
    runs_native = backend == "native" or (backend == "auto" and choose_native_ops().runs_native)
    return torch.bfloat16 if runs_native or computes_in_bfloat16() else torch.float32


def computes_in_bfloat16() -> bool:
    """Whether the processor has dot products in bfloat16 (AVX512_BF16 or AMX)."""
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(hasattr(torch.cpu, probe) and getattr(torch.cpu, probe)() for probe in probes)
