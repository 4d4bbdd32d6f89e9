"""NativeAttention: paged attention in compiled code, which reads the KV cache in place."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from asyncllm.errors import EngineError
from asyncllm.gpu.batch.step_inputs import StepInputs
from asyncllm.gpu.ops.backend import AttentionRequest, Constraints
from asyncllm.gpu.ops.base import AttentionShape
from asyncllm.gpu.ops.native_rope import check_cache
from asyncllm.gpu.ops.program import DTYPES
from asyncllm.native.context import Context, fail
from asyncllm.native.interface import AttentionArgs
from asyncllm.native.shared_library import Library, NativeUnavailableError

REMEDY = "`python -m asyncllm.native.build` compiles them, with a C++ compiler"


@dataclass(slots=True)
class StepRows:
    """The plan of a step, in the form that the library reads.

    Attributes:
        args: arguments that all layers share.
        held: arrays whose addresses are in ``args``.
    """

    args: AttentionArgs
    held: tuple[Any, ...]


def native_context(num_threads: int) -> Context:
    """Makes the context of an engine's native ops, with its threads.

    Raises:
        EngineError: the library is missing or does not work here.
    """
    try:
        return Context(Library(), num_threads)
    except NativeUnavailableError as error:
        raise EngineError(f'attention_backend="native": {error}; {REMEDY}') from error


class NativeAttention:
    """Attention of decode rows and chunks of prompts alike.

    A query's result depends on its sequence alone, to the last bit: neither on other rows of the
    step nor on how its prompt was cut into chunks.

    Args:
        sinks: ``[Hq]`` float32, a logit per head that takes part in the softmax.
    """

    name = "native"
    is_recordable = True
    needs_zeroed_blocks = False
    constraints: ClassVar = Constraints(
        device_types=frozenset({"cpu"}), dtypes=frozenset(DTYPES), max_head_dim=512, sinks=True
    )

    @staticmethod
    def default_block_size(device: torch.device) -> int:
        return 32

    @classmethod
    def make(cls, request: AttentionRequest) -> Self:
        """Makes the attention; EngineError if the library is missing or does not work here."""
        peer = request.peer
        if isinstance(peer, NativeAttention):
            return cls(peer.context, request.shape, request.dtype)
        return cls(native_context(request.num_threads), request.shape, request.dtype)

    def __init__(
        self, context: Context, shape: AttentionShape, dtype: torch.dtype,
        sinks: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.context, self.shape, self.dtype = context, shape, dtype
        self.sinks = None if sinks is None else sinks.float().contiguous()
        if self.sinks is not None and self.sinks.shape != (shape.num_heads,):
            raise ValueError(f"sinks {tuple(self.sinks.shape)}: expected ({shape.num_heads},)")

    def plan(self, step: StepInputs, window: int | None, group: int) -> StepRows:
        """Plans a step or a recording of one; its arrays are read in place when the op runs."""
        rows, table = step.host, step.groups[group].host_table
        if rows is None:
            raise NotImplementedError("native attention reads lengths on the host: no CUDA graphs")
        held = (
            np.ascontiguousarray(table, np.int32),
            np.ascontiguousarray(rows.query_start_loc, np.int64),
            np.ascontiguousarray(rows.seq_lens, np.int32),
            np.ascontiguousarray(rows.req_indices, np.int64),
        )
        blocks, starts, lengths, lines = held
        shape, sinks = self.shape, self.sinks
        args = AttentionArgs(
            block_table=blocks.ctypes.data,
            table_stride=blocks.shape[1],
            table_width=blocks.shape[1],
            query_start=starts.ctypes.data,
            seq_lens=lengths.ctypes.data,
            lines=lines.ctypes.data,
            table_lines=len(blocks),
            rows=len(lines),
            num_tokens=step.num_tokens,
            heads=shape.num_heads,
            kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            window=window or 0,
            scale=shape.scale,
            softcap=shape.softcap or 0.0,
            sinks=None if sinks is None else sinks.data_ptr(),
            dtype=DTYPES[self.dtype],
        )
        return StepRows(args, held)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, cache: Tensor, plan: StepRows,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        shape, args = self.shape, plan.args
        if sinks is not None:
            sinks = sinks.detach().float().contiguous()
            if sinks.shape != (shape.num_heads,):
                raise ValueError(f"sinks {tuple(sinks.shape)}: expected ({shape.num_heads},)")
            args.sinks = sinks.data_ptr()
        expected = (args.num_tokens, shape.num_heads, shape.head_dim)
        if q.shape != expected or q.dtype != self.dtype or q.device.type != "cpu":
            raise ValueError(
                f"native attention: q is {tuple(q.shape)} of {q.dtype} on {q.device}, expected "
                f"{expected} of {self.dtype} on cpu"
            )
        if q.stride(2) != 1:
            q = q.contiguous()
        strides = check_cache(cache, shape, self.dtype)
        args.kv_stride, args.block_stride, args.slot_stride, args.head_stride = strides
        args.cache, args.num_blocks, args.block_size = (cache.data_ptr(), *cache.shape[1:3])
        args.q_token_stride, args.q_head_stride = q.stride(0), q.stride(1)
        context, width = self.context, shape.num_heads * shape.head_dim
        if (recorder := context.recorder) is not None:
            out = recorder.empty(q, width)
            recorder.add(
                "attention", q, args, {"q": q, "out": out}, [*plan.held, cache, self.sinks, sinks]
            )
            return out
        out = q.new_empty((q.shape[0], width))
        args.q, args.out = q.data_ptr(), out.data_ptr()
        status = context.functions.attention(context.handle, ctypes.byref(args))
        if status:
            fail("attention", status)
        return out
