"""ExpertsConfig: a mixture of experts in a model's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class RoutingConfig:
    """Rules that choose and weight a token's experts from the router's logits.

    Attributes:
        top_k: number of experts of a token.
        scoring: function of the logits; "softmax" is over all experts.
        renormalise: divide the weights of a token by their sum.
        least_sum: lower bound of that sum.
        scale: factor on the weights after renormalisation.
        num_groups, top_groups: number of equal groups of experts, and of the groups to choose from:
            those with the greatest sums of their two best scores.
        correction: a bias per expert is added to the scores for choosing, not for the weights.
        correction_rows: first dimension of that bias in a file, if it has two.
        bias: the router has a bias on the logits.
        float32: logits are computed in float32, from weights in float32.
        expert_scale: a factor per expert on its weights, after everything else.
    """

    num_experts: int
    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalise: bool = False
    least_sum: float = 0.0
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    correction: bool = False
    correction_rows: int | None = None
    bias: bool = False
    float32: bool = False
    expert_scale: bool = False


@dataclass(frozen=True, slots=True)
class ActivationConfig:
    """Activation of experts: ``silu(gate) * up``; with ``gelu``, ``gelu_tanh(gate) * up``. With a
    limit, gpt-oss's clamped SwiGLU: ``(up + 1) * gate * sigmoid(alpha * gate)``, gate at most
    ``limit`` and up within ``±limit``."""

    limit: float | None = None
    alpha: float = 1.702
    gelu: bool = False


@dataclass(frozen=True, slots=True)
class ExpertsNames:
    """Tensor names of a layer with experts, without the prefix ``model.layers.N.``.

    Attributes:
        experts: module of the numbered experts; None if files only have fused ones.
        parts: an expert's projections: gate, up, down.
        fused: module of all experts' ``gate_up_proj`` and ``down_proj``, in files that fuse them.
        fused_router: the router's name in files with fused experts.
        transposed: fused tensors are ``[experts, in, out]``, with gate and up interleaved.
        correction, expert_scale, shared, shared_gate: names that only some families have.
        router_norm, norm, mixed_norm, mlp_norm: norms of layers with experts beside an MLP: before
            the router, before and after the experts, and after the MLP.
    """

    router: str = "mlp.gate"
    experts: str | None = "mlp.experts"
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    fused: str = "mlp.experts"
    fused_router: str = "mlp.gate"
    transposed: bool = False
    correction: str = "mlp.gate.e_score_correction_bias"
    expert_scale: str = "router.per_expert_scale"
    shared: str = "mlp.shared_experts"
    shared_gate: str = "mlp.shared_expert_gate"
    router_norm: str = "router.scale"
    norm: str = "pre_feedforward_layernorm_2"
    mixed_norm: str = "post_feedforward_layernorm_2"
    mlp_norm: str = "post_feedforward_layernorm_1"


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Experts in place of the MLP, or beside it, in the layers where ``layers[layer]`` is True.

    Attributes:
        intermediate_size: size of one expert.
        shared_size: size of the shared MLP, which every token passes beside its experts; 0 is none.
        shared_gate: the shared MLP's output is multiplied by the sigmoid of a logit of its own.
        bias: the experts' projections have biases.
        beside_mlp: the layers also have an ordinary MLP. MLP, router and experts all read the
            residual, each through a norm of its own.
    """

    layers: tuple[bool, ...]
    routing: RoutingConfig
    intermediate_size: int
    activation: ActivationConfig = ActivationConfig()
    shared_size: int = 0
    shared_gate: bool = False
    bias: bool = False
    beside_mlp: bool = False
    names: ExpertsNames = ExpertsNames()
