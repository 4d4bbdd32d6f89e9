"""CheckpointReader: reads a checkpoint's tensors by name, in any file format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Description of a stored tensor, read without loading it.

    Attributes:
        file: file of the tensor, for error messages.
        dtype: safetensors' name of the element type, e.g. "BF16".
        num_bytes: size in the file, with the scales of a quantised tensor.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """Quantised tensor ``[out, in]`` with elements ``(code - zero) * scale``. Blocks of ``block``
    (rows, columns) share a zero and a scale.

    Attributes:
        bits: bits of a code.
        rows: function ``(start, stop)`` that returns the codes ``[stop - start, in]`` of these
            rows, as uint8 or int8.
        scales: ``[ceil(out / block[0]), ceil(in / block[1])]``.
        zeros: same shape as ``scales``; None is 0.
        column_groups: ``[in]`` int64, the column of ``scales`` for each input, if inputs are not
            grouped in order; ``block[0]`` is 1 then.
        is_signed: whether codes are int8.
        step: number of rows that are stored together; ranges begin at multiples of it.
    """

    bits: int
    shape: tuple[int, ...]
    rows: Callable[[int, int], Tensor]
    scales: Tensor
    block: tuple[int, int]
    zeros: Tensor | None = None
    column_groups: Tensor | None = None
    is_signed: bool = False
    step: int = 1


class CheckpointReader(Protocol):
    """Access to a checkpoint's tensors under their names in the files. The loader decides which of
    them a model needs."""

    @property
    def label(self) -> str:
        """Name and parameters of the quantisation; empty for a plain checkpoint."""
        ...

    @property
    def ignored(self) -> str:
        """Ignored quantisation: that of activations and KV cache, which stay in the model's dtype;
        empty for none."""
        ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """All tensors of the checkpoint by name."""
        ...

    def tensor(self, name: str) -> Tensor:
        """Read a tensor: on the host, contiguous, perhaps a view of a mapped file.

        Raises:
            ModelLoadError: if it cannot be read.
        """
        ...

    def slices(self, name: str) -> Iterator[Tensor]:
        """Iterate over a tensor in consecutive slices of its first dimension. Dequantised tensors
        come in small slices, so that none is in memory twice."""
        ...

    def codes(self, name: str) -> Codes | None:
        """Integers and scales of a quantised tensor; None for a tensor that is stored otherwise."""
        ...

    def close(self) -> None:
        """Release the files. Tensors that were returned must not be used afterwards."""
