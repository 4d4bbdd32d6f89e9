"""ExpertsConfig: a mixture of experts in a model's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class RoutingConfig:
    """How a token's experts follow from the router's logits.

    Attributes:
        top_k: experts of a token.
        scoring: of the logits; "softmax" is over all experts.
        renormalise: the weights of a token are divided by their sum.
        least_sum: that divides them where their sum is less.
        scale: factor on the weights behind that.
        num_groups, top_groups: experts are chosen from the groups, equally large, whose two best
            scores have the greatest sums; one group is all experts.
        correction: a bias per expert is added to the scores that choose, not to those that weigh.
        correction_rows: its first dimension in a file, where it has two.
        bias: the router's own, on the logits.
        float32: logits are computed in float32, from weights in float32.
        expert_scale: a factor per expert on its weights, behind all else.
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
    """SiLU of the gate times up, or with ``gelu`` GELU by tanh; with a limit gpt-oss's clamped
    SwiGLU, ``(up + 1) * gate * sigmoid(alpha * gate)``, gate at most and up within plus and minus
    it."""

    limit: float | None = None
    alpha: float = 1.702
    gelu: bool = False


@dataclass(frozen=True, slots=True)
class ExpertsNames:
    """Tensor names of a layer with experts, behind ``model.layers.N.``.

    Attributes:
        experts: what numbered experts are in; None where there are fused ones alone.
        parts: of an expert: gate, up, down.
        fused: what has all experts' ``gate_up_proj`` and ``down_proj``, in files that fuse them.
        fused_router: the router's name in those.
        transposed: fused tensors are ``[experts, in, out]``, and gate and up take turns.
        correction, expert_scale, shared, shared_gate: of what not every family has.
        router_norm, norm, mixed_norm, mlp_norm: of experts beside an MLP: before the router, before
            and behind the experts, and behind the MLP.
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
        intermediate_size: of one expert.
        shared_size: of the MLP that all tokens have beside their experts; 0 is none.
        shared_gate: that is multiplied by the sigmoid of a logit of its own.
        bias: on the experts' projections.
        beside: the layers have their MLP as well, of which the experts are independent: all of them
            read the residual, behind norms of their own.
    """

    layers: tuple[bool, ...]
    routing: RoutingConfig
    intermediate_size: int
    activation: ActivationConfig = ActivationConfig()
    shared_size: int = 0
    shared_gate: bool = False
    bias: bool = False
    beside: bool = False
    names: ExpertsNames = ExpertsNames()
