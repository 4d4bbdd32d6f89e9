"""HostSamplingRules: bad words of several tokens and logits processors, which run on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncllm.core.batch import SlotAssignment
from asyncllm.core.token_rules import BadWords
from asyncllm.sampling_params import RequestLogitsProcessor
from asyncllm.validation import describe


@dataclass(slots=True, eq=False)
class RequestWithProcessors:
    """A request to which some of the engine's logits processors apply.

    Attributes:
        processors: indices of the processors that apply, which "claimed" the request.
        assignment: its assignment to an index of the persistent batch.
        output: output tokens so far; the processors hold the same list and see it grow.
        error: error of a processor that failed and no longer knows the request's state.
    """

    processors: tuple[int, ...]
    assignment: SlotAssignment
    output: list[int]
    error: Exception | None = None


@dataclass(slots=True)
class HostSamplingRules:
    """A request's sampling parameters that are applied on the host.

    Attributes:
        bad_words: the request's bad words of several tokens; None without them.
        processors: the request's own logits processors, in order.
        request_with_processors: the request, with the engine's processors that apply to it; None
            if none of the engine's processors applies.
    """

    bad_words: BadWords | None = None
    processors: tuple[RequestLogitsProcessor, ...] = ()
    request_with_processors: RequestWithProcessors | None = None

    @property
    def has_only_bad_words(self) -> bool:
        return not self.processors and self.request_with_processors is None

    def excluded_tokens(self, output: np.ndarray) -> list[int]:
        """List the tokens that would complete a bad word now.

        Args:
            output: ``[n]``, the output tokens so far.
        """
        # An array is not a Sequence, but BadWords needs only its length, items and slices.
        tokens: Any = output
        return [] if self.bad_words is None else self.bad_words.excluded_tokens(tokens)


def apply_processors(row: Tensor, rules: HostSamplingRules, output: np.ndarray) -> None:
    """Applies the request's own logits processors to its row, in place.

    Raises:
        TypeError: a processor did not return a tensor ``[vocab_size]``.
        RuntimeError: a processor raised a BaseException, such as SystemExit, that is not an
            Exception.
        Exception: the error that a processor raised.
    """
    value, tokens = row.clone(), output.tolist()
    try:
        for processor in rules.processors:
            name = f"logits processor {describe(processor)}"
            value = checked_logits(processor(tokens, value), row.shape, name)
        row.copy_(value)
    except Exception:
        raise
    except BaseException as error:
        # No signal is delivered on this thread, so the processor itself raised the SystemExit or
        # KeyboardInterrupt, which must end neither the thread nor the process.
        raise RuntimeError(f"a logits processor raised {describe(error)}") from error


def checked_logits(value: object, shape: torch.Size, name: str) -> Tensor:
    """Returns the result of a logits processor, after checks.

    Args:
        name: name of the processor, for errors.

    Raises:
        TypeError: it is no tensor of this shape.
        ValueError: it extends beyond its storage, which the processor may have resized. Torch would
            read past the end.
    """
    if not isinstance(value, Tensor) or value.shape != shape:
        is_tensor = isinstance(value, Tensor)
        kind = f"tensor of shape {tuple(value.shape)}" if is_tensor else type(value).__name__
        raise TypeError(f"{name} returned a {kind}, expected a tensor of shape {tuple(shape)}")
    spans = zip(value.shape, value.stride(), strict=True)
    last = value.storage_offset() + sum((count - 1) * stride for count, stride in spans)
    if value.untyped_storage().nbytes() < (last + 1) * value.itemsize:
        raise ValueError("a logits processor returned a tensor whose storage does not hold it")
    return value
