"""The MCP example over stdio."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from asyncllm import ToolCall
from asyncllm.testing import fake_engine
from tests.example_process import run_example

FOLDER = Path(__file__).resolve().parent.parent / "examples" / "mcp_tools"


@pytest.mark.slow
def test_example_runs_as_it_stands() -> None:
    pytest.importorskip("mcp")
    assert run_example(FOLDER / "agent.py") == (
        'What is the weather in Oslo?\n  get_weather({"city": "Oslo"}) -> snow\n'
        'It is snow in Oslo.\nWhat is 12 + 30?\n  add({"a": 12, "b": 30}) -> 42\n'
        "The answer is 42.\n"
    )


async def test_tool_errors_go_to_the_model() -> None:
    """The server's own process answers, over stdio; the model is a script."""
    mcp = pytest.importorskip("mcp")
    example = runpy.run_path(str(FOLDER / "agent.py"))
    prompts: list[str] = []

    def script(prompt: str) -> str:
        prompts.append(prompt)
        if len(prompts) < 3:
            city = ("Rome", "Oslo")[len(prompts) - 1]
            arguments = f'{{"city": "{city}"}}'
            call = f'{{"name": "get_weather", "arguments": {arguments}}}'
            return f"<tool_call>\n{call}\n</tool_call>"
        return "It snows."

    async with mcp.Client(example["SERVER"]) as client:
        tools = await example["list_tools"](client)
        assert [tool["function"]["name"] for tool in tools] == ["get_weather", "add"]
        async with fake_engine(script) as engine:
            assert await example["answer"](engine, client, "Weather?") == "It snows."
        run: Any = example["run_tool"]
        missing = await run(client, ToolCall("1", "get_weather", '{"city": "Rome"}'))
        assert missing.startswith("error: ")
        assert "no station in Rome, there is one in Oslo and Lisbon" in missing
        assert (await run(client, ToolCall("2", "add", '{"a": "x"}'))).startswith("error: ")
        assert (await run(client, ToolCall("3", "subtract", "{}"))).startswith("error: ")
        assert await run(client, ToolCall("4", "add", '{"a": 2, "b": 3}')) == "5"
