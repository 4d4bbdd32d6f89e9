"""NativeAttention: paged attention in C++, which reads the KV cache in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from asyncllm.errors import EngineError
from asyncllm.gpu.batch.step_inputs import StepInputs
from asyncllm.gpu.ops.backend import AttentionRequest, Constraints
from asyncllm.gpu.ops.base import AttentionShape
from asyncllm.gpu.ops.native_op import NativeOp
from asyncllm.gpu.ops.native_rope import set_cache_args
from asyncllm.gpu.ops.program import DTYPE_CODES
from asyncllm.native.context import NativeContext
from asyncllm.native.shared_library import Library, NativeUnavailableError

BUILD_LIBRARY_HINT = "`python -m asyncllm.native.build` compiles them, with a C++ compiler"


@dataclass(slots=True)
class NativeAttentionPlan:
    """Plan of a step: a native attention op without the arguments that differ by layer."""

    op: NativeOp
    num_rows: int
    num_tokens: int


def native_context(num_threads: int) -> NativeContext:
    """Makes the context of an engine's native ops, and starts its threads.

    Raises:
        EngineError: the native library is missing or does not work here.
    """
    try:
        return NativeContext(Library(), num_threads)
    except NativeUnavailableError as error:
        raise EngineError(f'attention_backend="native": {error}; {BUILD_LIBRARY_HINT}') from error


class NativeAttention:
    """Native attention, which computes decode rows and prefill rows by the same kernel.

    A query's result depends on its sequence alone, to the last bit. It depends neither on other
    rows of the step nor on how the prompt was divided into chunks.
    """

    name = "native"
    is_recordable = True
    needs_zeroed_blocks = False
    constraints: ClassVar = Constraints(
        device_types=frozenset({"cpu"}), dtypes=frozenset(DTYPE_CODES), max_head_dim=512, sinks=True
    )

    @staticmethod
    def default_block_size(device: torch.device) -> int:
        return 32

    @classmethod
    def make(cls, request: AttentionRequest) -> Self:
        """Makes the attention; reuses the context of ``request.sibling``.

        Raises:
            EngineError: the native library is missing or does not work here.
        """
        sibling = request.sibling
        if isinstance(sibling, NativeAttention):
            return cls(sibling.context, request.shape, request.dtype)
        return cls(native_context(request.num_threads), request.shape, request.dtype)

    def __init__(self, context: NativeContext, shape: AttentionShape, dtype: torch.dtype) -> None:
        self.context, self.shape, self.dtype = context, shape, dtype

    def plan(self, step: StepInputs, window: int | None, group: int) -> NativeAttentionPlan:
        """Plans a step that is run or recorded.

        A recorded op reads the step's arrays in place whenever the program runs.
        """
        rows, table = step.host, step.groups[group].host_table
        if rows is None:
            raise NotImplementedError("native attention reads lengths on the host: no CUDA graphs")
        shape, width = self.shape, table.shape[1]
        op = NativeOp(
            self.context,
            "attention",
            block_table=np.ascontiguousarray(table, np.int32),
            table_stride=width,
            table_width=width,
            query_start=np.ascontiguousarray(rows.query_start_loc, np.int64),
            seq_lens=np.ascontiguousarray(rows.seq_lens, np.int32),
            lines=np.ascontiguousarray(rows.req_indices, np.int64),
            table_lines=len(table),
            heads=shape.num_heads,
            kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            window=window or 0,
            scale=shape.scale,
            softcap=shape.softcap or 0.0,
            dtype=DTYPE_CODES[self.dtype],
        )
        return NativeAttentionPlan(op, len(rows.req_indices), step.num_tokens)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, cache: Tensor, plan: NativeAttentionPlan,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        shape, op = self.shape, plan.op
        args = op.args
        if sinks is not None:
            sinks = sinks.detach().float().contiguous()
            if sinks.shape != (shape.num_heads,):
                raise ValueError(f"sinks {tuple(sinks.shape)}: expected ({shape.num_heads},)")
            args.sinks = sinks.data_ptr()
        expected = (plan.num_tokens, shape.num_heads, shape.head_dim)
        if q.shape != expected or q.dtype != self.dtype or q.device.type != "cpu":
            raise ValueError(
                f"native attention: q is {tuple(q.shape)} of {q.dtype} on {q.device}, expected "
                f"{expected} of {self.dtype} on cpu"
            )
        if q.stride(2) != 1:
            q = q.contiguous()
        set_cache_args(args, cache, shape, self.dtype)
        args.q_token_stride, args.q_head_stride = q.stride(0), q.stride(1)
        out = op.empty_output(q, shape.num_heads * shape.head_dim)
        op(q, {"q": q, "out": out}, [cache, sinks], plan.num_rows)
        return out
