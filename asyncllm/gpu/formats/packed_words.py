"""Awq, Gptq: weights of 2, 4 or 8 bits with zero points, packed in words of 32 bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from asyncllm.checkpoint.config_file import ConfigFile
from asyncllm.checkpoint.reader import CheckpointReader, QuantisedTensor
from asyncllm.gpu.formats.base import (
    SCALE_DTYPES,
    PackedTensor,
    PackedTensorParts,
    WeightFormat,
    check_fields,
    check_group_indices,
    read_group_size,
    unpack_integers,
)

_NIBBLE_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Index of the nibble that holds each of a word's 8 outputs (AutoAWQ, ``WQLinear_GEMM``). A CUDA
kernel unpacks nibbles in pairs in this order."""

_KNOWN_AWQ_FIELDS = (
    "quant_method bits group_size zero_point version format backend modules_to_not_convert "
    "do_fuse fuse_max_seq_len modules_to_fuse exllama_config"
).split()
_KNOWN_GPTQ_FIELDS = (
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


class _PackedWordsFormat(WeightFormat):
    """WeightFormat of integers packed in words of 32 bits.

    A word of ``qweight`` packs adjacent inputs or adjacent outputs. The other tensors of a weight
    are ``qzeros [groups, out * bits / 32]`` and ``scales [groups, out]``. An element is
    ``(value - zero) * scale``.

    Attributes:
        group_size: inputs that share a scale; None is a whole row.
        along_outputs: whether a word of ``qweight`` packs adjacent outputs instead of inputs.
        value_order: index of each value in its word; None is ascending.
        zero_offset: number added to each word of ``qzeros`` before it is unpacked.
        desc_act: whether the checkpoint must have ``g_idx [in]``, the group of each input.
    """

    bits: int
    group_size: int | None
    along_outputs = False
    value_order: Tensor | None = None
    zero_offset: Tensor | int = 0
    desc_act = False

    def find_tensors(self, reader: CheckpointReader) -> Iterator[PackedTensor]:
        per_word = 32 // self.bits
        for parts in PackedTensorParts.find_all_with(reader, "qweight"):
            inputs, outputs = parts.require("qweight", ["I32"], num_dims=2).shape
            if self.along_outputs:
                outputs *= per_word
            else:
                inputs *= per_word
            group = self.group_size or inputs
            if self.along_outputs and inputs % group:
                raise parts.part_error("qweight", f"a multiple of group_size={group} rows")
            if outputs % per_word:
                raise parts.part_error("qweight", f"a multiple of {per_word} columns")
            groups = -(-inputs // group)
            parts.require("qzeros", ["I32"], (groups, outputs // per_word))
            parts.require("scales", SCALE_DTYPES, (groups, outputs))
            is_optional = not self.along_outputs and parts.find("g_idx") is not None
            if self.desc_act or is_optional:
                parts.require("g_idx", ["I32"], (inputs,))
            step = per_word if self.along_outputs else 1
            yield PackedTensor(parts.stem + "weight", (outputs, inputs), parts.names, step)

    def read(self, tensor: PackedTensor, parts: Mapping[str, Tensor]) -> QuantisedTensor:
        qweight, scales, inputs = parts["qweight"], parts["scales"], tensor.shape[1]
        zeros = unpack_integers(
            parts["qzeros"] + self.zero_offset, self.bits, 1, self.value_order
        ).T
        group, order, step = self.group_size or inputs, None, tensor.row_multiple
        if "g_idx" in parts:
            check_group_indices(tensor.parts["g_idx"], parts["g_idx"], len(scales))
            order = parts["g_idx"].long()
            if torch.equal(order, torch.arange(inputs) // group):
                order = None

        def read_rows(start: int, stop: int) -> Tensor:
            words = qweight[:, start // step : stop // step]
            return unpack_integers(words, self.bits, int(self.along_outputs), self.value_order).T

        fields = {"zeros": zeros, "column_groups": order, "row_multiple": step}
        return QuantisedTensor(self.bits, tensor.shape, read_rows, scales.T, (1, group), **fields)


class Awq(_PackedWordsFormat):
    """WeightFormat of ``quant_method`` "awq", version "gemm", as AutoAWQ packs it.

    ``qweight`` is ``[in, out / 8]``.

    Raises:
        ModelLoadError: an unknown field, or an unsupported value.
    """

    bits, along_outputs = 4, True

    def __init__(self, config: ConfigFile) -> None:
        check_fields(config, _KNOWN_AWQ_FIELDS, "modules_to_not_convert")
        config.integer("bits", 4, low=4, high=4)
        for name in ("version", "format"):
            value = config.values.get(name, "gemm")
            if not isinstance(value, str) or value.lower() != "gemm":
                raise config.field_error(name, "'gemm', whose order of the columns is known")
        if config.values.get("backend") == "llm-awq":
            raise config.field_error("backend", "one that packs as AutoAWQ's version 'gemm' does")
        if not config.boolean("zero_point", True):
            raise config.field_error("zero_point", "true")
        self.group_size, self.value_order = read_group_size(config), torch.tensor(_NIBBLE_ORDER)
        self.label = f"awq, 4 bits, groups of {self.group_size or 'a row'}"


class Gptq(_PackedWordsFormat):
    """WeightFormat of ``quant_method`` "gptq".

    ``qweight`` is ``[in * bits / 32, out]``. ``checkpoint_format`` "gptq" stores each zero
    point minus 1, "gptq_v2" the zero point. ``g_idx`` maps inputs to groups, in any order.

    Raises:
        ModelLoadError: an unknown field, or an unsupported value.
    """

    def __init__(self, config: ConfigFile) -> None:
        check_fields(config, _KNOWN_GPTQ_FIELDS, "modules_to_not_convert")
        self.bits = config.integer("bits")
        if self.bits not in (2, 4, 8):
            raise config.field_error("bits", "2, 4 or 8")
        self.group_size = read_group_size(config)
        self.desc_act = config.boolean("desc_act", False)
        if config.boolean("is_marlin_format", False):
            raise config.field_error("is_marlin_format", "false")
        name = "checkpoint_format" if "checkpoint_format" in config else "format"
        version = config.choice(name, ("gptq", "gptq_v2"), "gptq")
        # The quantiser subtracted ``fields``, which has a 1 in every field, from whole words. So a
        # zero point of 0 borrowed from the next field. Adding ``fields`` to whole words undoes it.
        fields = sum(1 << place for place in range(0, 32, self.bits))
        offset = fields if version == "gptq" else 0
        self.zero_offset = torch.tensor(offset, dtype=torch.int64).to(torch.int32)
        config.choice("pack_dtype", ("int32",), "int32")
        config.choice("method", ("gptq",), "gptq")
        for name in ("rotation", "adapter", "activation", "dynamic"):
            if config.values.get(name):
                raise config.field_error(name, "null")
        order = ", act-order" if self.desc_act else ""
        self.label = f"{version}, {self.bits} bits, groups of {self.group_size or 'a row'}{order}"
