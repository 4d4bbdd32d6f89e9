"""Fp8, Mxfp4: weights in floating point of 8 and 4 bits, with scales."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from asyncllm.checkpoint.config_file import ConfigFile
from asyncllm.checkpoint.reader import CheckpointReader, QuantisedTensor
from asyncllm.gpu.formats.base import (
    SCALE_DTYPES,
    PackedTensor,
    PackedTensorParts,
    RowReader,
    WeightFormat,
    check_fields,
    dequantise_rows,
    read_block_size,
)

_SCALE_SUFFIXES = ("weight_scale_inv", "weight_scale")
"""Suffixes of scale tensors. A scale multiplies the weight under either suffix, although "inv"
suggests division."""

_KNOWN_FP8_FIELDS = (
    "quant_method activation_scheme weight_block_size dequantize modules_to_not_convert "
    "modules_to_convert ignored_layers scale_fmt fmt expert_dtype kv_cache_scheme"
).split()
_MODULE_LIST_FIELDS = ("modules_to_not_convert", "modules_to_convert", "ignored_layers")
_KNOWN_FBGEMM_FIELDS = "quant_method activation_scale_ub modules_to_not_convert".split()

_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of e2m1 codes 0 to 7 (OCP Microscaling Formats 1.0, table 5). Codes 8 to 15 have the same
values, negated."""

_E8M0_EXPONENT_BIAS = 127
"""Bias of the e8m0 exponents."""


class Fp8(WeightFormat):
    """WeightFormat of ``quant_method`` "fp8" and "fbgemm_fp8".

    A weight is ``[out, in]`` of e4m3. ``weight_scale_inv`` or ``weight_scale`` has a scale per
    block of ``weight_block_size``, per row, or for the whole tensor.

    Raises:
        ModelLoadError: an unknown field, or an unsupported value.
    """

    ignored_tensor_suffixes = (".input_scale", ".input_scale_ub", ".k_scale", ".v_scale")

    def __init__(self, config: ConfigFile) -> None:
        self.block: tuple[int, int] | None = None
        if config.values["quant_method"] == "fbgemm_fp8":
            check_fields(config, _KNOWN_FBGEMM_FIELDS, *_MODULE_LIST_FIELDS)
            scheme = "dynamic"
        else:
            check_fields(config, _KNOWN_FP8_FIELDS, *_MODULE_LIST_FIELDS)
            config.choice("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
            config.choice("scale_fmt", ("float", "ue8m0"), "float")
            config.choice("expert_dtype", ("fp8",), "fp8")
            scheme = config.choice("activation_scheme", ("dynamic", "static"), "dynamic")
            if "weight_block_size" in config:
                self.block = read_block_size(config, "weight_block_size")
        size = f"blocks of {self.block[0]} x {self.block[1]}" if self.block else "channel or tensor"
        self.label = f"{config.values['quant_method']}, scales per {size}"
        self.ignored_quantisation = f"{scheme} FP8 activations"

    def find_tensors(self, reader: CheckpointReader) -> Iterator[PackedTensor]:
        for parts in PackedTensorParts.find_all_with(reader, "weight", ["F8_E4M3"]):
            shape = parts.require("weight", ["F8_E4M3"], num_dims=2).shape
            suffix = next(
                (s for s in _SCALE_SUFFIXES if parts.find(s)), _SCALE_SUFFIXES[self.block is None]
            )
            scale = parts.require(suffix, (*SCALE_DTYPES, "F8_E8M0"))
            accepted = [(), (1,), (shape[0],), (shape[0], 1)]
            if self.block is not None:
                accepted = [(-(-shape[0] // self.block[0]), -(-shape[1] // self.block[1]))]
            if scale.shape not in accepted:
                raise parts.part_error(suffix, "shape " + " or ".join(map(str, accepted)))
            yield PackedTensor(parts.stem + "weight", shape, parts.names)

    def read(self, tensor: PackedTensor, parts: Mapping[str, Tensor]) -> RowReader:
        weight = parts["weight"]
        scale = next(parts[suffix] for suffix in _SCALE_SUFFIXES if suffix in parts)
        if self.block is None:
            scale = scale.reshape(-1, 1)
        block = self.block or (1, weight.shape[1])
        codes = QuantisedTensor(8, tensor.shape, lambda *rows: weight[slice(*rows)], scale, block)
        return partial(dequantise_rows, codes)


class Mxfp4(WeightFormat):
    """WeightFormat of ``quant_method`` "mxfp4": e2m1 in blocks of 32, with an e8m0 scale per block.

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

    def find_tensors(self, reader: CheckpointReader) -> Iterator[PackedTensor]:
        for parts in PackedTensorParts.find_all_with(reader, "_blocks"):
            experts, outputs, blocks, width = parts.require("_blocks", ["U8"], num_dims=4).shape
            parts.require("_blocks", ["U8"], (experts, outputs, blocks, 16))
            parts.require("_scales", ["U8"], (experts, outputs, blocks))
            yield PackedTensor(parts.stem, (experts, blocks * width * 2, outputs), parts.names)

    def read(self, tensor: PackedTensor, parts: Mapping[str, Tensor]) -> RowReader:
        blocks, scales = parts["_blocks"], parts["_scales"]
        table = torch.tensor(_E2M1_VALUES + tuple(-value for value in _E2M1_VALUES))

        def read_rows(start: int, stop: int) -> Tensor:
            bytes_ = blocks[start:stop]
            nibbles = torch.stack((bytes_ & 15, bytes_ >> 4), dim=-1).flatten(-2)
            exponents = scales[start:stop].to(torch.int32) - _E8M0_EXPONENT_BIAS
            values = torch.ldexp(table[nibbles.int()], exponents.unsqueeze(-1))
            return values.flatten(-2).transpose(1, 2)

        return read_rows
