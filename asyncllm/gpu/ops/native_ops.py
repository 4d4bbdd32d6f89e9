"""NativeOps: the op set for CPUs in compiled code, on threads of its own."""

from __future__ import annotations

import ctypes
from typing import ClassVar

import torch
from torch import Tensor

from asyncllm.checkpoint.experts_config import ActivationConfig, RoutingConfig
from asyncllm.checkpoint.linear_attention_config import LinearAttentionConfig
from asyncllm.gpu.batch.decode_inputs import DecodeInputs
from asyncllm.gpu.batch.step_inputs import ModelInputs
from asyncllm.gpu.ops.base import AttentionShape, Embedding, RMSNorm, Rope, RopeAndCache
from asyncllm.gpu.ops.cpu_ops import CpuOps
from asyncllm.gpu.ops.experts import Experts, ExpertsWeights
from asyncllm.gpu.ops.gated_delta import DeltaBiases
from asyncllm.gpu.ops.linear_weights import LinearWeights, QuantScheme, WeightForm
from asyncllm.gpu.ops.native_experts import NativeExperts, NativeRouting
from asyncllm.gpu.ops.native_pointwise import (
    GELU_TANH,
    SILU,
    NativeGatedMul,
    NativeResidualAdd,
    NativeSoftcap,
)
from asyncllm.gpu.ops.native_recurrent import (
    NativeCausalConv,
    NativeGatedDelta,
    NativeGatedNorm,
    NativeSigmoidMul,
    NativeStateRows,
)
from asyncllm.gpu.ops.native_sampling import (
    NativeProcessLogits,
    NativeSample,
    NativeTopLogprobs,
)
from asyncllm.gpu.ops.native_weights import SPAN, conversions, pack, stored_as
from asyncllm.gpu.ops.program import DTYPES, rows_of
from asyncllm.gpu.ops.recorder import Recorder
from asyncllm.gpu.ops.routing import RouterWeights, Routing
from asyncllm.gpu.ops.torch_ops import check_head_norm, norms_whole_projections
from asyncllm.native.context import Context, fail
from asyncllm.native.interface import ARGS, RopeArgs


def parameter(x: Tensor) -> Tensor:
    """A layer's parameter at an address of its own that stays."""
    if x.dtype not in DTYPES or x.device.type != "cpu":
        raise ValueError(f"native ops: a parameter of {x.dtype} on {x.device}")
    return x.contiguous()


class NativeLinear:
    """A linear layer on weights that are packed, and replace the plain ones.

    Args:
        weights: of a form that NativeOps takes; unless it is plain, inputs are of any dtype.

    Raises:
        ModelLoadError: zeros that are not integers.
    """

    def __init__(self, context: Context, weights: LinearWeights) -> None:
        self.context = context
        self.n, self.k = weights.shape
        self.dtype = weights.values.dtype if weights.scheme == "plain" else None
        self.weights = pack(context, weights)

    def __call__(self, x: Tensor) -> Tensor:
        x, context = self._checked(x), self.context
        m = len(x)
        if (recorder := context.recorder) is not None:
            y = recorder.empty(x, self.n)
            args = ARGS["linear"](
                weights=self.weights.handle, x_stride=x.stride(0), y_stride=self.n,
                dtype=DTYPES[x.dtype],
            )  # fmt: skip
            recorder.add("linear", x, args, {"x": x, "y": y}, [self.weights])
            return y
        y = x.new_empty((m, self.n))
        status = context.functions.linear(
            context.handle, self.weights.handle, x.data_ptr(), x.stride(0), y.data_ptr(), self.n,
            m, DTYPES[x.dtype],
        )  # fmt: skip
        if status:
            fail("linear", status)
        return y

    def argmax(self, x: Tensor) -> Tensor:
        """``x [T, in] -> [T]`` int64, the first of the largest outputs: those of a call, rounded
        to the dtype of ``x``, without writing them. -1 where one is NaN or infinity, and
        NO_TOKEN_LEFT where all are minus infinity."""
        x, context = self._checked(x), self.context
        if (recorder := context.recorder) is not None:
            found = recorder.empty(x, 1, torch.int64)
            args = ARGS["argmax"](
                weights=self.weights.handle, x_stride=x.stride(0), dtype=DTYPES[x.dtype]
            )
            recorder.add("argmax", x, args, {"x": x, "out": found}, [self.weights])
            return found
        tokens = torch.empty(len(x), dtype=torch.int64, device="cpu")
        status = context.functions.linear_argmax(
            context.handle, self.weights.handle, x.data_ptr(), x.stride(0), tokens.data_ptr(),
            len(x), DTYPES[x.dtype],
        )  # fmt: skip
        if status:
            fail("linear_argmax", status)
        return tokens

    def _checked(self, x: Tensor) -> Tensor:
        x = rows_of(x, self.dtype or x.dtype)
        if x.shape[1] != self.k:
            raise ValueError(f"native linear: x has {x.shape[1]} columns, expected {self.k}")
        return x


class NativeEmbedding:
    """The embedding that a head is tied to: gathered from the head's packed weights, so that
    they are held once.

    Attributes:
        dtype, device, shape: as a plain table's ``[vocab_size, H]``.
    """

    def __init__(self, head: NativeLinear, dtype: torch.dtype, multiplier: float = 1.0) -> None:
        self.head, self.dtype, self.shape = head, dtype, (head.n, head.k)
        self.device, self.multiplier = torch.device("cpu"), multiplier

    def __call__(self, token_ids: Tensor) -> Tensor:
        ids, head, context = token_ids.contiguous(), self.head, self.head.context
        if ids.dtype != torch.int64 or ids.device.type != "cpu" or ids.dim() != 1:
            raise ValueError(f"native gather: ids are {tuple(ids.shape)} of {ids.dtype}")
        if (recorder := context.recorder) is not None:
            out = recorder.empty(ids, head.k, self.dtype)
            args = ARGS["gather"](
                weights=head.weights.handle, scale=self.multiplier, dtype=DTYPES[self.dtype]
            )
            recorder.add("gather", ids, args, {"ids": ids, "out": out}, [head.weights])
            return out
        out = torch.empty((len(ids), head.k), dtype=self.dtype, device="cpu")
        library = context.functions
        status = library.gather(
            context.handle, head.weights.handle, ids.data_ptr(), len(ids), out.data_ptr(),
            self.multiplier, DTYPES[self.dtype],
        )  # fmt: skip
        if status:
            fail("gather", status)
        return out


class NativeTable:
    """An embedding with a table of plain values ``[vocab_size, H]``."""

    def __init__(self, context: Context, values: Tensor, multiplier: float = 1.0) -> None:
        self.context, self.values = context, rows_of(values, values.dtype)
        self.multiplier = multiplier
        self.dtype, self.device, self.shape = values.dtype, values.device, values.shape

    def __call__(self, token_ids: Tensor) -> Tensor:
        ids, values, context = token_ids.contiguous(), self.values, self.context
        if ids.dtype != torch.int64 or ids.device.type != "cpu" or ids.dim() != 1:
            raise ValueError(f"native select: ids are {tuple(ids.shape)} of {ids.dtype}")
        (rows, width), stride, dtype = values.shape, values.stride(0), DTYPES[values.dtype]
        if (recorder := context.recorder) is not None:
            out = recorder.empty(ids, width, values.dtype)
            args = ARGS["select"](
                x=values.data_ptr(), x_stride=stride, x_rows=rows, width=width,
                scale=self.multiplier, dtype=dtype,
            )  # fmt: skip
            recorder.add("select", ids, args, {"ids": ids, "out": out}, [values])
            return out
        out = values.new_empty((len(ids), width))
        status = context.functions.select(
            context.handle, values.data_ptr(), stride, rows, ids.data_ptr(), len(ids),
            out.data_ptr(), width, self.multiplier, dtype,
        )  # fmt: skip
        if status:
            fail("select", status)
        return out


class NativeRMSNorm:
    """Norm in float32, rounded to the dtype of ``x`` before a weight of that dtype, and behind one
    in float32."""

    def __init__(
        self, context: Context, weight: Tensor, eps: float, multiplier: float = 1.0,
        scale: float = 1.0,
    ) -> None:  # fmt: skip
        self.context, self.weight, self.eps = context, parameter(weight), eps
        self.width, self.multiplier, self.scale = weight.shape[0], multiplier, scale
        self.wide = weight.dtype == torch.float32

    def __call__(self, x: Tensor) -> Tensor:
        return self._norm(x, None) if x.dim() == 2 else self._norm_parts(x)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        residual = rows_of(residual, x.dtype)
        return self._norm(x, residual), residual

    def _norm_parts(self, x: Tensor) -> Tensor:
        """Of each part of ``x [T, parts, width]``."""
        tokens, parts, width = x.shape
        if not x.is_contiguous() or width != self.width:
            raise ValueError(
                f"native rms_norm: x is {tuple(x.shape)} with strides {x.stride()}, expected "
                f"contiguous parts of {self.width} columns"
            )
        if (recorder := self.context.recorder) is None:
            return self._norm(x.view(-1, width), None).view(x.shape)
        return self._record(recorder, x.view(tokens, -1), None, parts).view(x.shape)

    def _norm(self, x: Tensor, residual: Tensor | None) -> Tensor:
        weight, context = self.weight, self.context
        x = rows_of(x, x.dtype if self.wide else weight.dtype)
        rows, width = x.shape
        if width != self.width or (residual is not None and residual.shape != x.shape):
            raise ValueError(
                f"native rms_norm: x is {tuple(x.shape)}, expected {self.width} columns and the "
                "residual's shape"
            )
        if (recorder := context.recorder) is not None:
            return self._record(recorder, x, residual)
        out = x.new_empty((rows, width))
        status = context.functions.rms_norm(
            context.handle, x.data_ptr(), x.stride(0),
            None if residual is None else residual.data_ptr(),
            0 if residual is None else residual.stride(0), weight.data_ptr(),
            DTYPES[weight.dtype], self.eps, self.multiplier, self.scale, out.data_ptr(), rows,
            width, DTYPES[x.dtype],
        )  # fmt: skip
        if status:
            fail("rms_norm", status)
        return out

    def _record(
        self, recorder: Recorder, x: Tensor, residual: Tensor | None, parts: int = 1
    ) -> Tensor:
        out, weight = recorder.empty(x, parts * self.width), self.weight
        args = ARGS["rms_norm"](
            x_stride=x.stride(0) // parts,
            residual_stride=0 if residual is None else residual.stride(0),
            weight=weight.data_ptr(), width=self.width, parts=parts, eps=self.eps,
            multiplier=self.multiplier, scale=self.scale,
            dtype=DTYPES[x.dtype], weight_dtype=DTYPES[weight.dtype],
        )  # fmt: skip
        tensors = {"x": x, "out": out} | ({} if residual is None else {"residual": residual})
        recorder.add("rms_norm", x, args, tensors, [weight])
        return out


class NativeRopeAndCache:
    """Norms and rotates the heads of q and k in place in ``qkv``, and writes k and v."""

    def __init__(
        self,
        context: Context,
        shape: AttentionShape,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        v_norm: Tensor | None = None,
    ) -> None:
        self.context, self.shape, self.norms = context, shape, None
        self.args = RopeArgs(
            eps=eps, heads=shape.num_heads, kv_heads=shape.num_kv_heads, head_dim=shape.head_dim
        )
        if q_norm is not None and k_norm is not None:
            self.norms = parameter(q_norm), parameter(k_norm)
            self.args.q_norm, self.args.k_norm = (norm.data_ptr() for norm in self.norms)
            self.args.whole_norms = norms_whole_projections(shape, q_norm, k_norm)
            self.args.norm_dtype = DTYPES[q_norm.dtype]
            if v_norm is not None:
                self.norms = *self.norms, parameter(v_norm)
                check_head_norm(shape, v_norm, q_norm.dtype)
                self.args.v_norm = self.norms[2].data_ptr()
        elif v_norm is not None:
            raise ValueError("a norm of values alone: expected one of queries and keys as well")

    def __call__(
        self, qkv: Tensor, rotary: tuple[Tensor, Tensor], cache: Tensor, slot_mapping: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See ``RopeAndCache``; ``rotary`` is the table and the positions."""
        (table, positions), shape, args = rotary, self.shape, self.args
        qkv = rows_of(qkv, table.dtype)
        num_tokens, dim = qkv.shape[0], shape.head_dim
        num_q, num_k = shape.num_heads, shape.num_kv_heads
        heads = qkv.view(num_tokens, num_q + 2 * num_k, dim)
        kv_strides = check_cache(cache, shape, table.dtype)
        if self.norms is not None and self.norms[0].dtype not in (table.dtype, torch.float32):
            raise ValueError(f"native rope: norms are not of {table.dtype} or torch.float32")
        for name, index in (("positions", positions), ("slots", slot_mapping)):
            if (
                index.dtype != torch.int64
                or index.shape[0] != num_tokens
                or not index.is_contiguous()
            ):
                raise ValueError(f"native rope: {name} are not {num_tokens} contiguous int64")
        args.token_stride, args.dtype = qkv.stride(0), DTYPES[qkv.dtype]
        args.table, args.table_rows = table.data_ptr(), table.shape[0]
        args.table_width = table.stride(0)
        args.cache, args.num_blocks, args.block_size = (cache.data_ptr(), *cache.shape[1:3])
        args.kv_stride, args.block_stride, args.slot_stride, args.head_stride = kv_strides
        context = self.context
        if (recorder := context.recorder) is not None:
            tensors = {"qkv": qkv, "positions": positions, "slots": slot_mapping}
            recorder.add("rope_and_cache", qkv, args, tensors, [table, cache, self.norms])
        else:
            args.qkv, args.num_tokens = qkv.data_ptr(), num_tokens
            args.positions, args.slots = positions.data_ptr(), slot_mapping.data_ptr()
            status = context.functions.rope_and_cache(context.handle, ctypes.byref(args))
            if status:
                fail("rope_and_cache", status)
        return heads[:, :num_q], heads[:, num_q : num_q + num_k], heads[:, num_q + num_k :]


class NativeRope:
    """Norms and rotates the heads of q in place."""

    def __init__(
        self, context: Context, shape: AttentionShape, norm: Tensor | None, eps: float
    ) -> None:
        self.context, self.shape, self.norm = context, shape, None
        self.args = RopeArgs(eps=eps, heads=shape.num_heads, head_dim=shape.head_dim)
        if norm is not None:
            check_head_norm(shape, norm)
            self.norm = parameter(norm)
            self.args.q_norm, self.args.norm_dtype = self.norm.data_ptr(), DTYPES[norm.dtype]

    def __call__(self, q: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """See ``Rope``; ``rotary`` is the table and the positions."""
        (table, positions), args, context = rotary, self.args, self.context
        q = rows_of(q, table.dtype)
        heads = q.view(len(q), self.shape.num_heads, self.shape.head_dim)
        if (
            positions.dtype != torch.int64
            or len(positions) != len(q)
            or not positions.is_contiguous()
        ):
            raise ValueError(f"native rope: positions are not {len(q)} contiguous int64")
        args.token_stride, args.dtype = q.stride(0), DTYPES[q.dtype]
        args.table, args.table_rows = table.data_ptr(), table.shape[0]
        args.table_width = table.stride(0)
        if (recorder := context.recorder) is not None:
            tensors = {"qkv": q, "positions": positions}
            recorder.add("rope_and_cache", q, args, tensors, [table, self.norm])
            return heads
        args.qkv, args.num_tokens, args.positions = q.data_ptr(), len(q), positions.data_ptr()
        status = context.functions.rope_and_cache(context.handle, ctypes.byref(args))
        if status:
            fail("rope_and_cache", status)
        return heads


def check_cache(cache: Tensor, shape: AttentionShape, dtype: torch.dtype) -> tuple[int, ...]:
    """The strides of a layer's KV but for the last, which is 1.

    Raises:
        ValueError: another shape, dtype, device or last stride, because it is written in place.
    """
    expected = (2, shape.num_kv_heads, shape.head_dim)
    found = (cache.shape[0], *cache.shape[3:])
    *strides, last = cache.stride()
    if found != expected or cache.dtype != dtype or cache.device.type != "cpu" or last != 1:
        raise ValueError(
            f"native ops: a KV cache {tuple(cache.shape)} of {cache.dtype} on {cache.device}, "
            f"expected [2, blocks, tokens, {shape.num_kv_heads}, {shape.head_dim}] of {dtype}"
        )
    return tuple(strides)


class NativeOps(CpuOps):
    """Compiled ops with a context's threads."""

    name = "native"
    schemes: ClassVar[frozenset[QuantScheme]] = frozenset({"plain", "int8", "int4"})
    accepted_weights = (
        "'plain', or 'int8' and 'int4' with scales per output channel or in blocks of (1, a "
        f"multiple of {SPAN}), and without column_order"
    )
    packs_linear = True

    def __init__(self, context: Context) -> None:
        self.context = context
        self.conversions = conversions(context)
        self.silu_mul = NativeGatedMul(context, SILU)
        self.gelu_mul = NativeGatedMul(context, GELU_TANH)
        self.sigmoid_mul = NativeSigmoidMul(context)
        self.softcap = NativeSoftcap(context)
        self.sample = NativeSample(context)
        self.process_logits = NativeProcessLogits(context)
        self.top_logprobs = NativeTopLogprobs(context)

    def enter_thread(self) -> None:
        # It computes with the context's own, which have long time slices as well.
        self.context.functions.lengthen_slice()

    def takes(self, form: WeightForm) -> bool:
        return form.scheme == "plain" or stored_as(form) is not None

    def make_linear(self, weights: LinearWeights) -> NativeLinear:
        return NativeLinear(self.context, weights)

    def routing(self, config: RoutingConfig, weights: RouterWeights) -> Routing:
        return NativeRouting(self.context, config, weights, self.make_linear)

    def make_experts(self, weights: ExpertsWeights, config: ActivationConfig) -> Experts:
        return NativeExperts(self.context, weights, config, self.make_linear)

    def state_rows(self, inputs: ModelInputs | DecodeInputs) -> NativeStateRows:
        assert isinstance(inputs, ModelInputs)  # the host knows every row of a step on a CPU
        return NativeStateRows(inputs)

    def causal_conv(self, weight: Tensor) -> NativeCausalConv:
        return NativeCausalConv(self.context, weight)

    def gated_delta(self, shape: LinearAttentionConfig, biases: DeltaBiases) -> NativeGatedDelta:
        return NativeGatedDelta(self.context, shape, biases)

    def gated_norm(self, weight: Tensor, eps: float) -> NativeGatedNorm:
        return NativeGatedNorm(self.context, weight, eps)

    def embedding(self, values: Tensor, multiplier: float = 1.0) -> Embedding:
        return NativeTable(self.context, values, multiplier)

    def recorder(self) -> Recorder:
        return Recorder(self.context)

    def tied_embedding(
        self, weights: LinearWeights, dtype: torch.dtype, multiplier: float = 1.0
    ) -> tuple[NativeEmbedding, NativeLinear]:
        head = self.linear(weights)
        assert isinstance(head, NativeLinear)
        return NativeEmbedding(head, dtype, multiplier), head

    def read(self, memory: Tensor) -> int:
        total, context = ctypes.c_uint64(), self.context
        status = context.functions.read(
            context.handle, memory.data_ptr(), memory.nbytes, ctypes.byref(total)
        )
        if status:
            fail("read", status)
        return ctypes.c_int64(total.value).value

    def rms_norm(
        self, weight: Tensor, eps: float, multiplier: float = 1.0, scale: float = 1.0
    ) -> RMSNorm:
        return NativeRMSNorm(self.context, weight, eps, multiplier, scale)

    def residual_add(self, multiplier: float = 1.0, scale: float = 1.0) -> RMSNorm:
        return NativeResidualAdd(self.context, multiplier, scale)

    def rope(self, shape: AttentionShape, norm: Tensor | None, eps: float) -> Rope:
        return NativeRope(self.context, shape, norm, eps)

    def rope_and_cache(
        self,
        shape: AttentionShape,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        v_norm: Tensor | None = None,
    ) -> RopeAndCache:
        return NativeRopeAndCache(self.context, shape, q_norm, k_norm, eps, v_norm)

    def rotary(self, table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return table, positions
