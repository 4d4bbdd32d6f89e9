"""NativeOps: the op set for CPUs in C++, on threads of its own."""

from __future__ import annotations

import ctypes
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from asyncllm.gpu.ops.base import Embedding
from asyncllm.gpu.ops.cpu_ops import CpuOps
from asyncllm.gpu.ops.linear_weights import GGUF_BLOCK_SIZES, LinearWeights, QuantScheme, WeightSpec
from asyncllm.gpu.ops.native_embedding import NativeEmbedding, NativePlainEmbedding
from asyncllm.gpu.ops.native_experts import NativeExperts, NativeRouting
from asyncllm.gpu.ops.native_linear import NativeLinear, NativeMergedLinear
from asyncllm.gpu.ops.native_norms import NativeResidualAdd, NativeRMSNorm
from asyncllm.gpu.ops.native_pointwise import (
    GELU_TANH,
    SILU,
    NativeGatedMul,
    NativeSigmoidMul,
    NativeSoftcap,
)
from asyncllm.gpu.ops.native_recurrent import (
    NativeCausalConv,
    NativeGatedDelta,
    NativeGatedNorm,
    NativeStateRows,
)
from asyncllm.gpu.ops.native_rope import NativeRope, NativeRopeAndCache
from asyncllm.gpu.ops.native_sampling import process_logits, sample, top_logprobs
from asyncllm.gpu.ops.native_weights import INPUTS_PER_SCALE, native_quantisers, native_type_code
from asyncllm.gpu.ops.recorder import Recorder
from asyncllm.native.context import NativeContext


class NativeOps(CpuOps):
    """Op set of the native library; its ops run on the threads of ``context``."""

    name = "native"
    schemes: ClassVar[frozenset[QuantScheme]] = frozenset(
        {"plain", "int8", "int4", *GGUF_BLOCK_SIZES}
    )
    accepted_weights_text = (
        "'plain', or 'int8' and 'int4' with scales per output channel or in blocks of (1, a "
        f"multiple of {INPUTS_PER_SCALE}), or blocks of GGUF, and without column_order"
    )
    packs_linear = True
    state_rows = staticmethod(NativeStateRows)

    def __init__(self, context: NativeContext) -> None:
        self.context = context
        self.quantisers = native_quantisers(context)
        self.silu_mul = NativeGatedMul(context, SILU)
        self.gelu_mul = NativeGatedMul(context, GELU_TANH)
        self.sigmoid_mul = NativeSigmoidMul(context)
        self.softcap = NativeSoftcap(context)
        self.rms_norm = partial(NativeRMSNorm, context)
        self.residual_add = partial(NativeResidualAdd, context)
        self.rope = partial(NativeRope, context)
        self.rope_and_cache = partial(NativeRopeAndCache, context)
        self.causal_conv = partial(NativeCausalConv, context)
        self.gated_delta = partial(NativeGatedDelta, context)
        self.gated_norm = partial(NativeGatedNorm, context)
        self.routing = partial(NativeRouting, context)
        self.make_experts = partial(NativeExperts, context)
        self.embedding = partial(NativePlainEmbedding, context)
        self.sample = partial(sample, context)
        self.process_logits = partial(process_logits, context)
        self.top_logprobs = partial(top_logprobs, context)

    def prepare_current_thread(self) -> None:
        # The calling thread computes together with the context's threads, so give it the same time
        # slice.
        self.context.functions.lengthen_slice()

    def accepts_weights(self, spec: WeightSpec) -> bool:
        return spec.scheme == "plain" or native_type_code(spec) is not None

    def make_linear(self, weights: LinearWeights) -> NativeLinear | NativeMergedLinear:
        if weights.next_parts:
            return NativeMergedLinear(self.context, weights)
        return NativeLinear(self.context, weights)

    def packed_embedding(
        self, weights: LinearWeights, dtype: torch.dtype, multiplier: float = 1.0
    ) -> Embedding:
        return NativeEmbedding(NativeLinear(self.context, weights), dtype, multiplier)

    def recorder(self) -> Recorder:
        return Recorder(self.context)

    def tied_embedding(
        self, weights: LinearWeights, dtype: torch.dtype, multiplier: float = 1.0
    ) -> tuple[NativeEmbedding, NativeLinear]:
        head = self.linear(weights)
        assert isinstance(head, NativeLinear)
        return NativeEmbedding(head, dtype, multiplier), head

    def sum_int64(self, memory: Tensor) -> int:
        total = ctypes.c_uint64()
        self.context.call("read", memory.data_ptr(), memory.nbytes, ctypes.byref(total))
        return ctypes.c_int64(total.value).value

    def rotary(self, table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return table, positions
