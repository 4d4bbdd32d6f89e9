"""PinnedUploader: a checkpoint's tensors to a GPU through two small pinned buffers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

CHUNK_BYTES = 16 * 2**20
"""Of one buffer: some hundred microseconds on a PCIe bus, so that its start costs little."""

_NUM_BUFFERS = 2


class CopyEngine(Protocol):
    """How bytes get to the device: in order, and later than they were asked for."""

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Starts a copy, which may convert. ``source`` must not change until it is done."""
        ...

    def mark(self) -> Any:
        """Something to wait for: all that was started before."""
        ...

    def wait(self, mark: Any) -> None: ...


class CudaCopyEngine:
    """Copies on the thread's current stream."""

    def copy(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record()
        return event

    def wait(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()


@dataclass(slots=True)
class _Buffer:
    """Attributes:
    host: uint8, pinned if the device is one to copy to asynchronously.
    device: uint8, what is converted there; None until something has to be.
    mark: of the last copy out of it.
    """

    host: Tensor
    device: Tensor | None = None
    mark: Any = None


class PinnedUploader:
    """Copies tensors in chunks: while one buffer is on its way, the next chunk is read from
    the file into the other.

    Beside what it fills it takes two chunks on the host, and two on the device if anything
    has to be converted, which happens there. The host's pages of a mapped file are the
    operating system's, which takes them back as it likes.

    Args:
        device: where the targets are.
        chunk_bytes: size of a buffer.
        pin: page-lock the buffers; without that a GPU's copies are not asynchronous.
        transfers: CUDA's, unless given.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        pin: bool = True,
        transfers: CopyEngine | None = None,
    ) -> None:
        self.device = device
        self.chunk_bytes = chunk_bytes
        self.transfers = transfers or CudaCopyEngine()
        self._buffers = [
            _Buffer(torch.empty(chunk_bytes, dtype=torch.uint8, device="cpu", pin_memory=pin))
            for _ in range(_NUM_BUFFERS)
        ]
        self._next = 0

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Starts copying ``source``, of any dtype on the host, to ``target`` of the same shape
        on the device, both contiguous. ``source`` is not needed after the call."""
        source, target = source.view(-1), target.view(-1)
        step = self.chunk_bytes // source.dtype.itemsize
        for start in range(0, source.shape[0], step):
            self._copy_chunk(source[start : start + step], target[start : start + step])

    def finish(self) -> None:
        """Waits until everything has arrived."""
        for buffer in self._buffers:
            self._wait(buffer)

    def _copy_chunk(self, source: Tensor, target: Tensor) -> None:
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % len(self._buffers)
        self._wait(buffer)
        size = source.shape[0] * source.dtype.itemsize
        host = buffer.host[:size].view(source.dtype)
        host.copy_(source)
        if source.dtype == target.dtype:
            self.transfers.copy(host, target)
        else:
            # A copy that converts on its way would do so on the host.
            if buffer.device is None:
                buffer.device = torch.empty_like(buffer.host, device=self.device)
            raw = buffer.device[:size].view(source.dtype)
            self.transfers.copy(host, raw)
            self.transfers.copy(raw, target)
        buffer.mark = self.transfers.mark()

    def _wait(self, buffer: _Buffer) -> None:
        if buffer.mark is not None:
            self.transfers.wait(buffer.mark)
            buffer.mark = None
