"""NativeRMSNorm, NativeResidualAdd: norms in C++, fused with the residual addition."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncllm.gpu.ops.native_op import NativeOp
from asyncllm.gpu.ops.program import DTYPE_CODES, contiguous_parameter, contiguous_rows
from asyncllm.native.context import NativeContext


class NativeResidualAdd:
    """Substitute for the norm in blocks without a norm; ``add_and_norm`` only adds."""

    def __init__(self, context: NativeContext, multiplier: float = 1.0, scale: float = 1.0) -> None:
        self._op = NativeOp(context, "add", multiplier=multiplier, scale=scale)

    def __call__(self, x: Tensor) -> Tensor:
        return x

    def add_and_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        x, residual = contiguous_rows(x, x.dtype), contiguous_rows(residual, x.dtype)
        self._op.check_shape("x", x, residual.shape)
        args = self._op.args
        args.x_stride, args.residual_stride = x.stride(0), residual.stride(0)
        args.width, args.dtype = x.shape[1], DTYPE_CODES[x.dtype]
        self._op(x, {"x": x, "residual": residual})
        return residual, residual


class NativeRMSNorm:
    """Root mean square norm, computed in float32.

    The result is rounded to the dtype of ``x``: before the multiplication by a weight of that
    dtype, but after the multiplication by a float32 weight.
    """

    def __init__(
        self, context: NativeContext, weight: Tensor, eps: float, multiplier: float = 1.0,
        scale: float = 1.0,
    ) -> None:  # fmt: skip
        self.weight, self.width = contiguous_parameter(weight), weight.shape[0]
        self._op = NativeOp(
            context, "rms_norm", weight=self.weight, weight_dtype=DTYPE_CODES[weight.dtype],
            width=self.width, eps=eps, multiplier=multiplier, scale=scale,
        )  # fmt: skip

    def __call__(self, x: Tensor) -> Tensor:
        """Normalises ``x [T, width]``, or each part of a contiguous ``x [T, parts, width]``."""
        if x.dim() == 2:
            return self._norm(x, None)
        if not x.is_contiguous():
            raise ValueError(
                f"native rms_norm: x is {tuple(x.shape)} with strides {x.stride()}, expected "
                "contiguous parts"
            )
        return self._norm(x.view(len(x), -1), None, x.shape[1]).view(x.shape)

    def add_and_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        residual = contiguous_rows(residual, x.dtype)
        return self._norm(x, residual), residual

    def _norm(self, x: Tensor, residual: Tensor | None, num_parts: int = 1) -> Tensor:
        weight, op = self.weight, self._op
        x = contiguous_rows(x, x.dtype if weight.dtype == torch.float32 else weight.dtype)
        op.check_shape("x", x, (len(x), num_parts * self.width))
        args, out = op.args, op.empty_output(x, num_parts * self.width)
        args.x_stride, args.parts = x.stride(0) // num_parts, num_parts
        args.dtype = DTYPE_CODES[x.dtype]
        tensors = {"x": x, "out": out}
        args.residual = None
        if residual is not None:
            op.check_shape("residual", residual, x.shape)
            args.residual_stride, tensors["residual"] = residual.stride(0), residual
        op(x, tensors)
        return out
