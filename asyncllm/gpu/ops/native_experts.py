"""NativeRouting, NativeExperts: routing and experts in C++."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from asyncllm.checkpoint.experts_config import ActivationConfig, RoutingConfig
from asyncllm.errors import ModelLoadError
from asyncllm.gpu.ops.experts import ExpertsWeights, split_experts
from asyncllm.gpu.ops.native_linear import NativeLinear
from asyncllm.gpu.ops.native_op import NativeOp
from asyncllm.gpu.ops.native_pointwise import GELU_TANH, SILU
from asyncllm.gpu.ops.native_weights import native_type_code
from asyncllm.gpu.ops.program import DTYPE_CODES, contiguous_rows
from asyncllm.gpu.ops.routing import RouterWeights
from asyncllm.native.context import NativeContext


class NativeRouting:
    """``Routing`` in C++, on packed weights of the router."""

    def __init__(
        self, context: NativeContext, config: RoutingConfig, weights: RouterWeights
    ) -> None:
        self.top_k, self.router = config.top_k, NativeLinear(context, weights.linear)
        self._op = NativeOp(
            context,
            "routing",
            stride=config.num_experts,
            num_experts=config.num_experts,
            top_k=config.top_k,
            num_groups=config.num_groups,
            top_groups=config.top_groups,
            correction=_check_expert_vector("correction bias", weights.correction, config),
            scale=config.scale,
            least_sum=config.min_weight_sum,
            sigmoid=config.scoring == "sigmoid",
            renormalise=config.renormalise,
            expert_scale=_check_expert_vector("scale of experts", weights.expert_scale, config),
            dtype=DTYPE_CODES[weights.linear.values.dtype],
        )

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, op, router = contiguous_rows(x, x.dtype), self._op, self.router
        op.check_shape("x", x, (len(x), router.k))
        logits = router.project(x, router.dtype or x.dtype)
        ids = op.empty_output(x, self.top_k, torch.int32)
        weights = op.empty_output(x, self.top_k, torch.float32)
        op(x, {"logits": logits, "ids": ids, "weights": weights})
        return ids, weights


def _check_expert_vector(name: str, values: Tensor | None, config: RoutingConfig) -> Tensor | None:
    """Checks ``values [num_experts]`` and makes them contiguous float32; None stays None."""
    if values is None:
        return None
    if values.shape != (config.num_experts,):
        raise ModelLoadError(
            f"{name} of shape {tuple(values.shape)}, expected ({config.num_experts},)"
        )
    return values.float().contiguous()


class NativeExperts:
    """``Experts`` in C++, on packed copies of the weights.

    A token's result does not depend on other tokens, to the last bit.

    Raises:
        ModelLoadError: ``native_type_code`` does not cover the weights' quantisation.
    """

    def __init__(
        self, context: NativeContext, weights: ExpertsWeights, config: ActivationConfig
    ) -> None:
        layers = weights.gate_up, weights.down
        for layer in layers:
            if layer.scheme != "plain" and native_type_code(layer.spec) is None:
                raise ModelLoadError(
                    f"experts of scheme {layer.scheme!r} with scale_block={layer.scale_block}: the "
                    "op set 'native' has no layout for them"
                )
        self.layers = [
            [NativeLinear(context, part) for part in split_experts(layer, weights.num_experts)]
            for layer in layers
        ]
        self.dtypes = {part[0].dtype for part in self.layers} - {None}
        self.hidden_size = weights.hidden_size
        pointers = ctypes.c_void_p * weights.num_experts
        handles = [pointers(*(each.weights.handle for each in part)) for part in self.layers]
        gate_up, down = (ctypes.addressof(part) for part in handles)
        self._op = NativeOp(
            context,
            "experts",
            [handles, self.layers],
            gate_up=gate_up,
            down=down,
            num_experts=weights.num_experts,
            width=weights.hidden_size,
            inner=weights.intermediate_size,
            alpha=config.alpha,
            limit=config.limit or 0.0,
            activation=GELU_TANH if config.gelu else SILU,
        )

    def __call__(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        shared: Tensor | None = None,
        gate: Tensor | None = None,
    ) -> Tensor:
        x, op = contiguous_rows(x, x.dtype), self._op
        top_k = self._check_tensors(x, ids, weights, shared, gate)
        args, out = op.args, op.empty_output(x, self.hidden_size)
        args.x_stride, args.top_k, args.dtype = x.stride(0), top_k, DTYPE_CODES[x.dtype]
        tensors = {"x": x, "ids": ids, "weights": weights, "out": out}
        # Reset the optional pointers, which the previous call may have set.
        args.shared, args.gate = None, None
        if shared is not None:
            shared = contiguous_rows(shared, x.dtype)
            args.shared_stride, tensors["shared"] = shared.stride(0), shared
        if gate is not None:
            args.gate_stride, tensors["gate"] = gate.stride(0), gate
        op(x, tensors)
        return out

    def _check_tensors(
        self, x: Tensor, ids: Tensor, weights: Tensor, shared: Tensor | None, gate: Tensor | None
    ) -> int:
        """Checks shapes, dtypes and strides; returns top_k."""
        rows, top_k = ids.shape
        if self.dtypes - {x.dtype} or x.shape != (rows, self.hidden_size):
            raise ValueError(f"native experts: x is {tuple(x.shape)} of {x.dtype} for {rows} rows")
        for name, tensor, dtype in (("ids", ids, torch.int32), ("weights", weights, torch.float32)):
            if tensor.dtype != dtype or tensor.shape != (rows, top_k) or not tensor.is_contiguous():
                raise ValueError(f"native experts: {name} are no contiguous ({rows}, {top_k})")
        if shared is not None:
            self._op.check_shape("shared", shared, x.shape)
        if gate is not None and (gate.shape != (rows, 1) or gate.dtype != x.dtype):
            raise ValueError(f"native experts: gate is {tuple(gate.shape)} of {gate.dtype}")
        return top_k
