"""Launcher, BoundKernel: a compiled kernel launched again without the wrapper of Triton's JIT.

That wrapper classifies every argument of every launch anew, about 15 µs of Python, and a mixed step
has some 150 launches. An engine's launches differ in few ways, so their compiled kernels are kept
by all that the wrapper classifies, and found with one look-up.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
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
"""That a kernel is kept in at most, of all engines of the process."""

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
        constant = [param.is_constexpr for param in kernel.params]
        if constant != sorted(constant):
            raise TypeError(f"{kernel.fn.__name__}: expected constants behind all other arguments")
        self.unused = (None,) * sum(constant)
        self.num_tensors: int | None = None
        self.aligned = self.kept = self.varied = _getter([])
        self._bound: dict[tuple[Any, ...], BoundKernel] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **constants: self.bind(**constants)(grid, *args)

    def bind(self, **constants: Any) -> BoundKernel:
        """The kernel with its constants and options, which looks its forms up by the rest."""
        key = (*constants, *constants.values())
        bound = self._bound.get(key)
        if bound is None:
            if len(self._bound) >= MAX_FORMS:
                self._bound.clear()
            bound = self._bound[key] = BoundKernel(self, constants)
        return bound

    def take_in(self, args: tuple[Any, ...]) -> int:
        """Which arguments are tensors, from the first launch."""
        params = self.kernel.params[: len(self.kernel.params) - len(self.unused)]
        tensors = [isinstance(arg, torch.Tensor) for arg in args]
        count = sum(tensors)
        if len(args) != len(params) or not all(tensors[:count]):
            raise TypeError(
                f"{self.kernel.fn.__name__}: expected {len(params)} arguments, tensors before "
                f"numbers; got {args}"
            )
        exempt = [param.do_not_specialize_on_alignment for param in params[:count]]
        varying = [param.do_not_specialize for param in params[count:]]
        self.aligned = _getter([i for i, each in enumerate(exempt) if not each])
        self.kept = _getter([i for i, each in enumerate(varying) if not each])
        self.varied = _getter([i for i, each in enumerate(varying) if each])
        self.num_tensors = count
        return count

    def is_rare(self, numbers: tuple[Any, ...]) -> bool:
        runtime = knobs.runtime
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        # Chains, empty ones as a rule.
        return bool(
            (enter is not None and getattr(enter, "calls", True))
            or (leave is not None and getattr(leave, "calls", True))
            or self.kernel.pre_run_hooks
            or max(self.varied(numbers), default=0) >= INT32
        )


class BoundKernel:
    """A kernel with its constants and options: ``bound(grid, *tensors, *numbers)``."""

    __slots__ = ("_forms", "constants", "launcher")

    def __init__(self, launcher: Launcher, constants: dict[str, Any]) -> None:
        self.launcher, self.constants = launcher, constants
        self._forms: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def __call__(self, grid: tuple[int, ...], *args: Any) -> None:
        launcher = self.launcher
        count = launcher.num_tensors
        if count is None:
            count = launcher.take_in(args)
        tensors, numbers = args[:count], args[count:]
        addresses = tuple(map(_address, tensors))
        device = tensors[0].get_device()
        key = (device, *map(_dtype, tensors), *launcher.kept(numbers))
        form = self._forms.get(key)
        usual = not (reduce(or_, launcher.aligned(addresses)) % ALIGNMENT) and not (
            launcher.is_rare(numbers)
        )
        if form is None or not usual:
            compiled = launcher.kernel[grid](*args, **self.constants)
            # None where a hook of the JIT has kept it from compiling.
            if usual and compiled is not None:
                self._keep(key, compiled)
            return
        run, function, metadata = form
        x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        active: Any = driver.active
        stream = active.get_current_stream(device)
        # Constants are part of the compiled kernel.
        run(x, y, z, stream, function, metadata, None, None, None,
            *addresses, *numbers, *launcher.unused)  # fmt: skip

    def _keep(self, key: tuple[Any, ...], compiled: Any) -> None:
        if len(self._forms) >= MAX_FORMS:
            self._forms.clear()
        self._forms[key] = compiled.run, compiled.function, compiled.packed_metadata


class InterpretedKernel:
    """The same for Triton's interpreter, which keeps its own launches."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self.kernel[grid]

    def bind(self, **constants: Any) -> Callable[..., None]:
        return lambda grid, *args: self.kernel[grid](*args, **constants)


def launched(kernel: Any) -> Any:
    """Decorator of a kernel."""
    return Launcher(kernel) if isinstance(kernel, JITFunction) else InterpretedKernel(kernel)


def _getter(indices: list[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """``itemgetter``, which has a tuple for several indices only."""
    if len(indices) > 1:
        return itemgetter(*indices)
    if not indices:
        return lambda _: ()
    return lambda values: (values[indices[0]],)
