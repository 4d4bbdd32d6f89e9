"""NativeLinear: linear layers on packed weights."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncllm.gpu.ops.linear_weights import LinearWeights
from asyncllm.gpu.ops.native_weights import pack
from asyncllm.gpu.ops.program import DTYPES, rows_of
from asyncllm.native.context import Context, fail
from asyncllm.native.interface import ARGS


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

    def __call__(self, x: Tensor) -> Tensor:
        x, context = self._checked(x), self.context
        m = len(x)
        if (recorder := context.recorder) is not None:
            y = recorder.empty(x, self.n)
            args = ARGS["linear"](
                weights=self.weights.handle, x_stride=x.stride(0), y_stride=self.n,
                dtype=DTYPES[x.dtype],
            )  # fmt: skip
            recorder.add("linear", x, args, {"x": x, "y": y}, [self.weights])
            return y
        y = x.new_empty((m, self.n))
        status = context.functions.linear(
            context.handle, self.weights.handle, x.data_ptr(), x.stride(0), y.data_ptr(), self.n,
            m, DTYPES[x.dtype],
        )  # fmt: skip
        if status:
            fail("linear", status)
        return y

    def argmax(self, x: Tensor) -> Tensor:
        """``x [T, in] -> [T]`` int64: index of each row's largest output, the first of equal ones.

        Outputs are rounded to the dtype of ``x``, as in a call, but not written. -1 for a row with
        NaN or infinity, NO_TOKEN_LEFT if all outputs are minus infinity.
        """
        x, context = self._checked(x), self.context
        if (recorder := context.recorder) is not None:
            found = recorder.empty(x, 1, torch.int64)
            args = ARGS["argmax"](
                weights=self.weights.handle, x_stride=x.stride(0), dtype=DTYPES[x.dtype]
            )
            recorder.add("argmax", x, args, {"x": x, "out": found}, [self.weights])
            return found
        tokens = torch.empty(len(x), dtype=torch.int64, device="cpu")
        status = context.functions.linear_argmax(
            context.handle, self.weights.handle, x.data_ptr(), x.stride(0), tokens.data_ptr(),
            len(x), DTYPES[x.dtype],
        )  # fmt: skip
        if status:
            fail("linear_argmax", status)
        return tokens

    def _checked(self, x: Tensor) -> Tensor:
        x = rows_of(x, self.dtype or x.dtype)
        if x.shape[1] != self.k:
            raise ValueError(f"native linear: x has {x.shape[1]} columns, expected {self.k}")
        return x
