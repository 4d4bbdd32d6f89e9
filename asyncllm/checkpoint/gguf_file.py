"""GGUFFile: metadata and tensor table of a GGUF file, checked against the file's length."""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncllm.checkpoint.file_version import FileVersion
from asyncllm.checkpoint.gguf_choice import missing_parts_error, split_part_names
from asyncllm.checkpoint.small_file import converting_read_errors
from asyncllm.errors import ModelLoadError
from asyncllm.validation import describe

MAX_HEADER_ENTRIES = 2**17
"""Maximum number of metadata entries, and of tensors; real files have far fewer."""

MAX_NAME_BYTES = 256
"""Maximum size in bytes of a metadata key or tensor name: four times llama.cpp's limit. It
bounds the error messages, which contain names."""

MAX_ARRAY_LENGTH = 2**12
"""Maximum length of an array in ``GGUFFile.metadata``; a longer one, such as a vocabulary, is
replaced by its length."""

MAX_TOTAL_ARRAY_STRINGS = 2**21
"""Maximum number of strings in all arrays of a file: twice that of the largest tokenizer."""

MAX_TOTAL_NUMERIC_ELEMENTS = 2**18
"""Maximum total length of the number arrays that ``GGUFFile.metadata`` contains."""

MAX_HEADER_BYTES = 2**26
"""Maximum size in bytes of a file's metadata and tensor table; real ones have at most 20 MiB."""

MAX_STRING_BYTES = 2**24
"""Maximum size in bytes of a string in the metadata; the longest are chat templates."""

_SCALAR_FORMATS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_STRING_TYPE, _ARRAY_TYPE = 8, 9

GGML_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}
"""GGML tensor types by number (``ggml.h``): name, elements per block, bytes per block."""

UNQUANTISED_TYPES = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Entry of a GGUF file's tensor table.

    Attributes:
        path: the file; of a split file, the part that has the tensor.
        shape: in torch's order: the contiguous dimension is last.
        type: number in ``GGML_TYPES``.
        start_offset: offset of the first byte in the file.
    """

    path: Path
    shape: tuple[int, ...]
    type: int
    start_offset: int
    num_bytes: int

    @property
    def type_name(self) -> str:
        """The type's name, such as "Q4_K"."""
        return GGML_TYPES[self.type][0]

    @property
    def is_unquantised(self) -> bool:
        """Whether the tensor is not quantised."""
        return self.type_name in UNQUANTISED_TYPES


def gguf_parts(path: Path) -> list[Path]:
    """List all parts if ``path`` is one part of a split GGUF file; otherwise only ``path``.

    Raises:
        ModelLoadError: if a part is missing.
    """
    parts = [path.with_name(name) for name in split_part_names(path.name)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing and len(missing) < len(parts):
        raise missing_parts_error(str(path), missing, len(parts))
    return parts


class GGUFFile:
    """Header of a GGUF file (``ggml/docs/gguf.md``, versions 2 and 3), split or not.

    Attributes:
        path: the file; of a split one, the first part.
        metadata: values by key. An array of strings, or of more than ``MAX_ARRAY_LENGTH`` elements,
            is replaced by its length; ``read_array`` reads it.
        tensors: the tensor tables of all parts, by tensor name.
        versions: size and time of each part when its header was read.

    Args:
        path: the file, or any part of a split one.

    Raises:
        ModelLoadError: if a file cannot be read, is not a GGUF file, or ends before its last
            tensor; if parts are missing or do not belong together.
    """

    def __init__(self, path: Path) -> None:
        parts = gguf_parts(path)
        self.path = parts[0]
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        self.versions: list[FileVersion] = []
        for number, part in enumerate(parts):
            metadata, tensors = self._read_part(part)
            if not number:
                self.metadata = metadata
            self._check_part(part, metadata, number, len(parts))
            for name in tensors.keys() & self.tensors.keys():
                raise ModelLoadError(f"{part}: tensor {name!r} is there twice, in two parts")
            self.tensors |= tensors
        expected = self.metadata.get("split.tensors.count", len(self.tensors))
        if expected != len(self.tensors):
            raise ModelLoadError(
                f"{self.path}: split.tensors.count is {describe(expected)}, and its "
                f"{len(parts)} parts have {len(self.tensors)} tensors"
            )

    def _read_part(self, path: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        try:
            with converting_read_errors(path):
                self.versions.append(FileVersion(path))
                with (
                    path.open("rb") as file,
                    mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
                ):
                    cursor = _Cursor(path, data)
                    header = _read_header(cursor)
        except ValueError as error:  # mmap raises ValueError for an empty file.
            raise ModelLoadError(f"{path}: not a GGUF file ({error})") from error
        if len(self.versions) == 1:
            self._arrays = cursor.arrays
        return header

    def _check_part(
        self, path: Path, metadata: dict[str, Any], part_index: int, num_parts: int
    ) -> None:
        """Raise ModelLoadError if a part's metadata contradicts its file name or the first part."""
        places = metadata.get("split.count", 1) or 1, metadata.get("split.no", part_index)
        if places != (num_parts, part_index):
            raise ModelLoadError(
                f"{path}: split.count is {describe(places[0])} and split.no is "
                f"{describe(places[1])}, expected {num_parts} and {part_index}, as its name says"
            )
        for key, value in metadata.items():
            differs_by_part = key.startswith("split.") or key == "general.alignment"
            if not differs_by_part and self.metadata.get(key) != value:
                raise ModelLoadError(
                    f"{path}: metadata {key!r} is not that of {self.path.name}, expected the parts "
                    "of one file"
                )

    def check_unchanged(self) -> None:
        """Raise ModelLoadError if a part has changed since its header was read."""
        for version in self.versions:
            version.check_unchanged()

    def read_array(self, key: str) -> list[Any]:
        """Read an array of the metadata in full, however long it is.

        Raises:
            ModelLoadError: if the file has no array ``key``, or one of its strings is not UTF-8.
        """
        if key not in self._arrays:
            value = repr(self.metadata[key]) if key in self.metadata else "missing"
            raise ModelLoadError(
                f"{self.path}: metadata {key!r} is {value:.300}, expected an array"
            )
        start, end = self._arrays[key]
        with converting_read_errors(self.path), self.path.open("rb") as file:
            file.seek(start)
            cursor = _Cursor(self.path, file.read(end - start))
        return cursor.read_elements(key, cursor.read_number("I"), cursor.read_number("Q"))

    def read_floats(self, name: str) -> tuple[float, ...]:
        """Read the elements of a small tensor of type F32.

        Raises:
            ModelLoadError: for another type, or more than ``MAX_ARRAY_LENGTH`` elements.
        """
        tensor = self.tensors[name]
        count = math.prod(tensor.shape)
        if tensor.type_name != "F32" or count > MAX_ARRAY_LENGTH:
            raise ModelLoadError(
                f"{self.path}: tensor {name!r} is {tensor.type_name} of shape {tensor.shape}, "
                f"expected F32 of at most {MAX_ARRAY_LENGTH} elements"
            )
        with tensor.path.open("rb") as file:
            file.seek(tensor.start_offset)
            return struct.unpack(f"<{count}f", file.read(tensor.num_bytes))


def _read_header(cursor: _Cursor) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    """Read the metadata and the tensor table of one file."""
    if cursor.read_bytes(4) != b"GGUF":
        raise cursor.error("not a GGUF file: it does not begin with 'GGUF'")
    version = cursor.read_number("I")
    if version not in (2, 3):
        raise cursor.error(f"version is {version}, expected 2 or 3 of little endian")
    num_tensors, num_values = cursor.read_number("Q"), cursor.read_number("Q")
    if max(num_tensors, num_values) > MAX_HEADER_ENTRIES:
        raise cursor.error(
            f"{num_tensors} tensors and {num_values} metadata values, expected at most "
            f"{MAX_HEADER_ENTRIES} of each"
        )
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = cursor.read_name()
        if key in metadata:
            raise cursor.error(f"metadata {key!r} is there twice")
        metadata[key] = cursor.read_value(key, cursor.read_number("I"))
    entries = [_read_tensor_entry(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= 2**16:
        raise cursor.error(f"general.alignment is {describe(alignment)}, expected 1 to 65536")
    begin = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    end, previous = begin, ""
    for offset, name, shape, ggml_type in sorted(entries):
        if name in tensors:
            raise cursor.error(f"tensor {name!r} is there twice")
        start_offset = begin + offset
        if start_offset < end:
            raise cursor.error(f"tensors {previous!r} and {name!r} overlap")
        end, previous = start_offset + _tensor_num_bytes(cursor, name, shape, ggml_type), name
        if end > len(cursor.data):
            raise cursor.error(
                f"the file ends after {len(cursor.data)} bytes, within or before tensor "
                f"{name!r}, which ends at {end}"
            )
        tensors[name] = GGUFTensor(cursor.path, shape, ggml_type, start_offset, end - start_offset)
    return metadata, tensors


def _read_tensor_entry(cursor: _Cursor) -> tuple[int, str, tuple[int, ...], int]:
    name, dims = cursor.read_name(), cursor.read_number("I")
    if not 1 <= dims <= 4:
        raise cursor.error(f"tensor {name!r} has {dims} dimensions, expected 1 to 4")
    shape = tuple(cursor.read_number("Q") for _ in range(dims))[::-1]
    ggml_type, offset = cursor.read_number("I"), cursor.read_number("Q")
    return offset, name, shape, ggml_type


def _tensor_num_bytes(cursor: _Cursor, name: str, shape: tuple[int, ...], ggml_type: int) -> int:
    if ggml_type not in GGML_TYPES:
        known = ", ".join(name for name, _, _ in GGML_TYPES.values())
        raise cursor.error(f"tensor {name!r} is of GGML type {ggml_type}, expected one of {known}")
    label, elements, size = GGML_TYPES[ggml_type]
    if shape[-1] % elements or 0 in shape:
        raise cursor.error(
            f"tensor {name!r} of type {label} has shape {shape}, expected rows of "
            f"a multiple of {elements} elements, and no dimension of 0"
        )
    return math.prod(shape) // elements * size


class _Cursor:
    """Reader of consecutive values that never reads beyond the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap | bytes) -> None:
        self.path, self.data, self.position = path, data, 0
        self.arrays: dict[str, tuple[int, int]] = {}
        self.num_strings = self.num_numbers = 0

    def error(self, message: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path}: {message}")

    def read_bytes(self, count: int) -> bytes:
        self.skip(count)
        return self.data[self.position - count : self.position]

    def skip(self, count: int) -> None:
        if count > len(self.data) - self.position:
            raise self.error(
                f"the file ends after {len(self.data)} bytes, and {count} more are due at byte "
                f"{self.position}, within the header"
            )
        self.position += count
        if self.position > MAX_HEADER_BYTES:
            raise self.error(
                f"the header has {self.position} bytes or more, expected at most {MAX_HEADER_BYTES}"
            )

    def read_number(self, struct_format: str) -> Any:
        return struct.unpack(
            f"<{struct_format}", self.read_bytes(struct.calcsize(f"<{struct_format}"))
        )[0]

    def read_name(self) -> str:
        length, start_offset = self.read_number("Q"), self.position
        if length > MAX_NAME_BYTES:
            raise self.error(
                f"the name at byte {start_offset} of the header has {length} bytes, "
                f"expected at most {MAX_NAME_BYTES}"
            )
        return self.read_bytes(length).decode("utf-8", "replace")

    def read_value(self, key: str, value_type: int) -> Any:
        if value_type in _SCALAR_FORMATS:
            return self.read_number(_SCALAR_FORMATS[value_type])
        if value_type == _STRING_TYPE:
            size = self.read_number("Q")
            if size > MAX_STRING_BYTES:
                raise self.error(
                    f"metadata {key!r} has {size} bytes, expected at most {MAX_STRING_BYTES}"
                )
            return self.read_bytes(size).decode("utf-8", "replace")
        if value_type == _ARRAY_TYPE:
            start = self.position
            value = self._read_array(key, self.read_number("I"), self.read_number("Q"))
            self.arrays[key] = start, self.position
            return value
        raise self.error(f"metadata {key!r} is of type {value_type}, expected 0 to 12")

    def read_elements(self, key: str, value_type: int, count: int) -> list[Any]:
        if value_type != _STRING_TYPE:
            struct_format = f"<{count}{_SCALAR_FORMATS[value_type]}"
            return list(struct.unpack(struct_format, self.data[self.position :]))
        try:
            return [str(self.read_bytes(self.read_number("Q")), "utf-8") for _ in range(count)]
        except UnicodeDecodeError as error:
            raise self.error(f"metadata {key!r} has a string that is not UTF-8") from error

    def _read_array(self, key: str, value_type: int, count: int) -> Any:
        if value_type == _STRING_TYPE:
            self.num_strings += count
            if self.num_strings > MAX_TOTAL_ARRAY_STRINGS:
                raise self.error(
                    f"metadata {key!r} has {count} strings, expected at most "
                    f"{MAX_TOTAL_ARRAY_STRINGS} in all"
                )
            for _ in range(count):
                self.skip(self.read_number("Q"))
            return count
        if value_type not in _SCALAR_FORMATS:
            raise self.error(
                f"metadata {key!r} is an array of type {value_type}, expected strings or numbers"
            )
        struct_format = _SCALAR_FORMATS[value_type]
        size = count * struct.calcsize(f"<{struct_format}")
        if count > MAX_ARRAY_LENGTH:
            self.skip(size)
            return count
        self.num_numbers += count
        if self.num_numbers > MAX_TOTAL_NUMERIC_ELEMENTS:
            raise self.error(
                f"metadata {key!r} has {count} numbers, expected at most "
                f"{MAX_TOTAL_NUMERIC_ELEMENTS} in all arrays of up to {MAX_ARRAY_LENGTH}"
            )
        return list(struct.unpack(f"<{count}{struct_format}", self.read_bytes(size)))
