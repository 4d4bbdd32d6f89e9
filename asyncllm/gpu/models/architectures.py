"""The parameters of the decoder, and the names of their tensors in a checkpoint."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator

from asyncllm.checkpoint.model_config import ModelConfig
from asyncllm.gpu.models.experts import expert_parameters
from asyncllm.gpu.models.linear_attention import linear_attention_parameters
from asyncllm.gpu.models.parameter import Parameter
from asyncllm.gpu.transformers_model.config import TransformersConfig

_LAYER = re.compile(r"model\.layers\.(\d{1,6})\.")

SMALL_MODEL = 32_000_000
"""Parameters below which a model is bound by the number of ops."""

_PREDICTOR = re.compile(r"mtp\.")
"""Of modules that predict further tokens, in the checkpoints of Qwen3-Next and its successors."""
_KEYS_AND_VALUES = re.compile(r"model\.layers\.\d+\.self_attn\.[kv]_(proj|norm)\.")

_COMPUTED_BUFFER = re.compile(r".*\.rotary_emb\.(inv_freq|cos_cached|sin_cached)$")


def parameters(model: ModelConfig) -> Iterator[Parameter]:
    """Every parameter of the decoder, in the order in which it is built."""
    yield from _first_parameters(model)
    for layer in range(model.num_layers):
        yield from _layer_parameters(model, layer)
    yield from _last_parameters(model)


def is_unused(model: ModelConfig, name: str) -> bool:
    """Whether a checkpoint's tensor may be left out: a second copy of a tied output head, a table
    that older versions of transformers saved, one of a layer that predicts further tokens, or keys
    and values of a layer that attends to another's."""
    tied_head = model.tie_word_embeddings and name == "lm_head.weight"
    if tied_head or _COMPUTED_BUFFER.match(name) or _PREDICTOR.match(name):
        return True
    layer = _LAYER.match(name)
    if layer is None:
        return False
    index, end = int(layer[1]), model.num_layers + model.unused_layers
    if index < model.num_layers:
        return model.layer(index).kv_layer is not None and bool(_KEYS_AND_VALUES.match(name))
    return index < end


def sum_parameters(model: ModelConfig, size: Callable[[Parameter], int]) -> int:
    """The sum of ``size`` over all parameters. Layers are alike but for their mixer, their experts
    and their sizes, so one of each kind stands for all."""
    total = sum(map(size, (*_first_parameters(model), *_last_parameters(model))))
    for layer, count in _kinds_of_layers(model).items():
        total += count * sum(map(size, _layer_parameters(model, layer)))
    return total


def _kinds_of_layers(model: ModelConfig) -> dict[int, int]:
    """The first layer of each kind, and how many there are."""
    with_experts = model.experts.layers if model.experts is not None else ()
    linear = model.linear_attention.layers if model.linear_attention is not None else ()
    apart = [each for each in (with_experts, linear, model.layers) if each]
    if not apart:
        return {0: model.num_layers}
    kinds = list(zip(*apart, strict=True))
    return {kinds.index(kind): count for kind, count in Counter(kinds).items()}


def is_small(model: ModelConfig | TransformersConfig) -> bool:
    """Whether the number of ops decides the speed, and not their arithmetic."""
    if isinstance(model, TransformersConfig):
        return model.num_parameters < SMALL_MODEL
    return sum_parameters(model, lambda parameter: math.prod(parameter.shape)) < SMALL_MODEL


def _first_parameters(model: ModelConfig) -> Iterator[Parameter]:
    hidden, inputs = model.hidden_size, model.layer_input
    yield _single("embed.weight", "model.embed_tokens.weight", (model.vocab_size, hidden))
    if inputs is not None:
        width, here = model.num_layers * inputs.size, "layer_inputs."
        table, projection = (
            "model.embed_tokens_per_layer.weight",
            "model.per_layer_model_projection",
        )
        yield _single(f"{here}table.weight", table, (inputs.vocab_size, width))
        yield _single(f"{here}projection.weight", f"{projection}.weight", (width, hidden))
        norm = "model.per_layer_projection_norm.weight"
        yield _norm(model, f"{here}norm.weight", norm, inputs.size)


def _last_parameters(model: ModelConfig) -> Iterator[Parameter]:
    vocab, hidden = model.vocab_size, model.hidden_size
    yield _norm(model, "norm.weight", "model.norm.weight", hidden)
    if not model.tie_word_embeddings:
        yield _single("lm_head.weight", "lm_head.weight", (vocab, hidden))


def _layer_parameters(model: ModelConfig, layer: int) -> Iterator[Parameter]:
    here, there = f"layers.{layer}.", f"model.layers.{layer}."
    hidden, names, sizes = model.hidden_size, model.names, model.layer(layer)
    inner, mlp = sizes.intermediate_size, f"{there}{names.mlp}."

    def norm(own: str, tensor: str | None) -> Iterator[Parameter]:
        if tensor is not None:
            yield _norm(model, f"{here}{own}.weight", f"{there}{tensor}.weight", hidden)

    yield from norm("input_norm", names.input_norm)
    linear = model.linear_attention
    if linear is not None and linear.layers[layer]:
        yield from linear_attention_parameters(linear, hidden, layer)
    else:
        yield from _attention_parameters(model, layer)
    yield from norm("mixer_norm", names.mixer_norm)
    yield from norm("post_norm", names.post_norm)
    experts = model.experts
    if experts is not None and experts.layers[layer]:
        yield from expert_parameters(experts, hidden, layer)
        if experts.beside:
            scale = f"{there}{experts.names.router_norm}"
            yield _norm(model, f"{here}router.norm.weight", scale, hidden)
            yield from norm("experts.norm", experts.names.norm)
            yield from norm("experts.mixed_norm", experts.names.mixed_norm)
            yield from norm("experts.mlp_norm", experts.names.mlp_norm)
        else:
            inner, here = experts.shared_size, f"{here}shared."
            mlp = f"{there}{experts.names.shared}."
        if experts.shared_gate:
            gate = f"{there}{experts.names.shared_gate}.weight"
            yield _single(f"{here}gate.weight", gate, (1, hidden))
    if inner:
        gate_up = _parts(names.gate_up, (inner, inner))
        yield from _linear(here + "gate_up", mlp, gate_up, hidden, model.mlp_bias)
        down = ((names.down, hidden),)
        yield from _linear(here + "down", mlp, down, inner, model.mlp_bias)
    here = f"layers.{layer}."
    yield from norm("mlp_norm", names.mlp_norm)
    if model.layer_input is not None:
        size = model.layer_input.size
        gate, projection = (("per_layer_input_gate", size),), (("per_layer_projection", hidden),)
        yield from _linear(f"{here}input.gate", there, gate, hidden, False)
        yield from _linear(f"{here}input.projection", there, projection, size, False)
        yield from norm("input.norm", "post_per_layer_input_norm")
    if model.layer_scalar:
        yield _single(f"{here}scalar", f"{there}layer_scalar", (1,))


def _attention_parameters(model: ModelConfig, layer: int) -> Iterator[Parameter]:
    here, there = f"layers.{layer}.", f"model.layers.{layer}.self_attn."
    hidden, sizes, names = model.hidden_size, model.layer(layer), model.names.qkv
    q_size, kv_size = model.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    rows = (2 * q_size if model.gated_attention else q_size, kv_size, kv_size)
    if sizes.kv_layer is not None:
        names, rows = names[:1], rows[:1]
    elif sizes.value_is_key:
        # A copy of its rows is less than a branch in every kernel.
        names = (*names[:2], names[1])
    yield from _linear(here + "qkv", there, _parts(names, rows), hidden, model.attention_bias)
    if model.qk_norm:
        whole = model.norms_whole_projections
        norms = {"q_norm": q_size} | ({"k_norm": kv_size} if sizes.kv_layer is None else {})
        for name, width in norms.items():
            width = width if whole else sizes.head_dim
            yield _norm(model, f"{here}{name}.weight", f"{there}{name}.weight", width)
    yield from _linear(here + "o", there, (("o_proj", hidden),), q_size, model.output_bias)
    if model.sinks:
        heads = ((f"{there}sinks", model.num_heads),)
        yield Parameter(f"{here}sinks", (model.num_heads,), heads, "float32")


def _parts(names: tuple[str, ...], rows: tuple[int, ...]) -> tuple[tuple[str, int], ...]:
    """Rows of each projection; of one that has all of them, their sum."""
    if len(names) == 1:
        return ((names[0], sum(rows)),)
    return tuple(zip(names, rows, strict=True))


def _norm(model: ModelConfig, name: str, tensor: str, width: int) -> Parameter:
    dtype = "float32" if model.wide_norms else None
    return Parameter(name, (width,), ((tensor, width),), dtype)


def _single(name: str, tensor: str, shape: tuple[int, ...]) -> Parameter:
    return Parameter(name, shape, ((tensor, shape[0]),))


def _linear(
    name: str, prefix: str, parts: tuple[tuple[str, int], ...], width: int, bias: bool
) -> Iterator[Parameter]:
    rows = sum(count for _, count in parts)
    weights = tuple((f"{prefix}{part}.weight", count) for part, count in parts)
    yield Parameter(f"{name}.weight", (rows, width), weights)
    if bias:
        biases = tuple((f"{prefix}{part}.bias", count) for part, count in parts)
        yield Parameter(f"{name}.bias", (rows,), biases)
