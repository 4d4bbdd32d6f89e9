"""Launcher: a compiled kernel launched again without the wrapper of Triton's JIT.

That wrapper classifies every argument of every launch anew, about 15 µs of Python, and a mixed step
has some 150 launches. An engine's launches differ in few ways, so their compiled kernels are kept
by all that the wrapper classifies, and found with one look-up.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from operator import attrgetter, itemgetter, or_
from typing import Any

import torch
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

ALIGNMENT = 16
"""Bytes; Triton compiles for pointers that are multiples of it, or for any."""

INT32 = 2**31

MAX_FORMS = 1024
"""Compiled kernels that a launcher keeps: of all engines of the process."""

_address = torch.Tensor.data_ptr
_dtype = attrgetter("dtype")


class Launcher:
    """A kernel whose arguments are tensors, then numbers, then constants by name.

    What a compiled kernel is kept by is at least as fine as what the JIT specialises on: the
    device; of tensors the dtype; of numbers their values, where the kernel does not say
    ``do_not_specialize``; constants and options as they are. The JIT's own path is taken by the
    first launch of each kind, and by every one that is rare: with a pointer that is not aligned and
    not exempt from it, a number beyond 32 bits that is not kept by its value, or hooks of a
    profiler.

    Args:
        kernel: its unspecialised numbers have to be integers.
    """

    def __init__(self, kernel: JITFunction[Any]) -> None:
        self.kernel = kernel
        self.fn = kernel.fn
        constant = [param.is_constexpr for param in kernel.params]
        if constant != sorted(constant):
            raise TypeError(f"{kernel.fn.__name__}: expected constants behind all other arguments")
        numbers = [param.do_not_specialize for param in kernel.params]
        exempt = [param.do_not_specialize_on_alignment for param in kernel.params]
        self._unused = (None,) * sum(constant)
        self._given = len(constant) - sum(constant)
        self._num_tensors: int | None = None
        self._varying = [i for i in range(self._given) if numbers[i]]
        self._exempt = [i for i in range(self._given) if exempt[i]]
        self._aligned = self._kept = self._varied = _getter([])
        self._forms: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        count = self._num_tensors
        if count is None:
            count = self._take_in(args)
        tensors, numbers = args[:count], args[count:]
        addresses = tuple(map(_address, tensors))
        active: Any = driver.active
        device = active.get_current_device()
        key = (
            device, *map(_dtype, tensors), *self._kept(numbers), *constants, *constants.values()
        )  # fmt: skip
        aligned = not reduce(or_, self._aligned(addresses)) % ALIGNMENT
        form = self._forms.get(key)
        if form is None or not aligned or self._is_rare(numbers):
            compiled = self.kernel[grid](*args, **constants)
            # None where a hook of the JIT has kept it from compiling.
            if compiled is not None and aligned and not self._is_rare(numbers):
                self._keep(key, compiled)
            return
        run, function, metadata = form
        x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        stream = active.get_current_stream(device)
        # Constants are part of the compiled kernel.
        run(x, y, z, stream, function, metadata, None, None, None,
            *addresses, *numbers, *self._unused)  # fmt: skip

    def _take_in(self, args: tuple[Any, ...]) -> int:
        """Which arguments are tensors, from the first launch."""
        tensors = [isinstance(arg, torch.Tensor) for arg in args]
        count = sum(tensors)
        name = self.kernel.fn.__name__
        if len(args) != self._given or not all(tensors[:count]):
            raise TypeError(f"{name}: expected {self._given} tensors, then numbers; got {args}")
        self._aligned = _getter([i for i in range(count) if i not in self._exempt])
        varying = [i - count for i in self._varying]
        self._kept = _getter([i for i in range(len(args) - count) if i not in varying])
        self._varied = _getter(varying)
        self._num_tensors = count
        return count

    def _is_rare(self, numbers: tuple[Any, ...]) -> bool:
        return (
            max(self._varied(numbers), default=0) >= INT32
            or bool(self.kernel.pre_run_hooks)
            or _is_hooked(knobs.runtime.launch_enter_hook)
            or _is_hooked(knobs.runtime.launch_exit_hook)
        )

    def _keep(self, key: tuple[Any, ...], compiled: Any) -> None:
        if len(self._forms) >= MAX_FORMS:
            self._forms.clear()
        self._forms[key] = compiled.run, compiled.function, compiled.packed_metadata


def launched(kernel: Any) -> Any:
    """Decorator of a kernel; Triton's interpreter keeps its own launches."""
    return Launcher(kernel) if isinstance(kernel, JITFunction) else kernel


def _is_hooked(hook: Any) -> bool:
    """Hooks of Triton are chains, empty ones as a rule."""
    return hook is not None and bool(getattr(hook, "calls", True))


def _getter(indices: list[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """``itemgetter``, which has a tuple for several indices only."""
    if len(indices) > 1:
        return itemgetter(*indices)
    if not indices:
        return lambda _: ()
    return lambda values: (values[indices[0]],)
