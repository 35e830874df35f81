"""Level 5: a sampler gets vLLM in its familiar words and all prompts at once; what it leaves out, the engine remembers.

In a recipe `sampler: scripts/examples/second_draft.py:SecondDraft`.
"""

from typing import Any


class SecondDraft:
    """Have every prompt answered, then ask for a better answer; both are learned from, what stands between is not."""

    def __init__(self, request: str = "Again, and better.") -> None:
        self.request = request

    def __call__(self, llm: Any, prompts: Any, sampling_params: Any) -> Any:
        """The second drafts: `RequestOutput`s, one for each prompt."""
        chats = [list(prompt.messages) for prompt in prompts]
        for chat, draft in zip(chats, llm.chat(messages=chats, sampling_params=sampling_params), strict=True):
            chat.append({"role": "assistant", "content": draft.outputs[0].text})
            chat.append({"role": "user", "content": self.request})
        return llm.chat(messages=chats, sampling_params=sampling_params)
