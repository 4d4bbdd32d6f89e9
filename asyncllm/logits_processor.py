"""LogitsProcessor: processes the logits of many requests at once, as in vLLM v1."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from asyncllm.errors import InvalidRequestError
from asyncllm.sampling_params import SamplingParams
from asyncllm.validation import describe, describe_error, value_error

ENTRY_POINT_GROUP = "asyncllm.logits_processors"
"""Entry point group by which other distributions add processors to every engine."""

AddedRequest = tuple[int, SamplingParams, Sequence[int], Sequence[int]]
"""``(index, params, prompt_token_ids, output_token_ids)``. ``output_token_ids`` is a live view:
whenever ``apply`` is called, it has all tokens before the one to sample."""


@dataclass(frozen=True, slots=True)
class BatchUpdate:
    """Requests that left and entered a processor since its last update. Apply ``removed`` before
    ``added``; an index occurs at most once in each.

    Attributes:
        batch_size: number of the processor's requests after the update.
        removed: indices of requests that left.
        added: requests that entered. A request that continues after a preemption or a pause already
            has output.
        moved: always empty, because a request keeps its index while it runs; processors written for
            vLLM read it.
    """

    batch_size: int
    removed: Sequence[int]
    added: Sequence[AddedRequest]
    moved: Sequence[Any] = ()


class ProcessorConfig(Protocol):
    """Protocol of the config that processors get: an EngineConfig whose limits are all set."""

    @property
    def max_num_seqs(self) -> int | None: ...

    @property
    def max_model_len(self) -> int | None: ...


class LogitsProcessor(ABC):
    """Base of the engine's logits processors; an engine makes one instance of each.

    The interface is vLLM v1's, with two differences. A processor gets only requests for which
    ``claims`` is true. It has to store its state by request index, because a step has only some of
    the requests, in any order; ``apply`` gets their indices. ``update_state`` and ``apply`` run on
    the engine thread, the other methods on the thread that submits a request. An exception ends
    only requests that the processor claims.

    Args:
        config: the engine's EngineConfig, with ``max_num_seqs`` and ``max_model_len`` set.
        device: torch device of the logits.
        is_pin_memory: whether tensors to copy to the device should be pinned.

    Attributes:
        extra_args: the keys of ``SamplingParams.extra_args`` that the processor reads. It must not
            change their values, which all outputs of a request share.
    """

    extra_args: ClassVar[Sequence[str]] = ()

    @abstractmethod
    def __init__(self, config: ProcessorConfig, device: Any, is_pin_memory: bool) -> None: ...

    @classmethod  # noqa: B027
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise (a ValueError, say) for invalid parameters. The request is then refused with an
        InvalidRequestError."""

    @classmethod
    def claims(cls, sampling_params: SamplingParams) -> bool:
        """Whether the processor applies to a request. By default it does if the request's
        ``extra_args`` have a key of the processor's ``extra_args``."""
        extra_args = sampling_params.extra_args or {}
        return any(name in extra_args for name in cls.extra_args)

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Whether the processor never changes the likeliest token. If so, it is not applied to
        greedy requests."""

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Update the state before each ``apply``. ``batch_update`` is None if the requests have not
        changed.

        If this method raises, all requests of the processor end, and no update reports their
        removal. New requests may get the same indices."""

    @abstractmethod
    def apply(self, logits: Any, indices: Sequence[int]) -> Any:
        """Process the logits of a step.

        Args:
            logits: ``[R, vocab_size]`` float32 on ``device``; may be changed in place.
            indices: request index of each of the R rows.

        If this method raises, or returns anything but a tensor of the same shape, these R requests
        end. A row that is not finite ends its request.

        Returns:
            A tensor of the shape of ``logits``.
        """


def applicable_processors(
    processors: Sequence[LogitsProcessor], sampling_params: SamplingParams
) -> tuple[int, ...]:
    """Indices of the processors that apply to a request.

    Raises:
        InvalidRequestError: for ``extra_args`` that no processor reads, or that a processor
            refuses.
    """
    known = {name for processor in processors for name in processor.extra_args}
    for name in sampling_params.extra_args or ():
        if name not in known:
            accepted = ", ".join(sorted(known)) or "none: the engine has no such logits processor"
            raise value_error(
                "extra_args", name, f"a key that a logits processor reads ({accepted})"
            )
    return tuple(
        index
        for index, processor in enumerate(processors)
        if _applies_to_request(processor, sampling_params)
    )


def _applies_to_request(processor: LogitsProcessor, sampling_params: SamplingParams) -> bool:
    try:
        processor.validate_params(sampling_params)
        if not processor.claims(sampling_params):
            return False
        return sampling_params.temperature != 0 or not processor.is_argmax_invariant()
    except InvalidRequestError:
        raise
    except Exception as error:
        raise InvalidRequestError(
            f"extra_args={describe(sampling_params.extra_args)}: logits processor "
            f"{type(processor).__name__} refused it: {describe_error(error)}",
            param="extra_args",
        ) from error
