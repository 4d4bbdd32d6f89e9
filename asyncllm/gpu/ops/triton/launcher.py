"""Launcher, BoundKernel: launch compiled Triton kernels without the Python wrapper of Triton's JIT.

In every launch the wrapper classifies every argument, which takes about 15 µs, and a mixed step has
some 150 launches. The arguments of an engine's launches fall into few classes, so that a dictionary
of compiled kernels by class replaces the wrapper.
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
"""Alignment, in bytes, for which Triton specialises kernels on pointers."""

MAX_LAUNCHES = 1024
"""Maximum number of entries in each of a kernel's caches, which all engines of the process
share."""

_address = torch.Tensor.data_ptr
_dtype = attrgetter("dtype")


class Launcher:
    """A kernel with a cache of its compiled variants, launched as ``launcher[grid](...)``.

    The arguments are tensors, then numbers, then constants and launch options by name. The cache
    key includes all that the JIT specialises on:

    - the device, and the dtypes of tensors;
    - types and values of numbers without ``do_not_specialize`` (2 and 2.0 are equal in Python, but
      not to a kernel);
    - types and values of constants and options.

    Some launches go through the JIT:

    - the first launch of each key;
    - a launch with an unaligned pointer, unless ``do_not_specialize_on_alignment`` names it;
    - a launch with a ``do_not_specialize`` number beyond 32 bits;
    - every launch while a profiler has hooks on launches.

    Args:
        kernel: kernel of ``triton.jit``. Its ``do_not_specialize`` numbers have to be integers.
    """

    def __init__(self, kernel: JITFunction[Any]) -> None:
        self.kernel = kernel
        constant = [param.is_constexpr for param in kernel.params]
        if constant != sorted(constant):
            raise TypeError(f"{kernel.fn.__name__}: expected constants behind all other arguments")
        self.constant_placeholders = (None,) * sum(constant)
        self.num_tensors: int | None = None
        self.pick_aligned = self.pick_specialised = self.pick_unspecialised = _tuple_getter([])
        self._bound_kernels: dict[tuple[Any, ...], BoundKernel] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **constants: self.bind(**constants)(grid, *args)

    def bind(self, **constants: Any) -> BoundKernel:
        """Returns the kernel bound to constants and options; equal ones give the same object."""
        values = constants.values()
        key = (*constants, *values, *map(type, values))
        bound = self._bound_kernels.get(key)
        if bound is None:
            if len(self._bound_kernels) >= MAX_LAUNCHES:
                self._bound_kernels.clear()
            bound = self._bound_kernels[key] = BoundKernel(self, constants)
        return bound

    def classify_args(self, args: tuple[Any, ...]) -> int:
        """Finds which arguments are tensors, in the first launch; returns the number of tensors."""
        params = self.kernel.params[: len(self.kernel.params) - len(self.constant_placeholders)]
        tensors = [isinstance(arg, torch.Tensor) for arg in args]
        count = sum(tensors)
        if len(args) != len(params) or not all(tensors[:count]):
            raise TypeError(
                f"{self.kernel.fn.__name__}: expected {len(params)} arguments, tensors before "
                f"numbers; got {args}"
            )
        exempt = [param.do_not_specialize_on_alignment for param in params[:count]]
        varying = [param.do_not_specialize for param in params[count:]]
        self.pick_aligned = _tuple_getter([i for i, each in enumerate(exempt) if not each])
        self.pick_specialised = _tuple_getter([i for i, each in enumerate(varying) if not each])
        self.pick_unspecialised = _tuple_getter([i for i, each in enumerate(varying) if each])
        self.num_tensors = count
        return count

    def needs_jit_path(self, numbers: tuple[Any, ...]) -> bool:
        return bool(
            has_launch_hooks()
            or self.kernel.pre_run_hooks
            or max(self.pick_unspecialised(numbers), default=0) >= INT32_END
        )


def has_launch_hooks() -> bool:
    """Whether a profiler has hooks on launches."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    # A hook may be a chain of calls, which is empty without a profiler.
    return bool(
        (enter is not None and getattr(enter, "calls", True))
        or (leave is not None and getattr(leave, "calls", True))
    )


@dataclass(frozen=True, slots=True)
class CompiledLaunch:
    """A compiled kernel, launched by ``launch(x, y, z, stream, *self.launch_args(arguments))``.

    Attributes:
        leading_args: arguments between the stream and the kernel's own arguments.
        passes_tuple: whether the kernel's own arguments are passed as one tuple.
    """

    launch: Callable[..., None]
    leading_args: tuple[Any, ...]
    passes_tuple: bool

    @classmethod
    def of(cls, compiled: Any, arguments: tuple[Any, ...]) -> CompiledLaunch:
        """Finds the C function behind Triton's own launcher, so that it can be called directly.

        Triton's launcher passes that function the kernel's arguments, after others that are the
        same in each launch. To learn these, a copy of the launcher is called once with a function
        that only records its arguments. If Triton's launcher works in another way, or allocates
        scratch memory for each launch, the result calls Triton's launcher instead of the C
        function.

        Args:
            arguments: the kernel's arguments in some launch; nothing is launched.
        """
        run = compiled.run
        head = compiled.function, compiled.packed_metadata, None, None, None
        plain = cls(run, head, passes_tuple=False)
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
            return cls(launch, rest[:-1], passes_tuple=True)
        if _all_equal(rest[-count:], arguments):
            return cls(launch, rest[:-count], passes_tuple=False)
        return plain

    def launch_args(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return (
            (*self.leading_args, arguments)
            if self.passes_tuple
            else (*self.leading_args, *arguments)
        )


def _all_equal(found: object, expected: tuple[Any, ...]) -> bool:
    if not isinstance(found, tuple) or len(found) != len(expected):
        return False
    return all(one is other for one, other in zip(found, expected, strict=True))


class BoundKernel:
    """A kernel bound to constants and options, launched as ``bound(grid, *tensors, *numbers)``."""

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
        addresses, specialised = tuple(map(_address, tensors)), launcher.pick_specialised(numbers)
        device = tensors[0].get_device()
        key = (device, *map(_dtype, tensors), *specialised, *map(type, specialised))
        # Constants are compiled into the kernel, which takes None in their places.
        arguments = (*addresses, *numbers, *launcher.constant_placeholders)
        fast_path = not (reduce(or_, launcher.pick_aligned(addresses)) % ALIGNMENT) and not (
            launcher.needs_jit_path(numbers)
        )
        cached = self._launches.get(key)
        if cached is None or not fast_path:
            compiled = launcher.kernel[grid](*args, **self.constants)
            # ``compiled`` is None if a hook of the JIT has prevented the compilation.
            if fast_path and compiled is not None:
                self._cache_launch(key, CompiledLaunch.of(compiled, arguments))
            return
        x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        active: Any = driver.active
        stream = active.get_current_stream(device)
        cached.launch(x, y, z, stream, *cached.launch_args(arguments))

    def _cache_launch(self, key: tuple[Any, ...], launch: CompiledLaunch) -> None:
        if len(self._launches) >= MAX_LAUNCHES:
            self._launches.clear()
        self._launches[key] = launch


class InterpretedKernel:
    """A kernel of Triton's interpreter, with the interface of Launcher."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self.kernel[grid]

    def bind(self, **constants: Any) -> Callable[..., None]:
        return lambda grid, *args: self.kernel[grid](*args, **constants)


def with_launcher(kernel: Any) -> Any:
    """Decorator that wraps a kernel in a Launcher, or in an InterpretedKernel."""
    return Launcher(kernel) if isinstance(kernel, JITFunction) else InterpretedKernel(kernel)


def _tuple_getter(indices: list[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Makes an ``itemgetter`` that returns a tuple for any number of indices."""
    if len(indices) > 1:
        return itemgetter(*indices)
    if not indices:
        return lambda _: ()
    return lambda values: (values[indices[0]],)
