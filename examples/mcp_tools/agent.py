"""A model that calls the tools of an MCP server, which runs as a child process.

Needs: pip install mcp
"""

import asyncio
import sys
from pathlib import Path
from typing import Any

from mcp import Client, MCPError, StdioServerParameters
from mcp.types import TextContent

from asyncllm import AsyncLLMEngine, ToolCall

SERVER = StdioServerParameters(
    command=sys.executable, args=[str(Path(__file__).with_name("server.py"))]
)


async def list_tools(client: Client) -> list[dict[str, Any]]:
    """The server's tools as ``chat(tools=…)`` takes them."""
    tools, cursor = [], None
    while True:
        page = await client.list_tools(cursor=cursor)
        for tool in page.tools:
            function = {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.input_schema,
            }
            tools.append({"type": "function", "function": function})
        if (cursor := page.next_cursor) is None:
            return tools


async def run_tool(client: Client, call: ToolCall) -> str:
    """What the server answers, in text. What goes wrong is for the model to know."""
    try:
        result = await client.call_tool(call.name, call.kwargs, read_timeout_seconds=30)
    except MCPError as error:
        return f"error: {error}"
    text = "\n".join(part.text for part in result.content if isinstance(part, TextContent))
    return f"error: {text}" if result.is_error else text


async def answer(engine: AsyncLLMEngine, client: Client, question: str, max_rounds: int = 4) -> str:
    """The answer, after as many calls as the model makes."""
    tools = await list_tools(client)
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    for _ in range(max_rounds):
        completion = await engine.chat(messages, tools=tools, temperature=0).result()
        messages.append(completion.message)
        if not completion.tool_calls:
            return completion.text
        calls = completion.tool_calls
        results = await asyncio.gather(*(run_tool(client, call) for call in calls))
        for call, result in zip(calls, results, strict=True):
            print(f"  {call.name}({call.arguments}) -> {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    raise RuntimeError(f"no answer after {max_rounds} rounds")


async def main() -> None:
    async with AsyncLLMEngine() as engine, Client(SERVER) as client:
        for question in ("What is the weather in Oslo?", "What is 12 + 30?"):
            print(question)
            print(await answer(engine, client, question))


if __name__ == "__main__":
    asyncio.run(main())
