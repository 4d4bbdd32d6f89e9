"""Awq: weights of 4 bits with zero points, as AutoAWQ packs them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from asyncllm.checkpoint.config_file import ConfigFile
from asyncllm.checkpoint.reader import CheckpointReader, QuantisedTensor
from asyncllm.gpu.formats.base import (
    SCALE_DTYPES,
    PackedTensor,
    TensorParts,
    WeightFormat,
    check_fields,
    group_size,
    unpack,
)

_NIBBLE_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Index of the nibble that holds each of a word's 8 outputs (AutoAWQ, ``WQLinear_GEMM``). A CUDA
kernel unpacks nibbles in pairs in this order."""

_KNOWN_FIELDS = (
    "quant_method bits group_size zero_point version format backend modules_to_not_convert "
    "do_fuse fuse_max_seq_len modules_to_fuse exllama_config"
).split()


class Awq(WeightFormat):
    """WeightFormat of ``quant_method`` "awq", version "gemm".

    Its tensors are ``qweight [in, out / 8]``, ``qzeros [in / group, out / 8]`` and
    ``scales [in / group, out]``; an element is ``(value - zero) * scale``.

    Raises:
        ModelLoadError: an unknown field, or an unsupported value.
    """

    def __init__(self, config: ConfigFile) -> None:
        check_fields(config, _KNOWN_FIELDS, "modules_to_not_convert")
        config.integer("bits", 4, low=4, high=4)
        for name in ("version", "format"):
            value = config.values.get(name, "gemm")
            if not isinstance(value, str) or value.lower() != "gemm":
                raise config.invalid_field(name, "'gemm', whose order of the columns is known")
        if config.values.get("backend") == "llm-awq":
            raise config.invalid_field("backend", "one that packs as AutoAWQ's version 'gemm' does")
        if not config.boolean("zero_point", True):
            raise config.invalid_field("zero_point", "true")
        self.group = group_size(config)
        self.label = f"awq, 4 bits, groups of {self.group or 'a row'}"

    def packed(self, reader: CheckpointReader) -> Iterator[PackedTensor]:
        for parts in TensorParts.find_all_with(reader, "qweight"):
            inputs, words = parts.require("qweight", ["I32"], dims=2).shape
            groups = inputs // (self.group or inputs)
            if inputs % (self.group or inputs):
                raise parts.part_error("qweight", f"a multiple of group_size={self.group} rows")
            parts.require("qzeros", ["I32"], (groups, words))
            parts.require("scales", SCALE_DTYPES, (groups, words * 8))
            yield PackedTensor(parts.stem + "weight", (words * 8, inputs), parts.names, step=8)

    def read(self, tensor: PackedTensor, parts: Mapping[str, Tensor]) -> QuantisedTensor:
        qweight, scales = parts["qweight"], parts["scales"]
        order, group = torch.tensor(_NIBBLE_ORDER), tensor.shape[1] // scales.shape[0]
        zeros = unpack(parts["qzeros"], 4, 1, order).T

        def rows(start: int, stop: int) -> Tensor:
            return unpack(qweight[:, start // 8 : stop // 8], 4, 1, order).T

        return QuantisedTensor(4, tensor.shape, rows, scales.T, (1, group), zeros, step=8)
