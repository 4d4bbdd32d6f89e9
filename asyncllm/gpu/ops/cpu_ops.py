"""CpuOps: the op set in plain torch, with sampling and experts for CPUs."""

from __future__ import annotations

from asyncllm.checkpoint.experts_config import ActivationConfig
from asyncllm.gpu.ops.cpu_sampling import sample
from asyncllm.gpu.ops.experts import Experts, ExpertsWeights, LoopedExperts
from asyncllm.gpu.ops.torch_ops import TorchOps


class CpuOps(TorchOps):
    """Op set in plain torch, whose sampling and experts branch on tensors' values on the host."""

    name = "cpu"
    sample = staticmethod(sample)

    def make_experts(self, weights: ExpertsWeights, config: ActivationConfig) -> Experts:
        activation = self.gelu_mul if config.gelu else self.silu_mul
        return LoopedExperts(weights, config, activation, self.make_linear)
