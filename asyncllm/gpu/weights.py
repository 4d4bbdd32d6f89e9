"""load_weights: reads a checkpoint's tensors into the decoder's parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asyncllm.checkpoint.model_config import ModelConfig
from asyncllm.checkpoint.progress import ProgressCallback
from asyncllm.checkpoint.reader import CheckpointReader, GGUFQuantisedTensor, QuantisedTensor
from asyncllm.checkpoint.text_part import TextModelReader
from asyncllm.errors import ModelLoadError
from asyncllm.gpu.formats.open_checkpoint import (
    PackedWeightStats,
    log_weight_sizes,
    open_checkpoint,
)
from asyncllm.gpu.formats.reader import row_ranges
from asyncllm.gpu.models.architectures import is_unused_tensor, parameters, total_parameter_size
from asyncllm.gpu.models.parameter import Parameter
from asyncllm.gpu.ops.linear_weights import (
    LinearWeights,
    QuantScheme,
    WeightSpec,
    join_weights,
)
from asyncllm.gpu.weight_upload import PinnedUploader

DUMMY_SEED = 0

PLAIN_WEIGHT_DTYPES = ("F64", "F32", "F16", "BF16")
"""Dtypes of a plain weight in a file; 8-bit integers and floats would need scales."""


_SCHEME_BY_BITS: dict[int, QuantScheme] = {4: "int4", 8: "int8"}
"""Quantisation scheme by the number of bits of an integer."""


def load_weights(
    model: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: ProgressCallback | None = None,
    uploader: PinnedUploader | None = None,
    open_reader: Callable[[Path, torch.dtype], CheckpointReader] = open_checkpoint,
    accepts_weights: Callable[[WeightSpec], bool] | None = None,
    *,
    is_transient: bool = False,
) -> Iterator[tuple[str, Tensor | LinearWeights]]:
    """Yields the decoder's parameters from a checkpoint, in the order of ``parameters``.

    Each parameter is allocated once. Its tensors in the checkpoint are copied into slices of that
    memory, and converted on the way. All names, shapes and dtypes are checked before the first
    parameter is made. Copies to a GPU go through ``PinnedUploader``, so that neither host nor
    device holds a tensor twice. A yielded parameter is complete for work on the thread's current
    stream.

    Args:
        dtype: dtype of the model; a parameter may have a dtype of its own.
        uploader: copies tensors to the device; None copies directly on a CPU, and through pinned
            buffers to a GPU.
        open_reader: opens the files in ``model.path`` as plain tensors.
        accepts_weights: whether linear layers compute with quantised weights of a spec. Such
            weights are yielded as stored, on the CPU; None dequantises all weights.
        is_transient: whether a yielded weight of a linear layer is valid only until the next one is
            requested, for an op set that packs each weight before it requests the next. Such a
            weight is a view of the mapped file, if the file holds it whole and in the model's
            dtype, else a view of one reused buffer. This saves a copy and an allocation per weight.

    Raises:
        ModelLoadError: a tensor does not fit; the message has the file, the tensor, and the
            expected and the found shape.
    """
    reader = open_reader(model.path, dtype)
    with closing(
        TextModelReader(reader, model.architecture) if model.is_text_part else reader
    ) as reader:
        model_params = [parameter.choose_layout(reader.tensors) for parameter in parameters(model)]
        _check_tensors(reader, model, model_params)
        if uploader is None and device.type == "cuda":
            uploader = PinnedUploader(device)
        tensors = reader.tensors
        num_bytes = sum(tensors[name].num_bytes for p in model_params for name, _ in p.parts)
        done = 0
        packed = PackedWeightStats()
        short_lived = _TransientWeights(model_params, dtype, reader) if is_transient else None
        for parameter in model_params:
            bundle = _quantised_weight(reader, parameter, accepts_weights)
            whole = None
            if bundle is not None:
                packed.add(bundle)
                target = bundle
            elif short_lived is not None and short_lived.is_read_once(parameter):
                whole = short_lived.mapped_view(parameter)
                target = short_lived.buffer_view(parameter) if whole is None else whole
            else:
                target = _allocate_parameter(parameter, dtype, device)
            row = 0
            for name, rows in parameter.parts:
                if isinstance(target, Tensor) and whole is None:
                    slices = parameter.iter_rows(reader.slices(name))
                    _copy_slices(slices, target[row : row + rows], uploader)
                row += rows
                done += tensors[name].num_bytes
                if progress is not None:
                    progress(done, num_bytes)
            yield parameter.name, target
        if uploader is not None:
            uploader.finish()
        log_weight_sizes(model.path, reader, dtype, packed)


class _TransientWeights:
    """Weights of linear layers, each valid until the next is requested."""

    def __init__(
        self, model_params: list[Parameter], dtype: torch.dtype, reader: CheckpointReader
    ) -> None:
        self._dtype, self._reader = dtype, reader
        copied = [
            each
            for each in model_params
            if self.is_read_once(each) and self.mapped_view(each) is None
        ]
        largest = max((math.prod(each.shape) for each in copied), default=0)
        self._buffer = torch.empty(largest, dtype=dtype, device="cpu")

    def is_read_once(self, parameter: Parameter) -> bool:
        """Whether a weight's memory may be reused once the next weight is requested.

        Expert weights are kept until all experts of a layer are read.
        """
        is_expert = ".experts." in parameter.name
        return parameter.is_linear and parameter.dtype is None and not is_expert

    def mapped_view(self, parameter: Parameter) -> Tensor | None:
        """View of the weight in the mapped file, or None.

        It is None if the file stores the weight in several tensors, or not in the model's dtype.
        """
        name = parameter.parts[0][0]
        info = self._reader.tensors[name]
        mapped = info.num_bytes == math.prod(parameter.shape) * self._dtype.itemsize
        if len(parameter.parts) != 1 or not mapped:
            return None
        found = next(iter(self._reader.slices(name)))
        fits = found.shape == parameter.shape and found.dtype == self._dtype
        return found if fits and found.data_ptr() % found.itemsize == 0 else None

    def buffer_view(self, parameter: Parameter) -> Tensor:
        return self._buffer[: math.prod(parameter.shape)].view(parameter.shape)


def _quantised_weight(
    reader: CheckpointReader,
    parameter: Parameter,
    accepts_weights: Callable[[WeightSpec], bool] | None,
) -> LinearWeights | None:
    """Quantised weight of a linear layer or embedding, as stored; None for any other parameter."""
    packable = (parameter.is_linear or parameter.is_embedding) and parameter.layout is None
    if accepts_weights is None or not packable:
        return None
    found = join_quantised_parts(
        [reader.quantised_tensor(name) for name, _ in parameter.parts], accepts_weights
    )
    if found is not None and found.next_parts and ".experts." in parameter.name:
        # Dequantise experts of different formats: ``split_experts`` needs one format for all.
        return None
    return found


def join_quantised_parts(
    parts: Sequence[QuantisedTensor | GGUFQuantisedTensor | None],
    accepts_weights: Callable[[WeightSpec], bool],
) -> LinearWeights | None:
    """Concatenates quantised parts along the outputs; integers and scales stay unchanged.

    Adjacent parts of one format become one LinearWeights; those of the next format follow in its
    ``next_parts``. Returns None if a part is not quantised, or has a form that
    ``accepts_weights`` refuses.
    """
    stacks: list[LinearWeights] = []
    for _, group in groupby(parts, _concatenation_key):
        found = [part for part in group if part is not None]
        blocks = [part for part in found if isinstance(part, GGUFQuantisedTensor)]
        codes = [part for part in found if isinstance(part, QuantisedTensor)]
        if blocks:
            stack = _concatenate_blocks(blocks, accepts_weights)
        else:
            stack = _concatenate_codes(codes, accepts_weights)
        if stack is None:
            return None
        stacks.append(stack)
    return join_weights(stacks)


def _concatenation_key(part: QuantisedTensor | GGUFQuantisedTensor | None) -> object:
    """Grouping key, equal for parts that can be concatenated in one tensor."""
    if isinstance(part, QuantisedTensor):
        return part.bits, min(part.block[1], part.shape[-1])
    return None if part is None else part.scheme


def _concatenate_blocks(
    parts: Sequence[GGUFQuantisedTensor], accepts_weights: Callable[[WeightSpec], bool]
) -> LinearWeights | None:
    scheme: Any = parts[0].scheme
    rows, columns = sum(part.shape[0] for part in parts), parts[0].shape[1]
    if not accepts_weights(WeightSpec((rows, columns), scheme)):
        return None
    # A lone part stays in the mapped file, without a copy.
    values = [part.read_rows(0, part.shape[0]) for part in parts]
    return LinearWeights(values[0] if len(values) == 1 else torch.cat(values), scheme=scheme)


def _concatenate_codes(
    codes: Sequence[QuantisedTensor], accepts_weights: Callable[[WeightSpec], bool]
) -> LinearWeights | None:
    if not codes:
        return None
    bits, columns = codes[0].bits, codes[0].shape[1]
    group = min(codes[0].block[1], columns)
    scheme = _SCHEME_BY_BITS.get(bits)
    if scheme is None or columns * bits % 8 or any(c.column_groups is not None for c in codes):
        return None
    zeros = torch.cat([_zero_points(part) for part in codes])
    # Signed 8-bit integers that are centred on 0 need no zero points.
    has_zeros = scheme == "int4" or bool(zeros.any())
    spec = WeightSpec((sum(c.shape[0] for c in codes), columns), scheme, (1, group), has_zeros)
    low, high = (0, 255) if scheme == "int4" else (-128, 127)
    if not accepts_weights(spec) or not low <= int(zeros.min()) <= int(zeros.max()) <= high:
        return None
    values = _concatenate_integers(codes, spec.shape, scheme)
    return LinearWeights(
        values,
        scheme=scheme,
        scales=torch.cat([_expand_to_rows(part, part.scales) for part in codes]),
        scale_block=spec.scale_block,
        zeros=zeros.to(values.dtype) if has_zeros else None,
    )


def _concatenate_integers(
    codes: Sequence[QuantisedTensor], shape: tuple[int, int], scheme: QuantScheme
) -> Tensor:
    """Concatenates quantised integers as LinearWeights stores them, a few rows at a time."""
    rows, columns = shape
    if scheme == "int4":
        values = torch.empty(rows, columns // 2, dtype=torch.uint8)
    else:
        values = torch.empty(rows, columns, dtype=torch.int8)
    first = 0
    for part in codes:
        for start, stop in row_ranges(part.shape, part.row_multiple):
            integers, target = part.read_rows(start, stop), values[first + start : first + stop]
            if scheme == "int4":
                torch.bitwise_or(integers[:, ::2], integers[:, 1::2] << 4, out=target)
            else:
                target.copy_(integers if part.is_signed else (integers ^ 128).view(torch.int8))
        first += part.shape[0]
    return values


def _zero_points(part: QuantisedTensor) -> Tensor:
    """Zero points in the layout of ``LinearWeights``, in which 8-bit values are signed."""
    shift = 128 if part.bits == 8 and not part.is_signed else 0
    if part.zeros is None:
        zeros = torch.zeros(part.scales.shape, dtype=torch.int16)
    else:
        zeros = part.zeros.to(torch.int16)
    return _expand_to_rows(part, zeros - shift)


def _expand_to_rows(part: QuantisedTensor, block_values: Tensor) -> Tensor:
    """Expands ``block_values`` to one row per row of the weights."""
    if part.block[0] == 1:
        return block_values
    return block_values.repeat_interleave(part.block[0], dim=0)[: part.shape[0]]


def _copy_slices(slices: Iterable[Tensor], target: Tensor, uploader: PinnedUploader | None) -> None:
    """Copies and converts the slices of a tensor, one after the other."""
    row = 0
    for source in slices:
        part = target[row : row + len(source)]
        if uploader is None:
            part.copy_(source)
        else:
            uploader.copy(source, part)
        row += len(source)


def dummy_weights(
    model: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: ProgressCallback | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yields random parameters, the same in every run.

    Norm weights are 1, biases 0, and matrices normal with variance ``1 / columns``, which keeps
    activations of order 1.
    """
    generator = torch.Generator(device=device).manual_seed(DUMMY_SEED)
    done, num_bytes = 0, weights_bytes(model, dtype)
    for parameter in parameters(model):
        tensor = _allocate_parameter(parameter, dtype, device)
        dummy_tensor(parameter.name, tensor, generator)
        done += tensor.nbytes
        if progress is not None:
            progress(done, num_bytes)
        yield parameter.name, tensor


def dummy_tensor(name: str, tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Fills a parameter with random numbers, see ``dummy_weights``."""
    if tensor.dim() > 1:
        return tensor.normal_(0.0, tensor.shape[-1] ** -0.5, generator=generator)
    return tensor.fill_(0.0 if name.endswith("bias") else 1.0)


def _allocate_parameter(parameter: Parameter, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(parameter.shape, dtype=parameter_dtype(parameter, dtype), device=device)


def parameter_dtype(parameter: Parameter, dtype: torch.dtype) -> torch.dtype:
    """Dtype in which a parameter is stored, in a model of ``dtype``."""
    return dtype if parameter.dtype is None else getattr(torch, parameter.dtype)


def weights_bytes(model: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of all parameters on the device."""
    return total_parameter_size(
        model, lambda p: math.prod(p.shape) * parameter_dtype(p, dtype).itemsize
    )


def _check_tied_head(reader: CheckpointReader, model: ModelConfig) -> None:
    """Raises ModelLoadError for a tied output head that differs from the stored embedding.

    transformers would compute with the stored head, so the results would differ.
    """
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    if not model.tie_word_embeddings or head not in reader.tensors:
        return
    found, expected = reader.tensor(head), reader.tensor(embedding)
    if found.dtype != expected.dtype or not torch.equal(found, expected):
        raise ModelLoadError(
            f"{reader.tensors[head].file}: tensor {head!r} is not {embedding!r}, expected a copy "
            "of it or none, because tie_word_embeddings is True"
        )


def _check_tensors(
    reader: CheckpointReader, model: ModelConfig, model_params: list[Parameter]
) -> None:
    """Raises ModelLoadError for a tensor that is missing, unexpected or of a wrong shape."""
    expected = {
        name: parameter.stored_shape(rows)
        for parameter in model_params
        for name, rows in parameter.parts
    }
    for name, shape in expected.items():
        info = reader.tensors.get(name)
        if info is None:
            places = ", ".join(sorted({str(info.file) for info in reader.tensors.values()}))
            raise ModelLoadError(f"{places}: tensor {name!r} is missing, expected {shape}")
        if info.shape != shape or info.dtype not in PLAIN_WEIGHT_DTYPES:
            raise ModelLoadError(
                f"{info.file}: tensor {name!r} is {info.dtype} of shape {info.shape}, expected "
                f"{' or '.join(PLAIN_WEIGHT_DTYPES)} of shape {shape}"
            )
    _check_tied_head(reader, model)
    for name, info in reader.tensors.items():
        if (
            name not in expected
            and not is_unused_tensor(model, name)
            and not _is_zero_bias(reader, name)
        ):
            raise ModelLoadError(
                f"{info.file}: tensor {name!r} is none of this architecture's: the model would "
                "be computed without it"
            )


def _is_zero_bias(reader: CheckpointReader, name: str) -> bool:
    """Whether a tensor is a bias of zeros, which quantisers add to layers without a bias."""
    return name.endswith(".bias") and not any(bool(part.any()) for part in reader.slices(name))
