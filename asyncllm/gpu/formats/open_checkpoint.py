"""open_checkpoint: opens a checkpoint of any format as plain tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from asyncllm.checkpoint.config_file import ConfigFile
from asyncllm.checkpoint.gguf_choice import is_gguf
from asyncllm.checkpoint.reader import CheckpointReader
from asyncllm.checkpoint.safetensors_reader import SafetensorsReader
from asyncllm.gpu.formats.base import WeightFormat
from asyncllm.gpu.formats.compressed_tensors import CompressedTensors
from asyncllm.gpu.formats.floats import Fp8, Mxfp4
from asyncllm.gpu.formats.gguf_reader import GGUFReader
from asyncllm.gpu.formats.packed_words import Awq, Gptq
from asyncllm.gpu.formats.reader import DequantisingReader
from asyncllm.gpu.ops.linear_weights import LinearWeights
from asyncllm.logger import get_logger

WEIGHT_FORMATS: dict[str, Callable[[ConfigFile], WeightFormat]] = {
    "awq": Awq,
    "compressed-tensors": CompressedTensors,
    "fbgemm_fp8": Fp8,
    "fp8": Fp8,
    "gptq": Gptq,
    "mxfp4": Mxfp4,
}
"""WeightFormat of each supported ``quant_method``."""

logger = get_logger(__name__)


@dataclass(slots=True)
class PackedWeightStats:
    """Forms and sizes of the weights that stay quantised, for the log.

    Attributes:
        form_phrases: phrases that describe the weights' quantisation.
        num_bytes, num_elements: bytes and number of elements of all such weights.
    """

    form_phrases: set[str] = field(default_factory=set)
    num_bytes: int = 0
    num_elements: int = 0

    def add(self, weights: LinearWeights) -> None:
        for part in weights.single_scheme_parts:
            if part.scale_block is None:
                where = "in blocks"
            elif part.scale_block[1] == part.shape[1]:
                where = "per channel"
            else:
                where = f"in groups of {part.scale_block[1]}"
            self.form_phrases.add(f"{part.scheme} {where}")
        self.num_bytes += weights.num_bytes
        self.num_elements += math.prod(weights.shape)


def open_checkpoint(path: Path, dtype: torch.dtype) -> CheckpointReader:
    """Open the checkpoint in a directory, or a GGUF file.

    Tensors have the names and shapes of an unquantised checkpoint; quantised ones are dequantised
    when they are read.

    Args:
        dtype: dtype of dequantised tensors.

    Raises:
        ModelLoadError: files are missing or damaged, the quantisation is not supported, or the
            tensors contradict its configuration.
    """
    if is_gguf(path):
        return GGUFReader(path, dtype)
    section = ConfigFile.read_if_present(path / "config.json").section("quantization_config")
    if not section.values:
        return SafetensorsReader(path)
    fmt = WEIGHT_FORMATS[section.choice("quant_method", tuple(WEIGHT_FORMATS))](section)
    source = SafetensorsReader(path)
    try:
        return DequantisingReader(source, fmt, dtype)
    except BaseException:
        source.close()
        raise


def log_weight_sizes(
    path: Path,
    reader: CheckpointReader,
    dtype: torch.dtype,
    packed: PackedWeightStats | None = None,
) -> None:
    """Log the form in which a quantised checkpoint's weights stay in memory, and their size.

    Args:
        packed: statistics of the weights that stay quantised.
    """
    if not reader.quantisation_label:
        return
    infos = reader.tensors.values()
    num_bytes = sum(math.prod(info.shape) for info in infos) * dtype.itemsize
    name, form = str(dtype).removeprefix("torch."), "weights (%s) are"
    if packed is not None and packed.form_phrases:
        num_bytes += packed.num_bytes - packed.num_elements * dtype.itemsize
        form_phrases = ", ".join(sorted(packed.form_phrases))
        form = f"weights (%s) stay packed for linear layers ({form_phrases}); others are"
    logger.info(
        "%s: " + form + " dequantised to %s as they are read: %.1f MiB read, %.1f MiB held%s",
        path,
        reader.quantisation_label,
        name,
        sum(info.num_bytes for info in infos) / 2**20,
        num_bytes / 2**20,
        f"; {reader.ignored_quantisation} are not used, activations and KV cache stay in {name}"
        if reader.ignored_quantisation
        else "",
    )
