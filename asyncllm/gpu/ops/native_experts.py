"""NativeRouting, NativeExperts: routing and experts in compiled code."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from asyncllm.checkpoint.experts_config import ActivationConfig, RoutingConfig
from asyncllm.errors import ModelLoadError
from asyncllm.gpu.ops.experts import ExpertsWeights, split
from asyncllm.gpu.ops.linear_weights import LinearWeights
from asyncllm.gpu.ops.native_pointwise import GELU_TANH, SILU
from asyncllm.gpu.ops.native_weights import native_type
from asyncllm.gpu.ops.program import DTYPES, rows_of
from asyncllm.gpu.ops.routing import RouterWeights
from asyncllm.native.context import Context, PackedWeights, fail
from asyncllm.native.interface import ARGS, ExpertsArgs, RoutingArgs


class PackedLayer(Protocol):
    """A linear layer on packed weights ``[n, k]``; ``dtype`` None takes inputs of any dtype."""

    weights: PackedWeights
    n: int
    k: int
    dtype: torch.dtype | None


Pack = Callable[[LinearWeights], PackedLayer]


class NativeRouting:
    """A router's logits, from packed weights, and the choice of experts by them."""

    def __init__(
        self, context: Context, config: RoutingConfig, weights: RouterWeights, pack: Pack
    ) -> None:
        self.context, self.top_k = context, config.top_k
        self.router = pack(weights.rows)
        self.correction = _per_expert("correction bias", weights.correction, config)
        self.expert_scale = _per_expert("scale of experts", weights.expert_scale, config)
        self.args = RoutingArgs(
            stride=config.num_experts,
            num_experts=config.num_experts,
            top_k=config.top_k,
            num_groups=config.num_groups,
            top_groups=config.top_groups,
            correction=None if self.correction is None else self.correction.data_ptr(),
            scale=config.scale,
            least_sum=config.least_sum,
            sigmoid=config.scoring == "sigmoid",
            renormalise=config.renormalise,
            expert_scale=None if self.expert_scale is None else self.expert_scale.data_ptr(),
            dtype=DTYPES[weights.rows.values.dtype],
        )

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, context, args, router = rows_of(x, x.dtype), self.context, self.args, self.router
        if x.shape[1] != router.k:
            raise ValueError(f"native routing: x has {x.shape[1]} columns, expected {router.k}")
        dtype = router.dtype or x.dtype
        if (recorder := context.recorder) is not None:
            logits = recorder.empty(x, router.n, dtype)
            linear = ARGS["linear"](
                weights=router.weights.handle, x_stride=x.stride(0), y_stride=router.n,
                dtype=DTYPES[x.dtype],
            )  # fmt: skip
            recorder.add("linear", x, linear, {"x": x, "y": logits}, [router.weights])
            ids = recorder.empty(x, self.top_k, torch.int32)
            weights = recorder.empty(x, self.top_k, torch.float32)
            tensors = {"logits": logits, "ids": ids, "weights": weights}
            recorder.add("routing", x, args, tensors, [self.correction, self.expert_scale])
            return ids, weights
        logits = x.new_empty((len(x), router.n), dtype=dtype)
        functions = context.functions
        status = functions.linear(
            context.handle, router.weights.handle, x.data_ptr(), x.stride(0), logits.data_ptr(),
            router.n, len(x), DTYPES[x.dtype],
        )  # fmt: skip
        if status:
            fail("linear", status)
        ids = x.new_empty((len(x), self.top_k), dtype=torch.int32)
        weights = x.new_empty((len(x), self.top_k), dtype=torch.float32)
        args.logits = logits.data_ptr()
        args.ids, args.weights = ids.data_ptr(), weights.data_ptr()
        status = functions.routing(context.handle, ctypes.byref(args), len(x))
        if status:
            fail("routing", status)
        return ids, weights


def _per_expert(name: str, values: Tensor | None, config: RoutingConfig) -> Tensor | None:
    """Checks ``values [num_experts]`` and makes them contiguous float32; None stays None."""
    if values is None:
        return None
    if values.shape != (config.num_experts,):
        raise ModelLoadError(
            f"{name} of shape {tuple(values.shape)}, expected ({config.num_experts},)"
        )
    return values.float().contiguous()


class NativeExperts:
    """Experts on packed weights, which replace the plain ones.

    A token's result does not depend on other tokens, to the last bit.

    Raises:
        ModelLoadError: quantised weights of a form that has no native type.
    """

    def __init__(
        self, context: Context, weights: ExpertsWeights, config: ActivationConfig, pack: Pack
    ) -> None:
        self.context = context
        layers = weights.gate_up, weights.down
        for layer in layers:
            if layer.scheme != "plain" and native_type(layer.form) is None:
                raise ModelLoadError(
                    f"experts of scheme {layer.scheme!r} with scale_block={layer.scale_block}: the "
                    "op set 'native' has no layout for them"
                )
        self.layers = [
            [pack(part) for part in split(layer, weights.num_experts)] for layer in layers
        ]
        self.dtypes = {part[0].dtype for part in self.layers} - {None}
        handles = ctypes.c_void_p * weights.num_experts
        self.handles = [handles(*(each.weights.handle for each in part)) for part in self.layers]
        gate_up, down = (ctypes.addressof(part) for part in self.handles)
        self.args = ExpertsArgs(
            gate_up=gate_up,
            down=down,
            num_experts=weights.num_experts,
            width=weights.width,
            inner=weights.inner,
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
        x, args, context = rows_of(x, x.dtype), self.args, self.context
        top_k = self._check(x, ids, weights, shared, gate)
        args.x_stride, args.top_k, args.dtype = x.stride(0), top_k, DTYPES[x.dtype]
        tensors = {"x": x, "ids": ids, "weights": weights}
        # Without this an argument that is left out would keep the last call's pointer.
        args.shared, args.gate = None, None
        if shared is not None:
            shared = rows_of(shared, x.dtype)
            args.shared_stride, tensors["shared"] = shared.stride(0), shared
        if gate is not None:
            args.gate_stride, tensors["gate"] = gate.stride(0), gate
        if (recorder := context.recorder) is not None:
            out = recorder.empty(x, args.width)
            recorder.add("experts", x, args, tensors | {"out": out}, [self.handles, self.layers])
            return out
        out = x.new_empty(x.shape)
        for name, tensor in (tensors | {"out": out}).items():
            setattr(args, name, tensor.data_ptr())
        status = context.functions.experts(context.handle, ctypes.byref(args), len(x))
        if status:
            fail("experts", status)
        return out

    def _check(
        self, x: Tensor, ids: Tensor, weights: Tensor, shared: Tensor | None, gate: Tensor | None
    ) -> int:
        """Returns top_k; raises ValueError for tensors that would be read out of bounds."""
        rows, top_k = ids.shape
        if self.dtypes - {x.dtype} or x.shape != (rows, self.args.width):
            raise ValueError(f"native experts: x is {tuple(x.shape)} of {x.dtype} for {rows} rows")
        for name, tensor, dtype in (("ids", ids, torch.int32), ("weights", weights, torch.float32)):
            if tensor.dtype != dtype or tensor.shape != (rows, top_k) or not tensor.is_contiguous():
                raise ValueError(f"native experts: {name} are no contiguous ({rows}, {top_k})")
        if shared is not None and shared.shape != x.shape:
            raise ValueError(f"native experts: shared is {tuple(shared.shape)}")
        if gate is not None and (gate.shape != (rows, 1) or gate.dtype != x.dtype):
            raise ValueError(f"native experts: gate is {tuple(gate.shape)} of {gate.dtype}")
        return top_k
