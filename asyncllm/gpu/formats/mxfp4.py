"""Mxfp4: the experts of gpt-oss, e2m1 in blocks of 32 that share a power of two."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from asyncllm.checkpoint.config_file import ConfigFile
from asyncllm.checkpoint.reader import CheckpointReader
from asyncllm.gpu.formats.base import (
    PackedTensor,
    Rows,
    TensorParts,
    WeightFormat,
    check_fields,
)

_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of e2m1 codes 0 to 7 (OCP Microscaling Formats 1.0, table 5); 8 to 15 are negative."""

_EXPONENT_BIAS = 127
"""Bias of the e8m0 exponents."""


class Mxfp4(WeightFormat):
    """WeightFormat of ``quant_method`` "mxfp4".

    Its tensors are ``*_blocks [experts, out, in / 32, 16]`` uint8, with even inputs in the low half
    of each byte, and ``*_scales [experts, out, in / 32]`` e8m0. The dequantised tensor is
    ``[experts, in, out]``, the layout of gpt-oss.

    Raises:
        ModelLoadError: an unknown field, or an unsupported value.
    """

    label = "mxfp4, blocks of 32"

    def __init__(self, config: ConfigFile) -> None:
        known = ("quant_method", "modules_to_not_convert", "dequantize")
        check_fields(config, known, "modules_to_not_convert")

    def packed(self, reader: CheckpointReader) -> Iterator[PackedTensor]:
        for parts in TensorParts.find_all_with(reader, "_blocks"):
            experts, outputs, blocks, width = parts.require("_blocks", ["U8"], dims=4).shape
            parts.require("_blocks", ["U8"], (experts, outputs, blocks, 16))
            parts.require("_scales", ["U8"], (experts, outputs, blocks))
            yield PackedTensor(parts.stem, (experts, blocks * width * 2, outputs), parts.names)

    def read(self, tensor: PackedTensor, parts: Mapping[str, Tensor]) -> Rows:
        blocks, scales = parts["_blocks"], parts["_scales"]
        table = torch.tensor(_E2M1_VALUES + tuple(-value for value in _E2M1_VALUES))

        def rows(start: int, stop: int) -> Tensor:
            bytes_ = blocks[start:stop]
            nibbles = torch.stack((bytes_ & 15, bytes_ >> 4), dim=-1).flatten(-2)
            exponents = scales[start:stop].to(torch.int32) - _EXPONENT_BIAS
            values = torch.ldexp(table[nibbles.int()], exponents.unsqueeze(-1))
            return values.flatten(-2).transpose(1, 2)

        return rows
