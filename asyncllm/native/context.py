"""NativeContext, PackedWeights: an engine's objects in the native library."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any, NoReturn

from asyncllm.native.interface import STRUCTS
from asyncllm.native.shared_library import Library, NativeUnavailableError

_STATUS_MESSAGES = {
    1: "shapes, strides or an alignment that no kernel takes",
    2: "out of memory for scratch space",
    3: "it is closed, or this is a forked child of the process that made it",
    4: "a slot, block or position, or a token or line, beyond its table",
}


class NativeContext:
    """Threads and scratch memory of one engine, and the kernels of one instruction set.

    Only one thread at a time may call ops with a context. Its threads end when the last reference
    to the context is gone, and not while an op still uses them.

    Args:
        num_threads: number of threads that compute, the calling thread included.
        isa: name of the instruction set; None is the best one of the processor.

    Attributes:
        recorder: the Recorder that records ops, while a step is recorded; else None.

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
            isa_name = isa or library.best_isa().decode()
            raise NativeUnavailableError(f"{isa_name} with {num_threads} threads cannot be started")
        self.isa = library.isa(self._handle).decode()
        self._finalizer = weakref.finalize(self, library.close, self._handle)
        self._finalizer.atexit = False

    @property
    def handle(self) -> int:
        """Handle of the context in the library, for a direct call of an op.

        Raises:
            UnrecordableError: a step is being recorded, and the recording would lack the op.
        """
        if self.recorder is not None:
            self.recorder.raise_unrecordable()
        return self._handle

    @property
    def weights_layout(self) -> str:
        """Name of the layout of packed weights. Contexts can exchange packed weights only if their
        layouts are equal."""
        return f"{self.isa}-{self.functions.layout()}"

    def call(self, op: str, *args: Any) -> None:
        """Calls an op of the library directly.

        Raises:
            MemoryError, RuntimeError: the op fails, see ``raise_for_status``.
        """
        status = getattr(self.functions, op)(self.handle, *args)
        if status:
            raise_for_status(op, status)

    def checksums(self, address: int, byte_ranges: Sequence[tuple[int, int]]) -> list[int]:
        """Checksums of ranges of memory, as unsigned 64-bit numbers. One call computes them all
        without the GIL.

        Args:
            byte_ranges: offset from ``address`` and size in bytes of each range.
        """
        count = len(byte_ranges)
        offsets, sizes = (
            (ctypes.c_int64 * count)(*each) for each in zip(*byte_ranges, strict=True)
        )
        results = (ctypes.c_uint64 * count)()
        self.call("checksums", address, offsets, sizes, count, results)
        return list(results)


class PackedWeights:
    """Weights of a linear layer, packed in the layout of a context's kernels.

    Args:
        handle: result of the library's ``pack``, ``pack_grouped`` or ``view_weights``; 0 or None if
            it failed.

    Attributes:
        address, num_bytes: memory of the packed weights, without the bias.
        form: ctypes structure ``PanelArgs``: sizes and dtypes, from which ``view`` computes
            offsets.

    Raises:
        MemoryError: the packed weights cannot be allocated.
    """

    def __init__(self, context: NativeContext, handle: int | None, n: int, k: int) -> None:
        if not handle:
            raise MemoryError(f"weights of {n} x {k} cannot be packed")
        library, self.handle = context.functions, handle
        self._owner: object = None
        self.num_bytes: int = library.weights_bytes(handle)
        self.form = STRUCTS["PanelArgs"]()
        self.address: int = library.describe_weights(handle, self.form)
        weakref.finalize(self, library.free_weights, handle).atexit = False

    @classmethod
    def view(
        cls, context: NativeContext, form: Any, address: int, num_bytes: int, bias: int | None,
        owner: object,
    ) -> PackedWeights:  # fmt: skip
        """Makes PackedWeights from packed weights in memory, without a copy.

        Args:
            form: attribute ``form`` of the PackedWeights whose memory was stored. Their context's
                ``weights_layout`` must have been equal to that of ``context``.
            address: address of the packed weights, ``num_bytes`` long and aligned to 64 bytes.
            bias: address of the bias, ``[n]`` float32; None for none.
            owner: object that owns this memory; referenced as long as the weights exist.
        """
        handle = context.functions.view_weights(context.handle, form, address, num_bytes, bias)
        weights = cls(context, handle, form.n, form.k)
        weights._owner = owner
        return weights


def raise_for_status(op: str, status: int) -> NoReturn:
    """Raises MemoryError or RuntimeError for a status of the library other than 0."""
    error = MemoryError if status == 2 else RuntimeError
    raise error(f"native {op}: {_STATUS_MESSAGES[status]}")
