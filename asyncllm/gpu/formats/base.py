"""WeightFormat: how a quantised checkpoint stores the tensors of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from asyncllm.checkpoint.codes import Codes
from asyncllm.checkpoint.config_file import ConfigFile
from asyncllm.checkpoint.reader import CheckpointReader, TensorInfo
from asyncllm.errors import ModelLoadError

SCALE_DTYPES = ("F32", "BF16", "F16")

Rows = Callable[[int, int], Tensor]
"""Function of ``(start, stop)`` that returns these rows of a tensor, dequantised to float32."""


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A tensor of the model, and the tensors of the checkpoint that store it.

    Attributes:
        name, shape: as in an unquantised checkpoint.
        parts: names of the stored tensors by their suffix, such as "qweight", "weight_scale".
        step: rows that are stored together; slices begin at multiples of it.
    """

    name: str
    shape: tuple[int, ...]
    parts: Mapping[str, str]
    step: int = 1


class WeightFormat(Protocol):
    """A quantisation method of a checkpoint's ``quantization_config``.

    Attributes:
        label: name and numbers of the method, for the log.
        ignored: settings for activations or the KV cache, which stay in the model's dtype, in
            words for the log; empty for none.
    """

    label: str
    ignored: str

    def packed(self, reader: CheckpointReader) -> Iterator[PackedTensor]:
        """Finds every tensor that is stored in this format.

        Raises:
            ModelLoadError: a part is missing, or its dtype or shape contradicts the other parts
                or the configuration.
        """
        ...

    def is_ignored(self, name: str) -> bool:
        """Whether a tensor of the checkpoint is for activations or the KV cache only."""
        ...

    def read(self, tensor: PackedTensor, parts: Mapping[str, Tensor]) -> Codes | Rows:
        """Reads a tensor: as Codes if it is stored as integers, as dequantised Rows if as floats.

        Raises:
            ModelLoadError: values of the parts contradict their shapes.
        """
        ...


class TensorParts:
    """Looks up the parts of one packed tensor by suffix, and checks them.

    Args:
        stem: common prefix of the parts' names.
    """

    def __init__(self, tensors: Mapping[str, TensorInfo], stem: str) -> None:
        self.tensors, self.stem = tensors, stem
        self.names: dict[str, str] = {}

    def require(
        self,
        suffix: str,
        dtypes: Iterable[str],
        shape: tuple[int, ...] | None = None,
        dims: int | None = None,
    ) -> TensorInfo:
        """Returns the part, of one of ``dtypes``, and of ``shape`` or with ``dims`` dimensions.

        Raises:
            ModelLoadError: the part is missing, or has another dtype or shape.
        """
        info = self.find(suffix)
        if info is None:
            owner = self.names and next(iter(self.names.values()))
            raise ModelLoadError(
                f"{self._file()}: tensor {self.stem + suffix!r} is missing"
                + (f", which {owner!r} needs" if owner else "")
            )
        if 0 in info.shape:
            raise self.bad(suffix, "no dimension of 0")
        accepted, fits = " or ".join(dtypes), info.dtype in dtypes
        if shape is not None:
            accepted, fits = f"{accepted} of shape {shape}", fits and info.shape == shape
        elif dims is not None:
            accepted, fits = f"{accepted} of {dims} dimensions", fits and len(info.shape) == dims
        if not fits:
            raise self.bad(suffix, accepted)
        return info

    def find(self, suffix: str) -> TensorInfo | None:
        """Returns the part unchecked; None where the checkpoint has no such tensor."""
        info = self.tensors.get(self.stem + suffix)
        if info is not None:
            self.names[suffix] = self.stem + suffix
        return info

    def bad(self, suffix: str, accepted: str) -> ModelLoadError:
        info = self.tensors[self.stem + suffix]
        return ModelLoadError(
            f"{info.file}: tensor {self.stem + suffix!r} is {info.dtype} of shape {info.shape}, "
            f"expected {accepted}"
        )

    def _file(self) -> str:
        found = [self.tensors[name].file for name in self.names.values()]
        return str(found[0] if found else next(iter(self.tensors.values())).file)


def stems(tensors: Iterable[str], suffix: str) -> Iterator[str]:
    """Names that end with ``suffix``, with the suffix removed."""
    for name in tensors:
        if name.endswith(suffix):
            yield name.removesuffix(suffix)


def refuse_unknown(config: ConfigFile, known: Iterable[str]) -> None:
    """Raises ModelLoadError for an unknown field, which may change what the weights mean."""
    for name in config.values:
        if name in config and name not in known:
            raise config.bad(name, "no such field, which may change what the weights mean")


def modules(config: ConfigFile, *names: str) -> None:
    """Checks the form of lists of modules; the tensors themselves say which are quantised.

    Raises:
        ModelLoadError: a field is no list of strings.
    """
    for name in names:
        value = config.values.get(name)
        if value is not None and not (
            isinstance(value, list) and all(isinstance(entry, str) for entry in value)
        ):
            raise config.bad(name, "a list of module names")


def group_size(config: ConfigFile) -> int | None:
    """Reads ``group_size``, the inputs that share a scale; None, for -1, is a whole row.

    Raises:
        ModelLoadError: no positive integer, and not -1.
    """
    if config.values.get("group_size") == -1:
        return None
    return config.integer("group_size")


def unpack(words: Tensor, bits: int, dim: int, order: Tensor | None = None) -> Tensor:
    """Unpacks unsigned integers of ``bits`` from int32 words, lowest bits first.

    Args:
        words: int32 of two dimensions.
        bits: 2, 4 or 8. No value crosses a byte, so that bytes are unpacked.
        dim: dimension along which the values of a word are adjacent.
        order: ``[32 / bits]``, the place in the word of each value; its own index by default.

    Returns:
        uint8, ``32 / bits`` times as long in ``dim``.
    """
    values = words.contiguous().view(torch.uint8).view(*words.shape, 4)
    if bits < 8:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
        values = ((values.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(2)
    if order is not None:
        values = values[:, :, order]
    return values.transpose(1, 2).flatten(0, 1) if dim == 0 else values.flatten(1)
