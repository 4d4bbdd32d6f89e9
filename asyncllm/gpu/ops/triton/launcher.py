"""Launcher, BoundKernel: a compiled kernel launched again without the wrapper of Triton's JIT.

That wrapper classifies every argument of every launch anew, about 15 µs of Python, and a mixed step
has some 150 launches. An engine's launches differ in few ways, so their compiled kernels are kept
by all that the wrapper classifies, and found with one look-up.
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

from asyncllm.gpu.ops.triton.tuning import INT32

ALIGNMENT = 16
"""Bytes; Triton compiles for pointers that are multiples of it, or for any."""

MAX_FORMS = 1024
"""That a kernel is kept in at most, of all engines of the process."""

_address = torch.Tensor.data_ptr
_dtype = attrgetter("dtype")


class Launcher:
    """A kernel whose arguments are tensors, then numbers, then constants by name.

    What a compiled kernel is kept by is at least as fine as what the JIT specialises on: the
    device; of tensors the dtype; of numbers their types and values, where the kernel does not say
    ``do_not_specialize`` (2 and 2.0 are equal, but an integer and a float to a kernel); constants
    and options likewise. The JIT's own path is taken by the first launch of each kind, and by every
    one that is rare: with a pointer that is not aligned and not exempt from it, a number beyond 32
    bits that is not kept by its value, or hooks of a profiler.

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
        values = constants.values()
        key = (*constants, *values, *map(type, values))
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
        return bool(
            is_observed()
            or self.kernel.pre_run_hooks
            or max(self.varied(numbers), default=0) >= INT32
        )


def is_observed() -> bool:
    """Whether a profiler's hooks look at launches."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    # Chains, empty ones as a rule.
    return bool(
        (enter is not None and getattr(enter, "calls", True))
        or (leave is not None and getattr(leave, "calls", True))
    )


@dataclass(frozen=True, slots=True)
class Form:
    """A compiled kernel and its launch: ``launch(x, y, z, stream, *form.rest(arguments))``.

    Attributes:
        head: what comes between the stream and the kernel's arguments.
        nested: the arguments are one tuple.
    """

    launch: Callable[..., None]
    head: tuple[Any, ...]
    nested: bool

    @classmethod
    def of(cls, compiled: Any, arguments: tuple[Any, ...]) -> Form:
        """Triton's launcher hands the arguments on to a function in C, with things that are the
        same in each launch. What it hands on is noted once, so that later launches call the
        function at once; its own call stays where it is not of that kind, or takes scratch memory
        for each launch.

        Args:
            arguments: of a launch; the kernel is not launched.
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
        if _same(rest[-1], arguments):
            return cls(launch, rest[:-1], nested=True)
        if _same(rest[-count:], arguments):
            return cls(launch, rest[:-count], nested=False)
        return plain

    def rest(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*self.head, arguments) if self.nested else (*self.head, *arguments)


def _same(found: object, expected: tuple[Any, ...]) -> bool:
    if not isinstance(found, tuple) or len(found) != len(expected):
        return False
    return all(one is other for one, other in zip(found, expected, strict=True))


class BoundKernel:
    """A kernel with its constants and options: ``bound(grid, *tensors, *numbers)``."""

    __slots__ = ("_forms", "constants", "launcher")

    def __init__(self, launcher: Launcher, constants: dict[str, Any]) -> None:
        self.launcher, self.constants = launcher, constants
        self._forms: dict[tuple[Any, ...], Form] = {}

    def __call__(self, grid: tuple[int, ...], *args: Any) -> None:
        launcher = self.launcher
        count = launcher.num_tensors
        if count is None:
            count = launcher.take_in(args)
        tensors, numbers = args[:count], args[count:]
        addresses, kept = tuple(map(_address, tensors)), launcher.kept(numbers)
        device = tensors[0].get_device()
        key = (device, *map(_dtype, tensors), *kept, *map(type, kept))
        # Constants are part of the compiled kernel.
        arguments = (*addresses, *numbers, *launcher.unused)
        usual = not (reduce(or_, launcher.aligned(addresses)) % ALIGNMENT) and not (
            launcher.is_rare(numbers)
        )
        form = self._forms.get(key)
        if form is None or not usual:
            compiled = launcher.kernel[grid](*args, **self.constants)
            # None where a hook of the JIT has kept it from compiling.
            if usual and compiled is not None:
                self._keep(key, Form.of(compiled, arguments))
            return
        x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        active: Any = driver.active
        stream = active.get_current_stream(device)
        form.launch(x, y, z, stream, *form.rest(arguments))

    def _keep(self, key: tuple[Any, ...], form: Form) -> None:
        if len(self._forms) >= MAX_FORMS:
            self._forms.clear()
        self._forms[key] = form


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
