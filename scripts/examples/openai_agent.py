"""Level 6: an OpenAI client, as `client: scripts/examples/openai_agent.py:agent` in a recipe.

It knows nothing of training: the server it talks to captures what is sampled, under the API key of this trajectory. It
may be any agent that takes a base URL and a key, in any framework.
"""

from typing import Any

from openai import AsyncOpenAI


async def agent(base_url: str, api_key: str, model: str, row: dict[str, Any], *, looks: int = 1) -> float:
    """Ask the row's question, and then for another look; an answer that settles on the row's earns the reward."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as openai:
        messages: list[Any] = [{"role": "user", "content": str(row["prompt"])}]
        for look in range(looks + 1):
            answer = (await openai.chat.completions.create(model=model, messages=messages)).choices[0].message
            messages.append({"role": "assistant", "content": answer.content or ""})
            if look < looks:
                messages.append({"role": "user", "content": "Look again."})
    return float(str(row["answer"]) in (answer.content or ""))
