"""AttentionBackend: the protocol of attention backends, with their constraints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from asyncllm.gpu.ops.base import Attention, AttentionShape

CUDA_DEVICE_TYPES = frozenset({"cuda"})
HALF_DTYPES = frozenset({torch.float16, torch.bfloat16})


@dataclass(frozen=True, slots=True)
class AttentionRequest:
    """The model and the device for which attention is needed.

    Attributes:
        dtype: dtype of queries and KV.
        block_size: tokens per KV block; None until it is chosen.
        windows: sliding windows of the model's layers, as numbers of keys that a query sees;
            contains None if a layer has no window.
        num_threads: number of CPU threads, for a backend that starts its own.
        sibling: attention that was made for another kind of layer of the same model. The backend
            may reuse its resources.
    """

    shape: AttentionShape
    dtype: torch.dtype
    device: torch.device
    block_size: int | None
    windows: frozenset[int | None]
    num_threads: int = 1
    sibling: Attention | None = None


@dataclass(frozen=True, slots=True)
class UnmetConstraint:
    """A constraint of a backend, broken by a request.

    Attributes:
        field: name of the request's field. Only "block_size" is also a setting of the engine.
        actual: the request's value.
        expected: text with the field and its limit, such as "head size at most 256".
    """

    field: str
    actual: str
    expected: str


@dataclass(frozen=True, slots=True)
class Constraints:
    """Limits of an attention backend; None means no limit.

    Attributes:
        device_types: accepted values of ``torch.device.type``.
        min_capability, max_capability: CUDA compute capability as (major, minor), both
            inclusive; not checked on other devices.
        dtypes: dtypes of queries and KV.
        max_head_dim: largest head size.
        head_dim_multiple: the head size has to be a multiple of it.
        block_multiple: the tokens per KV block have to be a multiple of it.
        window: whether sliding windows are supported.
        softcap: whether a soft cap on the scores is supported.
        sinks: whether attention sinks are supported.
    """

    device_types: frozenset[str] | None = None
    min_capability: tuple[int, int] | None = None
    max_capability: tuple[int, int] | None = None
    dtypes: frozenset[torch.dtype] | None = None
    max_head_dim: int | None = None
    head_dim_multiple: int = 1
    block_multiple: int = 1
    window: bool = True
    softcap: bool = True
    sinks: bool = False

    def unmet(
        self, request: AttentionRequest, capability: tuple[int, int] | None = None
    ) -> Iterator[UnmetConstraint]:
        """Yields the constraints that ``request`` breaks.

        Args:
            capability: compute capability of the request's device, if it is a CUDA device.
        """
        yield from self._unmet_device_constraints(request.device, capability)
        shape = request.shape
        if self.dtypes is not None and request.dtype not in self.dtypes:
            names = " or ".join(sorted(_dtype_name(dtype) for dtype in self.dtypes))
            yield UnmetConstraint("dtype", _dtype_name(request.dtype), f"dtype {names}")
        if self.max_head_dim is not None and shape.head_dim > self.max_head_dim:
            expected = f"head size at most {self.max_head_dim}"
            yield UnmetConstraint("head size", str(shape.head_dim), expected)
        if shape.head_dim % self.head_dim_multiple:
            expected = f"head size a multiple of {self.head_dim_multiple}"
            yield UnmetConstraint("head size", str(shape.head_dim), expected)
        windows = sorted(window for window in request.windows if window is not None)
        if windows and not self.window:
            yield UnmetConstraint("sliding window", str(windows[0]), "no sliding window")
        if shape.softcap is not None and not self.softcap:
            yield UnmetConstraint("soft cap", str(shape.softcap), "no soft cap on the scores")
        if shape.sinks and not self.sinks:
            yield UnmetConstraint("sinks", "attention with sinks", "no attention sinks")
        if request.block_size is not None and request.block_size % self.block_multiple:
            expected = f"block_size a multiple of {self.block_multiple}"
            yield UnmetConstraint("block_size", str(request.block_size), expected)

    def _unmet_device_constraints(
        self, device: torch.device, capability: tuple[int, int] | None
    ) -> Iterator[UnmetConstraint]:
        if self.device_types is not None and device.type not in self.device_types:
            expected = f"device {' or '.join(sorted(self.device_types))}"
            yield UnmetConstraint("device", str(device), expected)
            return
        if capability is None or device.type != "cuda":
            return
        low, high = self.min_capability, self.max_capability
        if (low and capability < low) or (high and capability > high):
            limits = [
                f" {word} {capability_text(limit)}"
                for word, limit in (("from", low), ("to", high))
                if limit
            ]
            expected = f"compute capability{''.join(limits)}"
            yield UnmetConstraint("compute capability", capability_text(capability), expected)


@runtime_checkable
class AttentionBackend(Protocol):
    """Protocol of a backend that the setting ``attention_backend`` selects by name.

    Built-in backends are the Attention classes themselves, whose ``make`` is a class method.
    Another distribution registers a backend under the entry point group
    ``asyncllm.attention_backends``; the entry point's name is the backend's name. The entry point
    is an Attention class, a class whose constructor takes no arguments, or an instance.

    Attributes:
        constraints: limits that are checked before ``make`` is called.
    """

    @property
    def constraints(self) -> Constraints: ...

    def default_block_size(self, device: torch.device) -> int:
        """Tokens per KV block if ``block_size`` is not configured."""
        ...

    def make(self, request: AttentionRequest) -> Attention:
        """Makes the attention of one kind of layer; called once per engine and kind.

        ``request.block_size`` is never None.

        Raises:
            EngineError: a library that the backend needs is missing or does not work here.
        """
        ...


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def capability_text(capability: tuple[int, int]) -> str:
    """Formats a compute capability in the usual notation, such as "8.0"."""
    return f"{capability[0]}.{capability[1]}"
