"""text_name: the tensors of a multimodal checkpoint that its text model has."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from asyncllm.checkpoint.reader import CheckpointReader

if TYPE_CHECKING:
    from torch import Tensor

_TEXT_PART = re.compile(r"^(?:model\.)?(?:language_model|text_model)\.(?:model\.)?(?!lm_head)")
_TEXT_HEAD = re.compile(r"^(?:model\.)?(?:language_model\.)?(lm_head\.)")


def text_name(name: str) -> str | None:
    """A tensor's name in the text model alone; None for one of another tower."""
    head = _TEXT_HEAD.match(name)
    if head is not None:
        return head.group(1) + name[head.end() :]
    part = _TEXT_PART.match(name)
    return None if part is None else "model." + name[part.end() :]


class TextPartReader:
    """CheckpointReader of the text model's tensors, under the names that they have in it.

    Args:
        source: reads the whole checkpoint; closed with this reader.
    """

    def __init__(self, source: CheckpointReader) -> None:
        self.source = source
        self._names = {
            text: name for name in source.tensors if (text := text_name(name)) is not None
        }
        self.tensors = {text: source.tensors[name] for text, name in self._names.items()}

    @property
    def num_skipped(self) -> int:
        """Tensors of other towers."""
        return len(self.source.tensors) - len(self.tensors)

    def tensor(self, name: str) -> Tensor:
        return self.source.tensor(self._names[name])

    def slices(self, name: str) -> Iterator[Tensor]:
        return self.source.slices(self._names[name])

    def close(self) -> None:
        self.source.close()
