"""``asyncllm serve`` as a user runs it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from asyncllm.cli import main
from asyncllm.errors import InvalidRequestError
from tests.app_clients import events_of, user

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}


async def command(*arguments):
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "asyncllm", "serve", *arguments),
        env=ENVIRONMENT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


@asynccontextmanager
async def serving(*arguments):
    """The process and its address."""
    process = await command("--port", "0", *arguments)
    try:
        line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
        assert "http://" in line, (line, await process.stderr.read())
        yield process, line.split()[-1].removesuffix("/v1")
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def test_the_engine_thread_soon_gets_the_gil(monkeypatch):
    def fail(engine):
        raise InvalidRequestError("ended here")

    intervals = []
    monkeypatch.setattr("asyncllm.cli.serve._log_to_stderr", lambda level: None)
    monkeypatch.setattr("asyncllm.cli.serve.running_engine", fail)
    monkeypatch.setattr(sys, "setswitchinterval", intervals.append)
    assert main(["serve", "--port", "0"]) == 2
    assert intervals == [0.0005]


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_serve_answers_logs_and_drains(tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text("one\ntwo\n")
    arguments = ("--token-file", str(tokens), "--served-model-name", "tiny", "--no-uvloop")
    async with serving(*arguments) as (process, url):
        headers = {"authorization": "Bearer two"}
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as client:
            models = (await client.get("/v1/models")).json()["data"]
            assert [model["id"] for model in models] == ["tiny"]
            refused = await client.get("/v1/models", headers={"authorization": "Bearer x"})
            assert refused.status_code == 401
            body = {
                "messages": user("Tell me a story about a fox."),
                "stream": True,
                "ignore_eos": True,
                "max_tokens": 300,
            }
            async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                parts = answer.aiter_text()
                text = await anext(parts)
                process.send_signal(signal.SIGTERM)
                async for part in parts:
                    text += part
        *_, last, done = events_of(text)
        assert (last["choices"][0]["finish_reason"], done) == ("length", "[DONE]")
        _, errors = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 0
    lines = [line for line in errors.decode().splitlines() if "/v1/" in line]
    assert [line.split()[6] for line in lines] == ["200", "401", "200"]
    assert "WITHOUT A TOKEN" not in errors.decode()


@pytest.mark.asyncio(loop_factories=["asyncio"])
@pytest.mark.slow
async def test_a_second_signal_does_not_wait():
    policy = ("--scheduling-policy", "priority")
    async with serving("--host", "0.0.0.0", *policy) as (process, url):
        # With another policy the priority is refused.
        body = {"messages": user("Hi"), "stream": True, "ignore_eos": True, "n": 8, "priority": 1}
        port = url.rsplit(":", 1)[1]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                assert answer.status_code == 200
                parts = answer.aiter_text()
                await anext(parts)
                process.send_signal(signal.SIGINT)
                await asyncio.sleep(0.2)
                process.send_signal(signal.SIGINT)
                _, errors = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 0
    assert "WITHOUT A TOKEN" in errors.decode()


def test_invalid_options_are_refused_before_loading(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("asyncllm.cli.serve._log_to_stderr", lambda level: None)
    for arguments, told in (
        (("--port", "70000"), "port=70000"),
        (("--host", "192.0.2.1"), "--host 192.0.2.1"),
        (("--timeout", "-1"), "timeout=-1"),
        (("--drain", "nan"), "drain=nan"),
        (("--token-file", str(tmp_path / "none")), "--token-file"),
        (("--token", ""), "token"),
        (("--scheduling-policy", "x"), "scheduling_policy='x'"),
    ):
        assert main(["serve", *arguments]) == 2
        assert told in capsys.readouterr().err
