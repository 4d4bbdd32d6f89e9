"""WeightFormat: how a quantised checkpoint stores the tensors of a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from asyncllm.checkpoint.config_file import ConfigFile
from asyncllm.checkpoint.reader import CheckpointReader, QuantisedTensor, TensorInfo
from asyncllm.errors import ModelLoadError

SCALE_DTYPES = ("F32", "BF16", "F16")

RowReader = Callable[[int, int], Tensor]
"""Function of ``(start, stop)`` that returns these rows of a tensor, dequantised to float32."""


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A tensor of the model, and the tensors of the checkpoint that store it.

    Attributes:
        name, shape: name and shape of the tensor in an unquantised checkpoint.
        parts: names of the stored tensors by their suffix, such as "qweight", "weight_scale".
        row_multiple: number of rows that are stored together; slices begin at multiples of this
            number.
    """

    name: str
    shape: tuple[int, ...]
    parts: Mapping[str, str]
    row_multiple: int = 1


class WeightFormat(Protocol):
    """A quantisation method of a checkpoint's ``quantization_config``.

    Attributes:
        label: phrase for the log: the method's name, bits and group sizes.
        ignored_quantisation: phrase for the log: the quantisation of activations and the KV cache,
            which is ignored because both stay in the model's dtype; "" if there is none.
        ignored_tensor_suffixes: ends of names of tensors that concern only activations or the KV
            cache.
    """

    label: str
    ignored_quantisation: str = ""
    ignored_tensor_suffixes: tuple[str, ...] = ()

    def find_tensors(self, reader: CheckpointReader) -> Iterator[PackedTensor]:
        """Find every tensor that is stored in this format.

        Raises:
            ModelLoadError: a part is missing, or its dtype or shape contradicts the other parts
                or the configuration.
        """
        ...

    def read(
        self, tensor: PackedTensor, parts: Mapping[str, Tensor]
    ) -> QuantisedTensor | RowReader:
        """Return a QuantisedTensor for integer values, or a RowReader for floating point values.

        Raises:
            ModelLoadError: values of the parts contradict their shapes.
        """
        ...


class PackedTensorParts:
    """Looks up the parts of one packed tensor by suffix, and checks them.

    Args:
        stem: common prefix of the parts' names.
    """

    def __init__(self, tensors: Mapping[str, TensorInfo], stem: str) -> None:
        self.tensors, self.stem = tensors, stem
        self.names: dict[str, str] = {}

    @classmethod
    def find_all_with(
        cls, reader: CheckpointReader, suffix: str, dtypes: Collection[str] = ()
    ) -> Iterator[PackedTensorParts]:
        """Yield the PackedTensorParts of each packed tensor that has a part ``suffix``.

        Args:
            dtypes: accepted dtypes of that part; () accepts all.
        """
        for name, info in reader.tensors.items():
            if name.endswith(suffix) and (not dtypes or info.dtype in dtypes):
                yield cls(reader.tensors, name.removesuffix(suffix))

    def require(
        self,
        suffix: str,
        dtypes: Iterable[str],
        shape: tuple[int, ...] | None = None,
        num_dims: int | None = None,
    ) -> TensorInfo:
        """Return the part ``suffix``, checked for dtype and for shape or number of dimensions.

        Raises:
            ModelLoadError: the part is missing, or has another dtype or shape.
        """
        info = self.find(suffix)
        if info is None:
            owner = next(iter(self.names.values()))
            raise ModelLoadError(
                f"{self.tensors[owner].file}: tensor {self.stem + suffix!r} is missing, which "
                f"{owner!r} needs"
            )
        if 0 in info.shape:
            raise self.part_error(suffix, "no dimension of 0")
        accepted, fits = " or ".join(dtypes), info.dtype in dtypes
        if shape is not None:
            accepted, fits = f"{accepted} of shape {shape}", fits and info.shape == shape
        elif num_dims is not None:
            accepted = f"{accepted} of {num_dims} dimensions"
            fits = fits and len(info.shape) == num_dims
        if not fits:
            raise self.part_error(suffix, accepted)
        return info

    def find(self, suffix: str) -> TensorInfo | None:
        """Return the part ``suffix`` without checks; None if the checkpoint has no such tensor."""
        info = self.tensors.get(self.stem + suffix)
        if info is not None:
            self.names[suffix] = self.stem + suffix
        return info

    def part_error(self, suffix: str, accepted: str) -> ModelLoadError:
        info = self.tensors[self.stem + suffix]
        return ModelLoadError(
            f"{info.file}: tensor {self.stem + suffix!r} is {info.dtype} of shape {info.shape}, "
            f"expected {accepted}"
        )


def check_fields(config: ConfigFile, known_fields: Iterable[str], *module_list_fields: str) -> None:
    """Check the names of the fields, and the types of the fields ``module_list_fields``.

    The lists of modules are not used: the tensors themselves show which modules are
    quantised.

    Raises:
        ModelLoadError: a field is unknown, and may change the meaning of the weights; or a list of
            modules is not a list of strings.
    """
    for name in config.values:
        if name in config and name not in known_fields:
            raise config.field_error(name, "no such field, which may change what the weights mean")
    for name in module_list_fields:
        if name in config:
            config.checked_list(
                name, "a list of module names", lambda entry: isinstance(entry, str)
            )


def read_group_size(config: ConfigFile) -> int | None:
    """Read the number of inputs that share a scale; None means a whole row (-1 in the file).

    Raises:
        ModelLoadError: the value is neither a positive integer nor -1.
    """
    if config.values.get("group_size") == -1:
        return None
    return config.integer("group_size")


def read_block_size(config: ConfigFile, name: str) -> tuple[int, int]:
    """Read the field ``name``: size of a quantisation block, as rows and columns.

    Raises:
        ModelLoadError: the value is no list of two integers from 1 to 65536.
    """
    accepted = "two integers from 1 to 65536, rows and columns"
    rows, columns = config.checked_list(
        name, accepted, lambda n: type(n) is int and 1 <= n <= 2**16, length=2
    )
    return rows, columns


def check_group_indices(name: str, groups: Tensor, num_groups: int) -> None:
    """Check the group index of each input, stored in tensor ``name``.

    Raises:
        ModelLoadError: an index is negative, or not below ``num_groups``.
    """
    low, high = int(groups.min()), int(groups.max())
    if low < 0 or high >= num_groups:
        raise ModelLoadError(
            f"tensor {name!r} has values from {low} to {high}, expected 0 to {num_groups - 1}, the "
            "groups of the scales"
        )


def unpack_integers(words: Tensor, bits: int, dim: int, order: Tensor | None = None) -> Tensor:
    """Unpack unsigned integers of ``bits`` from int32 words, lowest bits first.

    Args:
        words: int32 of two dimensions.
        bits: 2, 4 or 8, so that no value crosses a byte.
        dim: dimension along which the values of a word are adjacent.
        order: ``[32 / bits]``, the position of each value in its word; ascending by default.

    Returns:
        uint8, ``32 / bits`` times as long in ``dim``.
    """
    values = words.contiguous().view(torch.uint8).view(*words.shape, 4)
    if bits < 8:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
        values = ((values.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(2)
    if order is not None:
        values = values[:, :, order]
    return values.transpose(1, 2).flatten(0, 1) if dim == 0 else values.flatten(1)


def dequantise_rows(codes: QuantisedTensor, start: int, stop: int) -> Tensor:
    """Dequantise rows ``start`` to ``stop - 1`` to float32."""
    part = codes.read_rows(start, stop).float()
    if codes.zeros is not None:
        part -= _expand_grid(codes, codes.zeros, start, stop)
    return part.mul_(_expand_grid(codes, codes.scales, start, stop))


def _expand_grid(codes: QuantisedTensor, grid: Tensor, start: int, stop: int) -> Tensor:
    """Expand ``grid``, which has one entry per block, to the elements of rows ``start`` to
    ``stop - 1``.

    Returns:
        float32 ``[stop - start, in]``, or a shape that broadcasts to it.
    """
    if codes.column_groups is not None:
        return grid[start:stop].float()[:, codes.column_groups]
    part = grid.float()
    if part.shape[0] > 1:
        part = part[torch.arange(start, stop) // codes.block[0]]
    if part.shape[1] > 1:
        part = part.repeat_interleave(codes.block[1], dim=1)[:, : codes.shape[1]]
    return part
