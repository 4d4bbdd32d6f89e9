"""probe_model: learns a model's attention calls from one forward pass on the meta device.

Nothing depends on the model's name.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from asyncllm.errors import ModelLoadError
from asyncllm.gpu.transformers_model.config import TransformersConfig, build_skeleton
from asyncllm.gpu.transformers_model.interface import (
    ENGINE_IMPLEMENTATION_NAME,
    PROBE_IMPLEMENTATION_NAME,
    register_transformers_functions,
    set_call_handler,
)
from asyncllm.gpu.transformers_model.recurrent_probe import (
    CacheCallRecorder,
    RecurrentCall,
    probe_recurrent,
)
from asyncllm.validation import describe_error

NUM_PROBE_TOKENS = 3
"""Number of tokens of the forward pass: more than one, and different from usual sizes of other
dimensions."""


@dataclass(slots=True, eq=False)
class AttentionCall:
    """One call of attention.

    Attributes:
        module: name of the calling module.
        num_heads, num_key_heads: numbers of query heads and key heads.
        key_dim, value_dim: head sizes of k and v.
        num_queries, num_keys: tokens of q and of k.
        scale: factor on ``q @ k``; None if the module passes none.
        mask: transformers' mask, which tells which keys a query sees; None without a mask.
        window, softcap: sliding window and soft cap that the module passes; None if it passes none.
        has_sinks: whether the module passes attention sinks, a logit per head.
        kv_call: index of the earlier call whose keys this call reuses; None if it has its own.
        options: other arguments of the call that are set.
    """

    module: str
    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    num_queries: int
    num_keys: int
    scale: float | None
    mask: Any
    window: int | None
    softcap: float | None
    has_sinks: bool
    kv_call: int | None
    options: dict[str, Any]


@dataclass(slots=True, eq=False)
class ProbeResult:
    """Record of a model's forward pass: its calls, and the modules that take part.

    Attributes:
        model: the probed skeleton.
        base_name: name of the skeleton's submodule that ends with the last norm.
        attention_calls: calls of attention, in order.
        linears: names of the linear layers that are called, and whose weight no other code reads.
        experts: names of the modules with experts.
        embedding_processes_rows: whether the embedding's class calls ``nn.Embedding.forward`` and
            processes the result.
        recurrent_calls: calls of modules that keep a state of a sequence, in order.
        idle_modules: names of modules that take a cache and do not use it.
    """

    model: nn.Module
    base_name: str
    attention_calls: list[AttentionCall] = field(default_factory=list)
    linears: set[str] = field(default_factory=set)
    experts: set[str] = field(default_factory=set)
    embedding_processes_rows: bool = False
    recurrent_calls: list[RecurrentCall] = field(default_factory=list)
    idle_modules: set[str] = field(default_factory=set)


_IGNORED_ATTENTION_OPTIONS = frozenset(
    "dropout is_causal use_cache cache_position position_ids output_attentions "
    "output_hidden_states output_router_logits return_dict logits_to_keep".split()
)
"""Options of attention that the engine may ignore: inference has no dropout, every mask is checked
to be causal, and RoPE is applied before attention."""


class _CallRecorder:
    """Call handler that records the calls of attention and experts, and computes neither."""

    def __init__(self, probe: ProbeResult) -> None:
        self.probe = probe
        self.names = {module: name for name, module in probe.model.named_modules()}
        self.keys: list[Tensor] = []

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
        attention_mask: Any = None, scaling: float | None = None, **options: Any,
    ) -> Tensor:  # fmt: skip
        in_use = {name: value for name, value in options.items() if _is_option_in_use(name, value)}
        kv_call = next((i for i, earlier in enumerate(self.keys) if earlier is key), None)
        self.keys.append(key)
        self.probe.attention_calls.append(
            AttentionCall(
                module=self.names[module],
                num_heads=query.shape[1],
                num_key_heads=key.shape[1],
                key_dim=key.shape[-1],
                value_dim=value.shape[-1],
                num_queries=query.shape[2],
                num_keys=key.shape[2],
                scale=None if scaling is None else float(scaling),
                mask=attention_mask,
                window=in_use.pop("sliding_window", None),
                softcap=in_use.pop("softcap", None),
                has_sinks=in_use.pop("s_aux", None) is not None,
                kv_call=kv_call,
                options=in_use,
            )
        )
        return query.new_empty((1, query.shape[2], query.shape[1], value.shape[-1]))

    def experts(self, module: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        self.probe.experts.add(self.names[module])
        return torch.empty_like(hidden)


def _is_option_in_use(name: str, value: Any) -> bool:
    """Whether an option of attention is set, and is not one that may be ignored."""
    is_set = value is not None and not (isinstance(value, (bool, int, float)) and not value)
    return is_set and name not in _IGNORED_ATTENTION_OPTIONS


def linear_classes() -> tuple[type[nn.Module], ...]:
    """Classes of linear layers: torch's, and GPT-2's, whose weight is ``[in, out]``."""
    from transformers.pytorch_utils import Conv1D

    return nn.Linear, Conv1D


class _WatchedLinear(nn.Module):
    """Mixin that records whether a linear layer is called, and whether other code reads its weight.

    It comes before the layer's class in the method resolution order.
    """

    def forward(self, *args: Any) -> Tensor:
        self.__dict__.update(called=True, inside=True)
        try:
            return super().forward(*args)
        finally:
            self.__dict__["inside"] = False

    def __getattr__(self, name: str) -> Any:
        if name in ("weight", "bias") and not self.__dict__.get("inside"):
            self.__dict__["read"] = True
        return super().__getattr__(name)


class _WatchedEmbedding(nn.Embedding):
    """Base class that records whether a subclass calls ``nn.Embedding.forward``."""

    def forward(self, input: Tensor) -> Tensor:
        self.__dict__["called"] = True
        return super().forward(input)


def probe_model(model: TransformersConfig) -> ProbeResult:
    """Run a model on the meta device and record its calls of attention and other modules.

    This sets the attention and experts implementations in ``model.config``.

    Raises:
        ModelLoadError: the forward pass reads tensors on the host, or fails.
    """
    register_transformers_functions()
    model.config._attn_implementation = PROBE_IMPLEMENTATION_NAME
    model.config._experts_implementation = ENGINE_IMPLEMENTATION_NAME
    try:
        skeleton: Any = build_skeleton(model.path, model.model_class, model.config)
    # A class that accepts only its own attention implementations refuses PROBE_IMPLEMENTATION_NAME.
    except ModelLoadError as error:
        raise ModelLoadError(
            f"{model.path}: {model.architecture}: its code takes none but its own attention "
            f"({describe_error(error.__cause__ or error)}), expected a class that calls "
            "transformers' attention interface"
        ) from error
    result = ProbeResult(skeleton, _base_name(model, skeleton))
    recorder = _CallRecorder(result)
    watched = {}
    classes = {kind: type(kind.__name__, (_WatchedLinear, kind), {}) for kind in linear_classes()}
    for name, module in skeleton.named_modules():
        set_call_handler(module, recorder)
        if type(module) in classes:
            module.__class__ = classes[type(module)]
            watched[name] = module
    base, embedding = getattr(skeleton, result.base_name), skeleton.get_input_embeddings()
    kind: Any = type(embedding)
    if isinstance(embedding, nn.Embedding) and kind is not nn.Embedding:
        embedding.__class__ = type(kind.__name__, (kind, _WatchedEmbedding), {})
    try:
        with torch.no_grad(), CacheCallRecorder(skeleton) as cache_calls:
            hidden = base(
                input_ids=torch.zeros((1, NUM_PROBE_TOKENS), dtype=torch.int64, device="meta"),
                position_ids=torch.arange(NUM_PROBE_TOKENS, device="meta").unsqueeze(0),
                # The mask says that no token is padding: without a mask, transformers reads the
                # positions to find packed sequences. The mask is on the host, because recurrent
                # layers read it there.
                attention_mask=torch.ones((1, NUM_PROBE_TOKENS), dtype=torch.int64, device="cpu"),
                use_cache=False,
            ).last_hidden_state
            compute_logits(make_output_head(skeleton, result.base_name), hidden[0])
        callers = [call.module for call in result.attention_calls]
        result.recurrent_calls, result.idle_modules = probe_recurrent(
            skeleton, cache_calls, callers
        )
    except Exception as error:
        raise ModelLoadError(
            f"{model.path}: {model.architecture}: what its layers need cannot be learned, because "
            f"one pass of its code without weights fails{_error_location(error, recorder.names)}: "
            f"{describe_error(error)}"
        ) from error
    result.embedding_processes_rows = (
        isinstance(embedding, _WatchedEmbedding) and "called" in embedding.__dict__
    )
    result.linears = {
        name
        for name, module in watched.items()
        if "called" in module.__dict__ and "read" not in module.__dict__
    }
    return result


def _error_location(error: BaseException, names: Mapping[nn.Module, str]) -> str:
    """Phrase that names the innermost module whose code raised ``error``; "" if there is none."""
    location, traceback = "", error.__traceback__
    while traceback is not None:
        module = traceback.tb_frame.f_locals.get("self")
        if isinstance(module, nn.Module) and names.get(module):
            location = f" in {names[module]} ({type(module).__name__})"
        traceback = traceback.tb_next
    return location


def _base_name(model: TransformersConfig, skeleton: nn.Module) -> str:
    for name in (getattr(skeleton, "base_model_prefix", ""), "model", "transformer"):
        if isinstance(getattr(skeleton, name, None), nn.Module):
            return name
    raise ModelLoadError(
        f"{model.path}: {model.architecture}: expected a part that ends with the last norm, and an "
        "output head beside it"
    )


# --- the output head, which probe_model and the decoder run apart from the base model ------------


class _PassThroughBaseModel(nn.Module):
    """Substitute for the base model: returns the hidden states that are passed as input embeddings.

    Attributes that the head reads from it, such as a multiplier, are those of the base model.
    """

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.__dict__["base"] = base

    @property
    def decoder(self) -> _PassThroughBaseModel:
        """Substitute for the base model's ``decoder``, which some heads call directly."""
        return self

    def forward(
        self, *unused: Any, inputs_embeds: Tensor | None = None, **options: Any
    ) -> _BaseModelOutput:
        assert inputs_embeds is not None
        return _BaseModelOutput(inputs_embeds)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["base"], name)


class _BaseModelOutput:
    """Output of a base model; optional fields are None."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


def make_output_head(modules: Any, base_name: str) -> Any:
    """Make a shallow copy of a model, in which the base model passes hidden states through.

    Calling the copy runs only the model's own code for logits, such as soft caps and scales.

    Args:
        base_name: name of the submodule that ends with the last norm.
    """
    head = copy.copy(modules)
    base = _PassThroughBaseModel(getattr(modules, base_name))
    head._modules = dict(modules._modules) | {base_name: base}
    return head


def compute_logits(head: Any, hidden: Tensor) -> Tensor:
    """Compute logits of hidden states, ``[S, H] -> [S, vocab_size]``."""
    return head(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits[0]
