"""copy_to_device: copies without waiting for the device; lazy_zeros: allocates zeros lazily."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT_BYTES = 64


def copy_to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copies ``array`` to a tensor on the device; on a CPU the tensor shares the array's memory.

    The array is copied to pinned memory first: a copy from pageable memory would wait for all work
    that is queued on the stream. torch keeps the pinned copy until the device has read it.
    """
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Tensor of zeros; on a CPU a page takes memory only once it is touched.

    ``torch.zeros`` would write every page; numpy gets zeroed pages from the operating system.

    Raises:
        MemoryError, ValueError: too little memory on the host.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    raw = np.zeros(size + _ALIGNMENT_BYTES, dtype=np.uint8)
    first = -raw.ctypes.data % _ALIGNMENT_BYTES
    return torch.from_numpy(raw[first : first + size]).view(dtype).view(shape)
