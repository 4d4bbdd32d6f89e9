"""Generate and complete: completions of the rows of a Ray dataset."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncllm import AsyncLLMEngine, EngineConfig, SamplingParams
from asyncllm import validation as check
from asyncllm_ray.wire import check_sendable

if TYPE_CHECKING:
    from ray.data import Dataset

_FORMATS = ("default", "numpy", "pandas", "pyarrow")
_OWN_OPTIONS = {"fn", "batch_size", "compute", "concurrency", "udf_modifying_row_count"}


class Generate:
    """Class for ``Dataset.map_batches`` that completes each row with an engine of its own.

        rows.map_batches(
            Generate,
            fn_constructor_kwargs={"prompt": "question", "sampling_params": {"max_tokens": 64}},
            batch_size=64,
            compute=ray.data.ActorPoolStrategy(size=2),
        )

    ``complete`` does this with checked arguments. Each actor runs one engine, which completes the
    rows of several batches at a time. Batches may be of NumPy, pandas or pyarrow. Three columns are
    added: the text, the finish reason, and the error, which is the message for a failed row and
    None for any other. With ``n`` above 1 in ``sampling_params`` the text and the finish reason of
    a row are lists of ``n`` strings. A failed row does not end other rows. If an actor is lost, Ray
    Data repeats its unfinished batches.

    Args:
        model, config, overrides: as for ``AsyncLLMEngine``.
        prompt: name of the column with the prompt: text, token ids or messages; or a function of a
            row, a dict, that makes it.
        sampling_params: for all rows, as SamplingParams or a dict of its fields; or a function of a
            row, whose result has to have ``n=1``.
        output, finish_reason, error: names of the added columns. Rows may not have them already.

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
        finish_reason: str = "finish_reason",
        error: str = "error",
        **overrides: Any,
    ) -> None:
        if not callable(prompt):
            accepted = "the name of a column, or a function of a row"
            prompt = partial(_column, _text("prompt", prompt, accepted))
        self._num_outputs = 1
        if isinstance(sampling_params, Mapping):
            accepted = "names of SamplingParams' fields"
            sampling_params = SamplingParams(
                **{
                    _text("sampling_params", key, accepted): sampling_params[key]
                    for key in sampling_params
                }
            )
        if isinstance(sampling_params, SamplingParams):
            self._num_outputs = sampling_params.n
        elif sampling_params is not None:
            if not callable(sampling_params):
                accepted = "SamplingParams, a dict of its fields, a function of a row, or None"
                raise check.value_error("sampling_params", sampling_params, accepted)
            sampling_params = partial(_call, partial(_one_output, sampling_params))
        self._prompt, self._params = partial(_call, prompt), sampling_params
        self._columns: dict[str, str] = {}
        for name, column in [
            ("output", output),
            ("finish_reason", finish_reason),
            ("error", error),
        ]:
            if check.string(name, column) in self._columns.values():
                raise check.value_error(name, column, "the name of a column of its own")
            self._columns[name] = column
        self._engine = AsyncLLMEngine(model, config=config, **overrides)
        self._lock = asyncio.Lock()

    async def start(self) -> None:
        """Start the engine, if it has not started. The first batch does so, too.

        Raises:
            ModelLoadError: if the engine cannot start.
        """
        async with self._lock:
            if self._engine.state == "new":
                await self._engine.start()

    async def __call__(self, batch: Any) -> Any:
        """Complete a batch; returns it with the new columns.

        Args:
            batch: dict of columns, pandas.DataFrame or pyarrow.Table.

        Raises:
            InvalidRequestError: if the batch has a column with the name of a new one, or is of
                another type.
            ModelLoadError, EngineDeadError: if the engine cannot start, or has died.
        """
        columns = _read_columns(batch)
        self.check_columns(columns)
        await self.start()
        rows = [dict(zip(columns, one, strict=True)) for one in zip(*columns.values(), strict=True)]
        texts: list[Any] = []
        reasons: list[Any] = []
        errors: list[str | None] = []
        params = self._params
        async with self._engine.map(rows, prompt=self._prompt, sampling_params=params) as results:
            async for found in results:
                outputs = () if found.completion is None else found.completion.outputs
                texts.append(self._value([one.text for one in outputs]))
                reasons.append(self._value([one.finish_reason for one in outputs]))
                errors.append(None if found.error is None else _message(found.error))
        values = dict(zip(self._columns.values(), (texts, reasons, errors), strict=True))
        if _library(batch) != "pyarrow":
            return {**batch, **values}
        import pyarrow

        for name, column in values.items():
            is_list = column is not errors and self._num_outputs > 1
            kind = pyarrow.list_(pyarrow.string()) if is_list else pyarrow.string()
            batch = batch.append_column(name, pyarrow.array(column, kind))
        return batch

    def check_columns(self, names: Collection[str]) -> None:
        """Raise InvalidRequestError if rows with columns of these names cannot get the new ones."""
        for field, column in self._columns.items():
            if column in names:
                accepted = f"a name that no column of the rows has ({', '.join(sorted(names))})"
                raise check.value_error(field, column, accepted)

    def _value(self, outputs: list[Any]) -> Any:
        """A row's value in a new column: None if the row failed, a list if each row has several
        outputs."""
        if not outputs:
            return None
        return outputs if self._num_outputs > 1 else outputs[0]


def complete(
    rows: Dataset,
    model: str | os.PathLike[str] | None = None,
    config: EngineConfig | None = None,
    *,
    batch_size: int = 64,
    concurrency: int | tuple[int, int] = 1,
    map_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Dataset:
    """Complete the rows of a dataset; returns the dataset with the new columns.

        answers = complete(rows, prompt="question", sampling_params={"max_tokens": 64})

    As any operation of a dataset, it runs when the result is read. Arguments are checked at once,
    before an actor starts; only files of a model are read by the actors. Columns of ``rows`` are
    checked at once if the dataset knows them, else by the actors.

    Args:
        rows: the dataset.
        model, config, options: as for ``Generate``.
        batch_size: number of rows in a batch. Small batches leave the engine idle.
        concurrency: number of actors, each with an engine; or the least and the greatest number.
        map_options: further options of ``Dataset.map_batches``: ``num_cpus`` and ``num_gpus`` of an
            actor, ``batch_format`` and others.

    Raises:
        InvalidRequestError: for an argument that cannot be used, or cannot be sent to an actor.
    """
    import ray.data

    if not isinstance(rows, ray.data.Dataset):
        raise check.value_error("rows", rows, "a ray.data.Dataset")
    given = {"model": model, "config": config, **options}
    generate = Generate(**given)  # Neither threads nor files are opened before its start.
    for name, value in given.items():
        check_sendable(name, value)
    schema = rows.schema(fetch_if_missing=False)
    if schema is not None:
        generate.check_columns(schema.names)
        prompt = options.get("prompt", "prompt")
        if isinstance(prompt, str):
            _column(prompt, dict.fromkeys(schema.names))
    return rows.map_batches(
        Generate,
        fn_constructor_kwargs=given,
        batch_size=check.integer("batch_size", batch_size, 1),
        compute=_actors(concurrency),
        udf_modifying_row_count=False,
        **_check_map_options(rows, map_options),
    )


def _actors(concurrency: Any) -> Any:
    from ray.data import ActorPoolStrategy

    if not isinstance(concurrency, Sequence):
        return ActorPoolStrategy(size=check.integer("concurrency", concurrency, 1))
    if isinstance(concurrency, str) or len(concurrency) != 2:
        raise check.value_error(
            "concurrency", concurrency, "a number of actors, or two: least, most"
        )
    least = check.integer("concurrency", concurrency[0], 1)
    most = check.integer("concurrency", concurrency[1], least)
    return ActorPoolStrategy(min_size=least, max_size=most)


def _check_map_options(rows: Any, given: Any) -> dict[str, Any]:
    if not isinstance(given, Mapping | None):
        raise check.value_error("map_options", given, "a dict of options of map_batches, or None")
    found = dict(given or {})
    parameters = inspect.signature(rows.map_batches).parameters.values()
    known = {one.name for one in parameters if one.kind is one.KEYWORD_ONLY} - _OWN_OPTIONS
    known = sorted(name for name in known if not name.startswith("fn_"))
    for name in found:
        if name not in known:
            raise check.value_error("map_options", name, f"one of {', '.join(known)}")
    for name in ("num_cpus", "num_gpus", "memory"):
        check.number(name, found.get(name), 0, 1e18, optional=True)
    check.choice("batch_format", found.get("batch_format"), _FORMATS, optional=True)
    return found


def _read_columns(batch: Any) -> dict[str, list[Any]]:
    """The columns of a batch, with Python's own values."""
    if _library(batch) == "pyarrow":
        return {name: _plain(batch[name].to_pylist()) for name in batch.column_names}
    if not isinstance(batch, dict) and _library(batch) != "pandas":
        accepted = f"{', '.join(map(repr, _FORMATS))} or None"
        raise check.value_error("batch_format", type(batch).__name__, accepted)
    return {name: _plain(batch[name]) for name in batch}


def _library(batch: Any) -> str:
    return type(batch).__module__.partition(".")[0]


def _plain(column: Iterable[Any]) -> list[Any]:
    return [one.tolist() if isinstance(one, np.ndarray | np.generic) else one for one in column]


def _text(name: str, value: Any, accepted: str) -> str:
    if not isinstance(value, str):
        raise check.value_error(name, value, accepted)
    return check.string(name, value)


def _column(name: str, row: dict[str, Any]) -> Any:
    if name not in row:
        accepted = f"a column of the row: {', '.join(sorted(row)) or 'it has none'}"
        raise check.value_error("prompt", name, accepted)
    return row[name]


class _RowError(Exception):
    """Stands for its cause, an exception of a row's function that is no ``Exception``."""


def _call(function: Callable[[dict[str, Any]], Any], row: dict[str, Any]) -> Any:
    """Call a row's function. SystemExit, CancelledError and the like would end the row's batch."""
    try:
        return function(row)
    except Exception:
        raise
    except BaseException as error:
        raise _RowError from error


def _one_output(function: Callable[[dict[str, Any]], Any], row: dict[str, Any]) -> Any:
    params = function(row)
    if isinstance(params, SamplingParams) and params.n != 1:
        accepted = "1 from a function of a row; give SamplingParams for all rows to have more"
        raise check.value_error("sampling_params.n", params.n, accepted)
    return params


def _message(error: BaseException) -> str:
    """Text of a row's error. Arrow has no lone surrogates."""
    if isinstance(error, _RowError) and error.__cause__ is not None:
        error = error.__cause__
    return check.describe_error(error).encode("utf-8", "backslashreplace").decode()
