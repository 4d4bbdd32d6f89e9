"""load_decoder: loads a model with its weights, op set and attention."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch

from asyncllm.checkpoint.model_config import ModelConfig
from asyncllm.checkpoint.progress import ProgressCallback
from asyncllm.config import EngineConfig
from asyncllm.errors import InvalidRequestError
from asyncllm.gpu.devices import resolve_dtype
from asyncllm.gpu.huge_pages import warn_without_huge_pages
from asyncllm.gpu.kv_cache import KVGroup
from asyncllm.gpu.memory import check_weights_fit
from asyncllm.gpu.models.attention_kinds import kv_plan
from asyncllm.gpu.models.dense import build_decoder
from asyncllm.gpu.models.language_model import LanguageModel
from asyncllm.gpu.models.layers import AttentionKind
from asyncllm.gpu.ops.backend import AttentionRequest
from asyncllm.gpu.ops.base import Attention, AttentionShape
from asyncllm.gpu.ops.quantise import WeightQuantisers
from asyncllm.gpu.ops.registry import make_attention, make_ops, make_ops_without_attention
from asyncllm.gpu.ops.torch_ops import TorchOps
from asyncllm.gpu.packed.packed_store import PackedStore, Weights, open_store
from asyncllm.gpu.threads import available_cpus, set_thread_count
from asyncllm.gpu.transformers_model.config import TransformersConfig
from asyncllm.gpu.weights import dummy_weights, load_weights, weights_bytes
from asyncllm.validation import value_error

ATTENTION_FREE_BLOCK_SIZE = 256
"""Tokens per block of a model without attention. Its blocks hold no KV: they count tokens, and mark
the end of each prefix whose recurrent state is saved."""


def load_decoder(
    config: EngineConfig,
    model: ModelConfig | TransformersConfig,
    device: torch.device,
    num_threads: int | None,
    progress: ProgressCallback | None,
    *,
    in_model_folder: bool = False,
) -> tuple[LanguageModel, list[KVGroup], int, PackedStore | str]:
    """Loads a model, with its weights, op set, attention and KV groups.

    Args:
        num_threads: number of threads of the ops on a CPU; None is one per available core.
        progress: called with the bytes of weights read.
        in_model_folder: write the packed weights into the model's folder, see PackedStore.

    Returns:
        The model; its KV groups; the GPU's free bytes before loading (0 on a CPU); and the store of
        the packed weights, or the reason why there is none.
    """
    dtype = resolve_dtype(config.dtype, model, device, config.attention_backend)
    plan = None
    if isinstance(model, ModelConfig):
        kv = kv_plan(model)
    else:
        # Import transformers' modules late: the engine's own decoders do not need them.
        from asyncllm.gpu.transformers_model.build import ProbedModelPlan

        plan = ProbedModelPlan.of(model)
        kv = plan.kv
    attention, block_size = _make_attention(config, kv.kinds, dtype, device, num_threads)
    if attention:
        ops = make_ops(device, next(iter(attention.values())))
    else:
        _check_settings_without_attention(config, device)
        threads = num_threads or available_cpus()
        ops = make_ops_without_attention(config.attention_backend, device, threads)
    groups = kv.kv_groups(attention, block_size)
    free_at_start = 0
    if device.type == "cuda":
        free_at_start = check_weights_fit(config, device, model_bytes(model, dtype))
    quantisers = resolve_quantisers(config, model, device, ops)
    context = getattr(ops, "context", None)
    store = open_store(config, model, context, dtype, progress, in_model_folder=in_model_folder)
    if isinstance(model, ModelConfig):
        if ops.packs_linear:
            warn_without_huge_pages()
            if model.quantization is None:
                # Limit torch to one thread: after every copy torch's threads would spin and take
                # time from the native threads, which pack the weights.
                set_thread_count(1)
        load = dummy_weights
        if config.load_format != "dummy":
            accepts_weights = ops.accepts_weights if ops.schemes != {"plain"} else None
            load = partial(
                load_weights, accepts_weights=accepts_weights, is_transient=ops.packs_linear
            )
        read = partial(load, model, dtype, device, progress)

        def build(weights: Weights, are_packed: bool) -> LanguageModel:
            ops.linear_bytes = 0
            own = None if are_packed else quantisers
            return build_decoder(model, ops, attention, weights, own, dtype)

        decoder = build(read(), False) if isinstance(store, str) else store.build(read, build)
    else:
        assert plan is not None
        from asyncllm.gpu.transformers_model.build import load_transformers_decoder

        decoder = load_transformers_decoder(
            config, model, plan, ops, attention, groups, dtype, device, quantisers, progress
        )
    return decoder, groups, free_at_start, store


def _check_settings_without_attention(config: EngineConfig, device: torch.device) -> None:
    """Raises InvalidRequestError for settings that have no effect without attention layers."""
    op_sets = ("auto", "torch", "native") if device.type == "cpu" else ("auto", "torch")
    accepted = {"attention_backend": op_sets, "kv_cache_memory": (None,)}
    for name, values in accepted.items():
        if getattr(config, name) not in values:
            choices = " or ".join(map(repr, values))
            raise value_error(name, getattr(config, name), f"{choices}: the model has no attention")


def _make_attention(
    config: EngineConfig,
    kinds: Iterable[AttentionKind],
    dtype: torch.dtype,
    device: torch.device,
    num_threads: int | None,
) -> tuple[dict[AttentionKind, Attention], int]:
    """Makes the Attention of each kind; also returns the number of tokens per KV block."""
    attention: dict[AttentionKind, Attention] = {}
    alike: dict[tuple[AttentionShape, int | None], Attention] = {}
    block_size = config.block_size
    for kind in dict.fromkeys(kinds):
        # Kinds of layers that differ only in their KV group share one Attention; in a step each
        # kind gets its own plan.
        key = kind.shape, kind.window
        if key not in alike:
            request = AttentionRequest(
                kind.shape,
                dtype,
                device,
                block_size,
                frozenset({kind.window}),
                num_threads=num_threads or available_cpus(),
                sibling=next(iter(attention.values()), None),
            )
            alike[key], block_size = make_attention(config.attention_backend, request)
        attention[kind] = alike[key]
    return attention, block_size or ATTENTION_FREE_BLOCK_SIZE


def resolve_quantisers(
    config: EngineConfig,
    model: ModelConfig | TransformersConfig,
    device: torch.device,
    ops: TorchOps,
) -> WeightQuantisers | None:
    """Quantisers named by ``config.quantization``, for linear weights; None if it is unset.

    Raises:
        InvalidRequestError: the checkpoint is quantised already, or the device or its op set does
            not compute with weights of that quantisation.
    """
    name = config.quantization
    if name is None:
        return None
    if model.quantization is not None:
        accepted = f"None: the checkpoint's weights are quantised already ({model.quantization})"
        raise value_error("quantization", name, accepted)
    if device.type != "cpu" or name not in ops.quantisers:
        found = f"device {device}" if device.type != "cpu" else f"the op set {ops.name!r}"
        raise InvalidRequestError(
            f"quantization={name!r}: expected None, or a CPU with native ops "
            f'(attention_backend="native"), and this is {found}',
            param="quantization",
        )
    return ops.quantisers[name]


def model_bytes(model: ModelConfig | TransformersConfig, dtype: torch.dtype) -> int:
    """Bytes of all parameters on the device."""
    if isinstance(model, TransformersConfig):
        return model.num_parameters * dtype.itemsize
    return weights_bytes(model, dtype)
