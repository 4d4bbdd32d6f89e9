"""Parameter: a tensor of the decoder, and the checkpoint tensors that it is made from."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class StackLayout:
    """Layout of a fused checkpoint tensor that holds ``count`` stacked matrices.

    Its shape is ``[count, rows, columns]``, or ``[count, rows]`` for vectors.

    Attributes:
        is_transposed: whether the shape is ``[count, columns, rows]`` instead.
        is_interleaved: whether the checkpoint alternates the rows of each matrix's first and second
            half.
    """

    count: int
    is_transposed: bool = False
    is_interleaved: bool = False

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the checkpoint tensor, for a parameter of ``shape``."""
        matrix = (shape[0] // self.count, *shape[1:])
        return (self.count, *(reversed(matrix) if self.is_transposed else matrix))

    def iter_rows(self, tensor_slices: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield the rows of each stacked matrix, one tensor per matrix.

        Args:
            tensor_slices: the checkpoint tensor in slices of whole matrices.
        """
        for part in tensor_slices:
            for stored in part:
                rows = stored.transpose(0, -1) if self.is_transposed else stored
                if self.is_interleaved:
                    rows = rows.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1)
                yield rows.contiguous()


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the decoder and the checkpoint tensors that are stacked into it.

    Attributes:
        name: the parameter's name in the decoder, e.g. "layers.3.qkv.weight".
        shape: shape of all ``parts``, stacked along the first dimension.
        parts: ``(tensor name, number of rows)``, in order.
        dtype: torch's name of the parameter's dtype, e.g. "float32"; None is the model's.
        layout: layout of a single fused part; None if the parts are plain rows.
        is_linear: whether the parameter is a linear layer's weight that may be packed or quantised;
            false for weights of routers and of linear attention's gates.
        is_embedding: whether the parameter is an embedding's table, which may stay quantised as in
            the checkpoint.
        alternative: the same parameter in the layout of other checkpoints; None if all checkpoints
            have the same layout.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[tuple[str, int], ...]
    dtype: str | None = None
    layout: StackLayout | None = None
    is_linear: bool = False
    is_embedding: bool = False
    alternative: Parameter | None = None

    def choose_layout(self, tensors: Collection[str]) -> Parameter:
        """This parameter or its alternative, whichever a checkpoint with these tensors stores."""
        alternative = self.alternative
        if (
            alternative is None
            or self.parts[0][0] in tensors
            or alternative.parts[0][0] not in tensors
        ):
            return self
        return alternative

    def stored_shape(self, rows: int) -> tuple[int, ...]:
        """Shape that a part with ``rows`` rows has in the checkpoint."""
        shape = (rows, *self.shape[1:])
        return shape if self.layout is None else self.layout.stored_shape(shape)

    def iter_rows(self, tensor_slices: Iterable[Tensor]) -> Iterable[Tensor]:
        """Iterate over the rows of one of ``parts``, given slices of its checkpoint tensor."""
        return tensor_slices if self.layout is None else self.layout.iter_rows(tensor_slices)
