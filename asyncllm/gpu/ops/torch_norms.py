"""Root mean square norms in plain torch, and their substitute in blocks without one."""

from __future__ import annotations

import torch
from torch import Tensor


class TorchResidualAdd:
    """Replaces the norm of a block that has none: ``add`` only adds to the residual."""

    def __init__(self, multiplier: float, scale: float) -> None:
        self.multiplier, self.scale = multiplier, scale

    def __call__(self, x: Tensor) -> Tensor:
        return x

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        residual.add_(x, alpha=self.multiplier)
        if self.scale != 1.0:
            residual.mul_(self.scale)
        return self(residual), residual


class TorchRMSNorm(TorchResidualAdd):
    """Norm in float32, rounded to the model's dtype before the weight, as in Llama."""

    def __init__(
        self, weight: Tensor, eps: float, multiplier: float = 1.0, scale: float = 1.0
    ) -> None:
        super().__init__(multiplier, scale)
        self.weight, self.share = weight, 1.0 / weight.shape[-1]
        self.eps = torch.full((1,), eps, dtype=torch.float32, device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        return self._normed(x).to(x.dtype).mul_(self.weight)

    def _normed(self, x: Tensor) -> Tensor:
        wide = x.float()
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        return wide * torch.addcmul(self.eps, norm, norm, value=self.share).rsqrt_()


class TorchWideRMSNorm(TorchRMSNorm):
    """Norm in float32, rounded after its float32 weight, as in Gemma and OLMo 2."""

    def __call__(self, x: Tensor) -> Tensor:
        return self._normed(x).mul_(self.weight).to(x.dtype)


def torch_norm(
    weight: Tensor, eps: float, multiplier: float = 1.0, scale: float = 1.0
) -> TorchRMSNorm:
    """Makes the norm that fits its weight's dtype: float32 weights multiply before rounding."""
    kind = TorchWideRMSNorm if weight.dtype == torch.float32 else TorchRMSNorm
    return kind(weight, eps, multiplier, scale)
