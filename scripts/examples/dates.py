"""An MCP server with one tool: `rollout.mcp: {dates: {command: [.venv/bin/python, scripts/examples/dates.py]}}`."""

import datetime

from mcp.server.mcpserver import MCPServer

server = MCPServer("dates")


@server.tool()
def weekday(date: str) -> str:
    """Return the weekday of a date such as 2026-02-14."""
    return datetime.date.fromisoformat(date).strftime("%A")


if __name__ == "__main__":
    server.run("stdio")
