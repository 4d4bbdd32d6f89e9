"""Python blocks of the documentation, run in the order of the page.

What a page takes for granted, an engine say, is given to it here; a ``text`` block behind a
Python block is what it prints.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import logging
import math
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import asyncllm
from asyncllm import LLM, AsyncLLMEngine, EngineGroup
from asyncllm.testing import fake_engine

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n*```text\n(.*?)^```)?", re.M | re.S)
ELSEWHERE = {
    "docs/attention_backends.md": "tests/test_attention_backends.py",
    "docs/ray.md": "integrations/ray/tests/test_pages.py",
    "docs/structured_output.md": "tests/test_structured_params.py",
    "docs/testing.md": "tests/test_testing.py",
    "integrations/ray/README.md": "integrations/ray/tests/test_pages.py",
}
"""Pages whose own tests look at more than that they run."""
HERE = {
    "README.md": 4,
    "docs/callbacks.md": 1,
    "docs/chat.md": 4,
    "docs/formats.md": 1,
    "docs/groups.md": 2,
    "docs/kernels.md": 1,
    "docs/langchain.md": 2,
    "docs/models.md": 1,
    "docs/multiple_outputs.md": 4,
    "docs/observability.md": 7,
    "docs/pydantic_ai.md": 3,
    "docs/sampling.md": 2,
    "docs/server.md": 2,
    "docs/streaming.md": 11,
    "docs/tools.md": 7,
    "docs/websocket.md": 2,
    "integrations/langchain/README.md": 1,
    "integrations/pydantic_ai/README.md": 1,
}
"""Blocks by page."""

Names = dict[str, Any]


def test_every_block_is_run_somewhere():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    pages += (ROOT / "integrations").glob("*/README.md")
    found = {str(p.relative_to(ROOT)): p.read_text(encoding="utf-8") for p in pages}
    counts = {name: text.count("```python") for name, text in found.items() if "```py" in text}
    assert {name: count for name, count in counts.items() if name not in ELSEWHERE} == HERE
    for page, test in ELSEWHERE.items():
        assert counts[page]
        assert Path(page).name in (ROOT / test).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(num_blocks=256) as llm:
        yield llm


async def run(
    page: str,
    names: Names,
    capsys: pytest.CaptureFixture[str],
    prepare: Callable[[int, Names], None] = lambda number, names: None,
    replace: tuple[str, str] = ("\0", ""),
) -> list[str]:
    """What the blocks printed. A page's names are those that the ones before it made."""
    printed = []
    text = (ROOT / page).read_text(encoding="utf-8").replace(*replace)
    for number, match in enumerate(BLOCK.finditer(text)):
        prepare(number, names)
        code = compile(match[1], page, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if re.search(r"^asyncio\.run\(", match[1], re.M):
            await asyncio.to_thread(eval, code, names)
        elif inspect.iscoroutine(running := eval(code, names)):
            await running
        printed.append(capsys.readouterr().out)
        if match[2] is not None:
            assert printed[-1].rstrip() == match[2].rstrip()
    assert len(printed) == HERE[page]
    return printed


TEXT = r"(?!.*\w\(\w+=).{40,}"  # and no repr
PRINTED = {
    "README.md": (TEXT, TEXT, r"Usage\(prompt_tokens=\d+, completion_tokens=\d+, .*\)\n", TEXT),
    "docs/formats.md": ("",),  # an engine reads nothing until it is started
    "docs/kernels.md": (".*",),
    "docs/multiple_outputs.md": (
        r"([012] .* (None|length|stop)\n)+0 .+\n1 .+\n2 .+\n",
        "True\n",
        r"[0-4] -\d+\.\d+ .+\n",
        r"(-\d\.\d+ (stop|length) .+\n){4}",
    ),
    "docs/tools.md": (".*",) * 7,
}


@pytest.mark.parametrize("page", PRINTED)
async def test_page_runs_with_the_packaged_model(page, capsys):
    """With the packaged model; what a block defines the later ones know."""
    if page == "docs/kernels.md":
        pytest.importorskip("triton")
    names: Names = {"__name__": "__main__", "AsyncLLMEngine": AsyncLLMEngine}
    printed = await run(page, names, capsys, replace=('"path/to/Qwen3-0.6B", ', ""))
    for text, pattern in zip(printed, PRINTED[page], strict=True):
        assert re.fullmatch(pattern, text, re.S), text


async def test_server(capsys):
    testclient = pytest.importorskip("fastapi.testclient")
    names: Names = {}
    await run("docs/server.md", names, capsys)
    with testclient.TestClient(names["app"]) as client:
        assert client.get("/llm/v1/models").status_code == 401
        found = client.get("/llm/v1/models", headers={"Authorization": "Bearer secret"})
        assert [model["id"] for model in found.json()["data"]] == ["asyncllm/demo"]


@pytest.mark.parametrize("page", ["docs/pydantic_ai.md", "integrations/pydantic_ai/README.md"])
async def test_pydantic_ai(page, capsys):
    pytest.importorskip("pydantic_ai")
    pytest.importorskip("pydantic_ai_asyncllm")
    [*_, last] = await run(page, {}, capsys)
    assert last


async def test_langchain(capsys, llm):
    pytest.importorskip("langchain")
    pytest.importorskip("langchain_asyncllm")
    prompts = pytest.importorskip("langchain_core.prompts")
    parsers = pytest.importorskip("langchain_core.output_parsers")

    def get_weather(city: str) -> str:
        """Get the weather in a city."""
        return "snow"

    names: Names = {
        "prompt": prompts.ChatPromptTemplate.from_messages([("human", "{question}")]),
        "StrOutputParser": parsers.StrOutputParser,
        "questions": [{"question": "Who are you?"}, {"question": "What is 2 + 3?"}],
        "question": "What is the weather in Oslo?",
        "get_weather": get_weather,
    }

    def prepare(number: int, names: Names) -> None:
        if number == 1:  # the first block has closed its own
            names["engine"] = llm.engine

    printed = await run("docs/langchain.md", names, capsys, prepare)
    assert "Oslo" in printed[1]
    [story] = await run("integrations/langchain/README.md", {}, capsys)
    assert len(story) > 40


async def test_callbacks(capsys, llm):
    [printed] = await run("docs/callbacks.md", {"engine": llm.engine}, capsys)
    assert len(printed) > 40
    assert "completion_tokens" in printed


async def test_chat(capsys, llm):
    names: Names = {"engine": llm.engine, "messages": [{"role": "user", "content": "Hello!"}]}
    await run("docs/chat.md", names, capsys)
    assert (await names["stream"].result()).text
    assert names["room"] == names["engine"].max_model_len - len(names["prompt"])
    assert names["engine"].tokenizer.decode(names["prompt"]).count("Hello!") == 1


async def test_models(capsys):
    names: Names = {"AsyncLLMEngine": AsyncLLMEngine}
    await run("docs/models.md", names, capsys)
    assert names["engine"].config.hf_overrides["rope_scaling"]["factor"] == 4.0


async def test_sampling(capsys, llm):
    names: Names = {"engine": llm.engine, "text": "Once upon a time there was a fox."}
    printed = await run("docs/sampling.md", names, capsys)
    assert names["score"] < -1
    assert printed[1].strip()


class Response:
    def __init__(self, content: Any = None, **options: Any) -> None:
        self.content = content
        self.__dict__.update(options)


class App:
    """The part of a web framework that the pages use."""

    def __init__(self) -> None:
        self.routes: dict[str, Callable[[], Any]] = {}

    def get(self, path: str) -> Callable[[Any], Any]:
        return lambda handler: self.routes.setdefault(path, handler)


async def test_observability(capsys, llm):
    pytest.importorskip("prometheus_client")
    trace = pytest.importorskip("opentelemetry.sdk.trace")
    app, logged, health = App(), [], []
    names: Names = {"app": app, "JSONResponse": Response, "Response": Response}
    closing: list[asyncio.Future[None]] = []
    root, level = list(logging.root.handlers), logging.getLogger("asyncllm").level
    try:
        async with fake_engine("Yes.") as watched:

            def close() -> None:
                health.append(app.routes["/health"]())
                closing.append(asyncio.ensure_future(watched.aclose()))

            def prepare(number: int, names: Names) -> None:
                names["engine"] = llm.engine if number else watched
                if number == 0:  # it waits for the engine's end
                    asyncio.get_running_loop().call_later(0.05, close)
                if number == 5:
                    names["tracer_provider"] = trace.TracerProvider()

            printed = await run("docs/observability.md", names, capsys, prepare)
            await closing[0]
        names["Audit"].log = lambda self, *what: logged.append(what)
        done = await llm.engine.generate("Hello!", max_tokens=3, request_id="audited")
    finally:
        logging.root.handlers[:] = root
        logging.getLogger("asyncllm").setLevel(level)
    assert logged == [("audited", "text_completion"), ("audited", 3, done.finish_reason)]
    assert (health[0].content["state"], health[0].status_code) == ("running", 200)
    assert app.routes["/health"]().status_code == 200
    assert b"asyncllm" in app.routes["/metrics"]().content
    assert re.fullmatch(r"\d+ \d+ \d+%\n", printed[1])
    assert len(printed[2].split()) == 7


async def test_groups(capsys):
    group = EngineGroup([AsyncLLMEngine(num_threads=1) for _ in range(2)])
    names: Names = {"AsyncLLMEngine": AsyncLLMEngine, "EngineGroup": EngineGroup, "group": group}
    async with group:
        await run("docs/groups.md", names, capsys)
        assert list(group.engines) == [1, 2]
    assert names["completion"].text
    assert names["engine"].state == "closed"


async def test_streaming(capsys):
    names: Names = {name: getattr(asyncllm, name) for name in asyncllm.__all__}
    sent: list[str] = []

    async def send(text: str) -> None:
        sent.append(text)

    names |= {"prompt": "One?", "prompts": ["One?", "Two?"], "send": send, "event": str}
    names |= {"asyncio": asyncio, "math": math, "Response": Response}
    names["rows"] = [{"id": "a", "text": "One?"}, {"id": "b", "text": ""}]
    async with fake_engine("Yes.") as engine, fake_engine("No.", max_queued_requests=1) as full:
        names["engine"] = engine

        def prepare(number: int, names: Names) -> None:
            names["stream"] = engine.stream("Well?")

        printed = await run("docs/streaming.md", names, capsys, prepare)
        names["engine"] = full
        await full.pause()
        waiting = names["answer"](None)
        refused = names["answer"](None)
        assert (refused.status_code, refused.headers) == (503, {"Retry-After": "1"})
        await full.resume()
        assert (await waiting.result()).text == "No."
    assert engine.state == "closed"
    assert printed[0].startswith("stop Usage(")
    assert [result.text for result in names["results"]] == ["Yes.", "Yes."]
    assert names["stored"] == {"a": "Yes."}
    assert "".join(sent) == "Yes."
    assert names["delta"].text
    assert "Yes.".startswith(names["delta"].text)
    assert names["completion"].text == "Yes."


async def test_websocket(capsys):
    """The second block is the client of the first, which serves until it is cancelled."""
    openai = pytest.importorskip("openai")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    text = (ROOT / "docs/websocket.md").read_text(encoding="utf-8").replace("8000", str(port))
    server, client = (match[1] for match in BLOCK.finditer(text))

    def coroutine(source: str, names: Names) -> Any:
        return eval(compile(source, "websocket.md", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)

    serving = asyncio.ensure_future(coroutine(server, {}))
    while not serving.done():
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        await asyncio.sleep(0.02)
    await coroutine(client, {"openai": openai})
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    assert len(capsys.readouterr().out) > 40
