"""CheckpointReader: protocol for reading a checkpoint's tensors by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Description of a tensor in a checkpoint, made without loading the tensor.

    Attributes:
        file: file that contains the tensor.
        dtype: safetensors' name of the element type, e.g. "BF16".
        num_bytes: size in the file; for a quantised tensor, its scales included.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class QuantisedTensor:
    """Quantised matrix ``[out, in]`` with elements ``(code - zero) * scale``.

    Attributes:
        bits: number of bits of a code.
        shape: ``(out, in)``.
        read_rows: function that reads rows: ``read_rows(start, stop)`` returns codes
            ``[stop - start, in]``, uint8 or int8.
        scales: ``[ceil(out / block[0]), ceil(in / block[1])]``.
        block: rows and columns of a block, whose codes share one zero point and one scale.
        zeros: zero points, in the shape of ``scales``; None if all are 0.
        column_groups: ``[in]`` int64, the column of ``scales`` for each input; None if the inputs
            of a block are consecutive. If given, ``block[0]`` is 1.
        is_signed: whether codes are int8, not uint8.
        row_multiple: number of rows that are stored together; the ``start`` of ``read_rows`` must
            be a multiple of this number.
    """

    bits: int
    shape: tuple[int, ...]
    read_rows: Callable[[int, int], Tensor]
    scales: Tensor
    block: tuple[int, int]
    zeros: Tensor | None = None
    column_groups: Tensor | None = None
    is_signed: bool = False
    row_multiple: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class GGUFQuantisedTensor:
    """Quantised matrix ``[out, in]`` in blocks of a GGUF type, which include their scales.

    Attributes:
        scheme: the type's name in lower case, e.g. "q4_k".
        shape: ``(out, in)``.
        read_rows: function that reads rows: ``read_rows(start, stop)`` returns their bytes,
            ``[stop - start, bytes of a row]`` uint8.
    """

    scheme: str
    shape: tuple[int, ...]
    read_rows: Callable[[int, int], Tensor]


class CheckpointReader(Protocol):
    """Access to all tensors of a checkpoint, under their names in the files."""

    @property
    def quantisation_label(self) -> str:
        """Name and parameters of the quantisation; empty if the checkpoint is not quantised."""
        ...

    @property
    def ignored_quantisation(self) -> str:
        """The part of the quantisation that is not applied; empty if all of it is.

        Quantisation of activations and of the KV cache is not applied: both stay in the model's
        dtype.
        """
        ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """All tensors of the checkpoint, by name."""
        ...

    def tensor(self, name: str) -> Tensor:
        """Read a tensor to the host. It is contiguous, and may be a view of a mapped file.

        Raises:
            ModelLoadError: if it cannot be read.
        """
        ...

    def slices(self, name: str) -> Iterator[Tensor]:
        """Iterate over a tensor in consecutive slices of its first dimension.

        A quantised tensor is dequantised slice by slice, so that the whole tensor is never in
        memory in both forms.
        """
        ...

    def quantised_tensor(self, name: str) -> QuantisedTensor | GGUFQuantisedTensor | None:
        """Integer codes and scales, or GGUF blocks, of a quantised tensor. None for any other
        tensor."""
        ...

    def close(self) -> None:
        """Release the files. Tensors that the reader returned must not be used afterwards."""
