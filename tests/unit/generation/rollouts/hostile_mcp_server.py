"""An MCP server that answers the question for its tools in the way that its argument names, and floods in calls."""

import json
import os
import sys
import time

HOW = sys.argv[1]
NAMES = {"path": ["../../x"], "empty": [""], "twice": ["x", "x"], "large pages": ["x" * 100_000] * 10}


def flood(text: str) -> None:
    """Write the text for ever."""
    while True:
        os.write(1, text.encode())


def say(request: dict, **result: object) -> None:
    """Answer a request."""
    os.write(1, json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}).encode() + b"\n")


if __name__ == "__main__":
    for page, line in enumerate(sys.stdin):
        asked = json.loads(line)
        if asked["method"] == "initialize":
            version = asked["params"]["protocolVersion"]
            say(
                asked,
                protocolVersion=version,
                capabilities={"tools": {}},
                serverInfo={"name": "odd", "version": "1"},
            )
        elif asked["method"] == "tools/call":
            if asked["params"]["arguments"]:
                flood("not JSON\n" * 1000)
            say(asked, content=[{"type": "text", "text": "fine"}])
        elif asked["method"] != "tools/list":
            if "id" in asked:
                error = {"code": -32601, "message": "not here"}
                os.write(
                    1, json.dumps({"jsonrpc": "2.0", "id": asked["id"], "error": error}).encode() + b"\n"
                )
        elif HOW == "silence":
            time.sleep(3600)
        elif HOW == "line":
            flood("x" * 65536)
        elif HOW == "lines":
            flood("not JSON\n" * 1000)
        elif HOW == "notifications":
            note = {"method": "notifications/message", "params": {"level": "info", "data": "x" * 1000}}
            flood(json.dumps({"jsonrpc": "2.0"} | note) + "\n")
        else:
            tools = [
                {"name": name, "inputSchema": {"type": "object"}}
                for name in NAMES.get(HOW, [f"tool-{page}"])
            ]
            say(asked, tools=tools, **({"nextCursor": str(page)} if HOW.endswith("pages") else {}))
