"""ExpertsConfig: configuration of a model's mixture-of-experts layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class RoutingConfig:
    """Rules that choose and weight a token's experts from the router's logits.

    Attributes:
        top_k: number of experts per token.
        scoring: function from logits to scores; "softmax" is over all experts.
        renormalise: whether to divide the routing weights of a token by their sum.
        min_weight_sum: lower bound of the sum by which ``renormalise`` divides.
        scale: factor of the routing weights after renormalisation.
        num_groups: number of groups of experts, all of equal size.
        top_groups: number of groups from which a token's experts are chosen: those whose two best
            scores have the greatest sum.
        has_correction_bias: whether the router has a bias per expert that is added to the scores
            to choose experts, but not to compute routing weights.
        correction_rows: first dimension of the correction bias in a file, if it has two dimensions.
        has_bias: whether the router's logits have a bias.
        is_float32: whether the router's weights and logits are in float32.
        has_expert_scale: whether each expert has a factor, by which its routing weight is
            multiplied last.
    """

    num_experts: int
    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalise: bool = False
    min_weight_sum: float = 0.0
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    has_correction_bias: bool = False
    correction_rows: int | None = None
    has_bias: bool = False
    is_float32: bool = False
    has_expert_scale: bool = False


@dataclass(frozen=True, slots=True)
class ActivationConfig:
    """Activation of experts, one of three:

    - by default ``silu(gate) * up``;
    - with ``gelu``: ``gelu_tanh(gate) * up``;
    - with a ``limit``, gpt-oss's clamped SwiGLU: ``(up + 1) * gate * sigmoid(alpha * gate)``, with
      ``gate`` clamped to at most ``limit`` and ``up`` to ``[-limit, limit]``.
    """

    limit: float | None = None
    alpha: float = 1.702
    gelu: bool = False


@dataclass(frozen=True, slots=True)
class ExpertsTensorNames:
    """Names of the tensors of a layer's experts, which differ between families.

    All are without the prefix ``model.layers.N.``.

    Attributes:
        router: name of the router. In files with fused experts it may also be "mlp.gate".
        experts: module that contains one module per expert; None if files only have fused experts.
        projections: names of an expert's gate, up and down projections.
        fused_experts: module that contains the fused ``gate_up_proj`` and ``down_proj`` of all
            experts.
        is_transposed: whether fused tensors are ``[experts, in, out]``, with gate and up
            interleaved.
        correction_bias: the router's correction bias.
        shared_expert: the shared expert.
    """

    router: str = "mlp.gate"
    experts: str | None = "mlp.experts"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    fused_experts: str = "mlp.experts"
    is_transposed: bool = False
    correction_bias: str = "mlp.gate.e_score_correction_bias"
    shared_expert: str = "mlp.shared_experts"


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Configuration of the layers with experts.

    Attributes:
        layers: one entry per layer: whether it has experts.
        intermediate_size: intermediate size of one expert.
        shared_expert_size: intermediate size of the shared expert, which every token passes
            through; 0 for none.
        has_shared_expert_gate: whether the shared expert's output is multiplied by
            ``sigmoid(logit)``; a projection of the hidden state to one number gives the logit.
        has_bias: whether the experts' projections have biases.
        parallel_to_mlp: whether layers with experts also have an ordinary MLP. If so, the MLP, the
            router and the experts all read the residual, each through its own norm. Otherwise the
            experts replace the MLP.
    """

    layers: tuple[bool, ...]
    routing: RoutingConfig
    intermediate_size: int
    activation: ActivationConfig = ActivationConfig()
    shared_expert_size: int = 0
    has_shared_expert_gate: bool = False
    has_bias: bool = False
    parallel_to_mlp: bool = False
    names: ExpertsTensorNames = ExpertsTensorNames()
