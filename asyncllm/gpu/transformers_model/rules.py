"""check_modules, check_calls: refuse models that paged, flattened steps would compute wrongly.

They judge by a model's modules and their calls. A pattern that is only in the mask, a state that a
module keeps, or a dependence on the longest sequence of a batch would change results silently, and
show in no short comparison.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from asyncllm.errors import ModelLoadError
from asyncllm.gpu.transformers_model.config import TransformersConfig
from asyncllm.gpu.transformers_model.interface import ProbedMask
from asyncllm.gpu.transformers_model.probe import NUM_TOKENS, AttentionCall, Probe
from asyncllm.gpu.transformers_model.recurrent_probe import cache_parameters, cache_takers

_RECURRENT = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase, nn.RNNCellBase)
"""Modules in which tokens of a sequence see one another."""

_MAX_CHECKED_POSITION = 2**22
"""Largest position at which masks are checked."""


def check_modules(model: TransformersConfig) -> None:
    """Refuses a model by the modules and the configuration of its skeleton.

    Raises:
        ModelLoadError: a module or field is not supported; the message names it.
    """
    keepers = tuple(f"{name}." for name in cache_takers(model.skeleton))
    for name, module in model.skeleton.named_modules():
        kind = type(module).__name__
        if isinstance(module, _RECURRENT) and not f"{name}.".startswith(keepers):
            raise _refusal(
                model,
                f"{name} ({kind}) mixes tokens, and no module around it takes a cache, so that its "
                "layer keeps a state of its own",
                "attention and modules with a cache as the only places where tokens see one "
                "another",
            )
        if "indexer" in kind.lower():
            raise _refusal(
                model,
                f"{name} ({kind}) chooses the keys that attention sees, from a cache of its own",
                "attention to all keys or to a window",
            )
    for name, kind in rope_kinds(model.config):
        if "dynamic" in kind:
            raise _refusal(
                model,
                f"{name} is {kind!r}, which turns every sequence by the longest one of its batch",
                "a kind whose frequencies are fixed",
            )


def rope_kinds(config: Any) -> Iterator[tuple[str, str]]:
    """Field and kind of each set of RoPE parameters: one in all, or one per type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    sets = {"rope_parameters": parameters}
    if any(isinstance(value, dict) for value in parameters.values()):
        sets = {f"rope_parameters.{name}": value for name, value in parameters.items()}
    for name, values in sets.items():
        if isinstance(values, dict):
            yield f"{name}.rope_type", str(values.get("rope_type", "default"))


def check_calls(model: TransformersConfig, probe: Probe) -> list[int | None]:
    """Refuses a model by its layers' calls of attention and recurrent modules.

    Returns:
        The window of each call; None for all keys.

    Raises:
        ModelLoadError: a call is not supported; the message names the calling module.
    """
    _check_recurrent(model, probe)
    _check_coverage(model, probe)
    for call in probe.calls:
        _check_call(model, call)
    return [_window(model, call) for call in probe.calls]


def _check_coverage(model: TransformersConfig, probe: Probe) -> None:
    """Checks that each layer calls attention once or has recurrent modules, and nothing else does.

    A layer may have neither if the configuration says so.
    """
    count = model.config.num_hidden_layers
    lists = [
        name
        for name, module in probe.model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    prefix = min(lists, key=len, default=None)
    if prefix is None:
        raise _refusal(
            model,
            f"no list of modules has num_hidden_layers={count} entries",
            "one that holds the layers",
        )
    layers = [f"{prefix}.{index}" for index in range(count)]
    found: Counter[str] = Counter()
    calls = [(call.module, "calls attention") for call in probe.calls]
    states = [(call.module, "keeps a state") for call in probe.recurrent]
    for module, what in calls + states:
        owner = next((name for name in layers if f"{module}.".startswith(f"{name}.")), None)
        if owner is None:
            raise _refusal(model, f"{module} {what}", "calls by layers alone")
        found[owner] += what == "calls attention"
    plain = _plain_layers(model.config)
    for index, name in enumerate(layers):
        recurrent = any(f"{call.module}.".startswith(f"{name}.") for call in probe.recurrent)
        if found[name] > 1 or not (found[name] or recurrent or index in plain):
            kind = type(probe.model.get_submodule(name)).__name__
            raise _refusal(
                model,
                f"{name} ({kind}) calls attention {found[name]} times through transformers' "
                "attention interface",
                "one call in every layer" if found[name] else "one call or a recurrent module",
            )


def _plain_layers(config: Any) -> set[int]:
    """Indices of layers that, by the configuration, have an MLP or experts only."""
    for name in ("layer_types", "layers_block_type"):
        kinds = getattr(config, name, None)
        if isinstance(kinds, (list, tuple)):
            return {index for index, kind in enumerate(kinds) if kind in ("mlp", "moe")}
    return set()


def _check_recurrent(model: TransformersConfig, probe: Probe) -> None:
    """Refuses recurrent modules with a flaw, and other modules that mix tokens or take a cache."""
    keepers = tuple(f"{call.module}." for call in probe.recurrent)
    for call in probe.recurrent:
        if call.flaw is not None:
            found, accepted = call.flaw
            raise _refusal(model, f"{call.module} ({call.kind}) {found}", accepted)
    attending = tuple(f"{call.module}." for call in probe.calls)
    for name, module in probe.model.named_modules():
        kind = type(module).__name__
        if isinstance(module, _RECURRENT) and not f"{name}.".startswith(keepers):
            raise _refusal(
                model,
                f"{name} ({kind}) mixes tokens outside attention and recurrent modules",
                "those as the only places where tokens see one another",
            )
    for name, taken in cache_parameters(probe.model).items():
        if name not in probe.idle and not any(
            each.startswith(f"{name}.") for each in attending + keepers
        ):
            kind = type(probe.model.get_submodule(name)).__name__
            raise _refusal(
                model,
                f"{name} ({kind}) takes {taken}: it keeps a cache of its own",
                "attention and recurrent modules as the only ones with a cache",
            )


def _check_call(model: TransformersConfig, call: AttentionCall) -> None:
    if (call.num_queries, call.num_keys) != (NUM_TOKENS, NUM_TOKENS):
        raise _refusal(
            model,
            f"{call.module} attends with {call.num_queries} queries to {call.num_keys} keys of "
            f"{NUM_TOKENS} tokens",
            "a query and a key of every token",
        )
    if call.options:
        name, value = next(iter(call.options.items()))
        raise _refusal(
            model,
            f"{call.module} passes {name}={_describe(value)} to attention",
            "scaling, sliding_window, softcap and s_aux",
        )
    if call.heads % call.key_heads:
        raise _refusal(
            model,
            f"{call.module} has {call.heads} heads and {call.key_heads} of keys",
            "a multiple of them",
        )
    if call.scale is None:
        raise _refusal(model, f"{call.module} passes no scaling to attention", "a number")


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return repr(value)[:60]


def kv_shape(call: AttentionCall) -> tuple[int, int]:
    """Heads, and size of keys and values in the cache, which pads the smaller of the two."""
    return call.key_heads, max(call.key_size, call.value_size)


def _window(model: TransformersConfig, call: AttentionCall) -> int | None:
    """The window of the call's mask, in keys, the query's own included."""
    if not isinstance(call.mask, ProbedMask):
        raise _refusal(
            model,
            f"{call.module} passes the mask {_describe(call.mask)}",
            "one that transformers' mask functions make",
        )
    window = _mask_window(model, call)
    context = min(model.max_position_embeddings, _MAX_CHECKED_POSITION)
    if window is None and call.window is not None and call.window >= context:
        return call.window
    if window != call.window:
        raise _refusal(
            model,
            f"{call.module} passes sliding_window={call.window}, and its mask shows "
            + ("all keys" if window is None else f"the last {window} keys"),
            "the same in both",
        )
    return window


def _mask_window(model: TransformersConfig, call: AttentionCall) -> int | None:
    length = min(model.max_position_embeddings, _MAX_CHECKED_POSITION)
    keys = torch.arange(length, device="cpu")
    zero = torch.zeros((), dtype=torch.int64, device="cpu")
    window = None
    last = length - 1
    # The last queries first, because the first ones see all keys in any window.
    for query in sorted({last, last - 1, last * 2 // 3, last // 2, last // 3, 1, 0}, reverse=True):
        query = max(query, 0)
        at = torch.tensor(query, device="cpu")
        try:
            seen = torch.as_tensor(call.mask.function(zero, zero, at, keys)).expand(length)
        except Exception as error:
            raise _refusal(
                model,
                f"the mask of {call.module} depends on more than positions",
                "attention to all keys or to a window",
            ) from error
        count = int(seen.sum())
        if query == last and count < length:
            window = count
        first = 0 if window is None else max(query + 1 - window, 0)
        if count != query + 1 - first or not bool(seen[first : query + 1].all()):
            raise _refusal(
                model,
                f"the mask of {call.module} shows query {query} {count} keys that are neither all "
                "before it nor the last of them",
                "attention to all keys or to a window",
            )
    return window


def _refusal(model: TransformersConfig, found: str, accepted: str) -> ModelLoadError:
    return ModelLoadError(
        f"{model.path}: {model.architecture}: {found}; expected {accepted}. transformers' modules "
        "run here only where that is sure to give the model's own results"
    )
