"""Level 6 with images: an OpenAI client, as `client: scripts/examples/second_glance.py:agent` in a recipe.

The row's pictures are data URLs. Further pictures that the client sends are captured with their turn; an episode here
has two, so `data.max_images` must be at least 2. Like `openai_agent.py`, the client does not depend on training.
"""

import base64
import io
from typing import Any

from openai import AsyncOpenAI
from PIL import Image


async def agent(base_url: str, api_key: str, model: str, row: dict[str, Any]) -> float:
    """Ask about the row's picture, and again with its middle enlarged. The reward judges the last answer."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as openai:
        picture = row["images"][0]
        messages: list[Any] = [shown(picture, str(row["prompt"]))]
        answer = (
            (await openai.chat.completions.create(model=model, messages=messages)).choices[0].message
        )
        messages += [
            {"role": "assistant", "content": answer.content or ""},
            shown(enlarged(picture), "Look again."),
        ]
        answer = (
            (await openai.chat.completions.create(model=model, messages=messages)).choices[0].message
        )
    return float(str(row["answer"]) in (answer.content or ""))


def shown(url: str, text: str) -> dict[str, Any]:
    """Return a user's message with a picture."""
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    return {"role": "user", "content": parts}


def enlarged(url: str) -> str:
    """Return the middle of a picture, enlarged to the size of the picture; both are data URLs."""
    picture = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))
    width, height = picture.size
    middle = picture.crop((width // 4, height // 4, 3 * width // 4, 3 * height // 4)).resize(
        picture.size
    )
    buffer = io.BytesIO()
    middle.save(buffer, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
