"""load_modules: a checkpoint's tensors into transformers' modules."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from asyncllm.checkpoint.progress import Progress
from asyncllm.checkpoint.reader import CheckpointReader
from asyncllm.checkpoint.text_part import TextPart
from asyncllm.errors import ModelLoadError
from asyncllm.gpu.formats.open_checkpoint import log_sizes, open_checkpoint
from asyncllm.gpu.transformers_model.config import TransformersConfig
from asyncllm.gpu.weights import DUMMY_SEED, STORED_DTYPES
from asyncllm.validation import explain

_COMPUTED = re.compile(r".*\.rotary_emb\.(inv_freq|cos_cached|sin_cached)$")

_loading = threading.Lock()
"""transformers replaces functions of its own while it loads a model, for the whole process: of two
loads at once the second would find the first one's and put them back for good."""


def load_modules(
    model: TransformersConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    attention: str,
    experts: str,
    progress: Progress | None = None,
    open_reader: Callable[[Path, torch.dtype], CheckpointReader] = open_checkpoint,
) -> tuple[nn.Module, Owner]:
    """The model with its weights, by transformers' own conversion of names and layouts. On a CPU
    those of the model's dtype still lie in the mapped files, until their owner takes them.

    Args:
        attention, experts: names of the implementations.
        open_reader: makes the reader of the files in ``model.path``, of plain tensors.

    Raises:
        ModelLoadError: a tensor that is missing, surplus or misshapen, by name.
    """
    reader = open_reader(model.path, dtype)
    with closing(TextPart(reader, model.architecture) if model.is_text_part else reader) as reader:
        tensors = {}
        _check_dtypes(reader, model)
        loading = _Loading(sum(info.num_bytes for info in reader.tensors.values()), progress)
        for name, info in reader.tensors.items():
            if not _COMPUTED.match(name):
                tensors[name] = reader.tensor(name)
            loading.read(info.num_bytes)
        modules = _convert(model, tensors, dtype, attention, experts)
        log_sizes(model.path, reader, dtype)
        loading.num_bytes = sum(parameter.nbytes for parameter in modules.parameters())
        owner = Owner(device, tensors.values(), loading)
        if device.type != "cpu":
            owner.take_all(modules)
        return modules, owner


def _check_dtypes(reader: CheckpointReader, model: TransformersConfig) -> None:
    """Raises ModelLoadError for a weight that transformers would cast from another kind of number,
    such as one that is quantised and has no scales."""
    floats = {name for name, t in model.skeleton.state_dict().items() if t.is_floating_point()}
    for name, info in reader.tensors.items():
        if name in floats and info.dtype not in STORED_DTYPES:
            raise ModelLoadError(
                f"{info.file}: tensor {name!r} is {info.dtype}, expected "
                f"{' or '.join(STORED_DTYPES)}"
            )


def dummy_modules(
    model: TransformersConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    attention: str,
    experts: str,
    progress: Progress | None = None,
) -> tuple[nn.Module, Owner]:
    """The model with random weights, the same in every run, drawn as ``dummy_weights`` does."""
    generator = torch.Generator(device="cpu").manual_seed(DUMMY_SEED)
    tensors, done = {}, 0
    total = sum(each.numel() * dtype.itemsize for each in model.skeleton.state_dict().values())
    for name, parameter in model.skeleton.state_dict().items():
        if not parameter.is_floating_point():
            raise ModelLoadError(
                f'load_format="dummy": {name} is {parameter.dtype}, expected floating point'
            )
        drawn = torch.empty(parameter.shape, device="cpu")
        if parameter.dim() > 1:
            drawn.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
        else:
            drawn.fill_(0.0 if name.endswith("bias") else 1.0)
        tensors[name] = drawn.to(dtype)
        done += drawn.numel() * dtype.itemsize
        if progress is not None:
            progress(done, total)
    modules = _convert(model, tensors, dtype, attention, experts)
    owner = Owner(device)
    owner.take_all(modules)
    return modules, owner


def _convert(
    model: TransformersConfig,
    tensors: dict[str, Tensor],
    dtype: torch.dtype,
    attention: str,
    experts: str,
) -> nn.Module:
    try:
        with _loading, _quiet():
            modules, info = model.model_class.from_pretrained(
                None,
                config=model.config,
                state_dict=tensors,
                dtype=dtype,
                attn_implementation=attention,
                experts_implementation=experts,
                output_loading_info=True,
            )
    except (Exception, SystemExit) as error:
        why = _misshapen(model, tensors) or explain(error)
        raise ModelLoadError(
            f"{model.path}: transformers cannot load {model.architecture}: {why}"
        ) from error
    for kind in ("missing", "unexpected", "mismatched"):
        names = sorted(map(str, info[f"{kind}_keys"]))
        if names:
            raise ModelLoadError(
                f"{model.path}: tensor {names[0]} of {model.architecture} is {kind}"
                + (f", with {len(names) - 1} more" if names[1:] else "")
                + ": the model would be computed without it"
            )
    return modules.eval().requires_grad_(False)


def _misshapen(model: TransformersConfig, tensors: dict[str, Tensor]) -> str | None:
    """A tensor of another shape than the model's of that name, which transformers reports to its
    log alone; None where names or layouts are converted."""
    for name, expected in model.skeleton.state_dict().items():
        if name in tensors and tensors[name].shape != expected.shape:
            shape = tuple(tensors[name].shape)
            return f"tensor {name} is of shape {shape}, expected {tuple(expected.shape)}"
    return None


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bar, and its report: what is wrong is raised."""
    from transformers.utils import logging

    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()


class _Loading:
    """Progress in bytes of the files: half of a tensor's when it is read, where a quantised one is
    computed, and half when it becomes the engine's own, where a plain one is copied or packed.

    Args:
        total: bytes of the files.

    Attributes:
        num_bytes: of the model's parameters.
    """

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.total, self.progress, self.num_bytes = total, progress, 0
        self._read = self._taken = 0

    def read(self, num_bytes: int) -> None:
        self._read += num_bytes
        self._tell()

    def take(self, num_bytes: int) -> None:
        # What is taken again, as when it goes to a device first, counts once.
        self._taken = min(self._taken + num_bytes, self.num_bytes)
        self._tell()

    def finish(self) -> None:
        self._taken = self.num_bytes
        self._tell()

    def _tell(self) -> None:
        if self.progress is not None:
            taken = self.total * self._taken // self.num_bytes if self.num_bytes else 0
            self.progress((self._read + taken) // 2, self.total)


class Owner:
    """Makes tensors the engine's own: copies those that lie in a mapped file, which must not be
    read once the model runs, and moves all of them to the device.

    Args:
        mapped: tensors of files.
        loading: is told of what is taken.
    """

    def __init__(
        self,
        device: torch.device,
        mapped: Iterable[Tensor] = (),
        loading: _Loading | None = None,
    ) -> None:
        self.device, self._loading = device, loading
        self._mapped = {tensor.untyped_storage().data_ptr() for tensor in mapped}

    def take(self, tensor: Tensor) -> Tensor:
        """The tensor, or its copy."""
        if self._loading is not None:
            self._loading.take(tensor.nbytes)
        if self.device.type != "cpu":
            return tensor.to(self.device)
        return tensor.clone() if tensor.untyped_storage().data_ptr() in self._mapped else tensor

    def take_all(self, modules: nn.Module) -> None:
        """Takes all parameters and buffers; one that is shared stays shared."""
        for module in modules.modules():
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None:
                    tensor.data = self.take(tensor.data)

    def finish(self) -> None:
        """Everything is taken."""
        if self._loading is not None:
            self._loading.finish()


def tied_head(modules: Any) -> bool:
    """Whether the output head's weight is the embedding's."""
    head, embedding = modules.get_output_embeddings(), modules.get_input_embeddings()
    return getattr(head, "weight", None) is getattr(embedding, "weight", 0)
