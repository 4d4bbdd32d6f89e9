"""schemathesis against the application: no failure of the server's own, every answer as it is
described, and what the description forbids is refused. It has an environment of its own."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from asyncllm.testing import fake_engine
from tests.app_clients import served_app, url_of

BUILD = Path(__file__).parent.parent / "build"
COMMAND = Path(os.environ.get("SCHEMATHESIS", BUILD / "schemathesis/bin/schemathesis"))


@pytest.mark.slow
@pytest.mark.skipif(not COMMAND.is_file(), reason="pip install schemathesis in build/schemathesis")
@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_schemathesis(tmp_path):
    async with served_app(fake_engine("Hello, friend!", max_model_len=300)) as server:
        process = await asyncio.create_subprocess_exec(
            *(str(COMMAND), "run", url_of(server) + "/openapi.json"),
            *("--phases", "examples,coverage,fuzzing", "--max-examples", "20"),
            # A schema cannot say that min_tokens is at most max_tokens, say.
            *("--exclude-checks", "positive_data_acceptance"),
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        out, _ = await process.communicate()
    assert process.returncode == 0, out.decode()[-10_000:]
    assert b"13 selected / 13 total" in out
