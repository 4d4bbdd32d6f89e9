"""NativeLinear: linear layers on packed weights."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncllm.gpu.ops.linear_weights import LinearWeights
from asyncllm.gpu.ops.native_op import NativeOp
from asyncllm.gpu.ops.native_weights import pack
from asyncllm.gpu.ops.program import DTYPES, rows_of
from asyncllm.native.context import Context


class NativeLinear:
    """A linear layer on packed weights, which replace the plain ones.

    Args:
        weights: of a form that NativeOps takes. Quantised weights take inputs of any dtype.

    Raises:
        ModelLoadError: zeros that are not integers.
    """

    def __init__(self, context: Context, weights: LinearWeights) -> None:
        self.context = context
        self.n, self.k = weights.shape
        self.dtype = weights.values.dtype if weights.scheme == "plain" else None
        self.weights = pack(context, weights)
        handle, holds = self.weights.handle, [self.weights]
        self._linear = NativeOp(context, "linear", holds, weights=handle, y_stride=self.n)
        self._argmax = NativeOp(context, "argmax", holds, weights=handle)

    def __call__(self, x: Tensor) -> Tensor:
        return self.project(self._checked(x))

    def project(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Computes a layer's outputs in the dtype that the library gives them.

        Args:
            x: of any dtype for float32 and quantised weights, with contiguous rows.
            dtype: float32 for float32 weights; None is that of ``x``.
        """
        op = self._linear
        y = op.empty(x, self.n, dtype)
        op.args.x_stride, op.args.dtype = x.stride(0), DTYPES[x.dtype]
        op(x, {"x": x, "y": y})
        return y

    def argmax(self, x: Tensor) -> Tensor:
        """``x [T, in] -> [T]`` int64: index of each row's largest output, the first of equal ones.

        Outputs are rounded to the dtype of ``x``, as in a call, but not written. -1 for a row with
        NaN or infinity, NO_TOKEN_LEFT if all outputs are minus infinity.
        """
        x, op = self._checked(x), self._argmax
        tokens = op.empty(x, 1, torch.int64)
        op.args.x_stride, op.args.dtype = x.stride(0), DTYPES[x.dtype]
        op(x, {"x": x, "out": tokens})
        return tokens.view(-1)

    def _checked(self, x: Tensor) -> Tensor:
        x = rows_of(x, self.dtype or x.dtype)
        if x.shape[1] != self.k:
            raise ValueError(f"native linear: x has {x.shape[1]} columns, expected {self.k}")
        return x
