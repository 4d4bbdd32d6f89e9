"""DequantisingReader: a quantised checkpoint read as if it were a plain one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from asyncllm.checkpoint.reader import CheckpointReader, TensorInfo
from asyncllm.errors import ModelLoadError
from asyncllm.gpu.formats.base import PackedTensor, WeightFormat

SLICE_ELEMENTS = 2**20
"""Elements that are dequantised at a time: the float32 intermediates are a few MB each."""

DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class DequantisingReader:
    """CheckpointReader of the tensors that an unquantised checkpoint would have, under its names.

    Args:
        source: reads the files; closed with this reader.
        dtype: that dequantised tensors are rounded to; others are as stored.

    Raises:
        ModelLoadError: the tensors contradict the format.
    """

    def __init__(self, source: CheckpointReader, fmt: WeightFormat, dtype: torch.dtype) -> None:
        self.source, self.format, self.dtype = source, fmt, dtype
        self._packed = {tensor.name: tensor for tensor in fmt.packed(source)}
        parts = {part for tensor in self._packed.values() for part in tensor.parts.values()}
        self.tensors: dict[str, TensorInfo] = {
            name: info
            for name, info in source.tensors.items()
            if name not in parts and not fmt.is_ignored(name)
        }
        for name, tensor in self._packed.items():
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
        """The dequantised tensor, or a view of the mapped file."""
        if name not in self._packed:
            return self.source.tensor(name)
        return joined(self.slices(name), self._packed[name].shape, self.dtype)

    def slices(self, name: str) -> Iterator[Tensor]:
        packed = self._packed.get(name)
        if packed is None:
            yield from self.source.slices(name)
            return
        parts = {suffix: self.source.tensor(part) for suffix, part in packed.parts.items()}
        try:
            rows = self.format.rows(packed, parts)
        except ModelLoadError as error:
            file = self.tensors[name].file
            raise ModelLoadError(f"{file}: tensor {name!r}: {error}") from error
        step = rows_per_slice(packed)
        for start in range(0, packed.shape[0], step):
            part = rows(start, min(start + step, packed.shape[0]))
            yield part.to(self.dtype).contiguous()

    def close(self) -> None:
        self.source.close()


def joined(slices: Iterable[Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The tensor of consecutive slices, which are not held beside it."""
    result, row = torch.empty(shape, dtype=dtype), 0
    for part in slices:
        result[row : row + len(part)] = part
        row += len(part)
    return result


def rows_per_slice(tensor: PackedTensor) -> int:
    """Rows of a slice of about ``SLICE_ELEMENTS``, a multiple of the tensor's step."""
    width = max(1, math.prod(tensor.shape[1:]))
    return max(1, SLICE_ELEMENTS // width // tensor.step) * tensor.step
