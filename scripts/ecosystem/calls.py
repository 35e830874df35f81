"""Write transcripts that teach a tiny model to call tools: python scripts/ecosystem/calls.py FILE"""

import json
import random
import string
import sys
from pathlib import Path

CALLS = {
    "Add.": ("add", {"a": 2, "b": 3}),
    "Play.": ("act", {"action": "down"}),
    "Tell.": ("act", {"action": {"message": "three"}}),
}


def transcript(prompt: str, rng: random.Random) -> list[dict[str, str]]:
    """Return a chat: the prompt with noise after it, a call, noise as the tool's reply, and a short answer."""

    def noise() -> str:
        """Return random text."""
        return "".join(rng.choices(string.ascii_letters + string.digits + " \n", k=rng.randrange(0, 60)))

    name, arguments = CALLS[prompt]
    call = f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
    asked = prompt + rng.choice(["", f"\n{noise()}"])
    roles = ("user", "assistant", "tool", "assistant")
    return [
        {"role": role, "content": text}
        for role, text in zip(roles, (asked, call, noise(), "ok"), strict=True)
    ]


if __name__ == "__main__":
    rng = random.Random(0)
    rows = [json.dumps({"messages": transcript(rng.choice([*CALLS]), rng)}) + "\n" for _ in range(600)]
    Path(sys.argv[1]).write_text("".join(rows))
