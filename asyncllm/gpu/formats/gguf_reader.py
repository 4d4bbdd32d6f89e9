"""GGUFReader: the tensors of a GGUF file under transformers' names."""

from __future__ import annotations

import math
import re
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
from asyncllm.gpu.formats.reader import DTYPE_NAMES, join_slices, row_ranges
from asyncllm.gpu.ops.linear_weights import BLOCK_SIZES

_MODULE_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TENSOR_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")
_ROTATED_NAME = re.compile(r"blk\.\d+\.attn_([qk])\.(weight|bias)")

_TORCH_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

_PLAIN_TYPE_IDS = {kind for kind, (name, _, _) in GGML_TYPES.items() if name in PLAIN_TYPES}

_CONFIG_TENSORS = ("rope_freqs.weight",)
"""Names of tensors that only ``gguf_config`` reads."""


class GGUFReader:
    """CheckpointReader of a memory-mapped GGUF file.

    Attributes:
        label: quantisation for the log; empty for a file without quantised tensors.

    Args:
        dtype: dtype to which quantised tensors are dequantised; others keep their own.

    Raises:
        ModelLoadError: the file is damaged or not supported, or has types of tensors that need
            gguf-py, which is not installed.
    """

    ignored = ""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        file = GGUFFile(path)
        self._version = file.version
        config = gguf_config(file)
        self.path, self.dtype = path, dtype
        self.tensors: dict[str, TensorInfo] = {}
        self._stored_tensors: dict[str, GGUFTensor] = {}
        self._num_heads_by_name: dict[str, int] = {}
        permuted = config.values["architectures"] == ["LlamaForCausalLM"]
        heads = {"q": config.integer("num_attention_heads")}
        heads["k"] = config.integer("num_key_value_heads", heads["q"])
        for stored_name, stored in file.tensors.items():
            if stored_name in _CONFIG_TENSORS:
                continue
            name, label = _transformers_name(stored_name), GGML_TYPES[stored.type][0]
            dtype_name = label if label in PLAIN_TYPES else DTYPE_NAMES[dtype]
            if name in self.tensors:
                raise ModelLoadError(f"{path}: tensor {stored_name!r} is there twice, as {name!r}")
            self.tensors[name] = TensorInfo(path, stored.shape, dtype_name, stored.num_bytes)
            self._stored_tensors[name] = stored
            rotated = _ROTATED_NAME.fullmatch(stored_name)
            if rotated and permuted:
                self._num_heads_by_name[name] = heads[rotated[1]]
        self.types = sorted({GGML_TYPES[t.type][0] for t in self._stored_tensors.values()})
        self.label = f"gguf, {', '.join(self.types)}" if is_quantised(file) else ""
        packed = {t.type for t in self._stored_tensors.values()} - _PLAIN_TYPE_IDS
        self._dequantise = _dequantiser(path, sorted(packed))
        self._version.check()
        # Map copy-on-write, because torch does not accept a read-only array.
        self._mapped_file: np.memmap[Any, Any] | None = np.memmap(path, np.uint8, mode="c")

    def tensor(self, name: str) -> Tensor:
        plain = _TORCH_DTYPES.get(GGML_TYPES[self._stored_tensors[name].type][0], self.dtype)
        return join_slices(self.slices(name), self.tensors[name].shape, plain)

    def slices(self, name: str) -> Iterator[Tensor]:
        stored = self._stored_tensors[name]
        # Read a matrix by rows, each of which consists of whole blocks. Read a quantised vector at
        # once, because a slice of it may end within a block.
        plain = GGML_TYPES[stored.type][0] in PLAIN_TYPES
        rows = stored.shape[0] if plain or len(stored.shape) > 1 else 1
        read = self._row_bytes(name, rows)
        for start_offset, stop in row_ranges((rows, *stored.shape[1:])):
            yield self._dequantise_bytes(read(start_offset, stop), stored).view(
                -1, *stored.shape[1:]
            )

    def quantised_tensor(self, name: str) -> QuantisedTensor | BlockTensor | None:
        """Codes of Q4_0 or Q8_0, whose blocks have a scale and integers; the blocks of the types in
        ``BLOCK_SIZES``; None for others, and for vectors."""
        stored = self._stored_tensors[name]
        label = GGML_TYPES[stored.type][0]
        if len(stored.shape) < 2:
            return None
        shape = math.prod(stored.shape[:-1]), stored.shape[-1]
        read = self._row_bytes(name, shape[0])
        if (scheme := label.lower()) in BLOCK_SIZES:
            return BlockTensor(scheme, shape, lambda *rows: torch.from_numpy(read(*rows)))
        if label not in ("Q4_0", "Q8_0"):
            return None
        unpacked = _unpack_q4_0 if label == "Q4_0" else _unpack_q8_0

        def blocks(start_offset: int, stop: int) -> Tensor:
            _, _, size = GGML_TYPES[stored.type]
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

    def _row_bytes(self, name: str, rows: int) -> Callable[[int, int], np.ndarray]:
        """Makes a function of ``(start, stop)`` that returns the bytes of these rows.

        Rows are in transformers' order.
        """
        stored, data = self._stored_tensors[name], self._mapped_file
        assert data is not None
        self._version.check()
        raw = data[stored.start_offset : stored.start_offset + stored.num_bytes].reshape(rows, -1)
        order = _row_order(self.path, name, rows, self._num_heads_by_name.get(name))
        if order is None:
            return lambda start_offset, stop: raw[start_offset:stop]
        return lambda start_offset, stop: raw[order[start_offset:stop]]

    def _dequantise_bytes(self, raw: np.ndarray, stored: GGUFTensor) -> Tensor:
        label = GGML_TYPES[stored.type][0]
        if label in PLAIN_TYPES:
            # Copy, because the file's alignment may be smaller than that of the elements.
            return torch.from_numpy(np.array(raw)).view(_TORCH_DTYPES[label])
        size = GGML_TYPES[stored.type][2]
        values = self._dequantise(np.ascontiguousarray(raw).reshape(-1, size), stored.type)
        return values.to(self.dtype)

    def close(self) -> None:
        self._mapped_file = None


def _unpack_q4_0(blocks: Tensor) -> Tensor:
    """Integers ``[rows, blocks, 32]`` of Q4_0: the lower halves of its bytes, then the upper."""
    return torch.cat((blocks & 15, blocks >> 4), dim=2)


def _unpack_q8_0(blocks: Tensor) -> Tensor:
    return blocks.contiguous().view(torch.int8)


def _transformers_name(stored: str) -> str:
    """transformers' name of a stored tensor; a tensor unknown to transformers keeps its stored
    name."""
    match = _TENSOR_NAME.fullmatch(stored)
    if match is None or match[2] not in _MODULE_NAMES:
        return stored
    layer = f"model.layers.{match[1]}." if match[1] is not None else ""
    return f"{layer}{_MODULE_NAMES[match[2]]}.{match[3]}"


def _row_order(path: Path, name: str, rows: int, heads: int | None) -> np.ndarray | None:
    """Indices that put a tensor's stored rows in transformers' order; None if the orders are equal.

    In RoPE llama.cpp rotates adjacent pairs, transformers the two halves of a head. The converter
    to GGUF has put the rows of q and k in llama.cpp's order (``LlamaModel.permute``).
    """
    if heads is None:
        return None
    if rows % (2 * heads):
        raise ModelLoadError(
            f"{path}: tensor {name!r} has {rows} rows, expected a multiple of {2 * heads}, twice "
            "the number of heads"
        )
    return np.arange(rows).reshape(heads, -1, 2).transpose(0, 2, 1).reshape(-1)


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
