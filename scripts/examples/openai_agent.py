"""Level 6: an OpenAI client, as `client: scripts/examples/openai_agent.py:agent` in a recipe.

The agent does not depend on training: the server captures its answers under the trajectory's API key. Any agent of any
framework can take its place that accepts a base URL and a key.
"""

from typing import Any

from openai import AsyncOpenAI


async def agent(
    base_url: str, api_key: str, model: str, row: dict[str, Any], *, looks: int = 1
) -> float:
    """Ask the row's question, and then for another look. The reward is 1 if the last answer contains the row's."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as openai:
        messages: list[Any] = [{"role": "user", "content": str(row["prompt"])}]
        for look in range(looks + 1):
            answer = (
                (await openai.chat.completions.create(model=model, messages=messages)).choices[0].message
            )
            messages.append({"role": "assistant", "content": answer.content or ""})
            if look < looks:
                messages.append({"role": "user", "content": "Look again."})
    return float(str(row["answer"]) in (answer.content or ""))
