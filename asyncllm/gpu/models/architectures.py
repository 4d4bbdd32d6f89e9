"""The parameters of the dense decoder, and the names of their tensors in a checkpoint."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from asyncllm.checkpoint.model_config import ModelConfig
from asyncllm.gpu.transformers_model.config import TransformersConfig

SMALL_MODEL = 32_000_000
"""Parameters below which a model is bound by the number of ops."""

_COMPUTED_BUFFER = re.compile(r".*\.rotary_emb\.(inv_freq|cos_cached|sin_cached)$")


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the decoder and the checkpoint tensors that are stacked into it.

    The parameters of a linear layer follow one another under a common prefix: "weight" first,
    then those that go with it (bias, scales, zeros), each named as in ``LinearWeights``.

    Attributes:
        name: the decoder's own name, e.g. "layers.3.qkv.weight".
        shape: of the whole; ``parts`` are stacked along its first dimension.
        parts: ``(tensor name, rows)`` in order.
        dtype: torch's name of the dtype it is kept in, e.g. "float32"; None is the model's.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[tuple[str, int], ...]
    dtype: str | None = None


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
    """Whether a checkpoint's tensor may be left out: a second copy of a tied output head, or
    a table that older versions of transformers saved."""
    tied_head = model.tie_word_embeddings and name == "lm_head.weight"
    return tied_head or _COMPUTED_BUFFER.match(name) is not None


def sum_parameters(model: ModelConfig, size: Callable[[Parameter], int]) -> int:
    """The sum of ``size`` over all parameters. Layers are alike, so one stands for all."""
    of_layer = sum(map(size, _layer_parameters(model, 0)))
    return sum(map(size, parameters(replace(model, num_layers=0)))) + model.num_layers * of_layer


def is_small(model: ModelConfig | TransformersConfig) -> bool:
    """Whether the number of ops decides the speed, and not their arithmetic."""
    if isinstance(model, TransformersConfig):
        return model.num_parameters < SMALL_MODEL
    return sum_parameters(model, lambda parameter: math.prod(parameter.shape)) < SMALL_MODEL


def _layer_parameters(model: ModelConfig, layer: int) -> Iterator[Parameter]:
    here, there = f"layers.{layer}.", f"model.layers.{layer}."
    hidden, inner, names = model.hidden_size, model.intermediate_size, model.names
    q_size, kv_size = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    mlp = f"{there}{names.mlp}."

    def norm(own: str, tensor: str | None, width: int = hidden) -> Iterator[Parameter]:
        if tensor is not None:
            yield _norm(model, f"{here}{own}.weight", f"{there}{tensor}.weight", width)

    yield from norm("input_norm", names.input_norm)
    qkv = _parts(names.qkv, (q_size, kv_size, kv_size))
    yield from _linear(here + "qkv", there + "self_attn.", qkv, hidden, model.attention_bias)
    if model.qk_norm:
        whole = model.norms_whole_projections
        yield from norm("q_norm", "self_attn.q_norm", q_size if whole else model.head_dim)
        yield from norm("k_norm", "self_attn.k_norm", kv_size if whole else model.head_dim)
    output = (("o_proj", hidden),)
    yield from _linear(here + "o", there + "self_attn.", output, q_size, model.output_bias)
    yield from norm("mixer_norm", names.mixer_norm)
    yield from norm("post_norm", names.post_norm)
    gate_up = _parts(names.gate_up, (inner, inner))
    yield from _linear(here + "gate_up", mlp, gate_up, hidden, model.mlp_bias)
    down = ((names.down, hidden),)
    yield from _linear(here + "down", mlp, down, inner, model.mlp_bias)
    yield from norm("mlp_norm", names.mlp_norm)


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
