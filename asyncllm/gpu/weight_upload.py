"""PinnedUploader: copies a checkpoint's tensors to a GPU through two small pinned buffers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = 16 * 2**20
"""Size of a buffer in bytes. Copying it over PCIe takes hundreds of microseconds, far longer than
launching the copy."""


@dataclass(slots=True)
class _Buffer:
    """A pinned buffer and the chunk in it.

    Attributes:
        host: uint8, pinned for asynchronous copies.
        device: uint8, the chunk on the device before its conversion; None until a conversion.
        event: event of the last copy out of the buffer.
    """

    host: Tensor
    device: Tensor | None = None
    event: Any = None


class PinnedUploader:
    """Double-buffered copies of mapped tensors to a device.

    While one chunk is being copied, the next is read from the file into the other buffer.

    The uploader takes two chunks of memory on the host. Dtypes are converted on the device, which
    takes two chunks of memory there.

    Args:
        device: device of the targets.
        chunk_bytes: size of a buffer.
        pin: page-lock the buffers; without it, copies to a GPU are synchronous.
    """

    def __init__(
        self, device: torch.device, *, chunk_bytes: int = CHUNK_BYTES, pin: bool = True
    ) -> None:
        self.device, self.chunk_bytes = device, chunk_bytes
        self._buffers = [
            _Buffer(torch.empty(chunk_bytes, dtype=torch.uint8, device="cpu", pin_memory=pin))
            for _ in range(2)
        ]
        self._next_buffers = cycle(self._buffers)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Queues the copy of ``source`` on the host to ``target`` on the device.

        Both are contiguous and of the same shape; dtypes may differ. ``source`` may change or be
        freed after the call.
        """
        source, target = source.view(-1), target.view(-1)
        step = self.chunk_bytes // source.dtype.itemsize
        for start in range(0, source.shape[0], step):
            self._copy_chunk(source[start : start + step], target[start : start + step])

    def finish(self) -> None:
        """Waits until all queued copies are done."""
        for buffer in self._buffers:
            self._wait(buffer)

    def _copy_chunk(self, source: Tensor, target: Tensor) -> None:
        buffer = next(self._next_buffers)
        self._wait(buffer)
        size = source.shape[0] * source.dtype.itemsize
        host = buffer.host[:size].view(source.dtype)
        host.copy_(source)
        if source.dtype == target.dtype:
            self.queue_copy(host, target)
        else:
            # Copy, then convert on the device: one ``copy_`` would convert on the host.
            if buffer.device is None:
                buffer.device = torch.empty_like(buffer.host, device=self.device)
            raw = buffer.device[:size].view(source.dtype)
            self.queue_copy(host, raw)
            self.queue_copy(raw, target)
        buffer.event = self.record_event()

    def _wait(self, buffer: _Buffer) -> None:
        if buffer.event is not None:
            self.wait(buffer.event)
            buffer.event = None

    # --- copies on the thread's current stream; tests replace them with delayed ones ------------

    def queue_copy(self, source: Tensor, target: Tensor) -> None:
        """Queues a copy, which may convert the dtype.

        ``source`` must not change until the copy is done.
        """
        target.copy_(source, non_blocking=True)

    def record_event(self) -> Any:
        """Records an event that completes when all copies queued before it are done."""
        event = torch.cuda.Event()
        event.record()
        return event

    def wait(self, event: Any) -> None:
        event.synchronize()
