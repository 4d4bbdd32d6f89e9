"""ExpertsMLP: a mixture of experts in the place of an MLP, and its weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from asyncllm.checkpoint.experts_config import ExpertsConfig
from asyncllm.gpu.models.layers import NormedMLP
from asyncllm.gpu.models.parameter import Parameter, StackLayout
from asyncllm.gpu.models.scope import Scope
from asyncllm.gpu.ops.base import Linear, RMSNorm
from asyncllm.gpu.ops.experts import Experts, ExpertsWeights
from asyncllm.gpu.ops.linear_weights import LinearWeights
from asyncllm.gpu.ops.routing import RouterWeights, Routing


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


def build_experts(scope: Scope, config: ExpertsConfig) -> ExpertsMLP:
    """The experts of a layer, with the MLP that all tokens share where there is one."""
    ops, names, routing = scope.ops, config.names, config.routing
    hidden, count, inner = scope.model.hidden_size, routing.num_experts, config.intermediate_size
    rows = scope.linear_weights(
        _router(scope, config, "weight", hidden),
        _router(scope, config, "bias") if routing.bias else None,
    )
    correction = scale = None
    if routing.correction:
        layout = None if routing.correction_rows is None else StackLayout(routing.correction_rows)
        name = names.correction
        correction = scope.tensor("correction", name, (count,), "float32", layout)
    if routing.expert_scale:
        scale = scope.tensor("expert_scale", names.expert_scale, (count,), "float32")
    gate, up, down = names.parts
    mlp = ExpertsMLP(
        ops.routing(routing, RouterWeights(rows, correction, scale)),
        ops.experts(
            ExpertsWeights(
                count,
                _stack(scope, config, "gate_up", ((gate, inner), (up, inner)), hidden),
                _stack(scope, config, "down", ((down, hidden),), inner),
            ),
            config.activation,
            routing.top_k,
        ),
    )
    if config.shared_gate:
        mlp.gate = scope.linear("shared.gate", ((names.shared_gate, 1),), hidden)
    if config.shared_size:
        mlp.shared = scope.at("shared.", f"{names.shared}.").gated_mlp(config.shared_size)
    return mlp


def build_experts_beside(
    scope: Scope, config: ExpertsConfig, size: int
) -> tuple[NormedMLP, ExpertsBeside]:
    """An MLP of intermediate size ``size``, and the experts beside it."""
    model, names = scope.model, config.names
    experts = build_experts(scope, config)
    router = scope.norm_weight("router.norm", names.router_norm) * model.hidden_size**-0.5
    router_norm = scope.ops.rms_norm(router, model.rms_norm_eps)
    norm = scope.norm("experts.norm", names.norm)
    mixed_norm = scope.norm("experts.mixed_norm", names.mixed_norm)
    mlp_norm = scope.norm("experts.mlp_norm", names.mlp_norm)
    mlp = scope.at("", f"{model.names.mlp}.").gated_mlp(size)
    assert model.names.mlp_norm is not None
    whole = scope.norm("mlp_norm", model.names.mlp_norm)
    return NormedMLP(mlp, mlp_norm), ExpertsBeside(router_norm, norm, experts, mixed_norm, whole)


def _router(scope: Scope, config: ExpertsConfig, kind: str, *width: int) -> Parameter:
    """Weight or bias of the router, as it is: rounded weights would choose other experts."""
    names, routing = config.names, config.routing
    count, dtype = routing.num_experts, "float32" if routing.float32 else None
    own, fused = (
        scope.parameter(f"router.{kind}", (count, *width), ((f"{router}.{kind}", count),), dtype)
        for router in (names.router, names.fused_router)
    )
    return replace(own, other=fused)


def _stack(
    scope: Scope, config: ExpertsConfig, name: str, parts: tuple[tuple[str, int], ...], width: int
) -> LinearWeights:
    """A linear layer of all experts, one below the other: from a tensor per expert and part, or
    from one tensor."""
    names, count = config.names, config.routing.num_experts
    layout = StackLayout(count, names.transposed, names.transposed and name == "gate_up")
    rows = count * sum(each for _, each in parts)
    kinds = (("weight", "", (rows, width)), ("bias", "_bias", (rows,)))
    found = []
    for kind, suffix, shape in kinds if config.bias else kinds[:1]:
        own, linear = f"experts.{name}.{kind}", kind == "weight"
        fused = ((f"{names.fused}.{name}_proj{suffix}", rows),)
        parameter = scope.parameter(own, shape, fused, layout=layout, linear=linear)
        if names.experts is not None:
            single = [
                (f"{names.experts}.{expert}.{part}.{kind}", each)
                for expert in range(count)
                for part, each in parts
            ]
            apart = scope.parameter(own, shape, single, linear=linear)
            parameter = replace(apart, other=parameter)
        found.append(parameter)
    return scope.linear_weights(*found)
