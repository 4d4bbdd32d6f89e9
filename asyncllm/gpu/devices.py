"""resolve_device, resolve_dtype: device and data type of an engine."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from asyncllm.checkpoint.model_config import ModelConfig
from asyncllm.errors import EngineError, InvalidRequestError
from asyncllm.gpu.models.architectures import is_small
from asyncllm.gpu.ops.backend import dotted
from asyncllm.gpu.ops.registry import choose_native
from asyncllm.gpu.transformers_model.config import TransformersConfig
from asyncllm.logger import get_logger

logger = get_logger(__name__)

MIN_CAPABILITY = (8, 0)
"""Compute capability from which a GPU computes in bfloat16 and the kernels are compiled."""

_WAY_OUT = 'device="cpu" runs everywhere'
_NO_GPU = ("Found no NVIDIA driver", "No CUDA GPUs are available")
"""How torch's reasons begin where there is no GPU at all (c10/cuda/CUDAFunctions.cpp)."""


class CudaDriver:
    """CUDA as torch has it; tests put a simulated machine in its place.

    ``torch.cuda.is_available()`` is not asked: it turns every reason into False, and a driver
    that is too old into a Python warning beside it, while ``torch.cuda.init()`` raises them.
    """

    def built(self) -> bool:
        """Whether this torch was compiled with CUDA."""
        return torch.backends.cuda.is_built()

    def start(self) -> None:
        """Initialises CUDA. Raises RuntimeError with torch's reason where it cannot."""
        try:
            torch.cuda.init()
        except torch.cuda.DeferredCudaCallError as error:
            raise RuntimeError(str(error)) from error

    def count(self) -> int:
        return torch.cuda.device_count()

    def current(self) -> int:
        """Index of the calling thread's current device."""
        return torch.cuda.current_device()

    def capability(self, index: int) -> tuple[int, int]:
        return torch.cuda.get_device_capability(index)

    def name(self, index: int) -> str:
        return torch.cuda.get_device_name(index)


@dataclass(frozen=True, slots=True)
class _Obstacle:
    """The reason why CUDA cannot be used, and whether there is a GPU all the same."""

    reason: str
    gpu_is_there: bool
    cause: Exception | None = None


def resolve_device(name: str, driver: CudaDriver | None = None) -> torch.device:
    """The device of ``EngineConfig.device``, a CUDA device always with its index.

    Without a number it is the thread's current CUDA device, on an engine's own thread the
    first. "auto" is that if it can be used, else the CPU, with one warning where a GPU is there
    and cannot be used.

    Args:
        driver: torch's CUDA unless given.

    Raises:
        EngineError: "cuda" or "cuda:N", and torch was built without CUDA, there is no driver
            or GPU, the driver is too old for this torch or fails, there is no device N, or
            its compute capability is below 8.0. torch's own reason is in the message, and
            its exception is the cause.
    """
    if name == "cpu":
        return torch.device("cpu")
    driver = driver or CudaDriver()
    obstacle = _start(driver)
    if obstacle is None:
        wanted = None if name == "auto" else torch.device(name).index
        index = driver.current() if wanted is None else wanted
        obstacle = _check_device(driver, index)
        if obstacle is None:
            return torch.device("cuda", index)
    if name != "auto":
        raise EngineError(f"device={name!r}: {obstacle.reason}; {_WAY_OUT}") from obstacle.cause
    if obstacle.gpu_is_there:
        logger.warning('device="auto" is the CPU: %s', obstacle.reason)
    return torch.device("cpu")


def _start(driver: CudaDriver) -> _Obstacle | None:
    if not driver.built():
        return _Obstacle(f"torch {torch.__version__} was built without CUDA", False)
    try:
        driver.start()
    except RuntimeError as error:
        torch_reason = str(error)
        there = not torch_reason.startswith(_NO_GPU)
        return _Obstacle(f"CUDA cannot be used: {torch_reason}", there, error)
    return None


def _check_device(driver: CudaDriver, index: int) -> _Obstacle | None:
    count = driver.count()
    if index >= count:
        return _Obstacle(f"there are {count} CUDA devices, numbered from 0", True)
    found = driver.capability(index)
    if found < MIN_CAPABILITY:
        return _Obstacle(
            f"{driver.name(index)} has compute capability {dotted(found)}, expected "
            f"{dotted(MIN_CAPABILITY)} or higher",
            True,
        )
    return None


def set_current_device(device: torch.device) -> None:
    """Makes a CUDA device the calling thread's current one. Triton launches its kernels on
    that, wherever their arguments are."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def resolve_dtype(
    name: str, model: ModelConfig | TransformersConfig, device: torch.device, backend: str = "auto"
) -> torch.dtype:
    """The dtype of weights and KV. "auto" is the checkpoint's on a GPU. On a CPU it is bfloat16
    for a 16-bit checkpoint, where native ops run or the processor computes in it, and the model
    is not small, because a small one spends its time on conversions then; else float32.

    Args:
        backend: of attention, as configured; native ops go with its name.

    Raises:
        InvalidRequestError: the device cannot compute in it.
    """
    if name != "auto":
        # A GPU that ``resolve_device`` accepts computes in all that EngineConfig accepts.
        if name == "float16" and device.type == "cpu":
            raise InvalidRequestError(
                'dtype="float16": a CPU computes in "float32" or "bfloat16"', param="dtype"
            )
        return getattr(torch, name)
    if device.type != "cpu":
        return getattr(torch, model.dtype)
    half = model.dtype in ("bfloat16", "float16")
    if half and not is_small(model) and (computes_in_bfloat16() or runs_native(backend)):
        return torch.bfloat16
    return torch.float32


def runs_native(backend: str) -> bool:
    """Whether native ops run on a CPU. Their GEMM reads weights in 16 bits and multiplies in
    float32, on any processor that they are compiled for: a step, which waits for memory, takes
    half the time."""
    return backend == "native" or (backend == "auto" and choose_native().runs)


def computes_in_bfloat16() -> bool:
    """Whether the processor has dot products in bfloat16 (AVX512_BF16 or AMX)."""
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(hasattr(torch.cpu, probe) and getattr(torch.cpu, probe)() for probe in probes)
