"""An MCP server with a memory, which tells how many calls its process has had."""

import os
import sys
import time

from mcp.server.mcpserver import MCPServer

server = MCPServer("shelf")
shelf: list[str] = []


@server.tool()
def put(item: str) -> str:
    """Put one thing on the shelf."""
    shelf.append(item)
    return f"{len(shelf)}: {', '.join(shelf)} ({os.environ.get('SHELF')}, {os.environ.get('SECRET_OF_THE_TRAINER')})"


@server.tool()
def misbehave(how: str) -> str:
    """Do not answer as one should."""
    if how == "raise":
        raise ValueError("the shelf is full")
    if how == "exit":
        os._exit(3)
    if how == "flood":
        return "x" * 1_000_000
    if how == "babble":
        os.write(1, b"this is not JSON\n" * 1000)
        return "babbled"
    if how == "print":
        while True:
            os.write(1, b"what tools print\n" * 1000)
    if how == "late":
        time.sleep(1)
        return "too late"
    time.sleep(3600)
    return ""


if __name__ == "__main__":
    if sys.argv[1:] == ["--broken"]:
        sys.exit("no shelf here")
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    server.run("stdio")
