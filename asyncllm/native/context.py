"""Context: an engine's threads in the native library, and the weights packed for its kernels."""

from __future__ import annotations

import weakref
from typing import Any, NoReturn

from asyncllm.native.shared_library import Library, NativeUnavailableError

_STATUS = {
    1: "shapes, strides or an alignment that no kernel takes",
    2: "out of memory for scratch space",
    3: "it is closed, or this is a forked child of the process that made it",
    4: "a slot, block or position, or a token or line, beyond its table",
}


class Context:
    """Threads and scratch memory of one engine, and the kernels of one instruction set.

    One thread at a time calls ops with it. The threads end when the last reference is gone,
    so that none works on freed memory.

    Args:
        num_threads: threads, the caller's included.
        isa: instruction set; None is the best that the processor has.

    Attributes:
        recorder: the Recorder of ops while a step is recorded, else None.

    Raises:
        NativeUnavailableError: this processor or build does not have ``isa``, or the threads
            cannot be started.
    """

    recorder: Any = None

    def __init__(self, library: Library, num_threads: int, isa: str | None = None) -> None:
        self.functions = library
        self.num_threads = num_threads
        self._handle = library.create(num_threads, None if isa is None else isa.encode())
        if not self._handle:
            what = isa or library.best_isa().decode()
            raise NativeUnavailableError(f"{what} with {num_threads} threads cannot be started")
        self.isa = library.isa(self._handle).decode()
        self._end = weakref.finalize(self, library.close, self._handle)
        self._end.atexit = False

    @property
    def handle(self) -> int:
        """The library's handle, for an op that is called now.

        While a step is recorded it raises: the recorded program would lack the op.
        """
        if self.recorder is not None:
            self.recorder.refuse_call()
        return self._handle


class PackedWeights:
    """Weights in the layout of a context's kernels.

    Args:
        handle: result of ``pack`` or ``pack_grouped`` of the context's library, 0 if it failed.

    Raises:
        MemoryError: too little memory for the packed weights.
    """

    def __init__(self, context: Context, handle: int | None, n: int, k: int) -> None:
        if not handle:
            raise MemoryError(f"weights of {n} x {k} cannot be packed")
        library, self.handle = context.functions, handle
        self.num_bytes: int = library.weights_bytes(handle)
        weakref.finalize(self, library.free_weights, handle).atexit = False

    @classmethod
    def plain(
        cls, context: Context, values: int, dtype: int, n: int, k: int, stride: int,
        scales: int | None, bias: int | None,
    ) -> PackedWeights:  # fmt: skip
        """Packs floating point elements, or 8-bit integers with a scale per output.

        Args:
            values: address of ``[n, k]``, rows ``stride`` elements apart.
            dtype: ``DType`` of the interface.
            scales: address of ``[n]`` float32, for 8-bit weights; else None.
            bias: address of ``[n]`` float32, or None.
        """
        handle = context.functions.pack(context.handle, values, dtype, n, k, stride, scales, bias)
        return cls(context, handle, n, k)

    @classmethod
    def grouped(cls, context: Context, args: Any) -> PackedWeights:
        """Packs integers with a scale per output and group of inputs."""
        return cls(context, context.functions.pack_grouped(context.handle, args), args.n, args.k)


def fail(op: str, status: int) -> NoReturn:
    """Raises the error of a status other than 0: MemoryError or RuntimeError."""
    if status == 2:
        raise MemoryError(f"native {op}: {_STATUS[status]}")
    raise RuntimeError(f"native {op}: {_STATUS[status]}")
