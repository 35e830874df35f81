"""Serve Hotbunk's episodes from another Python. This file needs no package: put it beside your
script.

    from hotbunk_client import serve

    async def agent(base_url, api_key, model, row):  # or a plain function
        ...  # any OpenAI client or agent framework
        return 1.0  # or {"name": reward, ...}, or (reward, {"metric": number, ...})

    serve(agent)

The recipe names the script: `rollout.client: {command: [path/to/python, script.py], workers: 4}`.
Its `rollout.kwargs` are keyword arguments of the function. What the script prints is in
`clients.log` in the run's folder.
"""

import asyncio
import inspect
import json
import os
import socket
from collections.abc import Callable
from typing import Any


def serve(agent: Callable[..., Any]) -> None:
    """Answer episodes one after the other, on one event loop, until the run ends."""
    connection = socket.socket(fileno=int(os.environ["HOTBUNK_MESSAGES"]))
    os.set_inheritable(connection.fileno(), False)
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    with connection.makefile("rwb") as messages:

        def say(message: dict[str, Any]) -> None:
            """Send one line to the run."""
            messages.write(json.dumps(message).encode() + b"\n")
            messages.flush()

        say({"ready": True})
        for line in messages:
            asked = json.loads(line)
            try:
                returned = agent(
                    asked["base_url"], asked["api_key"], asked["model"], asked["row"], **asked["kwargs"]
                )
                if inspect.isawaitable(returned):
                    returned = loop.run_until_complete(returned)
                reward, metrics = returned if isinstance(returned, tuple) else (returned, {})
                say({"id": asked["id"], "reward": reward, "metrics": metrics})
            except Exception as error:
                say({"id": asked["id"], "error": f"{type(error).__name__}: {error}"[:1000]})
