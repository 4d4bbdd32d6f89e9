"""CheckpointReader: the tensors of a checkpoint by name, in any file format."""

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
        file: named in error messages.
        dtype: safetensors' name of the element type, e.g. "BF16".
        num_bytes: size in the file, with the scales of a quantised tensor.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int


class CheckpointReader(Protocol):
    """Access to a checkpoint's tensors under the names that its files give them. Which of
    them a model needs, and what it makes of them, is the loader's business."""

    @property
    def label(self) -> str:
        """Names the quantisation with its numbers; empty for a plain checkpoint."""
        ...

    @property
    def ignored(self) -> str:
        """The quantisation of activations and the KV cache that the files ask for, which stay in
        the model's dtype; empty for none."""
        ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """All tensors of the checkpoint by name."""
        ...

    def tensor(self, name: str) -> Tensor:
        """The tensor on the host, contiguous; it may be a view of a mapped file.

        Raises:
            ModelLoadError: it cannot be read.
        """
        ...

    def slices(self, name: str) -> Iterator[Tensor]:
        """The tensor in consecutive slices of its first dimension, each as from ``tensor``: one
        that is computed is made in small ones, so that it is never held whole beside its copy."""
        ...

    def codes(self, name: str) -> Codes | None:
        """The integers and scales that a quantised tensor is stored as; None for one that is
        stored as floating point numbers, or in another way."""
        ...

    def close(self) -> None:
        """Releases the files; tensors that were handed out are not used after it."""
