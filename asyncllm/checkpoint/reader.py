"""CheckpointReader: reads a checkpoint's tensors by name, in any file format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from asyncllm.checkpoint.codes import Codes


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
