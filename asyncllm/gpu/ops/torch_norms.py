"""TorchRMSNorm, TorchResidualAdd: norms in plain torch, with the residual addition."""

from __future__ import annotations

import torch
from torch import Tensor


class TorchResidualAdd:
    """Substitute for the norm in blocks without a norm; ``add_and_norm`` only adds."""

    def __init__(self, multiplier: float = 1.0, scale: float = 1.0) -> None:
        self.multiplier, self.scale = multiplier, scale

    def __call__(self, x: Tensor) -> Tensor:
        return x

    def add_and_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        residual.add_(x, alpha=self.multiplier)
        if self.scale != 1.0:
            residual.mul_(self.scale)
        return self(residual), residual


class TorchRMSNorm(TorchResidualAdd):
    """Norm in float32, rounded before the multiplication by its weight, as in Llama."""

    def __init__(
        self, weight: Tensor, eps: float, multiplier: float = 1.0, scale: float = 1.0
    ) -> None:
        super().__init__(multiplier, scale)
        self.weight, self.inverse_width = weight, 1.0 / weight.shape[-1]
        self.eps = torch.full((1,), eps, dtype=torch.float32, device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        return self._norm_in_float32(x).to(x.dtype).mul_(self.weight)

    def _norm_in_float32(self, x: Tensor) -> Tensor:
        wide = x.float()
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        return wide * torch.addcmul(self.eps, norm, norm, value=self.inverse_width).rsqrt_()


class TorchFloat32WeightRMSNorm(TorchRMSNorm):
    """Norm in float32, rounded after the multiplication by its weight, as in Gemma and OLMo 2."""

    def __call__(self, x: Tensor) -> Tensor:
        return self._norm_in_float32(x).mul_(self.weight).to(x.dtype)


def make_torch_norm(
    weight: Tensor, eps: float, multiplier: float = 1.0, scale: float = 1.0
) -> TorchRMSNorm:
    """Makes the norm for the weight's dtype, float32 or the model's.

    The norm is over the last dimension of ``[T, H]`` or ``[T, parts, H]``.

    Args:
        multiplier: factor on ``x`` in ``RMSNorm.add_and_norm``.
        scale: factor on the rounded sum in ``RMSNorm.add_and_norm``.
    """
    kind = TorchFloat32WeightRMSNorm if weight.dtype == torch.float32 else TorchRMSNorm
    return kind(weight, eps, multiplier, scale)
