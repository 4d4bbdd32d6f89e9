"""Batch jobs by Ray Data."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow
import pytest
import ray
import ray.data
from asyncllm_ray import Generate, complete
from ray.exceptions import RayTaskError

from asyncllm import LLM, EngineConfig, InvalidRequestError, SamplingParams

OPTIONS: dict[str, Any] = {"num_threads": 1, "num_blocks": 256}


GREEDY: dict[str, Any] = {"max_tokens": 4, "temperature": 0.0}
PAIR: dict[str, Any] = {"n": 2, "max_tokens": 6, "seed": 1}


async def test_a_batch_by_itself(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=0)
    generate = Generate(prompt="question", sampling_params=params, output="answer", **OPTIONS)
    batch = {"id": [1, 2, 3], "question": ["Mia", None, list(range(600))]}
    found = await generate(batch)
    assert found["id"] == [1, 2, 3]
    assert found["answer"] == [llm.generate("Mia", params).text, None, None]
    assert found["error"][0] is None
    assert found["error"][1].startswith("InvalidRequestError: prompt=None")
    assert found["error"][2].startswith("ContextLengthExceededError")
    assert found["finish_reason"][1:] == [None, None]
    missing = await generate({"other": ["Mia"]})
    assert missing["error"] == [
        "InvalidRequestError: prompt='question': expected a column of the row: other"
    ]
    await generate._engine.aclose()


async def test_functions_of_a_row(llm: LLM) -> None:
    generate = Generate(
        prompt=lambda row: row["a"] + row["b"],
        sampling_params=lambda row: SamplingParams(max_tokens=row["n"], temperature=0),
        **OPTIONS,
    )
    found = await generate({"a": ["Mia ", "Mia "], "b": ["sails", "rows"], "n": [3, 5]})
    assert found["text"] == [
        llm.generate("Mia sails", max_tokens=3, temperature=0).text,
        llm.generate("Mia rows", max_tokens=5, temperature=0).text,
    ]
    await generate._engine.aclose()


def raises(error: BaseException) -> Callable[[dict[str, Any]], Any]:
    def function(row: dict[str, Any]) -> Any:
        if row["id"] == 3:
            raise error
        return "Mia"

    return function


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("no"), "ValueError: no"),
        (ValueError("\ud800"), "ValueError: \\ud800"),
        (StopIteration(), "StopIteration: "),
        (SystemExit(3), "SystemExit: 3"),
        (GeneratorExit(), "GeneratorExit: "),
        (KeyboardInterrupt(), "KeyboardInterrupt: "),
        (asyncio.CancelledError(), "CancelledError: "),
    ],
)
@pytest.mark.parametrize("name", ["prompt", "sampling_params"])
async def test_a_function_that_raises_anything_fails_its_row(
    error: BaseException, message: str, name: str
) -> None:
    given: dict[str, Any] = {"prompt": lambda _: "Mia", "sampling_params": GREEDY}
    if name == "prompt":
        given["prompt"] = raises(error)
    else:
        given["sampling_params"] = lambda row: raises(error)(row) and SamplingParams(**GREEDY)
    generate = Generate(**OPTIONS, **given)
    found = await asyncio.wait_for(generate({"id": list(range(6))}), 20)
    assert found["error"] == [None, None, None, message, None, None]
    assert [text is None for text in found["text"]] == [number == 3 for number in range(6)]
    await generate._engine.aclose()


def fail_in_turn(row: dict[str, Any], lock: object = None) -> str:
    kinds = [SystemExit, GeneratorExit, KeyboardInterrupt, asyncio.CancelledError]
    if row["id"] < len(kinds):
        raise kinds[row["id"]](5)
    return "Mia"


BATCH = {"id": [1, 2, 3], "prompt": ["Mia", "", "A boat"]}


@pytest.mark.parametrize(
    "batch",
    [
        {name: np.array(column, object) for name, column in BATCH.items()},
        pandas.DataFrame(BATCH),
        pyarrow.table(BATCH),
    ],
    ids=["numpy", "pandas", "pyarrow"],
)
async def test_batches_of_each_format(batch: Any, llm: LLM) -> None:
    generate = Generate(sampling_params=GREEDY, **OPTIONS)
    table = await generate(batch)
    if isinstance(batch, pyarrow.Table):
        string = pyarrow.string()
        assert table.schema.types == [pyarrow.int64(), string, string, string, string]
        found = table.to_pydict()
    else:
        found = {name: list(column) for name, column in table.items()}
    texts = [llm.generate(prompt, **GREEDY).text for prompt in ("Mia", "A boat")]
    assert {name: found[name] for name in BATCH} == BATCH
    assert found["text"] == [texts[0], None, texts[1]]
    assert [error is None for error in found["error"]] == [True, False, True]
    await generate._engine.aclose()


async def test_a_batch_of_another_type_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="'pyarrow' or None") as caught:
        await Generate(**OPTIONS)([{"prompt": "Mia"}])
    assert caught.value.param == "batch_format"


@pytest.mark.parametrize(
    ("column", "param"),
    [("text", "output"), ("finish_reason", "finish_reason"), ("error", "error")],
)
async def test_no_column_is_overwritten(column: str, param: str) -> None:
    batch = {"prompt": ["Mia"], column: ["kept"]}
    with pytest.raises(InvalidRequestError) as caught:
        await Generate(**OPTIONS)(batch)
    assert caught.value.param == param
    generate = Generate(sampling_params=GREEDY, **{param: "mine"}, **OPTIONS)
    found = await generate(batch)
    assert found[column] == ["kept"]
    assert set(found) == {"prompt", "mine", "text", "finish_reason", "error"}
    await generate._engine.aclose()


@pytest.mark.parametrize("make", [dict, pyarrow.table])
async def test_several_outputs_are_a_list(make: Any, llm: LLM) -> None:
    generate = Generate(sampling_params=PAIR, **OPTIONS)
    table = await generate(make({"prompt": ["Mia", ""]}))
    found = table if make is dict else table.to_pydict()
    expected = [one.text for one in llm.generate("Mia", **PAIR).outputs]
    assert len(expected) == 2
    assert found["text"] == [expected, None]
    assert found["finish_reason"] == [["length", "length"], None]
    await generate._engine.aclose()


async def test_a_function_may_not_ask_for_several_outputs() -> None:
    generate = Generate(
        sampling_params=lambda row: SamplingParams(n=row["n"], max_tokens=4), prompt="p", **OPTIONS
    )
    found = await generate({"p": ["Mia", "Mia"], "n": [1, 2]})
    assert found["error"][0] is None
    assert found["error"][1].startswith("InvalidRequestError: sampling_params.n=2: expected 1")
    await generate._engine.aclose()


BAD_ARGUMENTS = [
    ({"prompt": 3}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"output": "error"}, "error"),
    ({"output": None}, "output"),
    ({"error": 5}, "error"),
    ({"finish_reason": ""}, "finish_reason"),
    ({"sampling_params": 5}, "sampling_params"),
    ({"sampling_params": {1: 2}}, "sampling_params"),
    ({"sampling_params": {"bogus": 1}}, "bogus"),
    ({"sampling_params": {"max_tokens": -1}}, "max_tokens"),
    ({"max_num_seqs": 0}, "max_num_seqs"),
    ({"bogus": 1}, "bogus"),
    ({"model": 5}, "model"),
    ({"config": {"num_threads": 1}}, "config"),
]


@pytest.mark.parametrize(("given", "param"), BAD_ARGUMENTS)
def test_arguments_are_refused_by_name(given: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Generate(**given)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("given", "param"),
    [
        *BAD_ARGUMENTS,
        ({"rows": None}, "rows"),
        ({"rows": [{"prompt": "Mia"}]}, "rows"),
        ({"prompt": "question"}, "prompt"),
        ({"output": "id"}, "output"),
        ({"prompt": partial(fail_in_turn, lock=threading.Lock())}, "prompt"),
        ({"concurrency": 0}, "concurrency"),
        ({"concurrency": -1}, "concurrency"),
        ({"concurrency": None}, "concurrency"),
        ({"concurrency": "two"}, "concurrency"),
        ({"concurrency": (2, 1)}, "concurrency"),
        ({"concurrency": (1, 2, 3)}, "concurrency"),
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": None}, "batch_size"),
        ({"map_options": 5}, "map_options"),
        ({"map_options": {"bogus": 5}}, "map_options"),
        ({"map_options": {"fn_args": ()}}, "map_options"),
        ({"map_options": {"num_cpus": -1}}, "num_cpus"),
        ({"map_options": {"num_gpus": "one"}}, "num_gpus"),
        ({"map_options": {"batch_format": "cudf"}}, "batch_format"),
    ],
)
def test_a_job_is_refused_before_it_runs(cluster: Any, given: dict[str, Any], param: str) -> None:
    rows = ray.data.from_items([{"id": 1, "prompt": "Mia"}])
    arguments: dict[str, Any] = {"rows": rows, **given}
    with pytest.raises(InvalidRequestError) as caught:
        complete(**arguments)
    assert caught.value.param == param


def test_an_engine_that_is_only_checked_starts_no_thread(cluster: Any) -> None:
    rows = ray.data.from_items([{"prompt": "Mia"}])
    before = threading.active_count()
    complete(rows, config=EngineConfig(num_blocks=256), concurrency=(1, 2))
    assert threading.active_count() == before


@pytest.mark.slow
@pytest.mark.parametrize("batch_format", ["default", "numpy", "pandas", "pyarrow", None])
def test_a_dataset_is_completed(cluster: Any, llm: LLM, batch_format: str | None) -> None:
    rows = ray.data.from_items([{"id": i, "prompt": f"{i} boats"} for i in range(40)])
    found = complete(
        rows,
        batch_size=16,
        map_options={"batch_format": batch_format, "num_cpus": 0.25},
        sampling_params=PAIR,
        **OPTIONS,
    ).take_all()
    texts = {row["id"]: list(row["text"]) for row in found}
    assert texts == {
        i: [one.text for one in llm.generate(f"{i} boats", **PAIR).outputs] for i in range(40)
    }
    assert {row["error"] for row in found} == {None}


@pytest.mark.slow
def test_a_job_goes_on_after_a_function_that_raises(cluster: Any) -> None:
    rows = ray.data.from_items([{"id": i} for i in range(12)], override_num_blocks=2)
    options = {"num_cpus": 0.25}
    found = complete(
        rows, prompt=fail_in_turn, sampling_params=GREEDY, map_options=options, **OPTIONS
    ).take_all()
    errors = {row["id"]: row["error"] for row in found}
    assert [errors[i] for i in range(4)] == [
        "SystemExit: 5",
        "GeneratorExit: 5",
        "KeyboardInterrupt: 5",
        "CancelledError: 5",
    ]
    assert [errors[i] for i in range(4, 12)] == [None] * 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": "/no/such/model"}, "ModelLoadError: /no/such/model: does not exist"),
        ({"output": "id"}, "InvalidRequestError: output='id': expected a name that no column"),
    ],
)
def test_an_actors_error_is_in_the_jobs(cluster: Any, given: dict[str, Any], message: str) -> None:
    # A dataset after a function does not know its columns.
    rows = ray.data.from_items([{"prompt": "Mia"}]).map_batches(lambda batch: batch | {"id": [1]})
    with pytest.raises(RayTaskError, match=re.escape(message)):
        complete(rows, map_options={"num_cpus": 0.25}, **(OPTIONS | given)).take_all()


class KilledOnce(Generate):
    """Kills its process once, in the middle of the job."""

    def __init__(self, flag: str, **given: Any) -> None:
        super().__init__(**given)
        self._flag = Path(flag)

    async def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        found = await super().__call__(batch)
        if max(batch["id"]) > 500 and not self._flag.exists():
            self._flag.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)
        return found


@pytest.mark.slow
def test_a_lost_actor_repeats_its_batches(cluster: Any, tmp_path: Path) -> None:
    rows = ray.data.from_items([{"id": i, "prompt": f"{i} boats"} for i in range(1000)])
    flag = tmp_path / "killed"
    given = OPTIONS | {"sampling_params": {"max_tokens": 8, "temperature": 0, "ignore_eos": True}}
    begin = time.monotonic()
    found = rows.map_batches(
        KilledOnce,
        fn_constructor_kwargs=given | {"flag": str(flag)},
        batch_size=50,
        compute=ray.data.ActorPoolStrategy(size=1),
        num_cpus=0.25,
    ).take_all()
    assert flag.exists()
    assert sorted(row["id"] for row in found) == list(range(1000))
    assert {row["finish_reason"] for row in found} == {"length"}
    assert time.monotonic() - begin < 120
