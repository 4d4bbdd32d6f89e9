"""Programs that measure servers and models, against the application on the packaged model: guidellm
for a minute, lm-eval's ``local-completions`` on a task of the test's own. Each has its packages in
a folder of its own, beside those that are installed:

    pip install --no-deps --target build/guidellm …
    pip install --no-deps --target build/lm_eval …

with what ``pip install --dry-run guidellm`` and ``lm_eval[api]`` ask for and is not there.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import asyncllm
from asyncllm import AsyncLLMEngine
from asyncllm.serving import create_app
from asyncllm.serving.http_server import HttpServer

ROOT = Path(__file__).parent.parent
BUILD = ROOT / "build"
DEMO = Path(asyncllm.__file__).parent / "demo_model"
pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_factories=["asyncio"])]


def folder_of(name):
    folder = Path(os.environ.get(name.upper(), BUILD / name))
    if not folder.is_dir():
        pytest.skip(f"pip install --no-deps --target {BUILD.name}/{name} its packages first")
    return folder


@asynccontextmanager
async def served(engine):
    async with HttpServer(create_app(engine), port=0, drain=1) as server:
        yield f"http://127.0.0.1:{server.port}"


async def run(name, *arguments):
    """Runs a module of the packages in the folder."""
    folder = folder_of(name)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", name, *map(str, arguments)),
        env={**os.environ, "PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await process.communicate()
    assert process.returncode == 0, out.decode()[-5000:]


async def test_guidellm_for_a_minute(tmp_path):
    report = tmp_path / "report.json"
    async with AsyncLLMEngine() as engine, served(engine) as url:
        await run(
            *("guidellm", "run", "--disable-progress"),
            "--backend",
            f"kind=openai_http,target={url},model=asyncllm/demo,"
            "request_format=/v1/chat/completions",
            *("--profile", "kind=concurrent,streams=8"),
            *("--constraint", "kind=max_duration,seconds=60"),
            *("--tokenizer", f"kind=hf_auto,model={DEMO}"),
            *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=24"),
            *("--output", f"kind=json,path={report}"),
        )
    (found,) = json.loads(report.read_text())["benchmarks"]
    totals = found["metrics"]["request_totals"]
    assert totals["errored"] == 0
    assert totals["successful"] > 20
    for request in found["requests"]["successful"]:
        assert request["output_metrics"]["text_tokens"] == 24
    print(json.dumps({name: found["metrics"][name]["successful"]["median"] for name in FIGURES}))


FIGURES = ("requests_per_second", "output_tokens_per_second", "time_to_first_token_ms")

TASK = """task: sums
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: answer
doc_to_choice: "{{{{choices}}}}"
"""
SUMS = [(2, 3), (4, 5), (12, 7), (6, 6), (10, 9), (1, 8)]


async def test_lm_eval_scores_as_the_engine_does(tmp_path):
    data = tmp_path / "data.jsonl"
    rows = [
        {
            "question": f"What is {a} + {b}?",
            "choices": [f"{a} + {b} = {a + b + more}." for more in (0, 1, 10)],
            "answer": 0,
        }
        for a, b in SUMS
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "sums.yaml").write_text(TASK.format(data=data))
    async with AsyncLLMEngine() as engine, served(engine) as url:
        await run(
            *("lm_eval", "run", "--model", "local-completions", "--log_samples"),
            "--model_args",
            f"model=asyncllm/demo,base_url={url}/v1/completions,tokenizer={DEMO}",
            *("--tasks", "sums", "--include_path", tmp_path, "--output_path", tmp_path / "out"),
        )
        (samples,) = tmp_path.glob("out/*/samples_*.jsonl")
        found = [json.loads(line) for line in samples.read_text().splitlines()]
        assert len(found) == len(rows)
        for sample in found:
            row = rows[sample["doc_id"]]
            begin = len(engine.tokenizer.encode(row["question"]))
            for choice, (told, _) in zip(row["choices"], sample["filtered_resps"], strict=True):
                ids = engine.tokenizer.encode(f"{row['question']} {choice}")
                own = await engine.generate(ids, max_tokens=1, prompt_logprobs=0)
                expected = sum(one.logprob for one in own.prompt_logprobs[begin:])
                assert abs(expected - float(told)) < 1e-3, (choice, expected, told)
