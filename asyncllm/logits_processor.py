"""LogitsProcessor: a processor of the logits of many requests at once, after vLLM v1's protocol."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from asyncllm.errors import InvalidRequestError
from asyncllm.sampling_params import SamplingParams
from asyncllm.validation import describe, explain, invalid

ENTRY_POINTS = "asyncllm.logits_processors"
"""Group of the entry points by which other distributions add processors to every engine."""

AddedRequest = tuple[int, SamplingParams, Sequence[int], Sequence[int]]
"""``(index, params, prompt_token_ids, output_token_ids)``. The output is a live view: it has all
tokens before the one that is sampled whenever ``apply`` is called."""


@dataclass(frozen=True, slots=True)
class BatchUpdate:
    """How a processor's part of the batch changed since its last update: ``removed``, then
    ``added``, an index at most once in each.

    Attributes:
        batch_size: requests of the processor's after the update.
        removed: request indices that were given up.
        added: requests that entered, at their start, or after a preemption or a pause with the
            output that they have already.
        moved: none, ever: a request keeps its index while it runs. There for processors that are
            written for vLLM.
    """

    batch_size: int
    removed: Sequence[int]
    added: Sequence[AddedRequest]
    moved: Sequence[Any] = ()


class ProcessorConfig(Protocol):
    """The limits that a processor may read of an EngineConfig; both are set."""

    @property
    def max_num_seqs(self) -> int | None: ...

    @property
    def max_model_len(self) -> int | None: ...


class LogitsProcessor(ABC):
    """A processor of the logits of all requests that it claims, made once per engine.

    It is vLLM v1's interface but for two things. A request is given to it only if it claims the
    request, and state is by request index: a step has some of the requests, in any order, so
    ``apply`` is told which. Methods run on the engine thread, but for the class methods, which run
    where a request is submitted. What any of them raises ends no request but those claimed.

    Args:
        config: the engine's EngineConfig, with ``max_num_seqs`` and ``max_model_len`` set.
        device: torch's, of the logits.
        is_pin_memory: whether tensors that are copied to it had better be pinned.

    Attributes:
        extra_args: keys of ``SamplingParams.extra_args`` that it reads.
    """

    extra_args: ClassVar[Sequence[str]] = ()

    @abstractmethod
    def __init__(self, config: ProcessorConfig, device: Any, is_pin_memory: bool) -> None: ...

    @classmethod  # noqa: B027
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raises, a ValueError for example, for parameters that it cannot honour: the request is
        refused with an InvalidRequestError."""

    @classmethod
    def claims(cls, sampling_params: SamplingParams) -> bool:
        """Whether it takes part in a request: unless overridden, whether ``extra_args`` of the
        request has a key that it reads."""
        given = sampling_params.extra_args or {}
        return any(name in given for name in cls.extra_args)

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Whether it never changes which token is the likeliest. It then has no part in greedy
        requests."""

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Called ahead of each ``apply``; None if its part of the batch has not changed.

        If it raises, all requests that it has by then end. It is told no more of them; others may
        enter at their indices."""

    @abstractmethod
    def apply(self, logits: Any, indices: Sequence[int]) -> Any:
        """The logits that it makes of these.

        Args:
            logits: ``[R, vocab_size]`` float32 on ``device``, its own to change in place.
            indices: the R rows' request indices.

        If it raises, or returns anything else, these R requests end. Logits that are not finite
        end their own.

        Returns:
            A tensor of that shape.
        """


def claiming(
    processors: Sequence[LogitsProcessor], sampling_params: SamplingParams
) -> tuple[int, ...]:
    """The numbers of the processors that have a part in a request.

    Raises:
        InvalidRequestError: ``extra_args`` that none of them reads, or that one refuses.
    """
    known = {name for processor in processors for name in processor.extra_args}
    for name in sampling_params.extra_args or ():
        if name not in known:
            accepted = ", ".join(sorted(known)) or "none: the engine has no such logits processor"
            raise invalid("extra_args", name, f"a key that a logits processor reads ({accepted})")
    return tuple(
        number
        for number, processor in enumerate(processors)
        if _has_part(processor, sampling_params)
    )


def _has_part(processor: LogitsProcessor, sampling_params: SamplingParams) -> bool:
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
            f"{type(processor).__name__} refused it: {explain(error)}",
            param="extra_args",
        ) from error
