"""parameters, is_unused_tensor: the parameters of a decoder, and the checkpoint tensors that it
ignores."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from asyncllm.checkpoint.model_config import ModelConfig
from asyncllm.gpu.models.attention_kinds import LayerAttention
from asyncllm.gpu.models.dense import DecoderBuilder
from asyncllm.gpu.models.parameter import Parameter
from asyncllm.gpu.ops.torch_ops import TorchOps
from asyncllm.gpu.transformers_model.config import TransformersConfig

_LAYER_PREFIX_PATTERN = re.compile(r"model\.layers\.(\d{1,6})\.")

MAX_SMALL_MODEL_PARAMETERS = 32_000_000
"""Number of parameters below which a model is bound by the overhead of ops, not by arithmetic."""

_MTP_PREFIX_PATTERN = re.compile(r"mtp\.")
"""Prefix of modules for multi-token prediction, in checkpoints of Qwen3-Next and its successors."""
_KV_PROJECTION_PATTERN = re.compile(r"model\.layers\.\d+\.self_attn\.[kv]_(proj|norm)\.")

COMPUTED_BUFFER_PATTERN = re.compile(r".*\.rotary_emb\.(inv_freq|cos_cached|sin_cached)$")


class _ParameterRecorder:
    """Source of weights that records the requested parameters, and returns placeholders.

    Matrices are on the meta device, without memory. Vectors are real, because arithmetic with norms
    on the meta device imports much of torch.
    """

    def __init__(self) -> None:
        self.requested_parameters: list[Parameter] = []

    def __call__(self, parameter: Parameter) -> Tensor:
        self.requested_parameters.append(parameter)
        if len(parameter.shape) == 1:
            return torch.ones(parameter.shape, dtype=torch.float32, device="cpu")
        return torch.empty(parameter.shape, dtype=torch.float32, device="meta")

    def make_decoder_builder(self, model: ModelConfig, layers: Iterable[int]) -> DecoderBuilder:
        """Make a builder of ``layers`` in plain torch that requests its weights from this recorder.

        The layers have no attention.
        """
        nothing: Any = None
        attention = dict.fromkeys(layers, LayerAttention(nothing, nothing, 0, 0, 0))
        return DecoderBuilder(model, TorchOps(), attention, self)


def parameters(model: ModelConfig) -> list[Parameter]:
    """Every parameter of the decoder, in the order in which ``build_decoder`` requests them."""
    layers, recorder = range(model.num_layers), _ParameterRecorder()
    recorder.make_decoder_builder(model, layers).decoder(layers, {}, ())
    return recorder.requested_parameters


def is_unused_tensor(model: ModelConfig, name: str) -> bool:
    """Whether the decoder ignores a checkpoint's tensor.

    It ignores a second copy of a tied output head, RoPE tables that older versions of transformers
    saved, layers for multi-token prediction, and key and value projections of a layer that reuses
    another layer's KV.
    """
    tied_head = model.tie_word_embeddings and name == "lm_head.weight"
    if tied_head or COMPUTED_BUFFER_PATTERN.match(name) or _MTP_PREFIX_PATTERN.match(name):
        return True
    layer = _LAYER_PREFIX_PATTERN.match(name)
    if layer is None:
        return False
    index, end = int(layer[1]), model.num_layers + model.num_unused_layers
    if index < model.num_layers:
        return model.layer(index).kv_layer is not None and bool(_KV_PROJECTION_PATTERN.match(name))
    return index < end


def total_parameter_size(model: ModelConfig, size_of_parameter: Callable[[Parameter], int]) -> int:
    """Sum ``size_of_parameter`` over all parameters.

    Layers differ only in mixer, experts and sizes, so only one layer of each kind is built, and its
    sum is multiplied by the number of such layers.
    """
    kinds, recorder = _count_layers_by_kind(model), _ParameterRecorder()
    builder = recorder.make_decoder_builder(model, kinds)
    builder.decoder((), {}, ())
    total = sum(map(size_of_parameter, recorder.requested_parameters))
    for layer, count in kinds.items():
        recorder.requested_parameters.clear()
        builder.layer(layer)
        total += count * sum(map(size_of_parameter, recorder.requested_parameters))
    return total


def _count_layers_by_kind(model: ModelConfig) -> dict[int, int]:
    """Number of layers of each kind; keys are the indices of the kinds' first layers."""
    with_experts = model.experts.layers if model.experts is not None else ()
    linear = model.linear_attention.layers if model.linear_attention is not None else ()
    traits = [each for each in (with_experts, linear, model.layers) if each]
    if not traits:
        return {0: model.num_layers}
    kinds = list(zip(*traits, strict=True))
    return {kinds.index(kind): count for kind, count in Counter(kinds).items()}


def is_small_model(model: ModelConfig | TransformersConfig) -> bool:
    """Whether a model has fewer parameters than ``MAX_SMALL_MODEL_PARAMETERS``."""
    if isinstance(model, TransformersConfig):
        return model.num_parameters < MAX_SMALL_MODEL_PARAMETERS
    return (
        total_parameter_size(model, lambda parameter: math.prod(parameter.shape))
        < MAX_SMALL_MODEL_PARAMETERS
    )
