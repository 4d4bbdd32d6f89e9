"""TritonOps: the op set on CUDA."""

from __future__ import annotations

from torch import Tensor

from asyncllm.checkpoint.experts_config import ActivationConfig, RoutingConfig
from asyncllm.checkpoint.linear_attention_config import LinearAttentionConfig
from asyncllm.gpu.batch.step_inputs import StepInputs
from asyncllm.gpu.ops.base import AttentionShape
from asyncllm.gpu.ops.experts import ExpertsWeights
from asyncllm.gpu.ops.gated_delta import DeltaBiases
from asyncllm.gpu.ops.routing import RouterWeights, Routing
from asyncllm.gpu.ops.torch_ops import TorchOps
from asyncllm.gpu.ops.triton.activation import gelu_mul, sigmoid_mul, silu_mul, softcap
from asyncllm.gpu.ops.triton.causal_conv import TritonCausalConv
from asyncllm.gpu.ops.triton.decode_inputs import decode_inputs
from asyncllm.gpu.ops.triton.experts import TritonExperts
from asyncllm.gpu.ops.triton.gated_delta import TritonGatedDelta
from asyncllm.gpu.ops.triton.gated_norm import TritonGatedNorm
from asyncllm.gpu.ops.triton.norm import TritonRMSNorm
from asyncllm.gpu.ops.triton.rope_cache import TritonRope, TritonRopeAndCache
from asyncllm.gpu.ops.triton.routing import TritonRouting
from asyncllm.gpu.ops.triton.sampling import sample
from asyncllm.gpu.ops.triton.state_rows import TritonStateRows
from asyncllm.gpu.ops.triton.tuning import SMALL_GROUP_ROWS


class TritonOps(TorchOps):
    """Fused kernels for memory-bound ops, and matrix products by torch, except those of experts.

    Call ``check_triton`` before importing this module.
    """

    name = "triton"
    silu_mul = staticmethod(silu_mul)
    gelu_mul = staticmethod(gelu_mul)
    sigmoid_mul = staticmethod(sigmoid_mul)
    softcap = staticmethod(softcap)
    decode_inputs = staticmethod(decode_inputs)
    sample = staticmethod(sample)

    def routing(self, config: RoutingConfig, weights: RouterWeights) -> Routing:
        # The kernel does not choose among groups of experts.
        if config.num_groups > 1:
            return super().routing(config, weights)
        return TritonRouting(config, weights, self.make_linear(weights.rows))

    def make_experts(self, weights: ExpertsWeights, config: ActivationConfig) -> TritonExperts:
        return TritonExperts(weights, config)

    def state_rows(self, step: StepInputs) -> TritonStateRows:
        return TritonStateRows.of(step)

    def causal_conv(self, weight: Tensor) -> TritonCausalConv:
        return TritonCausalConv(weight)

    def gated_delta(self, shape: LinearAttentionConfig, biases: DeltaBiases) -> TritonGatedDelta:
        return TritonGatedDelta(shape, biases)

    def gated_norm(self, weight: Tensor, eps: float) -> TritonGatedNorm:
        return TritonGatedNorm(weight, eps)

    def expert_tokens(self, num_experts: int, top_k: int) -> tuple[int, ...]:
        return (SMALL_GROUP_ROWS * num_experts // top_k + 1,)

    def rms_norm(
        self, weight: Tensor, eps: float, multiplier: float = 1.0, scale: float = 1.0
    ) -> TritonRMSNorm:
        return TritonRMSNorm(weight, eps, multiplier, scale)

    def rope(self, shape: AttentionShape, norm: Tensor | None, eps: float) -> TritonRope:
        return TritonRope(shape, norm, eps)

    def rope_and_cache(
        self,
        shape: AttentionShape,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        v_norm: Tensor | None = None,
    ) -> TritonRopeAndCache:
        return TritonRopeAndCache(shape, q_norm, k_norm, eps, v_norm)

    def rotary(self, table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns table and positions: the kernel looks the rows up."""
        return table, positions
