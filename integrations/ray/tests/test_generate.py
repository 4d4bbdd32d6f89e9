"""Batch jobs by Ray Data."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from asyncllm_ray import Generate

from asyncllm import LLM, InvalidRequestError, SamplingParams

OPTIONS: dict[str, Any] = {"num_threads": 1, "num_blocks": 256}


def complete(rows: Any, batch_size: int = 16, **given: Any) -> list[dict[str, Any]]:
    found = rows.map_batches(
        Generate,
        fn_constructor_kwargs=OPTIONS | given,
        batch_size=batch_size,
        concurrency=1,
        num_cpus=0.25,
    )
    return found.take_all()


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


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"prompt": 3}, "prompt"),
        ({"output": "error"}, "output"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
    ],
)
def test_arguments_are_refused_by_name(given: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Generate(**given)
    assert caught.value.param == param


@pytest.mark.slow
def test_a_dataset_is_completed(cluster: Any, llm: LLM) -> None:
    rows = ray.data.from_items([{"id": i, "prompt": f"{i} boats"} for i in range(40)])
    found = complete(rows, sampling_params={"max_tokens": 8, "temperature": 0})
    texts = {row["id"]: row["text"] for row in found}
    assert texts == {
        i: llm.generate(f"{i} boats", max_tokens=8, temperature=0).text for i in range(40)
    }
    assert {row["error"] for row in found} == {None}


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
        concurrency=1,
        num_cpus=0.25,
    ).take_all()
    assert flag.exists()
    assert sorted(row["id"] for row in found) == list(range(1000))
    assert {row["finish_reason"] for row in found} == {"length"}
    assert time.monotonic() - begin < 120
