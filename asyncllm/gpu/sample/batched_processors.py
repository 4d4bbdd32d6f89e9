"""BatchedProcessors: the engine's LogitsProcessors and the requests that they process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncllm.config import EngineConfig
from asyncllm.core.batch import SlotAssignment
from asyncllm.errors import EngineError
from asyncllm.gpu.h2d import copy_to_device
from asyncllm.gpu.sample.host_rules import RequestWithProcessors, checked_logits
from asyncllm.logits_processor import ENTRY_POINT_GROUP, BatchUpdate, LogitsProcessor
from asyncllm.validation import describe_error


class BatchedProcessors:
    """The engine's LogitsProcessors, and the batch updates that they have not received yet.

    Each processor is notified of its own requests only. A request may leave its index before its
    last step is sampled, so batch updates are numbered: a processor receives those that came before
    the step being sampled.

    Attributes:
        num_batch_updates: number of batch updates so far: requests that entered or left.
    """

    def __init__(self, processors: Sequence[LogitsProcessor]) -> None:
        self.num_batch_updates = 0
        self._processor_batches = [_ProcessorBatch(processor) for processor in processors]

    def add_request(self, assignment: SlotAssignment) -> RequestWithProcessors:
        prompt = assignment.num_prompt_tokens
        request = RequestWithProcessors(
            assignment.claiming_processors, assignment, list(assignment.token_ids[prompt:])
        )
        self._queue_update(request, is_added=True)
        return request

    def remove_request(self, request: RequestWithProcessors) -> None:
        self._queue_update(request, is_added=False)

    def _queue_update(self, request: RequestWithProcessors, *, is_added: bool) -> None:
        self.num_batch_updates += 1
        added = request if is_added else None
        update = self.num_batch_updates, request.assignment.req_index, added
        for number in request.processors:
            self._processor_batches[number].pending_updates.append(update)

    def apply(
        self,
        logits: Tensor,
        requests: Mapping[int, RequestWithProcessors],
        num_batch_updates: int,
        errors: dict[int, Exception],
    ) -> None:
        """Applies each processor, in place, to the rows of the requests that use it.

        Args:
            logits: ``[S, vocab_size]``.
            requests: by row, the RequestWithProcessors, whose output is up to date.
            num_batch_updates: number of batch updates before this step.
            errors: errors by row. Rows with an error are skipped; if a processor fails, errors are
                added for its rows.
        """
        for number, batch in enumerate(self._processor_batches):
            rows = [row for row, request in requests.items() if number in request.processors]
            if not rows:
                continue
            batch.update_state(num_batch_updates)
            failed = {row: error for row in rows if (error := requests[row].error) is not None}
            errors |= {row: error for row, error in failed.items() if row not in errors}
            rows = [row for row in rows if row not in errors]
            if not rows:
                continue
            index = copy_to_device(np.array(rows, dtype=np.int64), logits.device)
            indices = [requests[row].assignment.req_index for row in rows]
            try:
                logits[index] = batch.apply(logits[index], indices)
            except Exception as error:
                errors |= dict.fromkeys(rows, error)


class _ProcessorBatch:
    """A processor and the requests that it has been notified of.

    Attributes:
        pending_updates: batch updates that the processor has not received: the update's number, a
            request index, and the request that gets the index, or None if a request leaves it.
    """

    def __init__(self, processor: LogitsProcessor) -> None:
        self.processor = processor
        self.pending_updates: deque[tuple[int, int, RequestWithProcessors | None]] = deque()
        self._requests: dict[int, RequestWithProcessors] = {}

    def _processor_error(self, error: BaseException) -> RuntimeError:
        """Makes an error that names the processor, from the error that the processor raised.

        Even a SystemExit or KeyboardInterrupt is the processor's: no signal is delivered on this
        thread.
        """
        name = type(self.processor).__name__
        return RuntimeError(f"logits processor {name} failed: {describe_error(error)}")

    def apply(self, logits: Tensor, indices: list[int]) -> Tensor:
        shape = logits.shape
        try:
            return checked_logits(self.processor.apply(logits, indices), shape, "apply").to(logits)
        except BaseException as error:
            raise self._processor_error(error) from error

    def update_state(self, num_batch_updates: int) -> None:
        """Notifies the processor of batch updates up to number ``num_batch_updates``.

        If the processor raises, its state is unknown and all its requests fail. It is not told when
        these requests leave; requests that enter later are processed.
        """
        after: dict[int, RequestWithProcessors | None] = {}
        while self.pending_updates and self.pending_updates[0][0] <= num_batch_updates:
            _, req_index, request = self.pending_updates.popleft()
            after[req_index] = request
        before = self._requests
        removed = [i for i, request in after.items() if i in before and before[i] is not request]
        entered = {i: request for i, request in after.items() if request is not None}
        self._requests = {i: request for i, request in before.items() if i not in after} | entered
        update = None
        if removed or entered:
            added = [
                (
                    i,
                    claimed.assignment.sampling,
                    list(claimed.assignment.token_ids[: claimed.assignment.num_prompt_tokens]),
                    claimed.output,
                )
                for i, claimed in entered.items()
            ]
            update = BatchUpdate(len(self._requests), removed, added)
        try:
            self.processor.update_state(update)
        except BaseException as error:
            failure = self._processor_error(error)
            failure.__cause__ = error
            for request in self._requests.values():
                request.error = request.error or failure
            self._requests = {}


def make_processors(config: EngineConfig, device: torch.device) -> tuple[LogitsProcessor, ...]:
    """Makes the processors in the configuration, then those of installed distributions.

    Raises:
        EngineError: a processor cannot be loaded or made, or is no LogitsProcessor.
    """
    loaders: list[tuple[str, Callable[[], Any]]] = []
    for processor in config.logits_processors:
        if isinstance(processor, str):
            module, _, name = processor.partition(":")
            loaders.append((repr(processor), lambda m=module, n=name: getattr(import_module(m), n)))
        else:
            loaders.append((processor.__name__, lambda kind=processor: kind))
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        owner = entry.dist.name if entry.dist is not None else "an unknown distribution"
        loaders.append((f"{entry.value!r} of {owner}", entry.load))
    processors: dict[type, LogitsProcessor] = {}
    for name, load in loaders:
        try:
            kind = load()
            if not (isinstance(kind, type) and issubclass(kind, LogitsProcessor)):
                raise TypeError("it is no subclass of asyncllm.LogitsProcessor")
            if kind not in processors:
                processors[kind] = kind(config, device, device.type == "cuda")
        except Exception as error:
            raise EngineError(
                f"logits_processors: {name} cannot be made: {describe_error(error)}"
            ) from error
    return tuple(processors.values())
