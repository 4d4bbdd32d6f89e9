"""NativeLinear, NativeMergedLinear: linear layers on packed weights."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncllm.gpu.ops.linear_weights import LinearWeights
from asyncllm.gpu.ops.native_op import NativeOp
from asyncllm.gpu.ops.native_weights import pack_weights
from asyncllm.gpu.ops.program import DTYPE_CODES, contiguous_rows
from asyncllm.native.context import NativeContext


class NativeLinear:
    """Linear layer on a packed copy of its weights.

    Args:
        weights: weights that ``NativeOps.accepts_weights`` accepts. If they are quantised, inputs
            may have any dtype.

    Raises:
        ModelLoadError: a zero point is not an integer.
    """

    def __init__(self, context: NativeContext, weights: LinearWeights) -> None:
        self.context = context
        self.n, self.k = weights.shape
        self.dtype = weights.values.dtype if weights.scheme == "plain" else None
        self.weights = pack_weights(context, weights)
        handle, keep_alive = self.weights.handle, [self.weights]
        self._linear = NativeOp(context, "linear", keep_alive, weights=handle)
        self._argmax = NativeOp(context, "argmax", keep_alive, weights=handle)

    def __call__(self, x: Tensor) -> Tensor:
        return self.project(self.check_input(x))

    def project(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Computes the outputs ``[T, out]`` of ``x [T, in]``, without checks of ``x``.

        Args:
            x: input with contiguous rows, of the weights' dtype; of any dtype if the weights are
                float32 or quantised.
            dtype: dtype of the outputs; None is that of ``x``. Float32 weights need float32
                outputs, other weights outputs of the dtype of ``x``.
        """
        y = self._linear.empty_output(x, self.n, dtype)
        self.project_into(x, y)
        return y

    def project_into(self, x: Tensor, y: Tensor) -> None:
        """Writes the outputs of ``project`` to ``y [T, out]``.

        Args:
            x: as in ``project``.
            y: tensor with contiguous rows.
        """
        op = self._linear
        op.args.x_stride, op.args.y_stride = x.stride(0), y.stride(0)
        op.args.dtype = DTYPE_CODES[x.dtype]
        op(x, {"x": x, "y": y})

    def empty_output(self, x: Tensor, width: int) -> Tensor:
        """Allocates an output ``[T, width]`` of the dtype of ``x [T, in]``."""
        return self._linear.empty_output(x, width)

    def argmax(self, x: Tensor) -> Tensor:
        """Index of each row's largest output, ``x [T, in] -> [T]`` int64.

        See ``ArgmaxLinear``. Outputs are compared as rounded to the dtype of ``x``, like those of
        ``__call__``.
        """
        x, op = self.check_input(x), self._argmax
        tokens = op.empty_output(x, 1, torch.int64)
        op.args.x_stride, op.args.dtype = x.stride(0), DTYPE_CODES[x.dtype]
        op(x, {"x": x, "out": tokens})
        return tokens.view(-1)

    def check_input(self, x: Tensor) -> Tensor:
        x = contiguous_rows(x, self.dtype or x.dtype)
        self._linear.check_shape("x", x, (len(x), self.k))
        return x


class NativeMergedLinear:
    """Linear layer on weights of several schemes, such as q, k and v of different GGUF types.

    Each single-scheme part is a layer of its own, which writes its own columns of the outputs.
    """

    def __init__(self, context: NativeContext, weights: LinearWeights) -> None:
        self.layers = [NativeLinear(context, part) for part in weights.single_scheme_parts]
        self.n = weights.shape[0]

    def __call__(self, x: Tensor) -> Tensor:
        first = self.layers[0]
        x = first.check_input(x)
        y, column = first.empty_output(x, self.n), 0
        for layer in self.layers:
            layer.project_into(x, y[:, column : column + layer.n])
            column += layer.n
        return y
