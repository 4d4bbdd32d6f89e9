"""load_modules: loads a checkpoint's tensors into transformers' modules."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager

import torch
from torch import Tensor, nn

from asyncllm.checkpoint.progress import ProgressCallback
from asyncllm.checkpoint.reader import CheckpointReader
from asyncllm.checkpoint.text_part import TextModelReader
from asyncllm.errors import ModelLoadError
from asyncllm.gpu.formats.open_checkpoint import log_weight_sizes, open_checkpoint
from asyncllm.gpu.models.architectures import COMPUTED_BUFFER_PATTERN
from asyncllm.gpu.transformers_model.config import TransformersConfig
from asyncllm.gpu.transformers_model.interface import (
    ENGINE_IMPLEMENTATION_NAME,
    experts_implementation,
)
from asyncllm.gpu.weights import DUMMY_SEED, PLAIN_WEIGHT_DTYPES, dummy_tensor
from asyncllm.validation import describe_error

_LOAD_LOCK = threading.Lock()
"""Lock held while transformers loads a model, because loading replaces transformers' own global
functions for a while. A second load at that time would take the replacements for the originals, and
restore them for good."""


def load_modules(
    model: TransformersConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: ProgressCallback | None = None,
) -> tuple[nn.Module, TensorOwner]:
    """Load the model, with transformers' own conversion of names and layouts.

    On a CPU, weights of the model's dtype stay in the mapped files until the TensorOwner copies
    them.

    Raises:
        ModelLoadError: a tensor is missing, unexpected or of a wrong shape; the message names it.
    """
    reader = open_checkpoint(model.path, dtype)
    with closing(
        TextModelReader(reader, model.architecture) if model.is_text_part else reader
    ) as reader:
        tensors, infos = {}, reader.tensors
        _check_dtypes(reader, model)
        owner = TensorOwner(device, sum(info.num_bytes for info in infos.values()), progress)
        for name, info in infos.items():
            if not COMPUTED_BUFFER_PATTERN.match(name):
                tensors[name] = reader.tensor(name)
            owner.count_read(info.num_bytes)
        modules = _load_tensors(model, tensors, dtype, device)
        log_weight_sizes(model.path, reader, dtype)
        owner.track_tensors(modules, tensors.values())
        if device.type != "cpu":
            owner.take_all_tensors(modules)
        return modules, owner


def _check_dtypes(reader: CheckpointReader, model: TransformersConfig) -> None:
    """Raise ModelLoadError for a stored weight of a type other than floating point.

    For example, it may be a quantised weight whose scales are missing; transformers would cast it
    silently.
    """
    floats = {name for name, t in model.skeleton.state_dict().items() if t.is_floating_point()}
    for name, info in reader.tensors.items():
        if name in floats and info.dtype not in PLAIN_WEIGHT_DTYPES:
            raise ModelLoadError(
                f"{info.file}: tensor {name!r} is {info.dtype}, expected "
                f"{' or '.join(PLAIN_WEIGHT_DTYPES)}"
            )


def dummy_modules(
    model: TransformersConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: ProgressCallback | None = None,
) -> tuple[nn.Module, TensorOwner]:
    """Make the model with random weights, the same in every run, like ``dummy_weights``."""
    generator = torch.Generator(device="cpu").manual_seed(DUMMY_SEED)
    tensors, skeleton = {}, model.skeleton.state_dict()
    total = sum(each.numel() * dtype.itemsize for each in skeleton.values())
    owner = TensorOwner(device, total, progress)
    for name, parameter in skeleton.items():
        if not parameter.is_floating_point():
            raise ModelLoadError(
                f'load_format="dummy": {name} is {parameter.dtype}, expected floating point'
            )
        drawn = torch.empty(parameter.shape, device="cpu")
        tensors[name] = dummy_tensor(name, drawn, generator).to(dtype)
        owner.count_read(tensors[name].nbytes)
    modules = _load_tensors(model, tensors, dtype, device)
    owner.track_tensors(modules)
    owner.take_all_tensors(modules)
    return modules, owner


def _load_tensors(
    model: TransformersConfig, tensors: dict[str, Tensor], dtype: torch.dtype, device: torch.device
) -> nn.Module:
    try:
        with _LOAD_LOCK, _quiet_transformers():
            modules, info = model.model_class.from_pretrained(
                None,
                config=model.config,
                state_dict=tensors,
                dtype=dtype,
                attn_implementation=ENGINE_IMPLEMENTATION_NAME,
                experts_implementation=experts_implementation(device),
                output_loading_info=True,
            )
    except (Exception, SystemExit) as error:
        why = _describe_wrong_shape(model, tensors) or describe_error(error)
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


def _describe_wrong_shape(model: TransformersConfig, tensors: dict[str, Tensor]) -> str | None:
    """Describe the first tensor whose shape is not the model's; None if all shapes match.

    transformers only logs such shapes.
    """
    for name, expected in model.skeleton.state_dict().items():
        if name in tensors and tensors[name].shape != expected.shape:
            shape = tuple(tensors[name].shape)
            return f"tensor {name} is of shape {shape}, expected {tuple(expected.shape)}"
    return None


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Turn off transformers' progress bar and its load report, which ModelLoadError replaces."""
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


class TensorOwner:
    """Makes the engine own the memory of a model's tensors, and reports progress.

    On a CPU it copies tensors that are views of mapped files, which must not be read once the model
    runs. Otherwise it moves tensors to the device.

    Progress is in bytes of the files. Half of a tensor's bytes count when the tensor is read (and
    dequantised), and half when it becomes the engine's own (and is copied or packed).

    Args:
        total_bytes: bytes of the files.
    """

    def __init__(
        self, device: torch.device, total_bytes: int, progress: ProgressCallback | None
    ) -> None:
        self.device, self._total_bytes, self._progress = device, total_bytes, progress
        self._num_bytes_read = self._num_bytes_taken = self._num_bytes = 0
        self._mapped_addresses: set[int] = set()

    def count_read(self, num_bytes: int) -> None:
        self._num_bytes_read += num_bytes
        self._report_progress()

    def track_tensors(self, modules: nn.Module, mapped_tensors: Iterable[Tensor] = ()) -> None:
        """Record the size of ``modules``, and which tensors are views of mapped files."""
        self._num_bytes = sum(parameter.nbytes for parameter in modules.parameters())
        self._mapped_addresses = {tensor.untyped_storage().data_ptr() for tensor in mapped_tensors}

    def take_tensor(self, tensor: Tensor) -> Tensor:
        """Return the tensor if the engine owns its memory already, else a copy."""
        # Cap the sum: a tensor may be counted twice, for example because it was moved to a device
        # first.
        self._num_bytes_taken = min(self._num_bytes_taken + tensor.nbytes, self._num_bytes)
        self._report_progress()
        if self.device.type != "cpu":
            return tensor.to(self.device)
        address = tensor.untyped_storage().data_ptr()
        return tensor.clone() if address in self._mapped_addresses else tensor

    def take_all_tensors(self, modules: nn.Module) -> None:
        """Take all parameters and buffers of ``modules`` as ``take_tensor`` does, in place.

        Shared tensors stay shared.
        """
        for module in modules.modules():
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None:
                    tensor.data = self.take_tensor(tensor.data)

    def finish(self) -> None:
        """Report to ``progress`` that the engine owns all tensors."""
        self._num_bytes_taken = self._num_bytes
        self._report_progress()

    def _report_progress(self) -> None:
        if self._progress is not None:
            taken = 0
            if self._num_bytes:
                taken = self._total_bytes * self._num_bytes_taken // self._num_bytes
            self._progress((self._num_bytes_read + taken) // 2, self._total_bytes)
