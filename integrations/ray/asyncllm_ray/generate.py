"""Generate: completes the rows of a Ray dataset."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from asyncllm import AsyncLLMEngine, EngineConfig, SamplingParams
from asyncllm import validation as check


class Generate:
    """Class for ``Dataset.map_batches`` that completes each row with an engine of its own.

        rows.map_batches(
            Generate,
            fn_constructor_kwargs={"prompt": "question", "sampling_params": {"max_tokens": 64}},
            batch_size=64,
            concurrency=2,
        )

    Each actor runs one engine, which completes the rows of several batches at a time. Three columns
    are added: the text, ``finish_reason``, and ``error``, the message for a failed row and None for
    any other. A failed row does not end other rows. If an actor is lost, Ray Data repeats its
    unfinished batches.

    Args:
        model, config, overrides: as for ``AsyncLLMEngine``.
        prompt: name of the column with the prompt: text, token ids or messages; or a function of a
            row, a dict, that makes it.
        sampling_params: for all rows, as SamplingParams or a dict of its fields; or a function of a
            row.
        output: name of the column of the texts.

    Raises:
        InvalidRequestError: for an argument that cannot be used.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        config: EngineConfig | None = None,
        *,
        prompt: str | Callable[[dict[str, Any]], Any] = "prompt",
        sampling_params: SamplingParams
        | Mapping[str, Any]
        | Callable[[dict[str, Any]], SamplingParams | None]
        | None = None,
        output: str = "text",
        **overrides: Any,
    ) -> None:
        if not (isinstance(prompt, str) or callable(prompt)):
            raise check.invalid("prompt", prompt, "the name of a column, or a function of a row")
        if isinstance(sampling_params, Mapping):
            sampling_params = SamplingParams(**sampling_params)
        self._prompt = partial(_column, prompt) if isinstance(prompt, str) else prompt
        self._params = sampling_params
        self._output = check.string("output", output)
        if output in ("finish_reason", "error"):
            raise check.invalid("output", output, "the name of a column of its own")
        self._engine = AsyncLLMEngine(model, config=config, **overrides)
        self._lock = asyncio.Lock()

    async def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Complete a batch, a dict of columns; returns it with the new columns.

        Raises:
            ModelLoadError, EngineDeadError: if the engine cannot start, or has died.
        """
        async with self._lock:
            if self._engine.state == "new":
                await self._engine.start()
        names = list(batch)
        columns = [_plain(batch[name]) for name in names]
        rows = [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]
        texts: list[str | None] = []
        reasons: list[str | None] = []
        errors: list[str | None] = []
        params = self._params
        async with self._engine.map(rows, prompt=self._prompt, sampling_params=params) as results:
            async for found in results:
                done = found.completion
                texts.append(None if done is None else done.text)
                reasons.append(None if done is None else done.finish_reason)
                errors.append(None if found.error is None else check.explain(found.error))
        return {**batch, self._output: texts, "finish_reason": reasons, "error": errors}


def _plain(column: Any) -> Any:
    """The values of a column of NumPy or pandas, as Python's."""
    values = column.tolist() if hasattr(column, "tolist") else column
    return [one.tolist() if hasattr(one, "tolist") else one for one in values]


def _column(name: str, row: dict[str, Any]) -> Any:
    if name not in row:
        accepted = f"a column of the row: {', '.join(sorted(row)) or 'it has none'}"
        raise check.invalid("prompt", name, accepted)
    return row[name]
