"""NativePlainEmbedding, NativeEmbedding: embeddings from a plain table or from a tied head."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncllm.gpu.ops.native_linear import NativeLinear
from asyncllm.gpu.ops.native_op import NativeOp
from asyncllm.gpu.ops.program import DTYPE_CODES, contiguous_rows
from asyncllm.native.context import NativeContext


class NativeEmbedding:
    """Embedding that gathers rows from a tied output head's packed weights.

    The weights of embedding and head are thus in memory only once.

    Attributes:
        dtype, device, shape: those of a plain table ``[vocab_size, H]`` with the same rows.
    """

    def __init__(self, head: NativeLinear, dtype: torch.dtype, multiplier: float = 1.0) -> None:
        self.dtype, self.device, self.shape = dtype, torch.device("cpu"), (head.n, head.k)
        self._op = NativeOp(
            head.context, "gather", [head.weights],
            weights=head.weights.handle, scale=multiplier, dtype=DTYPE_CODES[dtype],
        )  # fmt: skip

    def __call__(self, token_ids: Tensor) -> Tensor:
        ids = token_ids.contiguous()
        if ids.dtype != torch.int64 or ids.device.type != "cpu" or ids.dim() != 1:
            raise ValueError(
                f"native {self._op.name}: ids are {tuple(ids.shape)} of {ids.dtype}, expected "
                "[tokens] int64 on cpu"
            )
        out = self._op.empty_output(ids, self.shape[1], self.dtype)
        self._op(ids, {"ids": ids, "out": out})
        return out


class NativePlainEmbedding(NativeEmbedding):
    """Embedding with a table of plain values ``[vocab_size, H]``."""

    def __init__(self, context: NativeContext, values: Tensor, multiplier: float = 1.0) -> None:
        self.values = contiguous_rows(values, values.dtype)
        self.dtype, self.device, self.shape = values.dtype, values.device, tuple(values.shape)
        rows, width = self.shape
        self._op = NativeOp(
            context, "select", x=self.values, x_stride=self.values.stride(0), x_rows=rows,
            width=width, scale=multiplier, dtype=DTYPE_CODES[self.dtype],
        )  # fmt: skip
