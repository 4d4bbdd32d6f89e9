"""GGUFReader: the tensors of a GGUF file under transformers' names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncllm.checkpoint.gguf_config import is_quantised
from asyncllm.checkpoint.gguf_file import GGML_TYPES, GGUFFile, GGUFTensor
from asyncllm.checkpoint.model_config import ModelConfig
from asyncllm.checkpoint.reader import GGUFQuantisedTensor, QuantisedTensor, TensorInfo
from asyncllm.errors import ModelLoadError
from asyncllm.gpu.formats.gguf_tensors import StoredTensor, model_tensors
from asyncllm.gpu.formats.reader import DTYPE_NAMES, join_slices, row_ranges
from asyncllm.gpu.ops.linear_weights import GGUF_BLOCK_SIZES

_TORCH_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class GGUFReader:
    """CheckpointReader of a memory-mapped GGUF file, which may be split into several files.

    Attributes:
        quantisation_label: quantisation for the log; empty for a file without quantised tensors.

    Args:
        dtype: dtype to which quantised tensors are dequantised; plain tensors keep theirs.

    Raises:
        ModelLoadError: the file is damaged or not supported, or has tensor types that only gguf-py
            reads, and gguf-py is not installed.
    """

    ignored_quantisation = ""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        file = GGUFFile(path)
        self._file = file
        self.path, self.dtype = path, dtype
        self.tensors: dict[str, TensorInfo] = {}
        self._stored_tensors = model_tensors(file, ModelConfig.from_gguf(file))
        for name, stored in self._stored_tensors.items():
            entry = stored.entry
            dtype_name = entry.type_name if entry.is_unquantised else DTYPE_NAMES[dtype]
            self.tensors[name] = TensorInfo(path, stored.shape, dtype_name, entry.num_bytes)
        entries = [stored.entry for stored in self._stored_tensors.values()]
        types = ", ".join(sorted({entry.type_name for entry in entries}))
        self.quantisation_label = f"gguf, {types}" if is_quantised(file) else ""
        quantised = {entry.type for entry in entries if not entry.is_unquantised}
        self._dequantise = _make_dequantiser(path, sorted(quantised))
        self._file.check_unchanged()
        # Map copy-on-write, because torch does not accept a read-only array.
        self._mapped_files: dict[Path, np.memmap[Any, Any]] = {
            version.path: np.memmap(version.path, np.uint8, mode="c") for version in file.versions
        }

    def tensor(self, name: str) -> Tensor:
        info = self.tensors[name]
        return join_slices(self.slices(name), info.shape, _TORCH_DTYPES[info.dtype])

    def slices(self, name: str) -> Iterator[Tensor]:
        stored = self._stored_tensors[name]
        entry = stored.entry
        rows = stored.shape[0] if _is_read_by_rows(entry) else 1
        read = self._make_row_reader(stored)
        for start, stop in row_ranges((rows, *entry.shape[1:])):
            values = self._dequantise_bytes(read(start, stop), entry).view(-1, *entry.shape[1:])
            yield values if stored.transform is None else stored.transform(values)

    def quantised_tensor(self, name: str) -> QuantisedTensor | GGUFQuantisedTensor | None:
        """Return codes and scales of a Q4_0 or Q8_0 matrix, or the blocks of a matrix of a type in
        ``GGUF_BLOCK_SIZES``; None for other tensors, and for a matrix with a transform."""
        stored = self._stored_tensors[name]
        label, shape = stored.entry.type_name, stored.shape
        if len(shape) != 2 or stored.transform is not None:
            return None
        read = self._make_row_reader(stored)
        if (scheme := label.lower()) in GGUF_BLOCK_SIZES:
            return GGUFQuantisedTensor(scheme, shape, lambda *rows: torch.from_numpy(read(*rows)))
        if label not in ("Q4_0", "Q8_0"):
            return None
        is_q4 = label == "Q4_0"

        def read_blocks(start: int, stop: int) -> Tensor:
            _, _, size = GGML_TYPES[stored.entry.type]
            raw = np.ascontiguousarray(read(start, stop))
            return torch.from_numpy(raw).view(stop - start, -1, size)

        def read_codes(start: int, stop: int) -> Tensor:
            codes = read_blocks(start, stop)[:, :, 2:].contiguous()
            # In Q4_0, the first half of a block is in the low halves of its bytes.
            codes = torch.cat((codes & 15, codes >> 4), 2) if is_q4 else codes.view(torch.int8)
            return codes.flatten(1)

        ranges = row_ranges(shape)
        scales = torch.cat(
            [read_blocks(*r)[:, :, :2].contiguous().view(torch.float16) for r in ranges]
        )
        scales = scales.flatten(1)
        zeros = torch.full_like(scales, 8.0) if is_q4 else None
        bits = 4 if is_q4 else 8
        return QuantisedTensor(bits, shape, read_codes, scales, (1, 32), zeros, is_signed=not is_q4)

    def _make_row_reader(self, stored_tensor: StoredTensor) -> Callable[[int, int], np.ndarray]:
        """Make a function of ``(start, stop)`` that returns the bytes of these rows.

        Rows are in transformers' order.
        """
        entry, order = stored_tensor.entry, stored_tensor.row_order
        data = self._mapped_files[entry.path]
        self._file.check_unchanged()
        raw = data[entry.start_offset : entry.start_offset + entry.num_bytes]
        raw = raw.reshape(entry.shape[0] if _is_read_by_rows(entry) else 1, -1)
        if order is None:
            return lambda start, stop: raw[start:stop]
        return lambda start, stop: raw[order[start:stop]]

    def _dequantise_bytes(self, raw: np.ndarray, entry: GGUFTensor) -> Tensor:
        if entry.is_unquantised:
            # Copy, because the file's alignment may be smaller than that of the elements.
            return torch.from_numpy(np.array(raw)).view(_TORCH_DTYPES[entry.type_name])
        size = GGML_TYPES[entry.type][2]
        values = self._dequantise(np.ascontiguousarray(raw).reshape(-1, size), entry.type)
        return values.to(self.dtype)

    def close(self) -> None:
        self._mapped_files.clear()


def _is_read_by_rows(entry: GGUFTensor) -> bool:
    """Whether a tensor is read row by row. A quantised vector is read at once, because a slice of
    it may end within a block."""
    return entry.is_unquantised or len(entry.shape) > 1


def _make_dequantiser(
    path: Path, ggml_types: Collection[int]
) -> Callable[[np.ndarray, int], Tensor]:
    """Make a function that dequantises blocks of these types to float32.

    transformers is several times as fast as gguf-py, but supports only the usual types; gguf-py
    supports all.
    """
    try:
        from transformers.integrations.gguf.dequant import GGML_BLOCK
        from transformers.integrations.gguf.dequant import dequantize as dequantize_torch
    except ImportError:  # An older version of transformers reads GGUF with gguf-py only.
        GGML_BLOCK, dequantize_torch = {}, None
    missing = [GGML_TYPES[ggml_type][0] for ggml_type in ggml_types if ggml_type not in GGML_BLOCK]
    by_package: Any = None
    types: dict[int, Any] = {}
    if missing:
        try:
            from gguf import GGMLQuantizationType, quants
        except ImportError as error:
            raise ModelLoadError(
                f"{path}: it has tensors of type {', '.join(missing)}, and gguf is not installed, "
                "which reads them: pip install 'asyncllm[gguf]'"
            ) from error
        types = {ggml_type: GGMLQuantizationType(ggml_type) for ggml_type in ggml_types}
        by_package = quants.dequantize

    def dequantise(blocks: np.ndarray, ggml_type: int) -> Tensor:
        if dequantize_torch is not None and ggml_type in GGML_BLOCK:
            return dequantize_torch(torch.from_numpy(blocks), ggml_type)
        return torch.from_numpy(by_package(blocks, types[ggml_type]))

    return dequantise
