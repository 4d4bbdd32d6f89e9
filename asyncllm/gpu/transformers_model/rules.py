"""check_modules, check_calls: refuse models that paged, flattened steps would compute wrongly.

They check a model's modules and their calls. A pattern of attention that only the mask has, a state
that a module keeps, or a dependence on the longest sequence of a batch would change results
silently, and a comparison on short sequences would not show it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn

from asyncllm.errors import ModelLoadError
from asyncllm.gpu.transformers_model.config import TransformersConfig
from asyncllm.gpu.transformers_model.interface import ProbeAttentionMask
from asyncllm.gpu.transformers_model.probe import NUM_PROBE_TOKENS, AttentionCall, ProbeResult
from asyncllm.gpu.transformers_model.recurrent_probe import (
    UnsupportedFeature,
    cache_parameter_by_module,
)

_TOKEN_MIXING_CLASSES = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase, nn.RNNCellBase)
"""Classes of torch's modules in which tokens of a sequence see one another."""

_ACCEPTED_ATTENTION_PHRASE = "attention to all keys or to a window"

_MAX_CHECKED_POSITION = 2**22
"""Maximum position at which masks are checked."""


def check_modules(model: TransformersConfig) -> None:
    """Refuse a model whose skeleton has an unsupported module or configuration field.

    Raises:
        ModelLoadError: a module or field is not supported; the message names it.
    """
    for name, module in model.skeleton.named_modules():
        kind = type(module).__name__
        if "indexer" in kind.lower():
            raise _unsupported_model_error(
                model,
                f"{name} ({kind}) chooses the keys that attention sees, from a cache of its own",
                _ACCEPTED_ATTENTION_PHRASE,
            )
    # ``rope_parameters`` has one set of parameters, or one per layer type.
    parameters = getattr(model.config, "rope_parameters", None) or {}
    for name, values in {"": parameters, **parameters}.items():
        kind = str(values.get("rope_type")) if isinstance(values, dict) else ""
        if "dynamic" in kind:
            field = f"rope_parameters.{name}.rope_type" if name else "rope_parameters.rope_type"
            raise _unsupported_model_error(
                model,
                f"{field} is {kind!r}, which turns every sequence by the longest one of its batch",
                "a kind whose frequencies are fixed",
            )


def check_calls(model: TransformersConfig, probe: ProbeResult) -> list[int | None]:
    """Check that layers call attention and recurrent modules in a supported way.

    Returns:
        The attention window of each call, in keys; None for all keys.

    Raises:
        ModelLoadError: a call is not supported; the message names the calling module.
    """
    for feature, accepted in chain(
        _unsupported_recurrence(probe),
        _unsupported_layers(probe, model.config),
        _unsupported_calls(probe),
    ):
        raise _unsupported_model_error(model, feature, accepted)
    return [_attention_window(model, call) for call in probe.attention_calls]


def _unsupported_layers(probe: ProbeResult, config: Any) -> Iterator[UnsupportedFeature]:
    """Yield the unsupported layers.

    A layer has to call attention once or to keep a state, unless the configuration says that it
    has an MLP or experts only. Calls outside of layers are not supported.
    """
    count = config.num_hidden_layers
    lists = [
        name
        for name, module in probe.model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    if not lists:
        yield f"no list of modules has num_hidden_layers={count} entries", "one of the layers"
        return
    prefix = min(lists, key=len)
    layer = re.compile(rf"{re.escape(prefix)}\.(\d+)\b")
    attending = [call.module for call in probe.attention_calls]
    recurrent = [call.module for call in probe.recurrent_calls]
    outside = [module for module in attending + recurrent if not layer.match(module)]
    num_attention_calls, num_recurrent_calls = (
        Counter(int(match[1]) for match in map(layer.match, modules) if match)
        for modules in (attending, recurrent)
    )
    if outside:
        yield f"{outside[0]} attends or keeps a state", "calls by layers alone"
    without_attention = _layers_without_mixer(config)
    for index in range(count):
        calls, name = num_attention_calls[index], f"{prefix}.{index}"
        if calls > 1 or not (calls or num_recurrent_calls[index] or index in without_attention):
            kind = type(probe.model.get_submodule(name)).__name__
            yield (
                f"{name} ({kind}) calls attention {calls} times through transformers' attention "
                "interface",
                "one call in every layer" if calls else "one call or a recurrent module",
            )


def _layers_without_mixer(config: Any) -> set[int]:
    """Indices of layers that have an MLP or experts only, according to the configuration."""
    for name in ("layer_types", "layers_block_type"):
        kinds = getattr(config, name, None)
        if isinstance(kinds, (list, tuple)):
            return {index for index, kind in enumerate(kinds) if kind in ("mlp", "moe")}
    return set()


def _unsupported_recurrence(probe: ProbeResult) -> Iterator[UnsupportedFeature]:
    """Yield recurrent modules with an unsupported feature, and other unsupported token mixers.

    Outside recurrent modules only attention may mix tokens or keep a cache.
    """
    recurrent = tuple(f"{call.module}." for call in probe.recurrent_calls)
    for call in probe.recurrent_calls:
        if call.unsupported_feature is not None:
            feature, accepted = call.unsupported_feature
            yield f"{call.module} ({call.class_name}) {feature}", accepted
    for name, module in probe.model.named_modules():
        if isinstance(module, _TOKEN_MIXING_CLASSES) and not f"{name}.".startswith(recurrent):
            yield (
                f"{name} ({type(module).__name__}) mixes tokens outside attention and recurrent "
                "modules",
                "those as the only places where tokens see one another",
            )
    known = [*recurrent, *(f"{call.module}." for call in probe.attention_calls)]
    for name, parameter in cache_parameter_by_module(probe.model).items():
        if name not in probe.idle_modules and not any(
            each.startswith(f"{name}.") for each in known
        ):
            kind = type(probe.model.get_submodule(name)).__name__
            yield (
                f"{name} ({kind}) takes {parameter}: it keeps a cache of its own",
                "attention and recurrent modules as the only ones with a cache",
            )


def _unsupported_calls(probe: ProbeResult) -> Iterator[UnsupportedFeature]:
    """Yield the arguments in attention calls that the engine's attention cannot handle."""
    for call in probe.attention_calls:
        queries, keys, heads = call.num_queries, call.num_keys, call.num_key_heads
        if (queries, keys) != (NUM_PROBE_TOKENS, NUM_PROBE_TOKENS):
            feature = f"attends with {queries} queries to {keys} keys of {NUM_PROBE_TOKENS} tokens"
            yield f"{call.module} {feature}", "a query and a key of every token"
        for name, value in call.options.items():
            feature = f"passes {name}={_describe_option(value)} to attention"
            yield f"{call.module} {feature}", "scaling, sliding_window, softcap and s_aux"
        if call.num_heads % heads:
            feature = f"has {call.num_heads} heads and {heads} of keys"
            yield f"{call.module} {feature}", "a multiple of them"
        if call.scale is None:
            yield f"{call.module} passes no scaling to attention", "a number"


def _describe_option(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return repr(value)[:60]


def _attention_window(model: TransformersConfig, call: AttentionCall) -> int | None:
    """The window of an attention call, in keys, the query's own included; None for all keys.

    Raises:
        ModelLoadError: the window that the module passes is not the one in its mask.
    """
    if not isinstance(call.mask, ProbeAttentionMask):
        feature = f"{call.module} passes the mask {_describe_option(call.mask)}"
        raise _unsupported_model_error(model, feature, "one that transformers' mask functions make")
    context = min(model.max_position_embeddings, _MAX_CHECKED_POSITION)
    window = _window_in_mask(model, call, context)
    if window is None and call.window is not None and call.window >= context:
        return call.window
    if window != call.window:
        shown = "all keys" if window is None else f"the last {window} keys"
        feature = f"{call.module} passes sliding_window={call.window}, and its mask shows {shown}"
        raise _unsupported_model_error(model, feature, "the same in both")
    return window


def _window_in_mask(
    model: TransformersConfig, call: AttentionCall, num_positions: int
) -> int | None:
    """The window in the call's mask for ``num_positions`` tokens; None if queries see all keys."""
    keys = torch.arange(num_positions, device="cpu")
    zero = torch.zeros((), dtype=torch.int64, device="cpu")
    window = None
    last = num_positions - 1
    # Check the last queries first: the first queries see all keys in any window.
    for query in sorted({last, last - 1, last * 2 // 3, last // 2, last // 3, 1, 0}, reverse=True):
        query = max(query, 0)
        at = torch.tensor(query, device="cpu")
        try:
            visible = torch.as_tensor(call.mask.function(zero, zero, at, keys)).expand(
                num_positions
            )
        except Exception as error:
            feature = f"the mask of {call.module} depends on more than positions"
            raise _unsupported_model_error(model, feature, _ACCEPTED_ATTENTION_PHRASE) from error
        count = int(visible.sum())
        if query == last and count < num_positions:
            window = count
        first = 0 if window is None else max(query + 1 - window, 0)
        if count != query + 1 - first or not bool(visible[first : query + 1].all()):
            feature = (
                f"the mask of {call.module} shows query {query} {count} keys that are neither all "
                "before it nor the last of them"
            )
            raise _unsupported_model_error(model, feature, _ACCEPTED_ATTENTION_PHRASE)
    return window


def _unsupported_model_error(
    model: TransformersConfig, feature: str, accepted: str
) -> ModelLoadError:
    return ModelLoadError(
        f"{model.path}: {model.architecture}: {feature}; expected {accepted}. transformers' "
        "modules run here only where that is sure to give the model's own results"
    )
