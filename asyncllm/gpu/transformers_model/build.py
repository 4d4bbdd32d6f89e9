"""load_transformers_decoder: transformers' modules with the engine's attention and op set."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from asyncllm.checkpoint.progress import ProgressCallback
from asyncllm.config import EngineConfig
from asyncllm.gpu.kv_cache import KVGroup
from asyncllm.gpu.kv_groups import KVPlan
from asyncllm.gpu.models.layers import AttentionKind
from asyncllm.gpu.ops.base import Attention, Linear
from asyncllm.gpu.ops.linear_weights import LinearWeights
from asyncllm.gpu.ops.quantise import WeightQuantisers
from asyncllm.gpu.ops.torch_ops import TorchOps
from asyncllm.gpu.state_cache import StateSpec
from asyncllm.gpu.transformers_model.attention import CurrentStep, PagedAttention, attention_kinds
from asyncllm.gpu.transformers_model.check import ReferenceLogprobs
from asyncllm.gpu.transformers_model.config import TransformersConfig
from asyncllm.gpu.transformers_model.decoder import TransformersDecoder
from asyncllm.gpu.transformers_model.families import is_tested
from asyncllm.gpu.transformers_model.interface import (
    ENGINE_IMPLEMENTATION_NAME,
    experts_implementation,
    set_call_handler,
)
from asyncllm.gpu.transformers_model.linear import (
    OpSetExperts,
    OpSetLinear,
    replace_embedding_table,
)
from asyncllm.gpu.transformers_model.probe import ProbeResult, linear_classes, probe_model
from asyncllm.gpu.transformers_model.recurrent import RecurrentModule
from asyncllm.gpu.transformers_model.rules import check_calls, check_modules
from asyncllm.gpu.transformers_model.weights import TensorOwner, dummy_modules, load_modules
from asyncllm.validation import value_error


@dataclass(frozen=True, slots=True)
class ProbedModelPlan:
    """Plan of a model's attention and states, made before its weights are loaded.

    Attributes:
        kv: attention kinds and KV groups, in the order of the calls of attention.
        states: states of all recurrent modules, in the order of their calls.
    """

    probe: ProbeResult
    kv: KVPlan
    states: list[StateSpec]

    @classmethod
    def of(cls, model: TransformersConfig) -> ProbedModelPlan:
        """Probe a model; raise ModelLoadError if the engine would not compute it correctly."""
        check_modules(model)
        probe = probe_model(model)
        kinds = attention_kinds(probe, check_calls(model, probe))
        sources = [call.kv_call for call in probe.attention_calls]
        states = [state for call in probe.recurrent_calls for state in call.states.values()]
        return cls(probe, KVPlan.of(kinds, sources, model.max_position_embeddings), states)


def load_transformers_decoder(
    config: EngineConfig,
    model: TransformersConfig,
    plan: ProbedModelPlan,
    ops: TorchOps,
    attention: Mapping[AttentionKind, Attention],
    groups: Sequence[KVGroup],
    dtype: torch.dtype,
    device: torch.device,
    quantisers: WeightQuantisers | None,
    progress: ProgressCallback | None,
) -> TransformersDecoder:
    """Load the modules and build the decoder.

    Unless the architecture is tested, its results are compared with those of the unchanged modules.

    Raises:
        InvalidRequestError: ``quantization`` for an architecture that is not tested.
    """
    load = dummy_modules if config.load_format == "dummy" else load_modules
    modules, owner = load(model, dtype, device, progress)
    reference = None
    if not is_tested(model):
        if quantisers is not None:
            raise value_error(
                "quantization", config.quantization,
                f"None for {model.architecture}, which is not among the tested architectures: "
                "rounded weights cannot be compared with the model's own results",
            )  # fmt: skip
        reference = ReferenceLogprobs.compute(modules, model, dtype, device)
    decoder = _build_decoder(model, plan, ops, attention, modules, owner, dtype, quantisers)
    if reference is not None:
        reference.check(decoder, list(groups))
    return decoder


def _build_decoder(
    model: TransformersConfig,
    plan: ProbedModelPlan,
    ops: TorchOps,
    attention: Mapping[AttentionKind, Attention],
    modules: Any,
    owner: TensorOwner,
    dtype: torch.dtype,
    quantisers: WeightQuantisers | None,
) -> TransformersDecoder:
    """Replace parts of transformers' modules by the engine's ops and return the decoder.

    Args:
        modules: the model with its weights. Its linear layers are replaced one by one, so that
            the weight of only one of them is held twice at a time.
        quantisers: quantisation of the weights of every linear layer; None for no quantisation.
    """
    step, probe = CurrentStep(), plan.probe
    for call, kind, index in zip(
        probe.attention_calls, plan.kv.kinds, plan.kv.indices, strict=True
    ):
        handler = PagedAttention(step, kind, attention[kind], call, index)
        set_call_handler(modules.get_submodule(call.module), handler)

    place = 0
    for call in probe.recurrent_calls:
        module = modules.get_submodule(call.module)
        module.__dict__["forward"] = RecurrentModule(step, module.forward, call, place)
        place += len(call.states)
    head = modules.get_output_embeddings()

    def make_linear(weights: LinearWeights) -> Linear:
        return ops.linear(quantisers.linear(weights) if quantisers else weights)

    def make_head(weights: LinearWeights) -> Linear:
        return ops.linear(quantisers.output_head(weights) if quantisers else weights)

    _replace_tied_head(modules, probe, ops, owner, quantisers)
    for name in probe.linears:
        linear = modules.get_submodule(name)
        if type(linear) in linear_classes():
            make_layer = make_head if linear is head else make_linear
            _replace_module(modules, name, _convert_linear(linear, make_layer, owner))
    if experts_implementation(owner.device) == ENGINE_IMPLEMENTATION_NAME:
        for name in probe.experts:
            module = modules.get_submodule(name)
            set_call_handler(module, OpSetExperts(module, make_linear, owner.take_tensor))
    owner.take_all_tensors(modules)
    owner.finish()
    embedding = torch.empty(0, dtype=dtype, device=owner.device)
    return TransformersDecoder(
        model, ops, attention, modules, probe.base_name, step, embedding, plan.states
    )


def _convert_linear(
    linear: Any, make_linear: Callable[[LinearWeights], Linear], owner: TensorOwner
) -> OpSetLinear:
    """Make the op set's linear layer from transformers' layer and drop that layer's weights."""
    bias = None if linear.bias is None else owner.take_tensor(linear.bias.detach())
    values = owner.take_tensor(linear.weight.detach())
    if type(linear) is not nn.Linear:
        values = values.t().contiguous()
    linear._parameters.clear()
    return OpSetLinear(make_linear(LinearWeights(values, bias)), *reversed(values.shape))


def _replace_tied_head(
    modules: Any,
    probe: ProbeResult,
    ops: TorchOps,
    owner: TensorOwner,
    quantisers: WeightQuantisers | None,
) -> None:
    """Replace a tied output head, and its embedding too if both can read one table."""
    head, embedding = modules.get_output_embeddings(), modules.get_input_embeddings()
    if type(head) is not nn.Linear or head.weight is not getattr(embedding, "weight", None):
        return
    names = {module: name for name, module in modules.named_modules()}
    if names[head] not in probe.linears:
        return
    bias = None if head.bias is None else owner.take_tensor(head.bias.detach())
    head.weight.data = owner.take_tensor(head.weight.data)
    weights = LinearWeights(head.weight.detach(), bias, is_tied=True)
    dtype = weights.values.dtype
    weights = quantisers.output_head(weights) if quantisers else weights
    if bias is None and (type(embedding) is nn.Embedding or probe.embedding_processes_rows):
        table, linear = ops.tied_embedding(weights, dtype)
        replace_embedding_table(embedding, table)
    else:
        # An embedding class that does more than a look-up keeps its own weight.
        linear = ops.linear(weights)
    _replace_module(modules, names[head], OpSetLinear(linear, head.in_features, head.out_features))


def _replace_module(modules: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(modules.get_submodule(parent), leaf, module)
