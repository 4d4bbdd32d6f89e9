"""TritonOps: the op set in Triton, for CUDA devices."""

from __future__ import annotations

from torch import Tensor

from asyncllm.checkpoint.experts_config import ActivationConfig, RoutingConfig
from asyncllm.gpu.ops.experts import ExpertsWeights
from asyncllm.gpu.ops.routing import RouterWeights, Routing
from asyncllm.gpu.ops.torch_ops import TorchOps
from asyncllm.gpu.ops.triton.activation import gelu_mul, sigmoid_mul, silu_mul, softcap
from asyncllm.gpu.ops.triton.causal_conv import TritonCausalConv
from asyncllm.gpu.ops.triton.decode_inputs import fill_decode_inputs
from asyncllm.gpu.ops.triton.experts import TritonExperts
from asyncllm.gpu.ops.triton.gated_delta import TritonGatedDelta
from asyncllm.gpu.ops.triton.norm import TritonGatedNorm, TritonRMSNorm
from asyncllm.gpu.ops.triton.rope_cache import TritonRope, TritonRopeAndCache
from asyncllm.gpu.ops.triton.routing import TritonRouting
from asyncllm.gpu.ops.triton.sampling import sample
from asyncllm.gpu.ops.triton.state_rows import TritonStateRows
from asyncllm.gpu.ops.triton.tuning import MAX_SMALL_GROUP_ROWS


class TritonOps(TorchOps):
    """Triton kernels for memory-bound ops and experts; torch for other matrix products.

    Call ``check_triton`` before importing this module.
    """

    name = "triton"
    silu_mul = staticmethod(silu_mul)
    gelu_mul = staticmethod(gelu_mul)
    sigmoid_mul = staticmethod(sigmoid_mul)
    softcap = staticmethod(softcap)
    fill_decode_inputs = staticmethod(fill_decode_inputs)
    sample = staticmethod(sample)
    state_rows = staticmethod(TritonStateRows.of)
    causal_conv = staticmethod(TritonCausalConv)
    gated_delta = staticmethod(TritonGatedDelta)
    gated_norm = staticmethod(TritonGatedNorm)
    rms_norm = staticmethod(TritonRMSNorm)
    rope = staticmethod(TritonRope)
    rope_and_cache = staticmethod(TritonRopeAndCache)

    def routing(self, config: RoutingConfig, weights: RouterWeights) -> Routing:
        # The Triton routing kernel does not support groups of experts.
        if config.num_groups > 1:
            return super().routing(config, weights)
        return TritonRouting(config, weights, self.make_linear(weights.linear))

    def make_experts(self, weights: ExpertsWeights, config: ActivationConfig) -> TritonExperts:
        return TritonExperts(weights, config)

    def expert_kernel_switch_points(self, num_experts: int, top_k: int) -> tuple[int, ...]:
        return (MAX_SMALL_GROUP_ROWS * num_experts // top_k + 1,)

    def rotary(self, table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the table and the positions, because the kernel itself looks up the rows."""
        return table, positions
