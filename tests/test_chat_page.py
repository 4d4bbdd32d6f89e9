"""The chat page in a real browser, on an engine in this process and on the packaged model.

Needs node, chromium, and ``npm install --prefix build/playwright playwright-core``.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import websockets.asyncio.server as websockets
from websockets.datastructures import Headers
from websockets.http11 import Response

from asyncllm import EngineStats, TokenStream
from asyncllm.serving.websocket import serve
from tests.fakes import FakeTokenizer, WordDecoder, fake
from tests.idle import idle

ROOT = Path(__file__).parent.parent
SERVER = ROOT / "examples" / "websocket_chat" / "server.py"
PLAYWRIGHT = ROOT / "build" / "playwright"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def _what_is_missing() -> str | None:
    if shutil.which("node") is None:
        return "node is not installed"
    if CHROMIUM is None:
        return "chromium is not installed"
    if not (PLAYWRIGHT / "node_modules" / "playwright-core").is_dir():
        return "npm install --prefix build/playwright playwright-core"
    return None


_MISSING = _what_is_missing()
pytestmark = [
    pytest.mark.skipif(_MISSING is not None, reason=_MISSING or ""),
    pytest.mark.asyncio(loop_factories=["asyncio"]),
]
SCREENSHOTS = ROOT / "build" / "screenshots"


def page(path):
    spec = importlib.util.spec_from_file_location("websocket_chat_server", SERVER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.page(path)


class Browser:
    """The node process that drives Chromium, as lines in and out."""

    def __init__(self, process):
        self.process = process

    async def hear(self):
        async with asyncio.timeout(120):
            line = await self.process.stdout.readline()
        assert line, (await self.process.stderr.read()).decode()
        return json.loads(line)

    def say(self):
        self.process.stdin.write(b"go\n")


@contextlib.asynccontextmanager
async def driven(scenario, url, out="."):
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    program, *folders = map(str, (ROOT / "tests" / "chat_page.mjs", PLAYWRIGHT, CHROMIUM, out))
    process = await asyncio.create_subprocess_exec(
        *("node", program, scenario, url, *folders),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield Browser(process)
        assert await process.wait() == 0, (await process.stderr.read()).decode()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def url_of(server):
    return f"http://127.0.0.1:{server.port}/"


@contextlib.asynccontextmanager
async def playing(scenario, max_model_len=1500, step_time=0.01):
    """A scenario on the page of an engine in this process: the browser, the engine, its rig."""
    rig = fake(num_blocks=400, max_model_len=max_model_len, step_time=step_time)
    async with rig.engine() as engine, serve(engine, port=0, page=page) as server:
        async with driven(scenario, url_of(server)) as browser:
            yield browser, engine, rig


@pytest.mark.slow
async def test_two_tabs_chat_at_once():
    async with playing("interleave", max_model_len=80) as (browser, _, rig):
        result = await browser.hear()
    for i, text in enumerate(result["texts"]):
        expected = rig.executor.reference([i + 1], 79)
        assert text.split() == [str(token) for token in expected]
    assert result["switches"] > 3  # one after the other there would be one


async def test_stop_aborts_within_a_step(monkeypatch):
    engines, steps, abort = [], [], TokenStream.abort

    def noting(self):
        steps.extend(engine.stats().num_steps for engine in engines)
        abort(self)

    monkeypatch.setattr(TokenStream, "abort", noting)
    async with playing("stop") as (browser, engine, _):
        engines.append(engine)
        assert await browser.hear() == {"note": "Stopped", "again": "Stopped"}
        stats = await idle(engine)
        assert stats.num_aborted == 2
        # The last stop was followed by the step under way, and no other.
        assert stats.num_steps - steps[-1] <= 1


async def test_a_reload_in_mid_answer_frees_the_blocks():
    async with playing("reload") as (browser, engine, _):
        assert await browser.hear() == "running"
        assert engine.stats().num_free_blocks < engine.stats().num_blocks
        browser.say()
        assert (await browser.hear())["note"].startswith("Interrupted")
        stats = await idle(engine)
        assert (stats.num_aborted, stats.num_finished) == (1, 0)
        browser.say()


class ScriptedDecoder(WordDecoder):
    def __init__(self, pieces):
        self.pieces = iter(pieces)

    def push(self, token_id):
        return next(self.pieces)


class ScriptedTokenizer(FakeTokenizer):
    def __init__(self, pieces):
        super().__init__()
        self.pieces = pieces

    def detokenizer(self, params, prompt_token_ids=()):
        detokenizer = super().detokenizer(params, prompt_token_ids)
        detokenizer._decoder = ScriptedDecoder(self.pieces)
        return detokenizer


async def shown(scenario, pieces):
    """What the browser reports of an answer that comes in these pieces."""
    rig = fake(max_model_len=len(pieces) + 1)
    rig.tokenizer = ScriptedTokenizer(pieces)
    async with rig.engine() as engine, serve(engine, port=0, page=page) as server:
        async with driven(scenario, url_of(server)) as browser:
            return await browser.hear()


PARTS = [
    ["p", "Let me [look] {there}.\n"],
    ["div", '<tool_call>\n{"name": "f",\n\n "arguments": {}}\n</tool_call>\n'],
    ["div", '<tool_call>{"name": "g"}</tool_call>\n'],
    ["p", "And:\n\n"],
    ["div", '{"a": ["}", 1,\n  {"b": "\\"{"}]}\n'],
    ["div", "[\n  1\n]\n"],
    ["p", "[1] says so.\n"],
    ["div", '{"never": [closed\n\n'],
    ["p", "That is it.\n"],
    ["div", '{"cut": "o'],
]


async def test_data_in_an_answer_is_monospaced():
    whole = "".join(text for _, text in PARTS)
    result = await shown("data", [whole[i : i + 3] for i in range(0, len(whole), 3)])
    parts = [[name, text.rstrip()] for name, text in PARTS]
    assert result == {"parts": parts, "mono": True, "failures": []}


MARKDOWN = """# Title

Some **bold**, `x < y` and a [link](https://example.org), not [this](javascript:window.ran=1).

1. one
2. two
   - [x] done

| a | b |
|---|:-:|
| 1 | 2 |

```json
{

}
```

<img src=x onerror='window.ran=1'> ![picture](http://127.0.0.1:9/picture.png)

> quoted"""
RENDERED = (
    "<h3>Title</h3>"
    "<p>Some <strong>bold</strong>, <code>x &lt; y</code> and a "
    '<a href="https://example.org" title="https://example.org" target="_blank" '
    'rel="noopener noreferrer">link</a>, not [this](javascript:window.ran=1).</p>'
    "<ol><li><span>one</span></li><li><span>two</span>"
    "<ul><li><span>☑ </span><span>done</span></li></ul></li></ol>"
    '<div class="table"><table><thead><tr><th>a</th><th style="text-align: center;">b</th></tr>'
    '</thead><tbody><tr><td>1</td><td style="text-align: center;">2</td></tr></tbody></table></div>'
    '<div class="code" data-language="json"><pre><code>{\n\n}</code></pre>'
    '<button type="button" class="quiet copy">Copy</button></div>'
    "<p>&lt;img src=x onerror='window.ran=1'&gt; "
    '<a href="http://127.0.0.1:9/picture.png" title="http://127.0.0.1:9/picture.png" '
    'target="_blank" rel="noopener noreferrer">picture</a></p>'
    "<blockquote><p>quoted</p></blockquote>"
)


async def test_markdown_is_rendered_and_copied():
    """As it grows, three characters at a time, it becomes what the whole text is."""
    pieces = [MARKDOWN[i : i + 3] for i in range(0, len(MARKDOWN), 3)]
    result = await shown("markdown", pieces)
    assert result == {
        "html": RENDERED,
        "again": RENDERED,
        "code": "{\n\n}",
        "whole": MARKDOWN,
        "kept": True,
        "requests": [],
        "ran": None,
        "failures": [],
    }


@pytest.mark.slow
async def test_chats_are_kept_by_tab_and_forgotten():
    async with playing("storage", max_model_len=30, step_time=0) as (browser, *_):
        result = await browser.hear()
    assert result["reloaded"] == "of the first tab"
    assert sorted(result["both"]) == ["New chat", "of the first tab", "of the second tab"]
    assert result["most"] == 20
    assert (result["forgotten"], result["left"]) == (["New chat"], 0)
    assert (result["refused"], result["failures"]) == ("without storage", [])


@pytest.mark.slow
async def test_no_scroll_bar_where_nothing_is_to_scroll():
    async with playing("empty", max_model_len=30, step_time=0) as (browser, *_):
        assert await browser.hear() == []


class ScriptedServer:
    """A server of the protocol whose answers think and call: what the page shows of it is looked
    at without a model that does."""

    def __init__(self):
        self.asked = []
        # The page shows "Thinking…" only until the text comes: it comes once that was seen.
        self.thinking_seen = asyncio.Semaphore(0)

    async def start(self):
        serving = await websockets.serve(self.talk, "127.0.0.1", 0, process_request=self.file)
        self.url = f"http://127.0.0.1:{serving.sockets[0].getsockname()[1]}/"
        return serving

    def file(self, connection, request):
        found = None if request.path.startswith("/v1/") else page(request.path)
        if found is None:
            return None
        kind, body = found
        headers = {"Content-Type": kind, "Content-Length": str(len(body)), "Connection": "close"}
        return Response(200, "OK", Headers(headers), body)

    async def talk(self, connection):
        if connection.request.path == "/v1/stats":
            stats = {"stats": dataclasses.asdict(EngineStats()), "connections": 1, "responses": []}
            await connection.send(json.dumps({"type": "asyncllm.stats", **stats}))
            await connection.wait_closed()
            return
        async for message in connection:
            create = json.loads(message)
            self.asked.append(create)
            last = create["input"][-1]
            events = ANSWER if last.get("type") == "function_call_output" else CALLS
            for event in events:
                if event is AFTER_THOUGHTS:
                    await self.thinking_seen.acquire()
                await connection.send(json.dumps(event))
                await asyncio.sleep(0.02)


USAGE = {"input_tokens": 9, "output_tokens": 9, "input_tokens_details": {"cached_tokens": 0}}


def created(name):
    return {"type": "response.created", "response": {"id": name}}


def completed(name):
    response = {"id": name, "status": "completed", "usage": USAGE}
    return {"type": "response.completed", "response": response}


def call_events(index, name, arguments):
    item = {"type": "function_call", "id": f"fc_{index}", "call_id": f"call_{index}", "name": name}
    added = {**item, "arguments": "", "status": "in_progress"}
    yield {"type": "response.output_item.added", "output_index": index, "item": added}
    for start in range(0, len(arguments), 5):
        fragment = {"output_index": index, "delta": arguments[start : start + 5]}
        yield {"type": "response.function_call_arguments.delta", **fragment}
    done = {**item, "arguments": arguments, "status": "completed"}
    yield {"type": "response.output_item.done", "output_index": index, "item": done}


HOSTILE = "<img src=x onerror='window.ran=1'><b>bold</b>"
AFTER_THOUGHTS = {"type": "response.output_text.delta", "delta": "Let me add."}
CALLS = [
    created("resp_1"),
    *(
        {"type": "response.reasoning_text.delta", "delta": word}
        for word in ("A ", "sum", " it is.")
    ),
    AFTER_THOUGHTS,
    *call_events(2, "add", '{"a": 12, "b": 30}'),
    *call_events(3, "get_time", json.dumps({"city": HOSTILE})),
    completed("resp_1"),
]
ANSWER = [
    created("resp_2"),
    {"type": "response.output_text.delta", "delta": "The answer is 42."},
    completed("resp_2"),
]


@pytest.mark.slow
async def test_calls_are_cards_and_thoughts_are_folded():
    """They run in the page, and their results go back to the model."""
    scripted = ScriptedServer()
    async with await scripted.start(), driven("tools", scripted.url, SCREENSHOTS) as browser:
        while (results := await browser.hear()) == "thinking":
            scripted.thinking_seen.release()
    error = f"error: no time zone is named after {HOSTILE}"
    for result in results:
        assert result["thoughts"] == [[False, "Thoughts", "A sum it is."]]
        assert result["texts"] == ["Let me add.", "The answer is 42."]
        assert result["calls"] == [
            ["add", "done", '{\n  "a": 12,\n  "b": 30\n}', "42"],
            ["get_time", "failed", json.dumps({"city": HOSTILE}, indent=2), error],
        ]
        assert (result["elements"], result["mono"], result["kept"]) == (0, True, 2)
        assert result["problems"] == []
    assert len(results) == 4
    question, results_of_calls = scripted.asked[:2]
    assert [tool["name"] for tool in question["tools"]] == ["add", "get_time"]
    assert question["input"] == [{"role": "user", "content": "What is 12 + 30?"}]
    assert results_of_calls["previous_response_id"] == "resp_1"
    assert results_of_calls["input"] == [
        {"type": "function_call_output", "call_id": "call_2", "output": "42"},
        {"type": "function_call_output", "call_id": "call_3", "output": error},
    ]


@pytest.mark.slow
async def test_enter_drawers_and_edges_on_a_phone():
    async with playing("phone") as (browser, *_):
        result = await browser.hear()
    assert result["hint"].startswith("Wait for the answer")
    assert (result["kept"], result["asked"]) == ("2", 1)
    assert (result["after"], result["sent"]) == ("", "2")
    assert result["note"] == result["tools"]
    assert result["drawers"] == [
        {"focused": "Close the conversations", "left": "show-rail", "open": None},
        {"focused": "Close the engine's activity", "left": "show-activity", "open": None},
    ]
    assert result["failures"] == []


async def test_markup_in_an_answer_stays_text():
    markup = "<b>1</b><script>window.ran = 1</script><img src=x onerror='window.ran=2'>"
    result = await shown("script", [markup] * 5)
    assert result["text"].count("<script>window.ran = 1</script>") == 5
    assert (result["elements"], result["ran"], result["failures"]) == (0, None, [])


async def test_a_lost_connection_says_so_and_comes_back():
    rig = fake(num_blocks=400, max_model_len=1500, step_time=0.01)
    async with rig.engine() as engine:
        server = await serve(engine, port=0, page=page)
        port = server.port
        async with driven("lost", url_of(server)) as browser:
            assert await browser.hear() == "running"
            await server.aclose()
            await idle(engine)
            browser.say()
            assert await browser.hear() == "lost"
            # A short answer, once the connection is back.
            short = fake(num_blocks=400, max_model_len=60)
            async with short.engine() as other, serve(other, port=port, page=page):
                browser.say()
                result = await browser.hear()
    assert "Reconnecting" in result["banner"]
    assert result["note"].startswith("Interrupted")
    assert result["offline"] in ("offline", "connecting")
    expected = short.executor.reference([1], 59)
    assert result["text"].split() == [str(token) for token in expected]


@contextlib.asynccontextmanager
async def example():
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(SERVER), "--port", "0"),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        async with asyncio.timeout(240):
            yield (await process.stdout.readline()).decode().strip()
    finally:
        process.terminate()
        await process.wait()


async def test_the_example_talks():
    async with example() as url:
        async with driven("talk", url) as browser:
            talk = await browser.hear()
        async with driven("keyboard", url) as browser:
            keyboard = await browser.hear()
        async with driven("look", url, SCREENSHOTS) as browser:
            assert await browser.hear() == {"problems": []}
    assert talk["failures"] == []
    assert talk["first"]
    assert talk["second"] == talk["again"] != ""
    assert "first token" in talk["metrics"]
    assert "tokens cached" in talk["metrics"]
    one, two, three, four = talk["sent"]
    assert one["temperature"] == 0
    assert one["instructions"].startswith("You are friendly")
    # The second turn sends what is new; regenerating it starts from the same place; an edited
    # first message starts over.
    assert two["previous_response_id"] == three["previous_response_id"] is not None
    assert two["input"] == three["input"] == [{"role": "user", "content": "What is my name?"}]
    assert four["previous_response_id"] is None
    assert four["input"] == [{"role": "user", "content": "Hello, my name is Anna."}]
    assert talk["count"] == 2
    assert keyboard["skip"] == "skip"
    assert keyboard["typed"] == "Hello!\nWho are you?"
    assert (keyboard["empty"], keyboard["focused"]) == (0, "prompt")
    assert "Answer: " in keyboard["announced"]
