"""The parameters of the decoder, and the names of their tensors in a checkpoint."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

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

_COMPUTED_BUFFER = re.compile(r".*\.rotary_emb\.(inv_freq|cos_cached|sin_cached)$")


def parameters(model: ModelConfig) -> Iterator[Parameter]:
    """Every parameter of the decoder, in the order in which it is built."""
    vocab, hidden = model.vocab_size, model.hidden_size
    yield _single("embed.weight", "model.embed_tokens.weight", (vocab, hidden))
    for layer in range(model.num_layers):
        yield from _layer_parameters(model, layer)
    yield _norm(model, "norm.weight", "model.norm.weight", hidden)
    if not model.tie_word_embeddings:
        yield _single("lm_head.weight", "lm_head.weight", (vocab, hidden))


def is_unused(model: ModelConfig, name: str) -> bool:
    """Whether a checkpoint's tensor may be left out: a second copy of a tied output head, a table
    that older versions of transformers saved, or one of a layer that predicts further tokens."""
    tied_head = model.tie_word_embeddings and name == "lm_head.weight"
    if tied_head or _COMPUTED_BUFFER.match(name) or _PREDICTOR.match(name):
        return True
    layer = _LAYER.match(name)
    end = model.num_layers + model.unused_layers
    return layer is not None and model.num_layers <= int(layer[1]) < end


def sum_parameters(model: ModelConfig, size: Callable[[Parameter], int]) -> int:
    """The sum of ``size`` over all parameters. Layers are alike but for their mixer and their
    experts, so one of each kind stands for all."""
    kinds = [_kind(model, layer) for layer in range(model.num_layers)]
    of_layers = 0
    for kind, count in Counter(kinds).items():
        of_layers += count * sum(map(size, _layer_parameters(model, kinds.index(kind))))
    return sum(map(size, parameters(replace(model, num_layers=0)))) + of_layers


def is_small(model: ModelConfig | TransformersConfig) -> bool:
    """Whether the number of ops decides the speed, and not their arithmetic."""
    if isinstance(model, TransformersConfig):
        return model.num_parameters < SMALL_MODEL
    return sum_parameters(model, lambda parameter: math.prod(parameter.shape)) < SMALL_MODEL


def _kind(model: ModelConfig, layer: int) -> tuple[bool, bool]:
    """Whether a layer has linear attention, and whether it has experts."""
    linear, experts = model.linear_attention, model.experts
    return (
        linear is not None and linear.layers[layer],
        experts is not None and experts.layers[layer],
    )


def _layer_parameters(model: ModelConfig, layer: int) -> Iterator[Parameter]:
    here, there = f"layers.{layer}.", f"model.layers.{layer}."
    hidden, inner, names = model.hidden_size, model.intermediate_size, model.names
    mlp = f"{there}{names.mlp}."

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
        inner, mlp, here = experts.shared_size, f"{there}{experts.names.shared}.", f"{here}shared."
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


def _attention_parameters(model: ModelConfig, layer: int) -> Iterator[Parameter]:
    here, there, hidden = f"layers.{layer}.", f"model.layers.{layer}.", model.hidden_size
    q_size, kv_size = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    queries = 2 * q_size if model.gated_attention else q_size
    qkv = _parts(model.names.qkv, (queries, kv_size, kv_size))
    yield from _linear(here + "qkv", there + "self_attn.", qkv, hidden, model.attention_bias)
    if model.qk_norm:
        whole = model.norms_whole_projections
        for name, size in (("q_norm", q_size), ("k_norm", kv_size)):
            width = size if whole else model.head_dim
            yield _norm(model, f"{here}{name}.weight", f"{there}self_attn.{name}.weight", width)
    output = (("o_proj", hidden),)
    yield from _linear(here + "o", there + "self_attn.", output, q_size, model.output_bias)
    if model.sinks:
        heads = ((f"{there}self_attn.sinks", model.num_heads),)
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
