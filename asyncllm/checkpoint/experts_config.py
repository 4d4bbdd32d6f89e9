"""ExpertsConfig: a mixture of experts in a model's configuration, a row of EXPERTS per family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from asyncllm.checkpoint.config_file import ConfigFile

MAX_EXPERTS = 4096


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
        bias: the router's own, on the logits.
        float32: logits are computed in float32, from weights in float32.
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
    bias: bool = False
    float32: bool = False


@dataclass(frozen=True, slots=True)
class ActivationConfig:
    """SiLU of the gate times up; with a limit gpt-oss's clamped SwiGLU,
    ``(up + 1) * gate * sigmoid(alpha * gate)``, gate at most and up within plus and minus it."""

    limit: float | None = None
    alpha: float = 1.702


@dataclass(frozen=True, slots=True)
class ExpertsNames:
    """Tensor names of a layer with experts, behind ``model.layers.N.``.

    Attributes:
        parts: of an expert in ``experts``: gate, up, down.
        fused: the module that holds all experts' as ``gate_up_proj`` and ``down_proj``.
        fused_router: the router's name there.
        transposed: fused tensors are ``[experts, in, out]``, with gate and up taking turns.
        correction, shared, shared_gate: of what not every family has.
    """

    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    fused: str = "mlp.experts"
    fused_router: str = "mlp.gate"
    transposed: bool = False
    correction: str = "mlp.gate.e_score_correction_bias"
    shared: str = "mlp.shared_experts"
    shared_gate: str = "mlp.shared_expert_gate"


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Experts in place of the MLP, in the layers where ``layers[layer]`` is True.

    Attributes:
        intermediate_size: of one expert.
        shared_size: of the MLP that all tokens have beside their experts; 0 is none.
        shared_gate: that is multiplied by the sigmoid of a logit of its own.
        bias: on the experts' projections.
    """

    layers: tuple[bool, ...]
    routing: RoutingConfig
    intermediate_size: int
    activation: ActivationConfig = ActivationConfig()
    shared_size: int = 0
    shared_gate: bool = False
    bias: bool = False
    names: ExpertsNames = ExpertsNames()


def read_experts(config: ConfigFile, architecture: str, num_layers: int) -> ExpertsConfig | None:
    """The experts of an architecture; None for one without, or a model that has none of them.

    Raises:
        ModelLoadError: numbers that are out of bounds or do not fit each other, with the field,
            its value and what would be accepted.
    """
    row = EXPERTS.get(architecture)
    experts = None if row is None else row(config, num_layers)
    return experts if experts is not None and any(experts.layers) else None


def _counts(config: ConfigFile, *names: str) -> tuple[int, int]:
    """Experts of a layer, by the first of these fields that is there, and of a token."""
    name = next((name for name in names if name in config), names[0])
    count = config.integer(name, high=MAX_EXPERTS)
    top_k = config.integer("num_experts_per_tok", high=MAX_EXPERTS)
    if top_k > count:
        raise config.bad("num_experts_per_tok", f"at most {name}={count}")
    return count, top_k


def _sparse_layers(config: ConfigFile, num_layers: int) -> tuple[bool, ...]:
    """Of Qwen: every ``decoder_sparse_step``-th, but for ``mlp_only_layers``."""
    step = config.integer("decoder_sparse_step", 1)
    dense = config.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(
        type(layer) is not int or not 0 <= layer < num_layers for layer in dense
    ):
        raise config.bad("mlp_only_layers", f"a list of layers from 0 to {num_layers - 1}")
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers))


def _first_dense(config: ConfigFile, num_layers: int, default: int) -> tuple[bool, ...]:
    first = config.integer("first_k_dense_replace", default, low=0)
    return tuple(layer >= first for layer in range(num_layers))


def _groups(config: ConfigFile, count: int, top_k: int) -> tuple[int, int]:
    """``n_group`` and ``topk_group``, which have to leave ``top_k`` experts to choose from."""
    groups = config.integer("n_group", 1, high=count)
    if count % groups or (groups > 1 and count // groups < 2):
        raise config.bad("n_group", f"a divisor of n_routed_experts={count}, at most half of it")
    chosen = config.integer("topk_group", 1)
    if not -(-top_k // (count // groups)) <= chosen <= groups:
        raise config.bad(
            "topk_group",
            f"at least {-(-top_k // (count // groups))} groups of {count // groups} experts, "
            f"for num_experts_per_tok={top_k}, and at most n_group={groups}",
        )
    return groups, chosen


def _mixtral(config: ConfigFile, num_layers: int) -> ExpertsConfig:
    count, top_k = _counts(config, "num_local_experts")
    return ExpertsConfig(
        (True,) * num_layers,
        RoutingConfig(count, top_k, renormalise=True),
        config.integer("intermediate_size"),
        names=ExpertsNames(
            router="block_sparse_moe.gate",
            experts="block_sparse_moe.experts",
            parts=("w1", "w3", "w2"),
        ),
    )


def _qwen3_moe(config: ConfigFile, num_layers: int) -> ExpertsConfig:
    count, top_k = _counts(config, "num_experts", "num_local_experts")
    return ExpertsConfig(
        _sparse_layers(config, num_layers),
        RoutingConfig(count, top_k, renormalise=config.boolean("norm_topk_prob", False)),
        config.integer("moe_intermediate_size"),
    )


def _qwen2_moe(config: ConfigFile, num_layers: int) -> ExpertsConfig:
    count, top_k = _counts(config, "num_experts")
    return ExpertsConfig(
        _sparse_layers(config, num_layers),
        RoutingConfig(count, top_k, renormalise=config.boolean("norm_topk_prob", False)),
        config.integer("moe_intermediate_size"),
        shared_size=config.integer("shared_expert_intermediate_size"),
        shared_gate=True,
        names=ExpertsNames(shared="mlp.shared_expert"),
    )


def _olmoe(config: ConfigFile, num_layers: int) -> ExpertsConfig:
    count, top_k = _counts(config, "num_experts", "num_local_experts")
    return ExpertsConfig(
        (True,) * num_layers,
        RoutingConfig(count, top_k, renormalise=config.boolean("norm_topk_prob", False)),
        config.integer("intermediate_size"),
    )


def _sigmoid(config: ConfigFile, num_layers: int, **defaults: int) -> ExpertsConfig:
    """GLM-4.5 and dots1, whose routing is DeepSeek V3's (arXiv 2412.19437)."""
    count, top_k = _counts(config, "n_routed_experts", "num_local_experts")
    groups, chosen = _groups(config, count, top_k)
    size = config.integer("moe_intermediate_size")
    return ExpertsConfig(
        _first_dense(config, num_layers, defaults["first_dense"]),
        RoutingConfig(
            count,
            top_k,
            scoring="sigmoid",
            renormalise=config.boolean("norm_topk_prob", bool(defaults["renormalise"])),
            least_sum=1e-20,
            scale=config.number("routed_scaling_factor", 1.0, high=1e3, open_low=True),
            num_groups=groups,
            top_groups=chosen,
            correction=True,
            float32=True,
        ),
        size,
        shared_size=size * config.integer("n_shared_experts", 1, high=MAX_EXPERTS),
    )


def _dots1(config: ConfigFile, num_layers: int) -> ExpertsConfig:
    return _sigmoid(config, num_layers, first_dense=0, renormalise=False)


def _glm4_moe(config: ConfigFile, num_layers: int) -> ExpertsConfig:
    return _sigmoid(config, num_layers, first_dense=1, renormalise=True)


def _gpt_oss(config: ConfigFile, num_layers: int) -> ExpertsConfig:
    count, top_k = _counts(config, "num_local_experts", "num_experts")
    return ExpertsConfig(
        (True,) * num_layers,
        # A softmax of the logits of a token's experts is that of all, renormalised.
        RoutingConfig(count, top_k, renormalise=True, bias=True),
        config.integer("intermediate_size"),
        ActivationConfig(
            limit=config.number("swiglu_limit", 7.0, high=1e6, open_low=True),
            alpha=config.number("swiglu_alpha", 1.702, high=1e3, open_low=True),
        ),
        bias=True,
        names=ExpertsNames(router="mlp.router", fused_router="mlp.router", transposed=True),
    )


EXPERTS: Mapping[str, Callable[[ConfigFile, int], ExpertsConfig]] = {
    "Dots1ForCausalLM": _dots1,
    "Glm4MoeForCausalLM": _glm4_moe,
    "GptOssForCausalLM": _gpt_oss,
    "MixtralForCausalLM": _mixtral,
    "OlmoeForCausalLM": _olmoe,
    "Qwen2MoeForCausalLM": _qwen2_moe,
    "Qwen3MoeForCausalLM": _qwen3_moe,
}
