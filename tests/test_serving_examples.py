"""The examples that need more than asyncllm itself, each run as a user would run it."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "integrations" / "langchain")]),
}


def test_fastapi_endpoint():
    pytest.importorskip("fastapi")
    uvicorn = pytest.importorskip("uvicorn")
    httpx = pytest.importorskip("httpx")
    spec = importlib.util.spec_from_file_location(
        "fastapi_sse", EXAMPLES / "fastapi_sse" / "app.py"
    )
    fastapi_sse = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fastapi_sse)

    async def main():
        server = uvicorn.Server(uvicorn.Config(fastapi_sse.app, port=0, log_level="warning"))
        serving = asyncio.ensure_future(server.serve())
        while not server.started:
            assert not serving.done()
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            lines = []
            asked = {"prompt": "What is 12 + 7?", "max_tokens": 20}
            async with client.stream("GET", "/stream", params=asked) as response:
                assert response.headers["content-type"].startswith("text/event-stream")
                async for line in response.aiter_lines():
                    lines.append(line)
            bad = await client.get("/stream", params={"prompt": "x", "max_tokens": 0})
            # A client that goes away in mid-answer.
            long = {"prompt": "Tell me a story about a fox.", "max_tokens": 400}
            async with client.stream("GET", "/stream", params=long) as response:
                async for _ in response.aiter_lines():
                    break
            while (stats := fastapi_sse.engine.stats()).num_running or stats.num_aborted < 1:
                await asyncio.sleep(0.01)
            assert (await client.get("/stats")).json() == {"running": 0, "waiting": 0, "kv": 0}
        server.should_exit = True
        await serving
        return lines, bad

    lines, bad = asyncio.run(main())
    data = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert "".join(one.get("text", "") for one in data)
    assert data[-1]["finish_reason"] in ("stop", "length")
    assert bad.status_code == 400
    assert "max_tokens" in bad.json()["detail"]


@pytest.mark.slow
def test_langchain_chain():
    pytest.importorskip("langchain_core")
    if not (ROOT / "integrations").is_dir():
        pytest.skip("a source distribution is without the integrations")
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / "langchain_chain" / "chain.py")],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert result.stdout.count("\n- ") == 4
    assert "first token after" in result.stdout
    assert "'asyncllm/demo'" in result.stdout
