"""Quantisation and packing of linear weights for the native kernels."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from asyncllm.errors import ModelLoadError
from asyncllm.gpu.ops.linear_weights import GGUF_BLOCK_SIZES, LinearWeights, WeightSpec
from asyncllm.gpu.ops.program import DTYPE_CODES
from asyncllm.gpu.ops.quantise import INT4_GROUP_SIZE, WeightQuantisers, check_even_inputs
from asyncllm.native.context import NativeContext, PackedWeights
from asyncllm.native.interface import STRUCTS

INT8_CODE, UINT4_CODE, UINT8_CODE = 3, 4, 5
"""The library's codes of quantised types. INT8_CODE has a scale per output channel, the others
have one per output channel and group of inputs."""

BLOCK_TYPE_CODES: Mapping[str, int] = {
    "q4_1": 6, "q5_0": 7, "q5_1": 8, "q4_k": 9, "q5_k": 10, "q6_k": 11, "iq4_nl": 12,
}  # fmt: skip
"""The library's codes of GGUF block types, by scheme."""

INPUTS_PER_SCALE = 32
"""Number of inputs per scale when the kernels quantise the inputs. The size of a group of weights
has to be a multiple of it."""


def native_type_code(spec: WeightSpec) -> int | None:
    """The library's type code for quantised weights of this spec; None if unsupported."""
    block_rows, group = spec.scale_block or (0, 0)
    columns = spec.shape[1]
    if spec.scheme in BLOCK_TYPE_CODES and not spec.has_column_order:
        return BLOCK_TYPE_CODES[spec.scheme]
    if spec.has_column_order or block_rows != 1:
        return None
    if spec.scheme == "int8" and group == columns and not spec.has_zeros:
        return INT8_CODE
    if group % INPUTS_PER_SCALE and group < columns:
        return None
    return {"int4": UINT4_CODE, "int8": UINT8_CODE}.get(spec.scheme)


def quantise_int8_native(context: NativeContext, weights: LinearWeights) -> LinearWeights:
    """Computes ``quantise.quantise_int8`` in C++, with bit-identical results."""
    rows, columns = weights.shape
    values = torch.empty(rows, columns, dtype=torch.int8, device="cpu")
    scales = torch.empty(rows, 1, dtype=torch.float32, device="cpu")
    _quantise_values(context, weights.values, values, scales, None, 8)
    return weights.with_quantised_values("int8", values, scales, columns)


def quantise_int4_native(context: NativeContext, weights: LinearWeights) -> LinearWeights:
    """Computes ``quantise.quantise_int4`` in C++, with bit-identical results.

    Raises:
        ModelLoadError: the number of inputs is odd.
    """
    rows, columns = weights.shape
    check_even_inputs(rows, columns)
    groups = -(-columns // INT4_GROUP_SIZE)
    values = torch.empty(rows, columns // 2, dtype=torch.uint8, device="cpu")
    scales = torch.empty(rows, groups, dtype=torch.bfloat16, device="cpu")
    zeros = torch.empty(rows, groups, dtype=torch.uint8, device="cpu")
    _quantise_values(context, weights.values, values, scales, zeros, 4)
    return weights.with_quantised_values("int4", values, scales, INT4_GROUP_SIZE, zeros)


def _quantise_values(
    context: NativeContext,
    values: Tensor,
    out: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bits: int,
) -> None:
    values = values if values.stride(1) == 1 else values.contiguous()
    n, k = values.shape
    args = STRUCTS["RoundArgs"](
        values=values.data_ptr(), n=n, k=k, row_stride=values.stride(0), values_out=out.data_ptr(),
        scales=scales.data_ptr(), zeros=_address(zeros), dtype=DTYPE_CODES[values.dtype], bits=bits,
    )  # fmt: skip
    context.call("round", args)


def native_quantisers(context: NativeContext) -> Mapping[str, WeightQuantisers]:
    """Functions that quantise weights in C++, with the keys of ``quantise.QUANTISERS``."""
    int8, int4 = partial(quantise_int8_native, context), partial(quantise_int4_native, context)
    return {"int8": WeightQuantisers(int8, int8), "int4": WeightQuantisers(int4, int8)}


def pack_weights(context: NativeContext, weights: LinearWeights) -> PackedWeights:
    """Packs weights for the kernels: by ``weights.panels`` if set, else by ``pack_new_weights``."""
    if weights.panels is not None:
        return weights.panels.pack(context, weights)
    return pack_new_weights(context, weights)


def pack_new_weights(context: NativeContext, weights: LinearWeights) -> PackedWeights:
    """Copies weights into the layout of the kernels.

    Args:
        weights: plain weights, or quantised ones that ``native_type_code`` covers.

    Raises:
        ModelLoadError: a zero point is not an integer.
        MemoryError: the packed weights cannot be allocated.
    """
    bias = None if weights.bias is None else weights.bias.float().contiguous()
    if weights.scheme != "plain":
        type_code = native_type_code(weights.spec)
        if weights.scheme in BLOCK_TYPE_CODES:
            return _pack_blocks(context, weights, bias)
        if type_code != INT8_CODE:
            assert type_code is not None
            return _pack_groupwise(context, weights, type_code, bias)
    values = weights.values if weights.values.stride(1) == 1 else weights.values.contiguous()
    scales = None if weights.scales is None else weights.scales.float().flatten().contiguous()
    type_code = INT8_CODE if weights.scheme == "int8" else DTYPE_CODES[values.dtype]
    n, k = values.shape
    handle = context.functions.pack(
        context.handle, values.data_ptr(), type_code, n, k, values.stride(0), _address(scales),
        _address(bias),
    )  # fmt: skip
    return PackedWeights(context, handle, n, k)


def _pack_groupwise(
    context: NativeContext, weights: LinearWeights, type_code: int, bias: Tensor | None
) -> PackedWeights:
    (n, k), scales, block = weights.shape, weights.scales, weights.scale_block
    assert scales is not None
    assert block is not None
    # The kernels take unsigned integers, so 128 is added to signed 8-bit values and zero points.
    offset = 128 if type_code == UINT8_CODE else 0
    values = weights.values.contiguous()
    if offset:
        values = values.view(torch.uint8) ^ 128
    scales = scales if scales.dtype in DTYPE_CODES else scales.float()
    scales, zeros = scales.contiguous(), _pack_zero_points(weights.zeros, offset, scales)
    args = STRUCTS["GroupedArgs"](
        values=values.data_ptr(), n=n, k=k, row_bytes=values.stride(0),
        group=-(-min(block[1], k) // INPUTS_PER_SCALE) * INPUTS_PER_SCALE,
        scales=scales.data_ptr(), zeros=_address(zeros),
        bias=_address(bias), dtype=type_code, scale_dtype=DTYPE_CODES[scales.dtype],
    )  # fmt: skip
    return PackedWeights(context, context.functions.pack_grouped(context.handle, args), n, k)


def _pack_blocks(
    context: NativeContext, weights: LinearWeights, bias: Tensor | None
) -> PackedWeights:
    values = weights.values if weights.values.stride(1) == 1 else weights.values.contiguous()
    n, k = weights.shape
    args = STRUCTS["GroupedArgs"](
        values=values.data_ptr(), n=n, k=k,
        row_bytes=values.stride(0), group=GGUF_BLOCK_SIZES[weights.scheme][0], bias=_address(bias),
        dtype=BLOCK_TYPE_CODES[weights.scheme], scale_dtype=DTYPE_CODES[torch.float16],
    )  # fmt: skip
    return PackedWeights(context, context.functions.pack_grouped(context.handle, args), n, k)


def _pack_zero_points(zeros: Tensor | None, offset: int, scales: Tensor) -> Tensor | None:
    """Zero points as bytes; None if all are the default, the middle of the unsigned range.

    Raises:
        ModelLoadError: a zero point is not an integer, or does not fit a byte.
    """
    if zeros is None:
        return None if offset else torch.zeros(scales.shape, dtype=torch.uint8)
    stored = zeros.float() + offset
    if not bool(((stored >= 0) & (stored <= 255) & (stored == stored.round())).all()):
        raise ModelLoadError(
            f"zeros: expected integers from {-offset} to {255 - offset}, found "
            f"{float(zeros.min())} to {float(zeros.max())}"
        )
    middle = offset or 8
    return None if bool((stored == middle).all()) else stored.to(torch.uint8).contiguous()


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
