"""TextModelReader: reads the text model's tensors in a multimodal checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from asyncllm.checkpoint.reader import (
    CheckpointReader,
    GGUFQuantisedTensor,
    QuantisedTensor,
    TensorInfo,
)
from asyncllm.errors import ModelLoadError
from asyncllm.logger import get_logger

if TYPE_CHECKING:
    from torch import Tensor


logger = get_logger(__name__)

_BASE_MODEL_PREFIX_PATTERN = re.compile(
    r"^(?:model\.)?(?:language_model|text_model)\.(?:model\.)?(?!lm_head)"
)
_LM_HEAD_PREFIX_PATTERN = re.compile(r"^(?:model\.)?(?:language_model\.)?(lm_head\.)")


def text_model_tensor_name(name: str) -> str | None:
    """Convert a tensor's name in a multimodal checkpoint to its name in the text-only model.

    Returns None for a tensor of a vision or audio tower.
    """
    head = _LM_HEAD_PREFIX_PATTERN.match(name)
    if head is not None:
        return head.group(1) + name[head.end() :]
    body = _BASE_MODEL_PREFIX_PATTERN.match(name)
    return None if body is None else "model." + name[body.end() :]


class TextModelReader:
    """CheckpointReader for the text model in a multimodal checkpoint.

    It names tensors as a text-only model does, and logs how many tensors it leaves out.

    Args:
        reader: reader of the whole checkpoint, which this reader owns and closes.
        architecture: name for the log.

    Raises:
        ModelLoadError: if the text model has no tensor besides ``lm_head``; closes ``reader``.
    """

    def __init__(self, reader: CheckpointReader, architecture: str) -> None:
        self._reader = reader
        self.quantisation_label = reader.quantisation_label
        self.ignored_quantisation = reader.ignored_quantisation
        self._stored_names = {
            new_name: name
            for name in reader.tensors
            if (new_name := text_model_tensor_name(name)) is not None
        }
        self.tensors: Mapping[str, TensorInfo] = {
            new_name: reader.tensors[name] for new_name, name in self._stored_names.items()
        }
        if not any(new_name.startswith("model.") for new_name in self._stored_names):
            reader.close()
            places = ", ".join(sorted({str(info.file) for info in reader.tensors.values()}))
            first = min(reader.tensors)
            raise ModelLoadError(
                f"{places}: no tensor is of the text part of a multimodal model, as config.json "
                f"describes it: the first of {len(reader.tensors)} is {first!r}, "
                "expected names like 'model.language_model.norm.weight'"
            )
        logger.info(
            "%s: the text part alone, without %d of %d tensors, which are of other towers",
            architecture, len(reader.tensors) - len(self.tensors), len(reader.tensors),
        )  # fmt: skip

    def tensor(self, name: str) -> Tensor:
        return self._reader.tensor(self._stored_names[name])

    def slices(self, name: str) -> Iterator[Tensor]:
        return self._reader.slices(self._stored_names[name])

    def quantised_tensor(self, name: str) -> QuantisedTensor | GGUFQuantisedTensor | None:
        return self._reader.quantised_tensor(self._stored_names[name])

    def close(self) -> None:
        self._reader.close()
