"""copy_to_device: a host array on a device, without waiting for the device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def copy_to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A tensor with the contents of ``array``; on a CPU it is that memory.

    From pageable memory CUDA would first wait for everything that is queued on the stream.
    torch keeps the pinned copy until the device has read it.
    """
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
