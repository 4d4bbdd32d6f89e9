"""An MCP server over stdio with two tools.

Needs: pip install mcp
"""

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("example", log_level="ERROR")


@server.tool()
def get_weather(city: str) -> str:
    """Get the weather in a city."""
    if city not in (known := {"Oslo": "snow", "Lisbon": "sun"}):
        raise ToolError(f"no station in {city}, there is one in {' and '.join(known)}")
    return known[city]


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


if __name__ == "__main__":
    server.run("stdio")
