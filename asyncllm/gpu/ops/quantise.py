"""quantise: rounds a linear layer's floating point weights to 8 or 4 bits.

``native_weights`` has the compiled form, with the same bits.
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
"""Elements converted to float32 at a time."""

GROUP = 32
"""Inputs that share a scale and a zero point in 4 bits."""

RANGE_FRACTIONS = (1.0, 0.92, 0.84)
"""Fractions of a group's range that its 15 steps may span."""


def quantise_int8(weights: LinearWeights) -> LinearWeights:
    """Rounds to int8 with one scale per output channel, symmetric about zero.

    The greatest magnitude of a channel becomes 127, so an element is off by at most a 254th of
    that. A channel with NaN or infinity gets such a scale, and its outputs are NaN.

    Args:
        weights: of scheme "plain".
    """
    values = weights.values
    largest = torch.linalg.vector_norm(values, ord=torch.inf, dim=1, keepdim=True)
    scales = largest.float().div_(127.0)
    # A channel of zeros stays zero.
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
    """Rounds to 4 bits, with a scale and a zero point for each output channel and GROUP inputs.

    Codes go from 0 to 15. Each fraction in RANGE_FRACTIONS of a group's range, which includes 0, is
    divided into 15 steps, with elements beyond it clipped; the one with the least squared error is
    kept. Errors are summed in halves, so that the sum is the same on every processor. Scales are
    rounded to bfloat16 first, so that codes are computed with the stored scales. A group with NaN
    or infinity gets such a scale, and its outputs are NaN.

    Args:
        weights: of scheme "plain".

    Raises:
        ModelLoadError: an odd number of inputs, which does not fill whole bytes.
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
    best, least = _steps(low, high, RANGE_FRACTIONS[0]), None
    for shrink in RANGE_FRACTIONS:
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
    """The scale that divides ``shrink`` of a range into 15 steps, and the code of 0."""
    scale = ((high - low) * (shrink / 15.0)).to(torch.bfloat16).float()
    zero = (low * -shrink * _inverse(scale)).round_().clamp_(0.0, 15.0).nan_to_num_()
    return scale, zero


def _inverse(scale: Tensor) -> Tensor:
    """Reciprocal of the scale; 0 for a group of zeros, which stays zero."""
    return scale.reciprocal().masked_fill_(scale == 0.0, 0.0)


def check_even_inputs(rows: int, columns: int) -> None:
    """Raises ModelLoadError for an odd number of inputs, which 4 bits each cannot pack."""
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
"""Conversions by value of ``EngineConfig.quantization``."""
