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
"""``(start, stop)`` to these rows of a tensor, its slices along the first dimension, in float32."""


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A tensor of the model, and the tensors of the checkpoint that it is stored in.

    Attributes:
        name: of the tensor in an unquantised checkpoint.
        shape: of the tensor in an unquantised checkpoint.
        parts: tensor names by what they are: "qweight", "weight_scale".
        step: rows that are stored together; slices begin at multiples of it.
    """

    name: str
    shape: tuple[int, ...]
    parts: Mapping[str, str]
    step: int = 1


class WeightFormat(Protocol):
    """A quantisation method of a checkpoint's ``quantization_config``.

    Attributes:
        label: names it with its numbers, for the log.
        ignored: what the checkpoint says of activations or the KV cache, which are kept in
            the model's dtype, for the log; empty for nothing.
    """

    label: str
    ignored: str

    def packed(self, reader: CheckpointReader) -> Iterator[PackedTensor]:
        """Every tensor that is stored in this format.

        Raises:
            ModelLoadError: a part is missing, or has another dtype or shape than the others
                and the configuration imply.
        """
        ...

    def is_ignored(self, name: str) -> bool:
        """Whether a tensor of the checkpoint has to do with activations or the KV cache only."""
        ...

    def read(self, tensor: PackedTensor, parts: Mapping[str, Tensor]) -> Codes | Rows:
        """The integers that a tensor is stored as, or the dequantised rows of one of floats.

        Raises:
            ModelLoadError: values within the parts that contradict their shapes.
        """
        ...


class PartsOf:
    """The parts of one packed tensor, looked up by suffix and checked.

    Args:
        stem: what the names of all parts begin with.
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
        """The part, of one of ``dtypes``, and of ``shape`` or with ``dims`` dimensions.

        Raises:
            ModelLoadError: it is missing or another.
        """
        info = self.find(suffix)
        if info is None:
            owner = self.names and next(iter(self.names.values()))
            raise ModelLoadError(
                f"{self._places()}: tensor {self.stem + suffix!r} is missing"
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
        """The part as it is; None where the checkpoint has no such tensor."""
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

    def _places(self) -> str:
        found = [self.tensors[name].file for name in self.names.values()]
        return str(found[0] if found else next(iter(self.tensors.values())).file)


def stems(tensors: Iterable[str], suffix: str) -> Iterator[str]:
    """Names that end with ``suffix``, without it."""
    for name in tensors:
        if name.endswith(suffix):
            yield name.removesuffix(suffix)


def refuse_unknown(config: ConfigFile, known: Iterable[str]) -> None:
    """Raises ModelLoadError for a field that is not ``known``: it may change what the weights
    mean."""
    for name in config.values:
        if name in config and name not in known:
            raise config.bad(name, "no such field, which may change what the weights mean")


def modules(config: ConfigFile, *names: str) -> None:
    """Checks lists of modules that are not quantised; which those are, the tensors say.

    Raises:
        ModelLoadError: one is no list of strings.
    """
    for name in names:
        value = config.values.get(name)
        if value is not None and not (
            isinstance(value, list) and all(isinstance(entry, str) for entry in value)
        ):
            raise config.bad(name, "a list of module names")


def group_size(config: ConfigFile) -> int | None:
    """``group_size``, inputs that share a scale; None, for -1, is all of a row.

    Raises:
        ModelLoadError: another number.
    """
    if config.values.get("group_size") == -1:
        return None
    return config.integer("group_size")


def unpack(words: Tensor, bits: int, dim: int, order: Tensor | None = None) -> Tensor:
    """Unsigned integers of ``bits`` from int32 words, lowest bits first.

    Args:
        words: int32 of two dimensions.
        bits: 2, 4 or 8. No value crosses a byte, so that all is done on those.
        dim: that the values of a word follow one another in.
        order: ``[32 / bits]`` the place in the word of each value; its own index by default.

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
