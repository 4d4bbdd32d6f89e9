"""NativeLinear: linear layers on packed weights."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncllm.gpu.ops.linear_weights import LinearWeights
from asyncllm.gpu.ops.native_op import NativeOp
from asyncllm.gpu.ops.native_weights import pack_weights
from asyncllm.gpu.ops.program import DTYPES, contiguous_rows
from asyncllm.native.context import Context


class NativeLinear:
    """Linear layer on a packed copy of its weights.

    Args:
        weights: weights of a form that ``NativeOps.accepts_form`` accepts. If they are quantised,
            inputs may have any dtype.

    Raises:
        ModelLoadError: a zero point is not an integer.
    """

    def __init__(self, context: Context, weights: LinearWeights) -> None:
        self.context = context
        self.n, self.k = weights.shape
        self.dtype = weights.values.dtype if weights.scheme == "plain" else None
        self.weights = pack_weights(context, weights)
        handle, keep_alive = self.weights.handle, [self.weights]
        self._linear = NativeOp(context, "linear", keep_alive, weights=handle, y_stride=self.n)
        self._argmax = NativeOp(context, "argmax", keep_alive, weights=handle)

    def __call__(self, x: Tensor) -> Tensor:
        return self.project(self._check_input(x))

    def project(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Computes the outputs ``[T, out]`` of ``x [T, in]``, without checks of ``x``.

        Args:
            x: input with contiguous rows. With float32 or quantised weights it may have any dtype,
                otherwise the weights' dtype.
            dtype: dtype of the outputs; has to be float32 for float32 weights, and the dtype of
                ``x``, or None, for others.
        """
        op = self._linear
        y = op.empty(x, self.n, dtype)
        op.args.x_stride, op.args.dtype = x.stride(0), DTYPES[x.dtype]
        op(x, {"x": x, "y": y})
        return y

    def argmax(self, x: Tensor) -> Tensor:
        """``x [T, in] -> [T]`` int64: index of each row's largest output, the first of equal ones.

        Outputs are compared as rounded to the dtype of ``x``, like those of ``__call__``. The index
        is -1 for a row whose outputs include NaN or infinity, and NO_TOKEN_LEFT for a row whose
        outputs are all minus infinity.
        """
        x, op = self._check_input(x), self._argmax
        tokens = op.empty(x, 1, torch.int64)
        op.args.x_stride, op.args.dtype = x.stride(0), DTYPES[x.dtype]
        op(x, {"x": x, "out": tokens})
        return tokens.view(-1)

    def _check_input(self, x: Tensor) -> Tensor:
        x = contiguous_rows(x, self.dtype or x.dtype)
        if x.shape[1] != self.k:
            raise ValueError(f"native linear: x has {x.shape[1]} columns, expected {self.k}")
        return x
