"""Makes Triton's interpreter faithful where its bfloat16 is not, and its sort a matter of
milliseconds.

The interpreter keeps bfloat16 in uint16 arrays: it truncates where hardware rounds, and its
dot product multiplies the bit patterns. Triton's sort, which is written in its own language, takes
seconds for 256 numbers.
"""

from __future__ import annotations

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

TensorHandle = interpreter.TensorHandle
plain_cast = interpreter.InterpreterBuilder.cast_impl
plain_dot = interpreter.InterpreterBuilder.create_dot


def widen(data: np.ndarray) -> np.ndarray:
    return (data.astype(np.uint32) << np.uint32(16)).view(np.float32)


def narrow(data: np.ndarray) -> np.ndarray:
    """Rounds to the nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(data, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(data), np.uint32(0x7FC0), rounded).astype(np.uint16)


def cast(self, src, dst_type):
    source, target = src.dtype.scalar, dst_type.scalar
    if source == target:
        return src
    if source == tl.bfloat16:
        wide = TensorHandle(widen(src.data), tl.float32)
        return wide if target == tl.float32 else plain_cast(self, wide, dst_type)
    if target == tl.bfloat16:
        return TensorHandle(narrow(src.data.astype(np.float32)), tl.bfloat16)
    return plain_cast(self, src, dst_type)


def dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    a, b = (cast(self, x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
    return plain_dot(self, a, b, d, input_precision, max_num_imprecise_acc)


def sort(x, dim=None, descending=False):
    assert len(x.shape) == 1
    ordered = np.sort(x.handle.data)
    if descending:
        ordered = ordered[::-1].copy()
    return tl.core.tensor(TensorHandle(ordered, x.handle.dtype), x.type)


# A device function that is called by another patches the language anew at every call, which
# takes longer than most of them: once per launch and module is enough.
patched: set[int] = set()
plain_launch = interpreter.GridExecutor.__call__


def launch(self, *args, **kwargs):
    patched.clear()
    return plain_launch(self, *args, **kwargs)


def call(self, *args, **kwargs):
    module = id(self.fn.__globals__)
    if module not in patched:
        interpreter._patch_lang(self.fn)
        patched.add(module)
    return self.rewrite()(*args, **kwargs)


def install() -> None:
    tl.sort = sort
    interpreter.InterpreterBuilder.cast_impl = cast
    interpreter.InterpreterBuilder.create_dot = dot
    interpreter.GridExecutor.__call__ = launch
    interpreter.InterpretedFunction.__call__ = call
