"""build_transformers_decoder: transformers' modules with the engine's attention and op set."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from asyncllm.core.kv_cache_spec import KVCacheSpec
from asyncllm.gpu.kv_cache import KVGroup
from asyncllm.gpu.kv_groups import (
    LayerCache,
    LayerGroup,
    group_layers,
    make_kv_groups,
    with_kv_groups,
)
from asyncllm.gpu.models.layers import AttentionKind
from asyncllm.gpu.ops.base import Attention, BlockLayout, Linear
from asyncllm.gpu.ops.linear_weights import LinearWeights
from asyncllm.gpu.ops.quantise import Conversion
from asyncllm.gpu.ops.torch_ops import TorchOps
from asyncllm.gpu.state_cache import StateSpec
from asyncllm.gpu.transformers_model.attention import (
    PagedAttention,
    Step,
    attention_kinds,
    kv_indices,
)
from asyncllm.gpu.transformers_model.config import TransformersConfig
from asyncllm.gpu.transformers_model.decoder import TransformersDecoder
from asyncllm.gpu.transformers_model.interface import ENGINE_NAME, set_handler
from asyncllm.gpu.transformers_model.linear import OpEmbedding, OpExperts, OpLinear, look_up_in
from asyncllm.gpu.transformers_model.probe import Probe, linear_kinds, probe
from asyncllm.gpu.transformers_model.recurrent import RecurrentModule
from asyncllm.gpu.transformers_model.rules import check_calls, check_modules
from asyncllm.gpu.transformers_model.weights import Owner, has_tied_head


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of a model's attention, KV groups and states, made before its weights are loaded.

    Attributes:
        kinds: kind of each call of attention, in the order of the calls.
        groups: KV groups of the layers that have a cache.
        states: states of all recurrent modules, in the order of their calls.
    """

    probe: Probe
    kinds: list[AttentionKind]
    groups: list[LayerGroup]
    states: list[StateSpec]

    @classmethod
    def of(cls, model: TransformersConfig) -> Plan:
        """Probes a model; ModelLoadError if the engine would not compute it correctly."""
        check_modules(model)
        found = probe(model)
        kinds, indices = attention_kinds(found, check_calls(model, found)), kv_indices(found)
        states = [state for call in found.recurrent for state in call.states.values()]
        if not kinds:
            return cls(found, kinds, [], states)
        groups = group_layers(_layer_caches(kinds, indices), model.max_position_embeddings)
        return cls(found, with_kv_groups(kinds, indices, groups), groups, states)

    def kv_groups(
        self, attention: Mapping[AttentionKind, Attention], block_size: int
    ) -> list[KVGroup]:
        """Makes the KV groups of the layers that have a cache.

        A model without attention gets blocks of one element, which only count tokens.
        """
        if not self.kinds:
            return [KVGroup(KVCacheSpec((0,), block_size), BlockLayout((1,)))]
        calls = zip(self.kinds, self.probe.calls, strict=True)
        writers = [kind for kind, call in calls if call.shared is None]
        return make_kv_groups(self.groups, writers, attention, block_size)


def _layer_caches(kinds: Sequence[AttentionKind], indices: Sequence[int]) -> list[LayerCache]:
    """LayerCache of each KV cache, with the widest window of the layers that read it."""
    caches: dict[int, LayerCache] = {}
    for kind, index in zip(kinds, indices, strict=True):
        cache = LayerCache.of(kind)
        windows = cache.window, caches.get(index, cache).window
        window = None if None in windows else max(window for window in windows if window)
        caches[index] = caches.get(index, cache)._replace(window=window)
    return [caches[index] for index in sorted(caches)]


def experts_implementation(device: torch.device) -> str:
    """Name of the experts implementation that transformers' modules call.

    On a CPU it is the engine's own implementation; elsewhere it is transformers' grouped matrix
    product, which reads no values on the host.
    """
    return ENGINE_NAME if device.type == "cpu" else "grouped_mm"


def build_transformers_decoder(
    model: TransformersConfig,
    plan: Plan,
    ops: TorchOps,
    attention: Mapping[AttentionKind, Attention],
    modules: Any,
    owner: Owner,
    dtype: torch.dtype,
    convert: Conversion | None = None,
) -> TransformersDecoder:
    """Replaces parts of transformers' modules by the engine's ops; returns the decoder.

    Args:
        modules: the model with its weights. Its linear layers are replaced one by one, so that
            the weight of only one of them is held twice at a time.
        convert: quantisation of the weights of every linear layer; None for no quantisation.
    """
    step, found = Step(), plan.probe
    indices = kv_indices(found)
    for call, kind, index in zip(found.calls, plan.kinds, indices, strict=True):
        handler = PagedAttention(step, kind, attention[kind], call, index)
        set_handler(modules.get_submodule(call.module), handler)

    place = 0
    for call in found.recurrent:
        places = {key: place + i for i, key in enumerate(call.states)}
        place += len(places)
        RecurrentModule.install(step, modules.get_submodule(call.module), call, places)
    head = modules.get_output_embeddings()

    def make(weights: LinearWeights) -> Linear:
        return ops.linear(convert.linear(weights) if convert else weights)

    def make_head(weights: LinearWeights) -> Linear:
        return ops.linear(convert.head(weights) if convert else weights)

    _replace_tied_head(modules, found, ops, owner, convert)
    for name in found.linears:
        linear = modules.get_submodule(name)
        if type(linear) in linear_kinds():
            own = make_head if linear is head else make
            _replace_module(modules, name, _convert_linear(linear, own, owner))
    if experts_implementation(owner.device) == ENGINE_NAME:
        for name in found.experts:
            module = modules.get_submodule(name)
            set_handler(module, OpExperts(module, make, owner.take_tensor))
    owner.take_all_tensors(modules)
    owner.finish()
    embedding = torch.empty(0, dtype=dtype, device=owner.device)
    return TransformersDecoder(
        model, ops, attention, modules, found.base, step, embedding, plan.states
    )


def _convert_linear(linear: Any, make: Callable[[LinearWeights], Linear], owner: Owner) -> OpLinear:
    """Makes the op set's linear layer from transformers' layer, and drops that layer's weights."""
    bias = None if linear.bias is None else owner.take_tensor(linear.bias.detach())
    values = owner.take_tensor(linear.weight.detach())
    if type(linear) is not nn.Linear:
        values = values.t().contiguous()
    linear._parameters.clear()
    return OpLinear(make(LinearWeights(values, bias)), *reversed(values.shape))


def _replace_tied_head(
    modules: Any, found: Probe, ops: TorchOps, owner: Owner, convert: Conversion | None
) -> None:
    """Replaces a tied output head, and its embedding too if both can read one table."""
    head, embedding = modules.get_output_embeddings(), modules.get_input_embeddings()
    names = {module: name for name, module in modules.named_modules()}
    if (
        type(head) is not nn.Linear
        or names[head] not in found.linears
        or not has_tied_head(modules)
    ):
        return
    bias = None if head.bias is None else owner.take_tensor(head.bias.detach())
    head.weight.data = owner.take_tensor(head.weight.data)
    weights = LinearWeights(head.weight.detach(), bias, shared=True)
    dtype = weights.values.dtype
    weights = convert.head(weights) if convert else weights
    if bias is None and (type(embedding) is nn.Embedding or found.embedding_processes_rows):
        table, linear = ops.tied_embedding(weights, dtype)
        if found.embedding_processes_rows:
            look_up_in(embedding, table)
        else:
            _replace_module(modules, names[embedding], OpEmbedding(table))
    else:
        # The embedding's class computes more than a look-up, so it keeps its own table.
        linear = ops.linear(weights)
    _replace_module(modules, names[head], OpLinear(linear, head.in_features, head.out_features))


def _replace_module(modules: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(modules.get_submodule(parent), leaf, module)
