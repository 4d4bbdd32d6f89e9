"""packed_weights: stacks quantised tensors to a linear layer's weights, without dequantisation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from asyncllm.checkpoint.reader import QuantisedTensor
from asyncllm.gpu.formats.reader import row_ranges
from asyncllm.gpu.ops.linear_weights import LinearWeights, QuantScheme, WeightForm

_SCHEME_BY_BITS: dict[int, QuantScheme] = {4: "int4", 8: "int8"}
"""Quantisation scheme by the number of bits of an integer."""


def packed_weights(
    parts: Sequence[QuantisedTensor | None], accepts_form: Callable[[WeightForm], bool]
) -> LinearWeights | None:
    """Stacks quantised parts along the outputs, with their integers and scales unchanged.

    Returns None for parts of different forms, or of a form that ``accepts_form`` refuses.
    """
    codes = [part for part in parts if part is not None]
    forms = {(part.bits, part.shape[1:], min(part.block[1], part.shape[-1])) for part in codes}
    if len(codes) < len(parts) or len(forms) != 1:
        return None
    bits, (columns,), group = forms.pop()
    scheme = _SCHEME_BY_BITS.get(bits)
    if scheme is None or columns * bits % 8 or any(c.column_groups is not None for c in codes):
        return None
    zeros = torch.cat([_zero_points(part) for part in codes])
    # Signed 8-bit integers that are centred on 0 need no zero points.
    has_zeros = scheme == "int4" or bool(zeros.any())
    form = WeightForm((sum(c.shape[0] for c in codes), columns), scheme, (1, group), has_zeros)
    low, high = (0, 255) if scheme == "int4" else (-128, 127)
    if not accepts_form(form) or not low <= int(zeros.min()) <= int(zeros.max()) <= high:
        return None
    values = _stack_integers(codes, form.shape, scheme)
    return LinearWeights(
        values,
        scheme=scheme,
        scales=torch.cat([_expand_to_rows(part, part.scales) for part in codes]),
        scale_block=form.scale_block,
        zeros=zeros.to(values.dtype) if has_zeros else None,
    )


def _stack_integers(
    codes: Sequence[QuantisedTensor], shape: tuple[int, int], scheme: QuantScheme
) -> Tensor:
    """Stacks the integers in the layout of ``LinearWeights``, a few rows at a time."""
    rows, columns = shape
    if scheme == "int4":
        values = torch.empty(rows, columns // 2, dtype=torch.uint8)
    else:
        values = torch.empty(rows, columns, dtype=torch.int8)
    first = 0
    for part in codes:
        for start, stop in row_ranges(part.shape, part.step):
            integers, target = part.read_rows(start, stop), values[first + start : first + stop]
            if scheme == "int4":
                torch.bitwise_or(integers[:, ::2], integers[:, 1::2] << 4, out=target)
            else:
                target.copy_(integers if part.is_signed else (integers ^ 128).view(torch.int8))
        first += part.shape[0]
    return values


def _zero_points(part: QuantisedTensor) -> Tensor:
    """Zero points in the layout of ``LinearWeights``, in which 8-bit values are signed."""
    shift = 128 if part.bits == 8 and not part.is_signed else 0
    if part.zeros is None:
        zeros = torch.zeros(part.scales.shape, dtype=torch.int16)
    else:
        zeros = part.zeros.to(torch.int16)
    return _expand_to_rows(part, zeros - shift)


def _expand_to_rows(part: QuantisedTensor, block_values: Tensor) -> Tensor:
    """Expands ``block_values`` to one row per row of the weights."""
    if part.block[0] == 1:
        return block_values
    return block_values.repeat_interleave(part.block[0], dim=0)[: part.shape[0]]
