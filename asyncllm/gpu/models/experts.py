"""ExpertsMLP: a mixture of experts in place of an MLP, and its construction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from asyncllm.checkpoint.experts_config import ExpertsConfig
from asyncllm.gpu.models.layers import PostNormBlock
from asyncllm.gpu.models.parameter import Parameter, StackLayout
from asyncllm.gpu.models.weight_scope import WeightScope
from asyncllm.gpu.ops.base import Linear, RMSNorm
from asyncllm.gpu.ops.experts import Experts, ExpertsWeights
from asyncllm.gpu.ops.linear_weights import LinearWeights
from asyncllm.gpu.ops.routing import RouterWeights, Routing


@dataclass(slots=True)
class ExpertsMLP:
    """Mixture of experts (Shazeer et al., 2017), with or without a shared expert.

    Attributes:
        shared_expert: the shared expert; None for a model without one.
        gate: projection to a logit, whose sigmoid multiplies the shared expert's output; None for
            no gate.
    """

    routing: Routing
    experts: Experts
    shared_expert: Callable[[Tensor], Tensor] | None = None
    gate: Linear | None = None

    def __call__(self, x: Tensor) -> Tensor:
        ids, weights = self.routing(x)
        if self.shared_expert is None:
            return self.experts(x, ids, weights)
        gate = None if self.gate is None else self.gate(x)
        return self.experts(x, ids, weights, self.shared_expert(x), gate)


@dataclass(slots=True)
class ExpertsBesideMLP:
    """Experts beside an MLP (Gemma 4), with the residual as their input.

    Attributes:
        router_norm, input_norm: norms of the residual before the router and before the experts.
        experts_output_norm: norm of the experts' output.
        sum_norm: norm of the sum of both outputs.
    """

    router_norm: RMSNorm
    input_norm: RMSNorm
    experts: ExpertsMLP
    experts_output_norm: RMSNorm
    sum_norm: RMSNorm

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """Run the experts on ``residual``, add the MLP's output ``x``, and normalise the sum.

        Shapes are ``[T, H]``.
        """
        ids, weights = self.experts.routing(self.router_norm(residual))
        mixed = self.experts.experts(self.input_norm(residual), ids, weights)
        return self.sum_norm.add_and_norm(self.experts_output_norm(mixed), x)[0]


def build_experts(scope: WeightScope, config: ExpertsConfig) -> ExpertsMLP:
    """Build a layer's experts, and its shared expert if it has one."""
    ops, names, routing = scope.ops, config.names, config.routing
    hidden, count, inner = scope.model.hidden_size, routing.num_experts, config.intermediate_size
    rows = scope.linear_weights(
        _router_parameter(scope, config, "weight", hidden),
        _router_parameter(scope, config, "bias") if routing.has_bias else None,
    )
    correction = scale = None
    if routing.has_correction_bias:
        layout = None if routing.correction_rows is None else StackLayout(routing.correction_rows)
        correction = scope.float32_vector("correction", count, names.correction_bias, layout=layout)
    if routing.has_expert_scale:
        scale = scope.float32_vector("expert_scale", count, "router.per_expert_scale")
    gate, up, down = names.projections
    mlp = ExpertsMLP(
        ops.routing(routing, RouterWeights(rows, correction, scale)),
        ops.experts(
            ExpertsWeights(
                count,
                _expert_weights(scope, config, "gate_up", ((gate, inner), (up, inner)), hidden),
                _expert_weights(scope, config, "down", ((down, hidden),), inner),
            ),
            config.activation,
            routing.top_k,
        ),
    )
    if config.has_shared_expert_gate:
        mlp.gate = scope.linear("shared.gate", (("mlp.shared_expert_gate", 1),), hidden)
    if config.shared_expert_size:
        mlp.shared_expert = scope.child("shared.", f"{names.shared_expert}.").gated_mlp(
            config.shared_expert_size
        )
    return mlp


def build_experts_beside_mlp(
    scope: WeightScope, config: ExpertsConfig, size: int
) -> tuple[PostNormBlock, ExpertsBesideMLP]:
    """Build an MLP of intermediate size ``size``, and the experts in parallel to it."""
    model, experts = scope.model, build_experts(scope, config)
    router = scope.norm_weight("router.norm", "router.scale", suffix="")
    router_norm = scope.ops.rms_norm(router * model.hidden_size**-0.5, model.rms_norm_eps)
    input_norm = scope.norm("experts.input_norm", "pre_feedforward_layernorm_2")
    output_norm = scope.norm("experts.output_norm", "post_feedforward_layernorm_2")
    mlp_norm = scope.norm("experts.mlp_norm", "post_feedforward_layernorm_1")
    mlp = scope.child("", f"{model.names.mlp}.").gated_mlp(size)
    assert model.names.mlp_norm is not None
    sum_norm = scope.norm("mlp_norm", model.names.mlp_norm)
    return PostNormBlock(mlp, mlp_norm), ExpertsBesideMLP(
        router_norm, input_norm, experts, output_norm, sum_norm
    )


def _router_parameter(
    scope: WeightScope, config: ExpertsConfig, kind: str, *width: int
) -> Parameter:
    """The router's weight or bias, never quantised: rounding would change the routing."""
    names, routing = config.names, config.routing
    dtype = "float32" if routing.is_float32 else None
    own, fused = (
        scope.parameter(
            "router", ((name, routing.num_experts),), *width, suffix=f".{kind}", dtype=dtype
        )
        for name in (names.router, "mlp.gate")
    )
    return replace(own, alternative=fused)


def _expert_weights(
    scope: WeightScope,
    config: ExpertsConfig,
    name: str,
    parts: tuple[tuple[str, int], ...],
    width: int,
) -> LinearWeights:
    """All experts' weights for linear layer ``name``, stored separately or in a fused tensor."""
    names, count, parameters = config.names, config.routing.num_experts, []
    layout = StackLayout(count, names.is_transposed, names.is_transposed and name == "gate_up")
    modules = [(f"{names.experts}.{i}.{part}", rows) for i in range(count) for part, rows in parts]
    weight = scope.parameter(f"experts.{name}", modules, width, is_linear=True)
    bias = scope.parameter(f"experts.{name}", modules, suffix=".bias") if config.has_bias else None
    for own, suffix in ((weight, ""), (bias, "_bias")):
        if own is not None:
            stored = f"{scope.stored_prefix}{names.fused_experts}.{name}_proj{suffix}"
            fused = replace(own, parts=((stored, own.shape[0]),), layout=layout)
            parameters.append(fused if names.experts is None else replace(own, alternative=fused))
    return scope.linear_weights(*parameters)
