"""Launcher, BoundKernel: launches of compiled kernels that bypass the wrapper of Triton's JIT.

That wrapper classifies every argument of every launch anew, about 15 µs of Python, and a mixed step
has some 150 launches. An engine's launches differ in few ways, so compiled kernels are cached by
the properties that the wrapper classifies, and found with one look-up.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import reduce
from operator import attrgetter, itemgetter, or_
from typing import Any

import torch
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from asyncllm.gpu.ops.triton.tuning import INT32_END

ALIGNMENT = 16
"""Bytes. Triton compiles kernels for pointers that are multiples of it, or for any pointers."""

MAX_LAUNCHES = 1024
"""Most cached launches of a kernel, of all engines of the process."""

_address = torch.Tensor.data_ptr
_dtype = attrgetter("dtype")


class Launcher:
    """A kernel whose arguments are tensors, then numbers, then constants by name.

    The cache key distinguishes at least what the JIT specialises on: the device; the dtypes of
    tensors; types and values of numbers without ``do_not_specialize`` (2 and 2.0 are equal in
    Python, but not to a kernel); types and values of constants and options. The JIT's own path is
    taken by the first launch of each key, and by every launch with an unaligned pointer, unless
    that is exempt, with an unspecialised number beyond 32 bits, or with hooks of a profiler.

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
        self.aligned = self.specialised = self.unspecialised = _getter([])
        self._bound: dict[tuple[Any, ...], BoundKernel] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **constants: self.bind(**constants)(grid, *args)

    def bind(self, **constants: Any) -> BoundKernel:
        """Returns the kernel with its constants and options, from the cache if it is there."""
        values = constants.values()
        key = (*constants, *values, *map(type, values))
        bound = self._bound.get(key)
        if bound is None:
            if len(self._bound) >= MAX_LAUNCHES:
                self._bound.clear()
            bound = self._bound[key] = BoundKernel(self, constants)
        return bound

    def classify_args(self, args: tuple[Any, ...]) -> int:
        """Finds out, from the first launch, which arguments are tensors; returns their number."""
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
        self.specialised = _getter([i for i, each in enumerate(varying) if not each])
        self.unspecialised = _getter([i for i, each in enumerate(varying) if each])
        self.num_tensors = count
        return count

    def needs_jit_path(self, numbers: tuple[Any, ...]) -> bool:
        return bool(
            is_observed()
            or self.kernel.pre_run_hooks
            or max(self.unspecialised(numbers), default=0) >= INT32_END
        )


def is_observed() -> bool:
    """Whether a profiler has hooks on launches."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    # Hooks are chains, which are empty without a profiler.
    return bool(
        (enter is not None and getattr(enter, "calls", True))
        or (leave is not None and getattr(leave, "calls", True))
    )


@dataclass(frozen=True, slots=True)
class CompiledLaunch:
    """A compiled kernel, launched by ``launch(x, y, z, stream, *self.rest(arguments))``.

    Attributes:
        head: arguments between the stream and the kernel's own.
        nested: the kernel's arguments are passed as one tuple.
    """

    launch: Callable[..., None]
    head: tuple[Any, ...]
    nested: bool

    @classmethod
    def of(cls, compiled: Any, arguments: tuple[Any, ...]) -> CompiledLaunch:
        """Finds the C function behind Triton's launcher, so that launches can call it directly.

        Triton's launcher calls that function with the kernel's arguments and others that are the
        same in each launch. The latter are recorded once, by a copy of the launcher. A launcher
        that works otherwise, or allocates scratch memory for each launch, is called itself.

        Args:
            arguments: arguments of a launch; the kernel is not launched.
        """
        run = compiled.run
        head = compiled.function, compiled.packed_metadata, None, None, None
        plain = cls(run, head, nested=False)
        launch = getattr(run, "launch", None)
        scratch = [getattr(run, f"{name}_scratch_size", 1) for name in ("global", "profile")]
        if launch is None or any(scratch):
            return plain
        given: list[tuple[Any, ...]] = []
        twin = copy(run)
        twin.launch = lambda *handed: given.append(handed)
        place = 1, 2, 3, 4
        twin(*place, *head, *arguments)
        if len(given) != 1 or given[0][:4] != place:
            return plain
        rest, count = given[0][4:], len(arguments)
        if _all_equal(rest[-1], arguments):
            return cls(launch, rest[:-1], nested=True)
        if _all_equal(rest[-count:], arguments):
            return cls(launch, rest[:-count], nested=False)
        return plain

    def rest(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*self.head, arguments) if self.nested else (*self.head, *arguments)


def _all_equal(found: object, expected: tuple[Any, ...]) -> bool:
    if not isinstance(found, tuple) or len(found) != len(expected):
        return False
    return all(one is other for one, other in zip(found, expected, strict=True))


class BoundKernel:
    """A kernel with its constants and options, called as ``bound(grid, *tensors, *numbers)``."""

    __slots__ = ("_launches", "constants", "launcher")

    def __init__(self, launcher: Launcher, constants: dict[str, Any]) -> None:
        self.launcher, self.constants = launcher, constants
        self._launches: dict[tuple[Any, ...], CompiledLaunch] = {}

    def __call__(self, grid: tuple[int, ...], *args: Any) -> None:
        launcher = self.launcher
        count = launcher.num_tensors
        if count is None:
            count = launcher.classify_args(args)
        tensors, numbers = args[:count], args[count:]
        addresses, specialised = tuple(map(_address, tensors)), launcher.specialised(numbers)
        device = tensors[0].get_device()
        key = (device, *map(_dtype, tensors), *specialised, *map(type, specialised))
        # Constants are part of the compiled kernel, which gets None in their places.
        arguments = (*addresses, *numbers, *launcher.unused)
        fast_path = not (reduce(or_, launcher.aligned(addresses)) % ALIGNMENT) and not (
            launcher.needs_jit_path(numbers)
        )
        cached = self._launches.get(key)
        if cached is None or not fast_path:
            compiled = launcher.kernel[grid](*args, **self.constants)
            # None where a hook of the JIT has prevented the compilation.
            if fast_path and compiled is not None:
                self._keep(key, CompiledLaunch.of(compiled, arguments))
            return
        x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        active: Any = driver.active
        stream = active.get_current_stream(device)
        cached.launch(x, y, z, stream, *cached.rest(arguments))

    def _keep(self, key: tuple[Any, ...], launch: CompiledLaunch) -> None:
        if len(self._launches) >= MAX_LAUNCHES:
            self._launches.clear()
        self._launches[key] = launch


class InterpretedKernel:
    """A kernel for Triton's interpreter, with the interface of Launcher."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self.kernel[grid]

    def bind(self, **constants: Any) -> Callable[..., None]:
        return lambda grid, *args: self.kernel[grid](*args, **constants)


def launched(kernel: Any) -> Any:
    """Decorator that wraps a kernel in a Launcher, or for Triton's interpreter."""
    return Launcher(kernel) if isinstance(kernel, JITFunction) else InterpretedKernel(kernel)


def _getter(indices: list[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """``itemgetter`` that always returns a tuple, also for one index or none."""
    if len(indices) > 1:
        return itemgetter(*indices)
    if not indices:
        return lambda _: ()
    return lambda values: (values[indices[0]],)
