"""ExpertsMLP: a mixture of experts in the place of an MLP, and its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from asyncllm.checkpoint.experts_config import ExpertsConfig
from asyncllm.gpu.models.parameter import Parameter, StackLayout
from asyncllm.gpu.ops.base import Linear, RMSNorm
from asyncllm.gpu.ops.experts import Experts
from asyncllm.gpu.ops.routing import Routing


@dataclass(slots=True)
class ExpertsMLP:
    """Each token's experts by the weights of its routing (Shazeer et al., 2017), and beside them an
    MLP that all tokens share.

    Attributes:
        gate: a logit, by whose sigmoid ``shared`` is multiplied.
    """

    routing: Routing
    experts: Experts
    shared: Callable[[Tensor], Tensor] | None = None
    gate: Linear | None = None

    def __call__(self, x: Tensor) -> Tensor:
        ids, weights = self.routing(x)
        if self.shared is None:
            return self.experts(x, ids, weights)
        gate = None if self.gate is None else self.gate(x)
        return self.experts(x, ids, weights, self.shared(x), gate)


@dataclass(slots=True)
class ExpertsBeside:
    """Experts of the residual beside an MLP (Gemma 4), and the norm of the sum of both.

    Attributes:
        router_norm, input_norm: of the residual, for the router and for the experts.
        mixed_norm: behind the experts.
    """

    router_norm: RMSNorm
    input_norm: RMSNorm
    experts: ExpertsMLP
    mixed_norm: RMSNorm
    norm: RMSNorm

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """Args: x: ``[T, H]``, what the MLP makes of the residual."""
        ids, weights = self.experts.routing(self.router_norm(residual))
        mixed = self.experts.experts(self.input_norm(residual), ids, weights)
        return self.norm.add(self.mixed_norm(mixed), x)[0]


def expert_parameters(experts: ExpertsConfig, hidden: int, layer: int) -> Iterator[Parameter]:
    """The parameters of a layer's experts, without those of the shared MLP."""
    here, there = f"layers.{layer}.", f"model.layers.{layer}."
    names, routing, inner = experts.names, experts.routing, experts.intermediate_size
    count, dtype = routing.num_experts, "float32" if routing.float32 else None
    kinds = {"weight": (count, hidden)} | ({"bias": (count,)} if routing.bias else {})
    for kind, shape in kinds.items():
        own, fused = (
            Parameter(f"{here}router.{kind}", shape, ((f"{there}{router}.{kind}", count),), dtype)
            for router in (names.router, names.fused_router)
        )
        yield Parameter(own.name, own.shape, own.parts, dtype, other=fused)
    if routing.correction:
        layout = None if routing.correction_rows is None else StackLayout(routing.correction_rows)
        tensor = ((there + names.correction, count),)
        yield Parameter(f"{here}correction", (count,), tensor, "float32", layout)
    if routing.expert_scale:
        tensor = ((there + names.expert_scale, count),)
        yield Parameter(f"{here}expert_scale", (count,), tensor, "float32")
    gate, up, down = names.parts
    yield from _stack(experts, layer, "gate_up", 2 * inner, hidden, ((gate, inner), (up, inner)))
    yield from _stack(experts, layer, "down", hidden, inner, ((down, hidden),))


def _stack(
    experts: ExpertsConfig,
    layer: int,
    name: str,
    rows: int,
    width: int,
    parts: tuple[tuple[str, int], ...],
) -> Iterator[Parameter]:
    """A linear layer of all experts, one below the other: from a tensor per expert and part, or
    from one tensor."""
    names, count = experts.names, experts.routing.num_experts
    there = f"model.layers.{layer}."
    for kind, shape in {"weight": (count * rows, width), "bias": (count * rows,)}.items():
        if kind == "bias" and not experts.bias:
            continue
        own = f"layers.{layer}.experts.{name}.{kind}"
        suffix = "" if kind == "weight" else "_bias"
        halves = names.transposed and name == "gate_up"
        fused = Parameter(
            own,
            shape,
            ((f"{there}{names.fused}.{name}_proj{suffix}", count * rows),),
            layout=StackLayout(count, names.transposed, halves),
        )
        single = tuple(
            (f"{there}{names.experts}.{expert}.{part}.{kind}", part_rows)
            for expert in range(count)
            for part, part_rows in parts
        )
        yield fused if names.experts is None else Parameter(own, shape, single, other=fused)
