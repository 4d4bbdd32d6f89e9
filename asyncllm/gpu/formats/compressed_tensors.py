"""CompressedTensors: integer and FP8 weights as llm-compressor writes them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from asyncllm.checkpoint.config_file import ConfigFile
from asyncllm.checkpoint.reader import CheckpointReader, QuantisedTensor
from asyncllm.errors import ModelLoadError
from asyncllm.gpu.formats.base import (
    SCALE_DTYPES,
    PackedTensor,
    PackedTensorParts,
    RowReader,
    WeightFormat,
    check_fields,
    check_group_indices,
    dequantise_rows,
    read_block_size,
    read_group_size,
    unpack_integers,
)

_KNOWN_FIELDS = (
    "quant_method config_groups format quantization_status global_compression_ratio ignore "
    "kv_cache_scheme sparsity_config transform_config moe_sparsity_config version"
).split()
_KNOWN_GROUP_FIELDS = "targets weights input_activations output_activations format".split()
_KNOWN_WEIGHTS_FIELDS = (
    "num_bits type symmetric group_size strategy block_structure dynamic actorder scale_dtype "
    "zp_dtype observer observer_kwargs"
).split()

FORMAT_NAMES = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """Entry of ``config_groups``: modules and how their weights are stored.

    Attributes:
        targets: module names, "re:" with a regular expression, or classes of modules.
        bits: bits of a stored integer; 8 for e4m3.
        block: number of rows and columns that share a scale; 0 columns stand for a whole row, None
            for the whole tensor.
    """

    targets: tuple[str, ...]
    bits: int
    is_float: bool
    is_symmetric: bool
    block: tuple[int, int] | None


class CompressedTensors(WeightFormat):
    """WeightFormat of ``quant_method`` "compressed-tensors".

    Format "pack-quantized" (4 and 8 bits) has ``weight_packed [out, in * bits / 32]`` and
    ``weight_shape``. Formats "int-quantized", "float-quantized" and "naive-quantized" (8 bits) have
    ``weight [out, in]`` of int8 or e4m3. All have ``weight_scale``. Asymmetric schemes also have
    ``weight_zero_point``. Schemes whose groups are not in order also have ``weight_g_idx [in]``,
    the group of each input. An element is ``(value - zero) * scale``.

    Raises:
        ModelLoadError: an unknown field, or an unsupported value.
    """

    ignored_tensor_suffixes = tuple(
        ".input_scale .input_zero_point .input_global_scale .output_scale .output_zero_point "
        ".q_scale .k_scale .v_scale .q_zero_point .k_zero_point .v_zero_point".split()
    )

    def __init__(self, config: ConfigFile) -> None:
        check_fields(config, _KNOWN_FIELDS, "ignore")
        config.choice("quantization_status", ("compressed",), "compressed")
        formats = (*FORMAT_NAMES, "mixed-precision")
        default = config.choice("format", formats, "pack-quantized")
        for name in ("transform_config", "moe_sparsity_config"):
            if config.values.get(name):
                raise config.field_error(name, "no such transformation of the weights")
        config.section("sparsity_config").choice("format", ("dense",), "dense")
        groups = config.section("config_groups")
        sections = [groups.section(name) for name in groups.values]
        schemes = [_read_scheme(section, default) for section in sections]
        self.schemes = [scheme for scheme in schemes if scheme is not None]
        if not self.schemes:
            raise config.field_error("config_groups", "an object with a group that has 'weights'")
        sizes = sorted({f"{s.bits} bits {_describe_block_shape(s.block)}" for s in self.schemes})
        self.label = f"compressed-tensors {default}, " + ", ".join(sizes)
        ignored = {_describe_activations(section) for section in sections} - {""}
        ignored |= {"KV cache scales"} if config.values.get("kv_cache_scheme") else set()
        self.ignored_quantisation = ", ".join(sorted(ignored))

    def find_tensors(self, reader: CheckpointReader) -> Iterator[PackedTensor]:
        for parts in PackedTensorParts.find_all_with(reader, "weight_packed"):
            yield self._make_bit_packed_tensor(reader, parts)
        for parts in PackedTensorParts.find_all_with(reader, "weight", ("I8", "F8_E4M3")):
            yield self._make_byte_per_value_tensor(parts)

    def _make_bit_packed_tensor(
        self, reader: CheckpointReader, parts: PackedTensorParts
    ) -> PackedTensor:
        scheme = self._scheme_of(parts, "weight_packed")
        rows, words = parts.require("weight_packed", ["I32"], num_dims=2).shape
        info = parts.require("weight_shape", ["I64"], (2,))
        shape = tuple(map(int, reader.tensor(parts.names["weight_shape"])))
        columns = shape[1]
        fits = shape[0] == rows and 0 < columns <= words * 32 // scheme.bits
        if scheme.is_float or not fits or words != -(-columns * scheme.bits // 32):
            raise ModelLoadError(
                f"{info.file}: tensor {parts.names['weight_shape']!r} is {list(shape)}, and "
                f"'weight_packed' is of shape {(rows, words)}, expected words of 32 bits with "
                f"{scheme.bits}-bit integers"
            )
        return self._make_packed_tensor(parts, scheme, (rows, columns))

    def _make_byte_per_value_tensor(self, parts: PackedTensorParts) -> PackedTensor:
        scheme = self._scheme_of(parts, "weight")
        dtype = "F8_E4M3" if scheme.is_float else "I8"
        rows, columns = parts.require("weight", [dtype], num_dims=2).shape
        if scheme.bits != 8:
            raise parts.part_error("weight", f"'weight_packed' of {scheme.bits} bits")
        return self._make_packed_tensor(parts, scheme, (rows, columns))

    def _make_packed_tensor(
        self, parts: PackedTensorParts, scheme: WeightScheme, shape: tuple[int, int]
    ) -> PackedTensor:
        """Check the parts common to packed and unpacked layouts, and make the PackedTensor."""
        (rows, columns), block = shape, scheme.block
        grid = (1,)
        if block is not None:
            grid = (-(-rows // block[0]), -(-columns // (block[1] or columns)))
        scale = parts.require("weight_scale", SCALE_DTYPES)
        if scale.shape != grid and not (block is None and scale.shape in ((), (1, 1))):
            raise parts.part_error("weight_scale", f"shape {grid}")
        if not scheme.is_symmetric:
            if "weight_packed" in parts.names and block is not None:
                words = -(-grid[0] * scheme.bits // 32)
                parts.require("weight_zero_point", ["I32"], (words, *grid[1:]))
            else:
                parts.require("weight_zero_point", ["I8"], scale.shape)
        else:
            # A symmetric scheme needs no zero points; if some are stored, ``read`` checks that all
            # are 0.
            parts.find("weight_zero_point")
        if parts.find("weight_g_idx") is not None:
            if block is None or block[0] != 1 or not block[1]:
                raise parts.part_error("weight_g_idx", "none where the strategy is not 'group'")
            parts.require("weight_g_idx", ["I32"], (columns,))
        return PackedTensor(parts.stem + "weight", shape, parts.names)

    def read(
        self, tensor: PackedTensor, parts: Mapping[str, Tensor]
    ) -> QuantisedTensor | RowReader:
        scheme = self._match_scheme(tensor.name.removesuffix(".weight"))
        assert scheme is not None
        columns, scale = tensor.shape[1], parts["weight_scale"]
        block = scheme.block or tensor.shape
        block = (block[0], block[1] or columns)
        scale = scale.reshape(-1, 1 if scheme.block is None else scale.shape[1])
        zeros = _zero_points(scheme, parts, scale)
        groups = _column_groups(tensor, parts, scale.shape[1])

        def read_rows(start: int, stop: int) -> Tensor:
            if "weight" in parts:
                return parts["weight"][start:stop]
            return unpack_integers(parts["weight_packed"][start:stop], scheme.bits, 1)[:, :columns]

        signed = "weight" in parts
        codes = QuantisedTensor(
            scheme.bits, tensor.shape, read_rows, scale, block, zeros, groups, signed
        )
        return partial(dequantise_rows, codes) if scheme.is_float else codes

    def _scheme_of(self, parts: PackedTensorParts, suffix: str) -> WeightScheme:
        name = parts.stem + suffix
        scheme = self._match_scheme(parts.stem.removesuffix("."))
        if scheme is None:
            raise ModelLoadError(
                f"{parts.tensors[name].file}: tensor {name!r} is quantised, and none of "
                "config_groups has a target for its module, expected its name, an expression or "
                "'Linear'"
            )
        return scheme

    def _match_scheme(self, module: str) -> WeightScheme | None:
        """Find the first scheme that names the module, else the first for all linear layers."""
        for scheme in self.schemes:
            for target in scheme.targets:
                if target == module or (
                    target.startswith("re:") and re.match(target.removeprefix("re:"), module)
                ):
                    return scheme
        return next((s for s in self.schemes if "Linear" in s.targets), None)


def _zero_points(scheme: WeightScheme, parts: Mapping[str, Tensor], scale: Tensor) -> Tensor | None:
    """Zero points of the stored values, in the shape of the scales; None if there are none.

    Packed values are unsigned: the signed values plus ``2 ** (bits - 1)``. The same is added to
    their zero points.
    """
    packed, half = "weight_packed" in parts, 1 << (scheme.bits - 1)
    if scheme.is_symmetric:
        if "weight_zero_point" in parts and bool(parts["weight_zero_point"].any()):
            raise ModelLoadError("'weight_zero_point' is not 0 and the weights are symmetric")
        return torch.full(scale.shape, float(half)) if packed else None
    zero = parts["weight_zero_point"]
    if zero.dtype == torch.int32:
        return unpack_integers(zero, scheme.bits, 0)[: scale.shape[0]].float()
    return zero.reshape(scale.shape).float() + (half if packed else 0)


def _column_groups(
    tensor: PackedTensor, parts: Mapping[str, Tensor], num_groups: int
) -> Tensor | None:
    """Find the group of each column; None if groups are in order."""
    groups = parts.get("weight_g_idx")
    # A ``weight_g_idx`` whose elements are all -1 means that groups are in order.
    if groups is None or bool((groups == -1).all()):
        return None
    check_group_indices(tensor.parts["weight_g_idx"], groups, num_groups)
    return groups.long()


def _read_scheme(group: ConfigFile, default_format: str) -> WeightScheme | None:
    """Read an entry of ``config_groups``; None if it is for activations only."""
    check_fields(group, _KNOWN_GROUP_FIELDS, "targets")
    targets = tuple(group.values.get("targets") or ())
    for target in targets:
        try:
            re.compile(target.removeprefix("re:"))
        except re.error as error:
            raise group.field_error(
                "targets", f"valid expressions ({target!r}: {error})"
            ) from error
    form = group.choice("format", FORMAT_NAMES, None) or default_format
    weights = group.section("weights")
    if not weights.values:
        return None
    check_fields(weights, _KNOWN_WEIGHTS_FIELDS)
    if form == "mixed-precision":
        raise group.field_error("format", " or ".join(FORMAT_NAMES))
    if weights.boolean("dynamic", False):
        raise weights.field_error("dynamic", "false")
    kind = weights.choice("type", ("int", "float"), "int")
    bits = weights.integer("num_bits", 8)
    is_float, symmetric = kind == "float", weights.boolean("symmetric", True)
    accepted = (4, 8) if form == "pack-quantized" else (8,)
    if bits not in accepted:
        raise weights.field_error(
            "num_bits", f"{' or '.join(map(str, accepted))} with format {form!r}"
        )
    if is_float != (form == "float-quantized") and form != "naive-quantized":
        raise weights.field_error("type", f"that of format {form!r}")
    if is_float and not symmetric:
        raise weights.field_error("symmetric", "true for floating point numbers")
    return WeightScheme(targets, bits, is_float, symmetric, _read_block_shape(weights))


def _read_block_shape(weights: ConfigFile) -> tuple[int, int] | None:
    group = read_group_size(weights) if "group_size" in weights else None
    # If the field ``strategy`` is missing, infer it as compressed-tensors does.
    implied = "tensor" if "group_size" not in weights else "group" if group else "channel"
    strategy = weights.choice("strategy", ("tensor", "channel", "group", "block"), implied)
    if strategy == "tensor":
        return None
    if strategy == "channel":
        return 1, 0
    if strategy == "group":
        return 1, group or weights.integer("group_size")
    return read_block_size(weights, "block_structure")


def _describe_block_shape(block: tuple[int, int] | None) -> str:
    if block is None:
        return "per tensor"
    if block == (1, 0):
        return "per channel"
    return f"in groups of {block[1]}" if block[0] == 1 else f"in blocks of {block[0]} x {block[1]}"


def _describe_activations(group: ConfigFile) -> str:
    activations = group.section("input_activations")
    if not activations.values:
        return ""
    kind = activations.choice("type", ("int", "float"), "int")
    return f"{activations.integer('num_bits', 8)}-bit {kind} activations"
