"""quantise_int8, quantise_int4: round a linear layer's floating point weights to 8 or 4 bits.

``native_weights`` has the same functions in C++, with bit-identical results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.errors import ModelLoadError
from asyncllm.gpu.ops.linear_weights import LinearWeights

MAX_CHUNK_ELEMENTS = 2**22
"""Maximum number of elements converted to float32 at a time."""

INT4_GROUP_SIZE = 32
"""Number of inputs that share a scale and a zero point, in weights quantised to 4 bits."""

INT4_CLIP_RATIOS = (1.0, 0.92, 0.84)
"""Fractions of a group's range that 4 bits may span; the fraction with the least error is used."""


def quantise_int8(weights: LinearWeights) -> LinearWeights:
    """Rounds to int8 with one scale per output channel, symmetric about zero.

    The greatest magnitude of a channel becomes 127, so that an element's error is at most a 254th
    of that magnitude. If a channel contains NaN or infinity, its scale is NaN or infinity, and its
    outputs are NaN.

    Args:
        weights: weights of scheme "plain".
    """
    values = weights.values
    largest = torch.linalg.vector_norm(values, ord=torch.inf, dim=1, keepdim=True)
    scales = largest.float().div_(127.0)
    # Divide a channel of zeros by 1, so that it stays zero.
    divisors = scales.masked_fill(scales == 0.0, 1.0)
    rows = max(1, MAX_CHUNK_ELEMENTS // values.shape[1])
    integers = torch.empty(values.shape, dtype=torch.int8, device=values.device)
    chunks = (tensor.split(rows) for tensor in (values, divisors, integers))
    for part, scale, target in zip(*chunks, strict=True):
        target.copy_((part / scale).round_().clamp_(-127.0, 127.0))
    return weights.with_quantised_values("int8", integers, scales, values.shape[1])


def quantise_int4(weights: LinearWeights) -> LinearWeights:
    """Rounds to 4 bits, with a scale and a zero point per output channel and group of inputs.

    Quantised values go from 0 to 15. A group's range is extended to include 0. For each fraction in
    INT4_CLIP_RATIOS, that fraction of the range is divided into 15 steps, and elements beyond
    it are clipped; the fraction with the least squared error is used. Squared errors are summed
    pairwise, so that the sum is the same on every processor. Scales are rounded to bfloat16, their
    stored dtype, before elements are divided by them. If a group contains NaN or infinity, so does
    its scale, and its outputs are NaN.

    Args:
        weights: weights of scheme "plain".

    Raises:
        ModelLoadError: the number of inputs is odd, and a byte holds two.
    """
    values = weights.values
    rows, columns = values.shape
    check_even_inputs(rows, columns)
    groups = -(-columns // INT4_GROUP_SIZE)
    packed = torch.empty(rows, columns // 2, dtype=torch.uint8, device=values.device)
    scales = torch.empty(rows, groups, dtype=torch.bfloat16, device=values.device)
    zeros = torch.empty(rows, groups, dtype=torch.uint8, device=values.device)
    step = max(1, MAX_CHUNK_ELEMENTS // columns)
    for first in range(0, rows, step):
        span = slice(first, first + step)
        part = F.pad(values[span].float(), (0, groups * INT4_GROUP_SIZE - columns)).view(
            -1, groups, INT4_GROUP_SIZE
        )
        scale, zero, quantised = _quantise_groups(part)
        scales[span], zeros[span] = scale.squeeze(2), zero.squeeze(2)
        quantised = quantised.flatten(1)[:, :columns]
        torch.bitwise_or(quantised[:, ::2], quantised[:, 1::2] << 4, out=packed[span])
    return weights.with_quantised_values("int4", packed, scales, INT4_GROUP_SIZE, zeros)


def _quantise_groups(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantises ``values [rows, groups, INT4_GROUP_SIZE]``.

    Returns:
        Scales and zero points ``[rows, groups, 1]``, and integers of the shape of ``values``.
    """
    low = values.amin(2, keepdim=True).clamp_(max=0.0)
    high = values.amax(2, keepdim=True).clamp_(min=0.0)
    best, least_error = _scale_and_zero_point(low, high, INT4_CLIP_RATIOS[0]), None
    for fraction in INT4_CLIP_RATIOS:
        scale, zero = _scale_and_zero_point(low, high, fraction)
        exact = values * _reciprocal(scale)
        error = exact.round().clamp_(-zero, 15.0 - zero).sub_(exact).square_()
        while (half := error.shape[2] // 2) > 0:
            error = error[:, :, :half] + error[:, :, half:]
        error = error.sqrt_().mul_(scale)
        if least_error is None:
            least_error = error
            continue
        better = error < least_error
        least_error = torch.where(better, error, least_error)
        best = torch.where(better, scale, best[0]), torch.where(better, zero, best[1])
    scale, zero = best
    quantised = (values * _reciprocal(scale)).round_().add_(zero).clamp_(0.0, 15.0)
    return scale, zero, quantised.nan_to_num_().to(torch.uint8)


def _scale_and_zero_point(
    low: Tensor, high: Tensor, range_fraction: float
) -> tuple[Tensor, Tensor]:
    """Scale that divides ``range_fraction`` of a range into 15 steps, and the zero point."""
    scale = ((high - low) * (range_fraction / 15.0)).to(torch.bfloat16).float()
    zero = (low * -range_fraction * _reciprocal(scale)).round_().clamp_(0.0, 15.0).nan_to_num_()
    return scale, zero


def _reciprocal(scale: Tensor) -> Tensor:
    """Reciprocal of the scale; 0 for a scale of 0, so that a group of zeros stays zero."""
    return scale.reciprocal().masked_fill_(scale == 0.0, 0.0)


def check_even_inputs(rows: int, columns: int) -> None:
    """Raises ModelLoadError for an odd number of inputs, because a byte holds two."""
    if columns % 2:
        raise ModelLoadError(
            f"weights {rows} x {columns} in 4 bits: expected an even number of inputs"
        )


QuantiseWeights = Callable[[LinearWeights], LinearWeights]


@dataclass(frozen=True, slots=True)
class WeightQuantisers:
    """The functions that quantise linear layers and the output head."""

    linear: QuantiseWeights
    output_head: QuantiseWeights


QUANTISERS: Mapping[str, WeightQuantisers] = {
    "int8": WeightQuantisers(quantise_int8, quantise_int8),
    "int4": WeightQuantisers(quantise_int4, quantise_int8),
}
"""Functions that quantise weights, by the value of ``EngineConfig.quantization``."""
