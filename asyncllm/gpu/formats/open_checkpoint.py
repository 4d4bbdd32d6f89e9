"""open_checkpoint: a reader of plain tensors for a checkpoint of any format."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch

from asyncllm.checkpoint.config_file import ConfigFile
from asyncllm.checkpoint.model_files import GGUF_SUFFIX
from asyncllm.checkpoint.reader import CheckpointReader
from asyncllm.checkpoint.safetensors_reader import SafetensorsReader
from asyncllm.gpu.formats.awq import Awq
from asyncllm.gpu.formats.base import WeightFormat
from asyncllm.gpu.formats.compressed_tensors import CompressedTensors
from asyncllm.gpu.formats.fp8 import Fp8
from asyncllm.gpu.formats.gguf_reader import GGUFReader
from asyncllm.gpu.formats.gptq import Gptq
from asyncllm.gpu.formats.mxfp4 import Mxfp4
from asyncllm.gpu.formats.reader import DequantisingReader
from asyncllm.logger import get_logger

FORMATS: dict[str, Callable[[ConfigFile], WeightFormat]] = {
    "awq": Awq,
    "compressed-tensors": CompressedTensors,
    "fbgemm_fp8": Fp8,
    "fp8": Fp8,
    "gptq": Gptq,
    "mxfp4": Mxfp4,
}
"""By ``quant_method``."""

logger = get_logger(__name__)


def open_checkpoint(path: Path, dtype: torch.dtype) -> CheckpointReader:
    """Opens the checkpoint in a directory, or a GGUF file. Its tensors have the names and shapes of
    an unquantised one, and those that were quantised are dequantised when they are read.

    Args:
        dtype: that dequantised tensors are rounded to.

    Raises:
        ModelLoadError: files that are missing or damaged, a quantisation that is not supported,
            or tensors that contradict it.
    """
    if path.suffix == GGUF_SUFFIX:
        gguf = GGUFReader(path, dtype)
        if gguf.quantised:
            log_sizes(path, gguf, f"gguf, {', '.join(gguf.types)}", "", dtype)
        return gguf
    section = ConfigFile.read_if_present(path / "config.json").section("quantization_config")
    if not section.values:
        return SafetensorsReader(path)
    fmt = FORMATS[section.choice("quant_method", tuple(FORMATS))](section)
    source = SafetensorsReader(path)
    try:
        reader = DequantisingReader(source, fmt, dtype)
    except BaseException:
        source.close()
        raise
    log_sizes(path, reader, fmt.label, fmt.ignored, dtype)
    return reader


def log_sizes(
    path: Path, reader: CheckpointReader, label: str, ignored: str, dtype: torch.dtype
) -> None:
    """The line that says what dequantising costs."""
    infos = reader.tensors.values()
    read = sum(info.num_bytes for info in infos)
    held = sum(math.prod(info.shape) for info in infos) * dtype.itemsize
    name = str(dtype).removeprefix("torch.")
    logger.info(
        "%s: weights (%s) are dequantised to %s as they are read: %.1f MiB read, %.1f MiB held%s",
        path,
        label,
        name,
        read / 2**20,
        held / 2**20,
        f"; {ignored} are not used, activations and KV cache stay in {name}" if ignored else "",
    )
