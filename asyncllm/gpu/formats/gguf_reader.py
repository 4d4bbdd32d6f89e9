"""GGUFReader: the tensors of a GGUF file under transformers' names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncllm.checkpoint.gguf_config import gguf_config, is_quantised
from asyncllm.checkpoint.gguf_file import GGML_TYPES, PLAIN_TYPES, GGUFFile, GGUFTensor
from asyncllm.checkpoint.reader import BlockTensor, QuantisedTensor, TensorInfo
from asyncllm.errors import ModelLoadError
from asyncllm.gpu.formats.gguf_tensors import StoredTensor, model_tensors
from asyncllm.gpu.formats.reader import DTYPE_NAMES, join_slices, row_ranges
from asyncllm.gpu.ops.linear_weights import BLOCK_SIZES

_TORCH_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

_PLAIN_TYPE_IDS = {kind for kind, (name, _, _) in GGML_TYPES.items() if name in PLAIN_TYPES}


class GGUFReader:
    """CheckpointReader of a memory-mapped GGUF file, or of a split one.

    Attributes:
        label: quantisation for the log; empty for a file without quantised tensors.

    Args:
        dtype: dtype to which quantised tensors are dequantised; plain tensors keep theirs.

    Raises:
        ModelLoadError: the file is damaged or not supported, or has types of tensors that need
            gguf-py, which is not installed.
    """

    ignored = ""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        file = GGUFFile(path)
        self._file = file
        config = gguf_config(file)
        self.path, self.dtype = path, dtype
        self.tensors: dict[str, TensorInfo] = {}
        self._stored_tensors = model_tensors(file, config)
        for name, stored in self._stored_tensors.items():
            label = GGML_TYPES[stored.entry.type][0]
            dtype_name = label if label in PLAIN_TYPES else DTYPE_NAMES[dtype]
            self.tensors[name] = TensorInfo(path, stored.shape, dtype_name, stored.entry.num_bytes)
        kinds = {stored.entry.type for stored in self._stored_tensors.values()}
        self.types = sorted(GGML_TYPES[kind][0] for kind in kinds)
        self.label = f"gguf, {', '.join(self.types)}" if is_quantised(file) else ""
        self._dequantise = _dequantiser(path, sorted(kinds - _PLAIN_TYPE_IDS))
        self._file.check_unchanged()
        # Map copy-on-write, because torch does not accept a read-only array.
        self._mapped_files: dict[Path, np.memmap[Any, Any]] = {
            version.path: np.memmap(version.path, np.uint8, mode="c") for version in file.versions
        }

    def tensor(self, name: str) -> Tensor:
        label = GGML_TYPES[self._stored_tensors[name].entry.type][0]
        plain = _TORCH_DTYPES.get(label, self.dtype)
        return join_slices(self.slices(name), self.tensors[name].shape, plain)

    def slices(self, name: str) -> Iterator[Tensor]:
        stored = self._stored_tensors[name]
        entry = stored.entry
        # Read a matrix by rows, each of which consists of whole blocks. Read a quantised vector at
        # once, because a slice of it may end within a block.
        plain = GGML_TYPES[entry.type][0] in PLAIN_TYPES
        rows = stored.shape[0] if plain or len(entry.shape) > 1 else 1
        read = self._row_bytes(stored)
        for start_offset, stop in row_ranges((rows, *entry.shape[1:])):
            values = self._dequantise_bytes(read(start_offset, stop), entry)
            values = values.view(-1, *entry.shape[1:])
            yield values if stored.transform is None else stored.transform(values)

    def quantised_tensor(self, name: str) -> QuantisedTensor | BlockTensor | None:
        """Returns codes and scales for Q4_0 and Q8_0, blocks for the types in ``BLOCK_SIZES``, None
        for other types."""
        stored = self._stored_tensors[name]
        label, shape = GGML_TYPES[stored.entry.type][0], stored.shape
        if len(shape) != 2 or stored.transform is not None:
            return None
        read = self._row_bytes(stored)
        if (scheme := label.lower()) in BLOCK_SIZES:
            return BlockTensor(scheme, shape, lambda *rows: torch.from_numpy(read(*rows)))
        if label not in ("Q4_0", "Q8_0"):
            return None
        unpacked = _unpack_q4_0 if label == "Q4_0" else _unpack_q8_0

        def blocks(start_offset: int, stop: int) -> Tensor:
            _, _, size = GGML_TYPES[stored.entry.type]
            raw = np.ascontiguousarray(read(start_offset, stop))
            return torch.from_numpy(raw).view(stop - start_offset, -1, size)

        def rows(start_offset: int, stop: int) -> Tensor:
            return unpacked(blocks(start_offset, stop)[:, :, 2:]).flatten(1)

        ranges = row_ranges(shape)
        scales = torch.cat([blocks(*r)[:, :, :2].contiguous().view(torch.float16) for r in ranges])
        scales = scales.flatten(1)
        zeros = torch.full_like(scales, 8.0) if label == "Q4_0" else None
        bits, signed = (4, False) if label == "Q4_0" else (8, True)
        return QuantisedTensor(bits, shape, rows, scales, (1, 32), zeros, is_signed=signed)

    def _row_bytes(self, stored: StoredTensor) -> Callable[[int, int], np.ndarray]:
        """Makes a function of ``(start, stop)`` that returns the bytes of these rows.

        Rows are in transformers' order.
        """
        entry, order = stored.entry, stored.row_order
        data = self._mapped_files[entry.path]
        self._file.check_unchanged()
        raw = data[entry.start_offset : entry.start_offset + entry.num_bytes]
        plain = GGML_TYPES[entry.type][0] in PLAIN_TYPES
        raw = raw.reshape(entry.shape[0] if plain or len(entry.shape) > 1 else 1, -1)
        if order is None:
            return lambda start_offset, stop: raw[start_offset:stop]
        return lambda start_offset, stop: raw[order[start_offset:stop]]

    def _dequantise_bytes(self, raw: np.ndarray, entry: GGUFTensor) -> Tensor:
        label = GGML_TYPES[entry.type][0]
        if label in PLAIN_TYPES:
            # Copy, because the file's alignment may be smaller than that of the elements.
            return torch.from_numpy(np.array(raw)).view(_TORCH_DTYPES[label])
        size = GGML_TYPES[entry.type][2]
        values = self._dequantise(np.ascontiguousarray(raw).reshape(-1, size), entry.type)
        return values.to(self.dtype)

    def close(self) -> None:
        self._mapped_files.clear()


def _unpack_q4_0(blocks: Tensor) -> Tensor:
    """Integers ``[rows, blocks, 32]`` of Q4_0: the lower halves of its bytes, then the upper."""
    return torch.cat((blocks & 15, blocks >> 4), dim=2)


def _unpack_q8_0(blocks: Tensor) -> Tensor:
    return blocks.contiguous().view(torch.int8)


def _dequantiser(path: Path, kinds: Collection[int]) -> Callable[[np.ndarray, int], Tensor]:
    """Makes a function that dequantises blocks of the types ``kinds`` to float32.

    transformers is several times as fast as gguf-py, but supports only the usual types; gguf-py
    supports all.
    """
    try:
        from transformers.integrations.gguf.dequant import GGML_BLOCK, dequantize
    except ImportError:  # An older version of transformers reads GGUF with gguf-py only.
        GGML_BLOCK, dequantize = {}, None
    missing = [GGML_TYPES[kind][0] for kind in kinds if kind not in GGML_BLOCK]
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
        types = {kind: GGMLQuantizationType(kind) for kind in kinds}
        by_package = quants.dequantize

    def values(blocks: np.ndarray, kind: int) -> Tensor:
        if dequantize is not None and kind in GGML_BLOCK:
            return dequantize(torch.from_numpy(blocks), kind)
        return torch.from_numpy(by_package(blocks, types[kind]))

    return values
