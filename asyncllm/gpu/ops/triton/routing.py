"""TritonRouting: the routing of ``gpu/ops/routing.py``, in Triton."""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright takes a Triton kernel for a plain function, and would reject ``kernel[grid]``.

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.checkpoint.experts_config import RoutingConfig
from asyncllm.gpu.ops.base import Linear
from asyncllm.gpu.ops.routing import RouterWeights


@triton.jit
def routing_kernel(
    ids,
    weights,
    logits,
    correction_bias,
    expert_scale,
    stride_logits,
    weight_scale,
    min_weight_sum,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr,
):
    """Chooses a token's top_k experts and their weights; grid ``(rows,)``.

    Of experts with equal scores the one with the smaller id is chosen first. ``expert_scale`` and
    ``correction_bias`` may be None. Unless ``min_weight_sum`` is None, the weights are divided by
    their sum, or by ``min_weight_sum`` if that is larger.
    """
    BLOCK: tl.constexpr = triton.next_power_of_2(NUM_EXPERTS)
    BLOCK_K: tl.constexpr = triton.next_power_of_2(TOP_K)
    row = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK)
    real = experts < NUM_EXPERTS
    logit = tl.load(logits + row * stride_logits + experts, mask=real, other=-float("inf"))
    logit = logit.to(tl.float32)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logit))
    else:
        scores = tl.exp(logit - tl.max(logit, 0))
        scores = scores / tl.sum(scores, 0)
    choice = scores
    if correction_bias is not None:
        choice += tl.load(correction_bias + experts, mask=real, other=0.0)
    # Choose NaN scores first, as torch.topk does, so that NaN reaches the output. If they stayed
    # NaN, they would equal no maximum, and the expert's id could be invalid.
    choice = tl.where(choice == choice, choice, float("inf"))
    choice = tl.where(real, choice, -float("inf"))
    places = tl.arange(0, BLOCK_K)
    chosen = tl.zeros((BLOCK_K,), tl.float32)
    found = tl.zeros((BLOCK_K,), tl.int32)
    left = real
    for place in range(TOP_K):
        best = tl.max(tl.where(left, choice, -float("inf")), 0)
        expert = tl.min(tl.where(left & (choice == best), experts, BLOCK), 0)
        score = tl.sum(tl.where(experts == expert, scores, 0.0), 0)
        chosen = tl.where(places == place, score, chosen)
        found = tl.where(places == place, expert, found)
        left = left & (experts != expert)
    if min_weight_sum is not None:
        total = tl.sum(chosen, 0)
        chosen = chosen / tl.where(total < min_weight_sum, min_weight_sum, total)
    chosen *= weight_scale
    if expert_scale is not None:
        chosen *= tl.load(expert_scale + found)
    wanted = places < TOP_K
    tl.store(ids + row * TOP_K + places, found, mask=wanted)
    tl.store(weights + row * TOP_K + places, chosen, mask=wanted)


class TritonRouting:
    """``Routing`` by a Triton kernel, for models without groups of experts.

    Args:
        router: linear layer that computes the logits.
    """

    def __init__(self, config: RoutingConfig, weights: RouterWeights, router: Linear) -> None:
        self.config, self.router, self.dtype = config, router, weights.linear.values.dtype
        self.correction = None if weights.correction is None else weights.correction.float()
        self.expert_scale = weights.expert_scale

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        config, (rows, _) = self.config, x.shape
        logits = self.router(x.to(self.dtype))
        ids = x.new_empty((rows, config.top_k), dtype=torch.int32)
        weights = x.new_empty((rows, config.top_k), dtype=torch.float32)
        if rows:
            routing_kernel[(rows,)](
                ids,
                weights,
                logits,
                self.correction,
                self.expert_scale,
                logits.stride(0),
                config.scale,
                config.min_weight_sum if config.renormalise else None,
                NUM_EXPERTS=config.num_experts,
                TOP_K=config.top_k,
                SIGMOID=config.scoring == "sigmoid",
                num_warps=1,
            )
        return ids, weights
