"""quantise: the weights of a linear layer from floating point to a scheme of fewer bits.

``native_weights`` has the compiled form, of the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.errors import ModelLoadError
from asyncllm.gpu.ops.linear_weights import LinearWeights

CHUNK = 2**22
"""Elements that are in float32 at a time."""

GROUP = 32
"""Inputs that share a scale and a zero point in 4 bits."""

SHRINKS = (1.0, 0.92, 0.84)
"""Parts of a group's range that its 15 steps may be."""


def quantise_int8(weights: LinearWeights) -> LinearWeights:
    """The nearest multiples of one scale per output channel, symmetric about zero.

    The greatest magnitude of a channel becomes 127, so an element is off by at most a 254th of
    it. A channel with NaN or infinity has such a scale, and its outputs are NaN.

    Args:
        weights: of scheme "plain".
    """
    values = weights.values
    largest = torch.linalg.vector_norm(values, ord=torch.inf, dim=1, keepdim=True)
    scales = largest.float().div_(127.0)
    # A channel of zeros stays one.
    divisors = scales.masked_fill(scales == 0.0, 1.0)
    rows = max(1, CHUNK // values.shape[1])
    chunks: list[tuple[Tensor, Tensor]] = list(
        zip(values.split(rows), divisors.split(rows), strict=True)
    )
    integers = torch.empty(values.shape, dtype=torch.int8, device=values.device)
    for (part, scale), target in zip(chunks, integers.split(rows), strict=True):
        target.copy_((part / scale).round_().clamp_(-127.0, 127.0))
    return LinearWeights(
        integers,
        bias=weights.bias,
        scheme="int8",
        scales=scales,
        scale_block=(1, values.shape[1]),
    )


def quantise_int4(weights: LinearWeights) -> LinearWeights:
    """Codes from 0 to 15 with a scale and a zero point for each output channel and GROUP inputs.

    The range of a group, 0 included, is divided into 15 steps, as a whole and shrunk by each of
    SHRINKS, beyond which elements are clipped; what has the least squared error is kept. Its sum is
    folded in halves, so that it has one value on every processor. Scales are rounded to bfloat16
    first, so that the codes are those of the scales that are stored. A group with NaN or infinity
    has such a scale, and its outputs are NaN.

    Args:
        weights: of scheme "plain".

    Raises:
        ModelLoadError: an odd number of inputs, which do not fill bytes.
    """
    values = weights.values
    rows, columns = values.shape
    check_even_inputs(rows, columns)
    groups = -(-columns // GROUP)
    packed = torch.empty(rows, columns // 2, dtype=torch.uint8, device=values.device)
    scales = torch.empty(rows, groups, dtype=torch.bfloat16, device=values.device)
    zeros = torch.empty(rows, groups, dtype=torch.uint8, device=values.device)
    step = max(1, CHUNK // columns)
    for first in range(0, rows, step):
        span = slice(first, first + step)
        part = F.pad(values[span].float(), (0, groups * GROUP - columns)).view(-1, groups, GROUP)
        scale, zero, codes = _nearest_codes(part)
        scales[span], zeros[span] = scale.squeeze(2), zero.squeeze(2)
        codes = codes.flatten(1)[:, :columns]
        torch.bitwise_or(codes[:, ::2], codes[:, 1::2] << 4, out=packed[span])
    return LinearWeights(
        packed,
        bias=weights.bias,
        scheme="int4",
        scales=scales,
        scale_block=(1, GROUP),
        zeros=zeros,
    )


def _nearest_codes(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scales and zero points ``[rows, groups, 1]``, and the codes of ``[rows, groups, GROUP]``."""
    low = values.amin(2, keepdim=True).clamp_(max=0.0)
    high = values.amax(2, keepdim=True).clamp_(min=0.0)
    best, least = _steps(low, high, SHRINKS[0]), None
    for shrink in SHRINKS:
        scale, zero = _steps(low, high, shrink)
        exact = values * _inverse(scale)
        error = exact.round().clamp_(-zero, 15.0 - zero).sub_(exact).square_()
        while (half := error.shape[2] // 2) > 0:
            error = error[:, :, :half] + error[:, :, half:]
        error = error.sqrt_().mul_(scale)
        if least is None:
            least = error
            continue
        better = error < least
        least = torch.where(better, error, least)
        best = torch.where(better, scale, best[0]), torch.where(better, zero, best[1])
    scale, zero = best
    codes = (values * _inverse(scale)).round_().add_(zero).clamp_(0.0, 15.0)
    return scale, zero, codes.nan_to_num_().to(torch.uint8)


def _steps(low: Tensor, high: Tensor, shrink: float) -> tuple[Tensor, Tensor]:
    """The scale that divides ``shrink`` of a range into 15, and the code of 0."""
    scale = ((high - low) * (shrink / 15.0)).to(torch.bfloat16).float()
    zero = (low * -shrink * _inverse(scale)).round_().clamp_(0.0, 15.0).nan_to_num_()
    return scale, zero


def _inverse(scale: Tensor) -> Tensor:
    """0 for a group of zeros, which stays one."""
    return scale.reciprocal().masked_fill_(scale == 0.0, 0.0)


def check_even_inputs(rows: int, columns: int) -> None:
    """Raises ModelLoadError for a weight that does not fill bytes in 4 bits."""
    if columns % 2:
        raise ModelLoadError(
            f"weights {rows} x {columns} in 4 bits: expected an even number of inputs"
        )


Convert = Callable[[LinearWeights], LinearWeights]


@dataclass(frozen=True, slots=True)
class Conversion:
    """The functions of a quantisation, for weights of linear layers and of the output head."""

    linear: Convert
    head: Convert


CONVERSIONS: Mapping[str, Conversion] = {
    "int8": Conversion(quantise_int8, quantise_int8),
    "int4": Conversion(quantise_int4, quantise_int8),
}
"""By ``EngineConfig.quantization``."""
