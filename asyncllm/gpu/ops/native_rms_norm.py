"""NativeRMSNorm: the norm of rows or of parts of them, fused with the residual addition."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncllm.gpu.ops.program import DTYPES, parameter, rows_of
from asyncllm.gpu.ops.recorder import Recorder
from asyncllm.native.context import Context, fail
from asyncllm.native.interface import ARGS


class NativeRMSNorm:
    """Root mean square norm in float32.

    It is rounded to the dtype of ``x`` before a weight of that dtype, but after a float32 weight.
    """

    def __init__(
        self, context: Context, weight: Tensor, eps: float, multiplier: float = 1.0,
        scale: float = 1.0,
    ) -> None:  # fmt: skip
        self.context, self.weight, self.eps = context, parameter(weight), eps
        self.width, self.multiplier, self.scale = weight.shape[0], multiplier, scale
        self.wide = weight.dtype == torch.float32

    def __call__(self, x: Tensor) -> Tensor:
        return self._norm(x, None) if x.dim() == 2 else self._norm_parts(x)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        residual = rows_of(residual, x.dtype)
        return self._norm(x, residual), residual

    def _norm_parts(self, x: Tensor) -> Tensor:
        """The norm of each part of ``x [T, parts, width]``."""
        tokens, parts, width = x.shape
        if not x.is_contiguous() or width != self.width:
            raise ValueError(
                f"native rms_norm: x is {tuple(x.shape)} with strides {x.stride()}, expected "
                f"contiguous parts of {self.width} columns"
            )
        if (recorder := self.context.recorder) is None:
            return self._norm(x.view(-1, width), None).view(x.shape)
        return self._record(recorder, x.view(tokens, -1), None, parts).view(x.shape)

    def _norm(self, x: Tensor, residual: Tensor | None) -> Tensor:
        weight, context = self.weight, self.context
        x = rows_of(x, x.dtype if self.wide else weight.dtype)
        rows, width = x.shape
        if width != self.width or (residual is not None and residual.shape != x.shape):
            raise ValueError(
                f"native rms_norm: x is {tuple(x.shape)}, expected {self.width} columns and the "
                "residual's shape"
            )
        if (recorder := context.recorder) is not None:
            return self._record(recorder, x, residual)
        out = x.new_empty((rows, width))
        status = context.functions.rms_norm(
            context.handle, x.data_ptr(), x.stride(0),
            None if residual is None else residual.data_ptr(),
            0 if residual is None else residual.stride(0), weight.data_ptr(),
            DTYPES[weight.dtype], self.eps, self.multiplier, self.scale, out.data_ptr(), rows,
            width, DTYPES[x.dtype],
        )  # fmt: skip
        if status:
            fail("rms_norm", status)
        return out

    def _record(
        self, recorder: Recorder, x: Tensor, residual: Tensor | None, parts: int = 1
    ) -> Tensor:
        out, weight = recorder.empty(x, parts * self.width), self.weight
        args = ARGS["rms_norm"](
            x_stride=x.stride(0) // parts,
            residual_stride=0 if residual is None else residual.stride(0),
            weight=weight.data_ptr(), width=self.width, parts=parts, eps=self.eps,
            multiplier=self.multiplier, scale=self.scale,
            dtype=DTYPES[x.dtype], weight_dtype=DTYPES[weight.dtype],
        )  # fmt: skip
        tensors = {"x": x, "out": out} | ({} if residual is None else {"residual": residual})
        recorder.add("rms_norm", x, args, tensors, [weight])
        return out
