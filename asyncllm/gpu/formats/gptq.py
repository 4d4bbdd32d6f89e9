"""Gptq: weights of 2, 4 or 8 bits; groups of inputs may be in any order."""

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
    check_groups,
    group_size,
    unpack,
)

_KNOWN_FIELDS = (
    "quant_method method bits group_size desc_act sym checkpoint_format format pack_dtype "
    "is_marlin_format dynamic lm_head modules_to_not_convert rotation adapter activation "
    # The following fields describe the quantiser's run or the intended kernels, so they are
    # ignored.
    "meta damp_percent damp_auto_increment static_groups true_sequential act_group_aware hyb_act "
    "mse dataset tokenizer batch_size backend model_seqlen model_name_or_path "
    "model_file_base_name block_name_to_quantize module_name_preceding_first_block pad_token_id "
    "max_input_length cache_block_outputs modules_in_block_to_quantize use_cuda_fp16 use_exllama "
    "disable_exllama exllama_config offload_to_disk offload_to_disk_path mock_quantization"
).split()


class Gptq(WeightFormat):
    """WeightFormat of ``quant_method`` "gptq".

    Its tensors are ``qweight [in * bits / 32, out]``, ``qzeros [groups, out * bits / 32]``,
    ``scales [groups, out]`` and ``g_idx [in]``, the group of each input. An element is
    ``(value - zero) * scale``; ``checkpoint_format`` "gptq" stores zero - 1, "gptq_v2" the zero
    point itself.

    Raises:
        ModelLoadError: an unknown field, or an unsupported value.
    """

    def __init__(self, config: ConfigFile) -> None:
        check_fields(config, _KNOWN_FIELDS, "modules_to_not_convert")
        self.bits = config.integer("bits")
        if self.bits not in (2, 4, 8):
            raise config.invalid_field("bits", "2, 4 or 8")
        self.group = group_size(config)
        self.desc_act = config.boolean("desc_act", False)
        if config.boolean("is_marlin_format", False):
            raise config.invalid_field("is_marlin_format", "false")
        name = "checkpoint_format" if "checkpoint_format" in config else "format"
        version = config.choice(name, ("gptq", "gptq_v2"), "gptq")
        # ``fields`` is a word with a 1 in every field. The quantiser subtracted it from whole
        # words, so adding it to whole words restores the zero points, borrows included.
        fields = sum(1 << place for place in range(0, 32, self.bits))
        offset = fields if version == "gptq" else 0
        self.zero_offset = torch.tensor(offset, dtype=torch.int64).to(torch.int32)
        config.choice("pack_dtype", ("int32",), "int32")
        config.choice("method", ("gptq",), "gptq")
        for name in ("rotation", "adapter", "activation", "dynamic"):
            if config.values.get(name):
                raise config.invalid_field(name, "null")
        order = ", act-order" if self.desc_act else ""
        self.label = f"{version}, {self.bits} bits, groups of {self.group or 'a row'}{order}"

    def packed(self, reader: CheckpointReader) -> Iterator[PackedTensor]:
        for parts in TensorParts.find_all_with(reader, "qweight"):
            words, outputs = parts.require("qweight", ["I32"], dims=2).shape
            inputs = words * 32 // self.bits
            groups = -(-inputs // (self.group or inputs))
            if outputs * self.bits % 32:
                raise parts.part_error("qweight", f"a multiple of {32 // self.bits} columns")
            parts.require("qzeros", ["I32"], (groups, outputs * self.bits // 32))
            parts.require("scales", SCALE_DTYPES, (groups, outputs))
            if self.desc_act or parts.find("g_idx") is not None:
                parts.require("g_idx", ["I32"], (inputs,))
            yield PackedTensor(parts.stem + "weight", (outputs, inputs), parts.names)

    def read(self, tensor: PackedTensor, parts: Mapping[str, Tensor]) -> QuantisedTensor:
        qweight, scales, inputs = parts["qweight"], parts["scales"], tensor.shape[1]
        zeros = unpack(parts["qzeros"] + self.zero_offset, self.bits, 1).T
        group, order = self.group or inputs, None
        if "g_idx" in parts:
            check_groups(tensor.parts["g_idx"], parts["g_idx"], len(scales))
            order = parts["g_idx"].long()
            if torch.equal(order, torch.arange(inputs) // group):
                order = None

        def rows(start: int, stop: int) -> Tensor:
            return unpack(qweight[:, start:stop], self.bits, 0).T

        return QuantisedTensor(self.bits, tensor.shape, rows, scales.T, (1, group), zeros, order)
