"""PackedFile: a model's weights in one file, as the native ops read them.

Packing takes most of an engine's start, and its result depends only on the checkpoint, the
quantisation and the kernels' layout. So the first start writes the result to a file, and later
starts map the file::

    preamble, 64 bytes   magic, format version, size of the file, place and digest of the header
    tensors              each at a multiple of 64 bytes, in the order of the decoder's parameters
    header               JSON: key, content, tensors

- ``key`` identifies the checkpoint, form, layout and version (``packed_store.py``). The file's name
  is a digest of the key, and the key itself is compared as well.
- ``content`` has a checksum of each file of the checkpoint.
- ``tensors`` has an entry per parameter: its form, its place, and the checksum of its bytes. The
  weight of a linear layer is stored as packed panels, experts one by one; other tensors are plain.

**Written** with the preamble last: it is zeros until all other bytes are in place. The file has
another name until it is complete and on the disk, so neither a process that is killed nor a full
disk leaves an incomplete file under the final name.

**Read** in this order: the open file's kind and owner, the preamble, the size, and the header's
digest are checked. Only then is the file mapped, shared and read-only, and its key compared; the
native threads compute the checksums of the tensors. A failed check is a miss and never an error. A
mapping outlives the unlinking and the replacement of its file. Truncation ends a process that reads
beyond the new end (SIGBUS); the engine never truncates a file, and only the file's owner could.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import os
import stat
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncllm.gpu.ops.linear_weights import LinearWeights, join_weights
from asyncllm.gpu.ops.native_weights import pack_new_weights
from asyncllm.native.context import NativeContext, PackedWeights
from asyncllm.native.interface import STRUCTS

MAGIC = b"asyncLLM"
FORMAT_VERSION = 2
"""Version of the file format. A file of another version is a miss."""

TENSOR_ALIGNMENT_BYTES = 64
"""Alignment of tensors in bytes, as the native ops expect."""

_PREAMBLE_STRUCT = struct.Struct("<8sIxxxxQQQ24s")
_DIGEST_BYTES = 24
_MAX_HEADER_BYTES = 2**28
_BYTES_PER_WRITE = 2**23
_PANEL_FIELDS = tuple(name for name, *_ in STRUCTS["PanelArgs"]._fields_)


class PackedFileError(Exception):
    """Error for a packed file that cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class PackedWeightEntry:
    """Entry of the file's header for one packed weight.

    Attributes:
        form: fields of the library's ``PanelArgs``, in their order.
        offset, num_bytes: place in the file.
    """

    form: list[int]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class StoredWeightFormat:
    """Dtypes, shapes and scheme of a linear layer's weights, see ``LinearWeights``.

    Attributes:
        dtype, shape: dtype of the values (torch's name), and their shape.
    """

    dtype: str
    shape: list[int]
    scheme: Any
    scale_block: list[int] | None
    scale_dtype: str | None
    scale_shape: list[int] | None
    has_zeros: bool

    def placeholder(self, panels: MappedPanelSource) -> LinearWeights:
        """Placeholder weights on the meta device; ``panels`` has the packed values."""
        scales = zeros = None
        if self.scale_shape is not None:
            assert self.scale_dtype is not None
            scales = _placeholder(self.scale_shape, self.scale_dtype)
            zeros = _placeholder(self.scale_shape, self.dtype) if self.has_zeros else None
        rows, columns = self.scale_block or (0, 0)
        return LinearWeights(
            _placeholder(self.shape, self.dtype),
            scheme=self.scheme,
            scales=scales,
            scale_block=None if self.scale_block is None else (rows, columns),
            zeros=zeros,
            panels=panels,
        )


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Entry of the file's header for one parameter of the decoder.

    Attributes:
        dtype, shape: torch's dtype name, and shape, of a plain tensor; empty for a linear layer.
        offset, num_bytes: place in the file.
        checksum: checksum of these bytes, see ``NativeContext.checksums``.
        parts: panels of a linear layer's weight, in the order in which they are packed; empty for a
            plain tensor.
        forms: format of each weight of a linear layer, in the order of their output rows; empty for
            a plain tensor.
    """

    name: str
    dtype: str
    shape: list[int]
    offset: int
    num_bytes: int
    checksum: int
    parts: list[PackedWeightEntry]
    forms: list[StoredWeightFormat]


class PackedWeightRecorder:
    """PanelSource that packs one linear parameter, and keeps the packed weights for the file.

    Attributes:
        weights: the packed weights, in the order of packing.
        forms: formats of the weights; consecutive weights of equal format, such as a layer's
            experts, have one entry with all their rows.
    """

    def __init__(self) -> None:
        self.weights: list[PackedWeights] = []
        self.forms: list[StoredWeightFormat] = []

    @property
    def nbytes(self) -> int:
        """Total bytes of the packed weights."""
        return sum(weights.num_bytes for weights in self.weights)

    def pack(self, context: NativeContext, weights: LinearWeights) -> PackedWeights:
        """Pack weights, and record them with their format."""
        packed = pack_new_weights(context, weights)
        self.weights.append(packed)
        values, scales, block = weights.values, weights.scales, weights.scale_block
        form = StoredWeightFormat(
            _dtype_name(values.dtype),
            [*values.shape],
            weights.scheme,
            None if block is None else [*block],
            None if scales is None else _dtype_name(scales.dtype),
            None if scales is None else [*scales.shape],
            weights.zeros is not None,
        )
        if self.forms and _can_concatenate_rows(self.forms[-1], form):
            form = _concatenate_rows(self.forms.pop(), form)
        self.forms.append(form)
        return packed


def _concatenate_rows(first: StoredWeightFormat, second: StoredWeightFormat) -> StoredWeightFormat:
    scale_shape = first.scale_shape
    if scale_shape is not None and second.scale_shape is not None:
        scale_shape = [scale_shape[0] + second.scale_shape[0], *scale_shape[1:]]
    shape = [first.shape[0] + second.shape[0], *first.shape[1:]]
    return replace(first, shape=shape, scale_shape=scale_shape)


def _can_concatenate_rows(first: StoredWeightFormat, second: StoredWeightFormat) -> bool:
    """Whether two weights' formats are equal except for the number of rows."""
    return replace(first, shape=second.shape, scale_shape=second.scale_shape) == second


@dataclass(frozen=True, slots=True, eq=False)
class MappedPanelSource:
    """PanelSource that returns one linear parameter's packed weights in the file's order."""

    file: PackedFile
    parts: Iterator[PackedWeightEntry]

    def pack(self, context: NativeContext, weights: LinearWeights) -> PackedWeights:
        part = next(self.parts)
        form = STRUCTS["PanelArgs"](*part.form)
        if (form.n, form.k) != weights.shape:
            raise RuntimeError(f"panels of {form.n} x {form.k} for weights of {weights.shape}")
        bias = None if weights.bias is None else weights.bias.float().contiguous()
        return PackedWeights.view(
            context, form, self.file.address + part.offset, part.num_bytes,
            None if bias is None else bias.data_ptr(), self.file,
        )  # fmt: skip


class PackedFile:
    """An open file of packed weights, mapped into memory.

    Args:
        allowed_uids: accepted user ids of the file's owner.

    Attributes:
        key: the header's ``key``, which identifies checkpoint, form, layout and version.
        checkpoint_checksums: the header's ``content``: checksum of each checkpoint file, by name.
        size: size in bytes.
        address: address of the file's first byte. The mapping lasts as long as this object, and
            the tensors and packed weights made from the file keep this object alive.
        identity: device, inode, size and modification time in nanoseconds of the mapped file.

    Raises:
        PackedFileError: the file is missing, incomplete, of another format or of another user.
    """

    def __init__(self, path: Path, allowed_uids: Collection[int]) -> None:
        self.path = path
        try:
            # Do not block on a FIFO, and do not follow a link, perhaps to another user's file.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError as error:
            raise PackedFileError("there is no such file") from error
        except OSError as error:
            raise PackedFileError(f"cannot be opened ({error.strerror})") from error
        try:
            header = self._read_header(fd, os.fstat(fd), allowed_uids)
            self.key: Any = header["key"]
            self.checkpoint_checksums: Mapping[str, int] = header["content"]
            self.entries = [_parse_entry(line) for line in header["tensors"]]
            self._check_offsets()
            self._mapping = mmap.mmap(fd, self.size, mmap.MAP_SHARED, mmap.PROT_READ)
        except (OSError, ValueError, TypeError, KeyError, struct.error) as error:
            raise PackedFileError(f"cannot be read ({error!r:.200})") from error
        finally:
            os.close(fd)
        # madvise fails on a kernel whose page cache has no huge pages.
        with suppress(OSError, AttributeError):
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        self.address: int = np.frombuffer(self._mapping, np.uint8).ctypes.data

    def _read_header(
        self, fd: int, file_stat: os.stat_result, allowed_uids: Collection[int]
    ) -> dict[str, Any]:
        """Check all of the file but its tensors; return the header."""
        if not stat.S_ISREG(file_stat.st_mode):
            raise PackedFileError("is no regular file")
        if file_stat.st_uid not in allowed_uids or file_stat.st_mode & (
            stat.S_IWGRP | stat.S_IWOTH
        ):
            raise PackedFileError(
                f"belongs to user {file_stat.st_uid} with mode "
                f"{stat.S_IMODE(file_stat.st_mode):o}, expected one of {sorted(allowed_uids)}, and "
                "no other user who can write it"
            )
        magic, version, size, header_offset, length, digest = _PREAMBLE_STRUCT.unpack(
            os.pread(fd, _PREAMBLE_STRUCT.size, 0)
        )
        if (magic, version) != (MAGIC, FORMAT_VERSION):
            raise PackedFileError(f"is none of format {FORMAT_VERSION}")
        if (
            size != file_stat.st_size
            or header_offset + length != size
            or length > _MAX_HEADER_BYTES
        ):
            raise PackedFileError(f"has {file_stat.st_size} bytes, expected {size}")
        header = os.pread(fd, length, header_offset)
        if _digest(header) != digest:
            raise PackedFileError("its header does not have the checksum that it was written with")
        self.size, self._end = size, header_offset
        self.identity = (
            file_stat.st_dev,
            file_stat.st_ino,
            file_stat.st_size,
            file_stat.st_mtime_ns,
        )
        return json.loads(header)

    def _check_offsets(self) -> None:
        for entry in self.entries:
            byte_ranges = [(entry.offset, entry.num_bytes)]
            byte_ranges += [(part.offset, part.num_bytes) for part in entry.parts]
            for offset, num_bytes in byte_ranges:
                is_misplaced = offset % TENSOR_ALIGNMENT_BYTES or offset < _PREAMBLE_STRUCT.size
                if is_misplaced or num_bytes < 1:
                    raise PackedFileError(f"has {entry.name} at an impossible place")
                if offset + num_bytes > self._end:
                    raise PackedFileError(f"ends within {entry.name}")

    def verify(self, context: NativeContext) -> None:
        """Compute the checksum of every tensor.

        Raises:
            PackedFileError: a checksum differs from the one in the header.
        """
        byte_ranges = [(entry.offset, entry.num_bytes) for entry in self.entries]
        checksums = context.checksums(self.address, byte_ranges)
        for entry, checksum in zip(self.entries, checksums, strict=True):
            if checksum != entry.checksum:
                raise PackedFileError(f"{entry.name} does not have the checksum of its bytes")

    def weights(self) -> Iterator[tuple[str, Tensor | LinearWeights]]:
        """Yield the decoder's parameters by name, in the order of the file.

        Linear weights refer to packed panels in this file; their own tensors are on the meta
        device. Linear weights are already quantised if ``key`` has a quantisation.
        """
        for entry in self.entries:
            read = self._linear_weights if entry.parts else self._plain_tensor
            yield entry.name, read(entry)

    def _plain_tensor(self, entry: TensorEntry) -> Tensor:
        # The tensor keeps the buffer alive, and the buffer keeps the mapping alive.
        buffer: Any = (ctypes.c_char * entry.num_bytes).from_address(self.address + entry.offset)
        buffer.owner = self
        return torch.frombuffer(buffer, dtype=getattr(torch, entry.dtype)).view(entry.shape)

    def _linear_weights(self, entry: TensorEntry) -> LinearWeights:
        panels = MappedPanelSource(self, iter(entry.parts))
        return join_weights([form.placeholder(panels) for form in entry.forms])


def write_packed_file(
    fd: int,
    context: NativeContext,
    key: Any,
    checkpoint_checksums: Mapping[str, int],
    tensors: Iterable[tuple[str, Tensor | PackedWeightRecorder]],
    check_stopped: Callable[[], None] = lambda: None,
) -> int:
    """Write a file of packed weights and wait until the disk has it.

    Args:
        fd: descriptor of an empty file.
        context: context whose threads compute the checksums.
        check_stopped: called before each write and checksum; raises an exception to end the
            writing.

    Returns:
        The file's size in bytes.

    Raises:
        OSError: the disk is full, or cannot be written.
    """
    entries: list[TensorEntry] = []
    writer = _Writer(fd, check_stopped)
    writer.append(memoryview(bytes(_PREAMBLE_STRUCT.size)))
    for name, tensor in tensors:
        if isinstance(tensor, Tensor):
            tensor = tensor.contiguous()
            pieces = [(tensor.data_ptr(), tensor.nbytes)]
        else:
            pieces = [(each.address, each.num_bytes) for each in tensor.weights]
        byte_ranges: list[tuple[int, int]] = []
        for address, num_bytes in pieces:
            writer.append(memoryview(bytes(-writer.end % TENSOR_ALIGNMENT_BYTES)))
            byte_ranges.append((writer.end, num_bytes))
            piece = (ctypes.c_char * num_bytes).from_address(address)
            writer.append(memoryview(piece).cast("B"))
        entries.append(_make_entry(name, tensor, byte_ranges))
    writer.flush()
    end = writer.end
    with mmap.mmap(fd, end, mmap.MAP_SHARED, mmap.PROT_READ) as mapping:
        # The mapping cannot be closed while an array of its memory exists.
        address = np.frombuffer(mapping, np.uint8).ctypes.data
        for index, entry in enumerate(entries):
            check_stopped()
            (checksum,) = context.checksums(address, [(entry.offset, entry.num_bytes)])
            entries[index] = replace(entry, checksum=checksum)
    lines = [asdict(entry) for entry in entries]
    header = json.dumps(
        {"key": key, "content": dict(checkpoint_checksums), "tensors": lines}
    ).encode()
    writer.append(memoryview(header))
    writer.flush()
    # The preamble makes the file valid, so write it once all other bytes are on the disk.
    os.fsync(fd)
    preamble = _PREAMBLE_STRUCT.pack(
        MAGIC, FORMAT_VERSION, writer.end, end, len(header), _digest(header)
    )
    if os.pwrite(fd, preamble, 0) != len(preamble):
        raise OSError("the preamble was not written as a whole")
    os.fsync(fd)
    return writer.end


class _Writer:
    """Appends to a file in writes of 8 MiB: the page cache uses large pages only within one write.

    Attributes:
        end: number of bytes appended.
    """

    def __init__(self, fd: int, check_stopped: Callable[[], None]) -> None:
        self._fd, self._check_stopped = fd, check_stopped
        self._buffer = bytearray()
        self.end = 0

    def append(self, data: memoryview) -> None:
        while data:
            part = data[: _BYTES_PER_WRITE - len(self._buffer)]
            self._buffer += part
            self.end += len(part)
            data = data[len(part) :]
            if len(self._buffer) == _BYTES_PER_WRITE:
                self.flush()

    def flush(self) -> None:
        self._check_stopped()
        data, self._buffer = memoryview(self._buffer), bytearray()
        while data:
            data = data[os.pwrite(self._fd, data, self.end - len(data)) :]


def _make_entry(
    name: str, tensor: Tensor | PackedWeightRecorder, byte_ranges: list[tuple[int, int]]
) -> TensorEntry:
    offset = byte_ranges[0][0]
    num_bytes = sum(byte_ranges[-1]) - offset
    if isinstance(tensor, Tensor):
        return TensorEntry(
            name, _dtype_name(tensor.dtype), [*tensor.shape], offset, num_bytes, 0, [], []
        )
    parts = [
        PackedWeightEntry([getattr(each.form, field) for field in _PANEL_FIELDS], start, size)
        for each, (start, size) in zip(tensor.weights, byte_ranges, strict=True)
    ]
    return TensorEntry(name, "", [], offset, num_bytes, 0, parts, tensor.forms)


def _parse_entry(line: dict[str, Any]) -> TensorEntry:
    parts: Any = [PackedWeightEntry(**part) for part in line["parts"]]
    forms: Any = [StoredWeightFormat(**form) for form in line["forms"]]
    return TensorEntry(**line | {"parts": parts, "forms": forms})


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _placeholder(shape: list[int], dtype: str) -> Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")


def _digest(header: bytes) -> bytes:
    return hashlib.blake2b(header, digest_size=_DIGEST_BYTES).digest()
