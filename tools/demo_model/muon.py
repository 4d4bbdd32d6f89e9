"""The Muon optimiser, with matrices of one shape handled together."""

from __future__ import annotations

import torch
from torch import Tensor


def orthogonalise(stack: Tensor, rounds: int = 5) -> Tensor:
    """Bring the singular values of a stack of wide matrices near one (Newton-Schulz)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = stack.bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(rounds):
        outer = x @ x.mT
        x = a * x + (b * outer + c * outer @ outer) @ x
    return x.float()


class Muon:
    """Momentum whose matrix steps are orthogonalised."""

    def __init__(self, weights: list[Tensor], momentum: float = 0.95) -> None:
        self.momentum = momentum
        groups: dict[tuple[int, int], list[Tensor]] = {}
        for weight in weights:
            groups.setdefault((min(weight.shape), max(weight.shape)), []).append(weight)
        self.groups = list(groups.values())
        self.states = [
            torch.zeros(len(group), *shape, device=group[0].device)
            for shape, group in zip(groups, self.groups, strict=True)
        ]

    @torch.no_grad()
    def step(self, rate: float, decay: float = 0.01) -> None:
        """One step on every matrix from its gradient."""
        for group, state in zip(self.groups, self.states, strict=True):
            wide = [weight.shape[0] <= weight.shape[1] for weight in group]
            grads = torch.stack([
                weight.grad if flat else weight.grad.mT
                for weight, flat in zip(group, wide, strict=True)
            ])
            state.lerp_(grads, 1 - self.momentum)
            steps = orthogonalise(grads.lerp(state, self.momentum))
            for weight, flat, step in zip(group, wide, steps, strict=True):
                scale = max(1.0, weight.shape[0] / weight.shape[1]) ** 0.5
                weight.mul_(1 - rate * decay)
                weight.add_(step if flat else step.mT, alpha=-rate * scale)
