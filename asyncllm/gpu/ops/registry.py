"""make_attention, make_ops: the choice of the attention backend and of the op set."""

from __future__ import annotations

import dataclasses
import inspect
from importlib.metadata import EntryPoint, entry_points

import torch

from asyncllm.errors import EngineError, InvalidRequestError
from asyncllm.gpu.ops.backend import AttentionBackend, AttentionRequest, UnmetConstraint
from asyncllm.gpu.ops.base import Attention
from asyncllm.gpu.ops.cpu_ops import CpuOps
from asyncllm.gpu.ops.flash_attention_2 import FlashAttention2
from asyncllm.gpu.ops.flash_attention_3 import FlashAttention3
from asyncllm.gpu.ops.native_attention import BUILD_LIBRARY_HINT, NativeAttention, native_context
from asyncllm.gpu.ops.native_ops import NativeOps
from asyncllm.gpu.ops.onednn_ops import OneDNNOps, onednn_works
from asyncllm.gpu.ops.torch_attention import TorchAttention
from asyncllm.gpu.ops.torch_ops import TorchOps
from asyncllm.gpu.ops.triton.attention import TritonAttention
from asyncllm.logger import get_logger
from asyncllm.native.shared_library import Library, NativeUnavailableError

logger = get_logger(__name__)

ENTRY_POINT_GROUP = "asyncllm.attention_backends"
"""Entry point group under which other distributions register backends."""

BUILTIN_BACKENDS: dict[str, AttentionBackend] = {
    backend.name: backend
    for backend in (
        TorchAttention,
        NativeAttention,
        TritonAttention,
        FlashAttention2,
        FlashAttention3,
    )
}
"""Built-in backends by name. ``make`` imports a backend's library."""


def make_attention(name: str, request: AttentionRequest) -> tuple[Attention, int]:
    """Makes the attention for a device and a model; returns it and the KV block size.

    The name "auto" selects

    - on CUDA "triton";
    - on a CPU "native", if native ops use its vector instructions (``choose_native_ops``);
    - "torch" elsewhere.

    Other backends are selected by name only. A backend that cannot be used is an error; no other
    backend replaces it.

    Raises:
        InvalidRequestError: there is no such backend, or the request breaks its constraints.
        EngineError: the backend's library is missing, too old or does not work here, or the entry
            point that registers the backend is faulty.
    """
    backend_name = resolve_backend_name(name, request)
    backend = find_backend(backend_name)
    block_size = request.block_size or backend.default_block_size(request.device)
    request = dataclasses.replace(request, block_size=block_size)
    capability = None
    if request.device.type == "cuda":
        capability = torch.cuda.get_device_capability(request.device)
    for unmet in backend.constraints.unmet(request, capability):
        raise _constraint_error(name, backend_name, unmet, request)
    attention = backend.make(request)
    if not isinstance(attention, Attention):
        raise EngineError(
            f"attention_backend={name!r}: it made a {type(attention).__name__}, which is no "
            "Attention (asyncllm.gpu.ops.base)"
        )
    return attention, block_size


def resolve_backend_name(name: str, request: AttentionRequest) -> str:
    """Replaces "auto" by the name of the default backend for the request."""
    if name != "auto":
        return name
    if request.device.type == "cuda":
        return "triton"
    if not _can_run_native_ops() or any(NativeAttention.constraints.unmet(request)):
        return "torch"
    return "native"


def _can_run_native_ops() -> bool:
    """Whether ``choose_native_ops`` chooses native ops; warns if only the library is missing."""
    choice = choose_native_ops()
    if choice.can_be_built:
        logger.warning("%s", choice.reason)
    return choice.runs_native


@dataclasses.dataclass(frozen=True, slots=True)
class NativeOpsChoice:
    """Whether the attention backend "auto" runs native ops on this CPU, and why.

    Attributes:
        reason: reason for the choice; names the remedy if ``can_be_built``.
        can_be_built: whether only the compiled library is missing.
    """

    runs_native: bool
    reason: str
    can_be_built: bool = False


def choose_native_ops() -> NativeOpsChoice:
    """Chooses native ops, unless the library is missing or has only baseline code for this CPU."""
    try:
        isa = Library().best_isa().decode()
    except NativeUnavailableError as error:
        # Log the exception's text, not the exception: a log handler may keep it, and with it all
        # frames of its traceback.
        reason = f"{error}: the CPU runs torch's, which are slower; {BUILD_LIBRARY_HINT}"
        return NativeOpsChoice(False, reason, can_be_built=True)
    if isa == "baseline":
        return NativeOpsChoice(
            False, "native ops have nothing for this processor's instruction set"
        )
    reason = f"native ops are compiled for this processor's {isa}"
    if getattr(torch.cpu, "get_capabilities", dict)().get("amx_bf16"):
        reason += '; they do not use its AMX tiles, and attention_backend="torch" does'
    return NativeOpsChoice(True, reason)


def find_backend(name: str) -> AttentionBackend:
    """Finds a backend by name, built in or registered by another distribution.

    Raises:
        InvalidRequestError: there is no such backend.
        EngineError: several backends have this name, or the backend cannot be loaded.
    """
    entries = list(entry_points(group=ENTRY_POINT_GROUP, name=name))
    owners = [_distribution_name(entry) for entry in entries]
    if name in BUILTIN_BACKENDS:
        owners.append("asyncllm")
    if len(owners) > 1:
        raise EngineError(
            f"attention_backend={name!r}: registered by {', '.join(sorted(owners))}; expected "
            "one of them to be installed, or another name"
        )
    if name in BUILTIN_BACKENDS:
        return BUILTIN_BACKENDS[name]
    if entries:
        return _load_backend(entries[0])
    others = sorted(
        {entry.name for entry in entry_points(group=ENTRY_POINT_GROUP)} - set(BUILTIN_BACKENDS)
    )
    raise InvalidRequestError(
        f"attention_backend={name!r}: expected one of "
        f"{', '.join(('auto', *BUILTIN_BACKENDS, *others))}",
        param="attention_backend",
    )


def make_ops(device: torch.device, attention: Attention | None) -> TorchOps:
    """Makes the op set that goes with an attention.

    On CUDA it is the Triton op set; if the attention is plain torch or None, it is plain torch's,
    which needs no compiler. On a CPU it is the native op set, on the attention's threads, if the
    attention is native; else it is oneDNN's, or plain torch's if oneDNN's does not work here.

    Raises:
        EngineError: Triton cannot compile kernels here.
    """
    if device.type == "cuda" and attention is not None and attention.name != "torch":
        from asyncllm.gpu.ops.triton.toolchain import check_triton

        # Check Triton first: if it is missing, the import of the kernels would raise an
        # ImportError.
        check_triton()
        from asyncllm.gpu.ops.triton.op_set import TritonOps

        return TritonOps()
    if device.type != "cpu":
        return TorchOps()
    if isinstance(attention, NativeAttention):
        return NativeOps(attention.context)
    if onednn_works():
        return OneDNNOps()
    logger.warning("this build of torch has no packed linear layers: decoding will be slower")
    return CpuOps()


def make_ops_without_attention(name: str, device: torch.device, num_threads: int) -> TorchOps:
    """Makes the op set of a model without attention.

    On a CPU it is the op set that goes with the attention backend ``name``, elsewhere torch's.

    Args:
        name: "auto", "torch" or, on a CPU, "native".

    Raises:
        EngineError: ``name`` is "native", but the library is missing or does not work here.
    """
    if device.type == "cpu" and (name == "native" or (name == "auto" and _can_run_native_ops())):
        return NativeOps(native_context(num_threads))
    return make_ops(device, None)


def _load_backend(entry: EntryPoint) -> AttentionBackend:
    """Loads the backend that an entry point registers; errors name its distribution."""
    what = f"attention_backend={entry.name!r}: {entry.value!r} of {_distribution_name(entry)}"
    try:
        loaded = entry.load()
        makes_itself = inspect.ismethod(getattr(loaded, "make", None))
        backend = loaded() if isinstance(loaded, type) and not makes_itself else loaded
    except Exception as error:
        raise EngineError(f"{what} cannot be loaded: {error!r}") from error
    if not isinstance(backend, AttentionBackend):
        raise EngineError(
            f"{what} is no AttentionBackend; expected constraints, default_block_size and make "
            "(asyncllm.gpu.ops.backend)"
        )
    return backend


def _distribution_name(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else "an unknown distribution"


def _constraint_error(
    name: str, backend_name: str, unmet: UnmetConstraint, request: AttentionRequest
) -> InvalidRequestError:
    """Makes the error for a broken constraint; it names the setting, the limit and an
    alternative."""
    setting = f"attention_backend={name!r}"
    if name == "auto":
        setting += f" is {backend_name!r} on device {request.device}, which"
    message = f"{setting} takes {unmet.expected}, and this is {unmet.actual}"
    param = "attention_backend"
    if unmet.field == "block_size":
        message = f"block_size={unmet.actual}: {setting} takes {unmet.expected}"
        param = "block_size"
    if not any(TorchAttention.constraints.unmet(request)):
        message += '; or attention_backend="torch", which covers it on any device'
    return InvalidRequestError(message, param=param)
