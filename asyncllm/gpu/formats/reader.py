"""DequantisingReader: reads a quantised checkpoint as plain tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import partial

import torch
from torch import Tensor

from asyncllm.checkpoint.reader import CheckpointReader, QuantisedTensor, TensorInfo
from asyncllm.errors import ModelLoadError
from asyncllm.gpu.formats.base import PackedTensor, RowReader, WeightFormat, dequantise_rows

SLICE_ELEMENTS = 2**20
"""Number of elements dequantised at a time, so that float32 intermediates take a few MB each."""

DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class DequantisingReader:
    """CheckpointReader of the tensors that an unquantised checkpoint would have, under its names.

    Args:
        source: reads the files; closed with this reader.
        dtype: dtype of dequantised tensors; plain tensors keep theirs.

    Raises:
        ModelLoadError: the tensors contradict the format.
    """

    def __init__(self, source: CheckpointReader, fmt: WeightFormat, dtype: torch.dtype) -> None:
        self.source, self.format, self.dtype = source, fmt, dtype
        self.quantisation_label = fmt.label
        self.ignored_quantisation = fmt.ignored_quantisation
        self._packed_tensors = {tensor.name: tensor for tensor in fmt.find_tensors(source)}
        parts = {part for tensor in self._packed_tensors.values() for part in tensor.parts.values()}
        self.tensors: dict[str, TensorInfo] = {
            name: info
            for name, info in source.tensors.items()
            if name not in parts and not name.endswith(fmt.ignored_tensor_suffixes)
        }
        for name, tensor in self._packed_tensors.items():
            if name in self.tensors:
                raise ModelLoadError(
                    f"{self.tensors[name].file}: tensor {name!r} is there both plain and as "
                    + ", ".join(sorted(tensor.parts.values()))
                )
            infos = [source.tensors[part] for part in tensor.parts.values()]
            num_bytes = sum(info.num_bytes for info in infos)
            self.tensors[name] = TensorInfo(
                infos[0].file, tensor.shape, DTYPE_NAMES[dtype], num_bytes
            )

    def tensor(self, name: str) -> Tensor:
        """Read a tensor: dequantised, or as a view of the mapped file if it is stored plain."""
        if name not in self._packed_tensors:
            return self.source.tensor(name)
        return join_slices(self.slices(name), self._packed_tensors[name].shape, self.dtype)

    def slices(self, name: str) -> Iterator[Tensor]:
        packed = self._packed_tensors.get(name)
        if packed is None:
            yield from self.source.slices(name)
            return
        weight = self._read_packed_tensor(packed)
        read_rows = (
            partial(dequantise_rows, weight) if isinstance(weight, QuantisedTensor) else weight
        )
        for start, stop in row_ranges(packed.shape, packed.row_multiple):
            yield read_rows(start, stop).to(self.dtype).contiguous()

    def quantised_tensor(self, name: str) -> QuantisedTensor | None:
        packed = self._packed_tensors.get(name)
        weight = None if packed is None else self._read_packed_tensor(packed)
        return weight if isinstance(weight, QuantisedTensor) else None

    def _read_packed_tensor(self, tensor: PackedTensor) -> QuantisedTensor | RowReader:
        parts = {suffix: self.source.tensor(part) for suffix, part in tensor.parts.items()}
        try:
            return self.format.read(tensor, parts)
        except ModelLoadError as error:
            name, file = tensor.name, self.tensors[tensor.name].file
            raise ModelLoadError(f"{file}: tensor {name!r}: {error}") from error

    def close(self) -> None:
        self.source.close()


def join_slices(slices: Iterable[Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Join consecutive slices into a tensor, holding one slice at a time."""
    result, row = torch.empty(shape, dtype=dtype), 0
    for part in slices:
        result[row : row + len(part)] = part
        row += len(part)
    return result


def row_ranges(shape: tuple[int, ...], row_multiple: int = 1) -> Iterator[tuple[int, int]]:
    """Split the rows of a tensor into ranges of about ``SLICE_ELEMENTS`` elements.

    Yields ``(start, stop)``; every start is a multiple of ``row_multiple``.
    """
    count = max(1, SLICE_ELEMENTS // max(1, math.prod(shape[1:])) // row_multiple) * row_multiple
    for start in range(0, shape[0], count):
        yield start, min(start + count, shape[0])
