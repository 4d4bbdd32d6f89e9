"""Which backends a device has, by name."""

from __future__ import annotations

import logging

import torch

from asyncllm.errors import InvalidRequestError
from asyncllm.gpu.ops.base import Attention, AttentionShape, OpSet
from asyncllm.gpu.ops.onednn_ops import OneDNNOps, onednn_works
from asyncllm.gpu.ops.torch_attention import TorchAttention
from asyncllm.gpu.ops.torch_ops import TorchOps

logger = logging.getLogger(__name__)


def attention_backends(device: torch.device) -> tuple[str, ...]:
    """Names that ``attention_backend`` accepts on this device, beside "auto"."""
    return ("torch",)


def make_attention(
    name: str, shape: AttentionShape, dtype: torch.dtype, device: torch.device
) -> Attention:
    """Raises InvalidRequestError for a backend that the device does not have."""
    accepted = attention_backends(device)
    if name not in ("auto", *accepted):
        raise InvalidRequestError(
            f"attention_backend={name!r}: expected one of auto, {', '.join(accepted)} "
            f"on device {device}",
            param="attention_backend",
        )
    return TorchAttention(shape, dtype)


def make_ops(device: torch.device) -> OpSet:
    """The op set for everything but attention."""
    if device.type != "cpu":
        return TorchOps()
    if onednn_works():
        return OneDNNOps()
    logger.warning("this build of torch has no packed linear layers: decoding will be slower")
    return TorchOps()
