"""Every Python block of the documentation runs, in the order of its page.

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
from asyncllm import LLM, AsyncLLMEngine
from asyncllm.testing import fake_engine

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n*```text\n(.*?)^```)?", re.M | re.S)
ELSEWHERE = {
    "README.md": "tests/test_examples.py",
    "docs/attention_backends.md": "tests/test_attention_backends.py",
    "docs/multiple_outputs.md": "tests/test_multiple_outputs.py",
    "docs/structured_output.md": "tests/test_structured_params.py",
    "docs/testing.md": "tests/test_testing.py",
}
"""Pages whose own tests look at more than that they run."""
HERE = {
    "docs/callbacks.md": 1,
    "docs/chat.md": 4,
    "docs/formats.md": 1,
    "docs/kernels.md": 1,
    "docs/langchain.md": 2,
    "docs/models.md": 1,
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


def test_every_block_is_run_somewhere() -> None:
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
    replace: tuple[str, str] = ("", ""),
) -> list[str]:
    """What the blocks printed. A page's names are those that the ones before it made."""
    printed = []
    for number, match in enumerate(BLOCK.finditer((ROOT / page).read_text(encoding="utf-8"))):
        prepare(number, names)
        source = match[1].replace(*replace) if replace[0] else match[1]
        code = compile(source, page, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if re.search(r"^asyncio\.run\(", source, re.M):
            await asyncio.to_thread(eval, code, names)
        elif inspect.iscoroutine(running := eval(code, names)):
            await running
        printed.append(capsys.readouterr().out)
        if match[2] is not None:
            assert printed[-1].rstrip() == match[2].rstrip()
    assert len(printed) == HERE[page]
    return printed


@pytest.mark.parametrize("page", ["docs/kernels.md", "docs/tools.md"])
def test_a_page_that_takes_nothing_for_granted(
    page: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if page == "docs/kernels.md":
        pytest.importorskip("triton")
    asyncio.run(run(page, {"__name__": "__main__"}, capsys))


def test_server(capsys: pytest.CaptureFixture[str]) -> None:
    testclient = pytest.importorskip("fastapi.testclient")
    names: Names = {}
    asyncio.run(run("docs/server.md", names, capsys))
    with testclient.TestClient(names["app"]) as client:
        assert client.get("/llm/v1/models").status_code == 401
        found = client.get("/llm/v1/models", headers={"Authorization": "Bearer secret"})
        assert [model["id"] for model in found.json()["data"]] == ["asyncllm/demo"]


@pytest.mark.parametrize("page", ["docs/pydantic_ai.md", "integrations/pydantic_ai/README.md"])
def test_pydantic_ai(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pydantic_ai")
    pytest.importorskip("pydantic_ai_asyncllm")
    [*_, last] = asyncio.run(run(page, {}, capsys))
    assert last


def test_langchain(capsys: pytest.CaptureFixture[str], llm: LLM) -> None:
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

    printed = asyncio.run(run("docs/langchain.md", names, capsys, prepare))
    assert "Oslo" in printed[1]
    [story] = asyncio.run(run("integrations/langchain/README.md", {}, capsys))
    assert len(story) > 40


def test_callbacks(capsys: pytest.CaptureFixture[str], llm: LLM) -> None:
    [printed] = asyncio.run(run("docs/callbacks.md", {"engine": llm.engine}, capsys))
    assert len(printed) > 40
    assert "completion_tokens" in printed


def test_chat(capsys: pytest.CaptureFixture[str], llm: LLM) -> None:
    names: Names = {"engine": llm.engine, "messages": [{"role": "user", "content": "Hello!"}]}

    async def main() -> None:
        await run("docs/chat.md", names, capsys)
        assert (await names["stream"].result()).text
        assert names["room"] == names["engine"].max_model_len - len(names["prompt"])
        assert names["engine"].tokenizer.decode(names["prompt"]).count("Hello!") == 1

    asyncio.run(main())


def test_models(capsys: pytest.CaptureFixture[str]) -> None:
    """An engine reads nothing until it is started."""
    names: Names = {"AsyncLLMEngine": AsyncLLMEngine}
    asyncio.run(run("docs/models.md", names, capsys))
    assert names["engine"].config.hf_overrides["rope_scaling"]["factor"] == 4.0


def test_formats(capsys: pytest.CaptureFixture[str]) -> None:
    """An engine reads nothing until it is started."""
    asyncio.run(run("docs/formats.md", {"AsyncLLMEngine": AsyncLLMEngine}, capsys))


def test_sampling(capsys: pytest.CaptureFixture[str], llm: LLM) -> None:
    names: Names = {"engine": llm.engine, "text": "Once upon a time there was a fox."}
    printed = asyncio.run(run("docs/sampling.md", names, capsys))
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


def test_observability(capsys: pytest.CaptureFixture[str], llm: LLM) -> None:
    pytest.importorskip("prometheus_client")
    trace = pytest.importorskip("opentelemetry.sdk.trace")
    app, logged, health = App(), [], []
    names: Names = {"app": app, "JSONResponse": Response, "Response": Response}

    async def main() -> list[str]:
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

            closing: list[asyncio.Future[None]] = []
            printed = await run("docs/observability.md", names, capsys, prepare)
            await closing[0]
        names["Audit"].log = lambda self, *what: logged.append(what)
        done = await llm.engine.generate("Hello!", max_tokens=3, request_id="audited")
        assert logged == [("audited", "text_completion"), ("audited", 3, done.finish_reason)]
        return printed

    root, level = list(logging.root.handlers), logging.getLogger("asyncllm").level
    try:
        printed = asyncio.run(main())
    finally:
        logging.root.handlers[:] = root
        logging.getLogger("asyncllm").setLevel(level)
    assert (health[0].content["state"], health[0].status_code) == ("running", 200)
    assert app.routes["/health"]().status_code == 200
    assert b"asyncllm" in app.routes["/metrics"]().content
    assert re.fullmatch(r"\d+ \d+ \d+%\n", printed[1])
    assert len(printed[2].split()) == 7


def test_streaming(capsys: pytest.CaptureFixture[str]) -> None:
    names: Names = {name: getattr(asyncllm, name) for name in asyncllm.__all__}
    sent: list[str] = []

    async def send(text: str) -> None:
        sent.append(text)

    names |= {"prompt": "One?", "prompts": ["One?", "Two?"], "send": send, "event": str}
    names |= {"asyncio": asyncio, "math": math, "Response": Response}

    async def main() -> list[str]:
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
        return printed

    printed = asyncio.run(main())
    assert printed[0].startswith("stop Usage(")
    assert [result.text for result in names["results"]] == ["Yes.", "Yes."]
    assert "".join(sent) == "Yes."
    assert names["delta"].text
    assert "Yes.".startswith(names["delta"].text)
    assert names["completion"].text == "Yes."


def test_websocket(capsys: pytest.CaptureFixture[str]) -> None:
    """The second block is the client of the first, which serves until it is cancelled."""
    openai = pytest.importorskip("openai")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    text = (ROOT / "docs/websocket.md").read_text(encoding="utf-8").replace("8000", str(port))
    server, client = (match[1] for match in BLOCK.finditer(text))

    def coroutine(source: str, names: Names) -> Any:
        return eval(compile(source, "websocket.md", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)

    async def main() -> None:
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

    asyncio.run(main())
    assert len(capsys.readouterr().out) > 40
