"""probe_recurrent: learns the states of recurrent modules from calls on the meta device.

Nothing depends on the model's name.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from asyncllm.gpu.state_cache import StateSpec
from asyncllm.validation import describe_error

CACHE_PARAMETER_NAMES = ("cache_params", "past_key_values", "past_key_value", "layer_past", "state")
"""Names that modules use for the parameter of ``forward`` that takes a cache."""

_PROBE_BATCH_SIZE = 2
_ACCEPTED_CACHE_DESCRIPTION = (
    "transformers' interface of linear attention: get_conv_state, update_conv_state, "
    "get_recurrent_state, update_recurrent_state"
)


StateKey = tuple[Literal["conv", "recurrent"], int]
"""Key of one state of a module: its kind, and transformers' ``state_idx``."""


class RecurrentCacheAdapter:
    """Adapter from one call's states to the interface of transformers' linear-attention caches.

    Updates change the states of the call's rows in place.

    Attributes:
        row_states: states ``[B, *shape]`` of the call's rows.
    """

    def __init__(self, row_states: Mapping[StateKey, Tensor]) -> None:
        self.row_states = row_states

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        return self.row_states["conv", state_idx]

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        return self.row_states["recurrent", state_idx]

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
    ) -> Tensor:
        """Return the stored inputs followed by the new ones; store the last ``kernel`` of them.

        Args:
            conv_states: ``[B, C, n]``, the new inputs.

        Returns:
            ``[B, C, kernel + n]``.
        """
        held = self.row_states["conv", state_idx]
        whole = torch.cat((held, conv_states), dim=-1)
        held.copy_(whole[..., -held.shape[-1] :])
        return whole

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0
    ) -> Tensor:
        return self.row_states["recurrent", state_idx].copy_(recurrent_states)

    def is_recording_past(self, layer_idx: int) -> bool:
        return False


def cache_parameter_by_module(model: nn.Module) -> dict[str, str]:
    """Name of the cache parameter of each module that takes a cache; keys are module names."""
    by_class: dict[type, str | None] = {}
    by_module = {}
    for name, module in model.named_modules():
        kind = type(module)
        if kind not in by_class:
            parameters = inspect.signature(kind.forward).parameters
            by_class[kind] = next(
                (each for each in CACHE_PARAMETER_NAMES if each in parameters), None
            )
        parameter = by_class[kind]
        if name and parameter is not None:
            by_module[name] = parameter
    return by_module


def modules_with_cache(model: nn.Module) -> list[str]:
    """Names of the innermost modules that take a cache: attention and recurrent modules."""
    names = list(cache_parameter_by_module(model))
    outer = {name[:dot] for name in names for dot in range(len(name)) if name[dot] == "."}
    return [name for name in names if name not in outer]


UnsupportedFeature = tuple[str, str]
"""Unsupported feature of a model, and the supported alternative: two phrases of an error
message."""


@dataclass(slots=True, eq=False)
class RecurrentCall:
    """A recurrent module's use of its cache, as ``probe_recurrent`` has found it.

    Attributes:
        module: name of the module.
        class_name: name of the module's class.
        hidden_parameter, cache_parameter: names of the parameters of ``forward`` that take hidden
            states ``[B, n, H]`` and the cache.
        states: states that the module keeps of a sequence.
        unsupported_feature: reason why the module cannot be computed in chunks and batches; None if
            it can.
    """

    module: str
    class_name: str
    hidden_parameter: str
    cache_parameter: str
    states: dict[StateKey, StateSpec]
    unsupported_feature: UnsupportedFeature | None = None


class ObservedCall(NamedTuple):
    """A module's call in the probe's forward pass, with its arguments."""

    args: tuple[Any, ...]
    options: dict[str, Any]


@dataclass(slots=True)
class CacheCallRecorder:
    """Context manager that records the calls of modules that take a cache."""

    model: nn.Module
    calls: dict[str, ObservedCall] = field(default_factory=dict)
    hooks: list[Any] = field(default_factory=list)

    def __enter__(self) -> CacheCallRecorder:
        self.hooks = [
            self.model.get_submodule(name).register_forward_pre_hook(
                self._make_hook(name), with_kwargs=True
            )
            for name in modules_with_cache(self.model)
        ]
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def _make_hook(self, name: str) -> Any:
        def record_call(module: nn.Module, args: Any, options: Any) -> tuple[Any, Any]:
            # Move a padding mask from the host to the meta device, where the hidden states are.
            # Otherwise _probe_module's call could fail before the module uses its cache, and the
            # error would not name the module.
            options = {
                key: value.to("meta") if isinstance(value, Tensor) else value
                for key, value in options.items()
            }
            self.calls[name] = ObservedCall(args, options)
            return args, options

        return record_call


class _StateRecorder(RecurrentCacheAdapter):
    """Empty cache that records the states that a module writes to it."""

    def __init__(self) -> None:
        super().__init__({})
        self.was_used = False
        self.states: dict[StateKey, StateSpec] = {}

    def get_conv_state(self, *args: Any, **kwargs: Any) -> Any:
        self.was_used = True

    get_recurrent_state = get_conv_state

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
    ) -> Tensor:
        if conv_kernel_size is None:
            raise TypeError("update_conv_state without conv_kernel_size")
        self._record_state(
            ("conv", state_idx), conv_states, (conv_states.shape[1], conv_kernel_size)
        )
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0
    ) -> Tensor:
        self._record_state(
            ("recurrent", state_idx), recurrent_states, tuple(recurrent_states.shape[1:])
        )
        return recurrent_states

    def _record_state(self, key: StateKey, state: Tensor, shape: tuple[int, ...]) -> None:
        self.was_used = True
        dtype = None if state.dtype is torch.bfloat16 else state.dtype
        self.states[key] = StateSpec(shape, dtype)

    def __getattr__(self, name: str) -> Any:
        self.__dict__["was_used"] = True
        raise AttributeError(f"{name} of its cache")

    def __getitem__(self, index: Any) -> Any:
        self.was_used = True
        raise TypeError("an item of its cache")


def probe_recurrent(
    model: nn.Module, cache_calls: CacheCallRecorder, attention_modules: list[str]
) -> tuple[list[RecurrentCall], set[str]]:
    """Find the calls of modules that keep a state, in order, and the names of idle modules.

    Idle modules take a cache and do not use it.

    Args:
        model: skeleton on the meta device. Modules with a state are cast to bfloat16, so that a
            state in the model's dtype differs from one that is always in float32.
        attention_modules: names of the modules that call attention.
    """
    recurrent, idle_modules, cache_parameters = [], set(), cache_parameter_by_module(model)
    for name, observed_call in cache_calls.calls.items():
        if not any(f"{caller}.".startswith(f"{name}.") for caller in attention_modules):
            call = _probe_module(
                model.get_submodule(name), name, cache_parameters[name], observed_call
            )
            if call is None:
                idle_modules.add(name)
            else:
                recurrent.append(call)
    return recurrent, idle_modules


def _probe_module(
    module: nn.Module, name: str, cache_parameter: str, observed_call: ObservedCall
) -> RecurrentCall | None:
    """Find out how a module uses its cache; None if the cache stays unused."""
    names = list(inspect.signature(module.forward).parameters)
    args, options = observed_call
    call = RecurrentCall(name, type(module).__name__, names[0], cache_parameter, {})
    recorder = _StateRecorder()
    try:
        with torch.enable_grad():
            arguments = dict(zip(names, args, strict=False)) | options
            module(**arguments | {cache_parameter: recorder})
            if not recorder.was_used:
                return None
            options = dict(options)
            hidden = args[0] if args else options.pop(call.hidden_parameter, None)
            call.unsupported_feature = _unsupported_arguments(
                hidden, observed_call, call, names
            ) or _unsupported_chunk_call(
                module.to(torch.bfloat16), call, hidden.detach().to(torch.bfloat16), options
            )
    except Exception as error:
        if not recorder.was_used:
            raise
        call.unsupported_feature = (
            f"asks its cache for more ({describe_error(error)})",
            _ACCEPTED_CACHE_DESCRIPTION,
        )
    return call


def _unsupported_arguments(
    hidden: Any, observed_call: ObservedCall, call: RecurrentCall, names: list[str]
) -> UnsupportedFeature | None:
    """Describe unsupported arguments of a module's call; None if all are supported."""
    if len(observed_call.args) > 1 or not isinstance(hidden, Tensor) or hidden.dim() != 3:
        return "takes more than hidden states [B, n, H] by position", "those alone"
    for name in names[1:]:
        if name != call.cache_parameter and isinstance(observed_call.options.get(name), Tensor):
            return f"takes the tensor {name} of all tokens", "hidden states and a cache alone"
    return None


def _unsupported_chunk_call(
    module: nn.Module, call: RecurrentCall, hidden: Tensor, options: dict[str, Any]
) -> UnsupportedFeature | None:
    """Describe why a module cannot compute a second chunk or a batch of tokens; None if it can.

    The module is called on each of the two. The result has to depend on every state that the call
    begins with.
    """
    recorder = _StateRecorder()
    options = {name: value for name, value in options.items() if not isinstance(value, Tensor)}
    module(hidden, **options | {call.cache_parameter: recorder})
    call.states = recorder.states
    if not call.states:
        return "updates no state of its cache", _ACCEPTED_CACHE_DESCRIPTION
    token = hidden[:, :1].expand(_PROBE_BATCH_SIZE, -1, -1)
    for description, tokens in (
        (f"a chunk of {hidden.shape[1]} tokens", hidden),
        ("single tokens", token),
    ):
        leaves = {
            key: torch.empty(
                (len(tokens), *spec.shape),
                dtype=spec.dtype or torch.bfloat16,
                device=tokens.device,
                requires_grad=True,
            )
            for key, spec in call.states.items()
        }
        row_states = {key: leaf.clone() for key, leaf in leaves.items()}
        out = module(tokens, **options | {call.cache_parameter: RecurrentCacheAdapter(row_states)})
        if not isinstance(out, Tensor) or out.shape[:-1] != tokens.shape[:-1]:
            return f"returns {type(out).__name__} for {description}", "hidden states [B, n, H]"
        reached = set(_leaf_tensor_ids(out))
        for key, leaf in leaves.items():
            if id(leaf) not in reached:
                return f"computes {description} without its {key[0]} state", "states that go on"
    return None


def _leaf_tensor_ids(output: Tensor) -> Iterator[int]:
    """Yield ``id`` of each leaf tensor from which autograd computed ``output``."""
    visited: set[Any] = set()
    pending = [output.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            yield id(variable)
        pending += [following for following, _ in node.next_functions]
