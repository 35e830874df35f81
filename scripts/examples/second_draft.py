"""Level 5: a sampler gets the interface of `vllm.LLM` and all prompts at once. Answers are recorded for training.

In a recipe `sampler: scripts/examples/second_draft.py:SecondDraft`.
"""

from typing import Any


class SecondDraft:
    """Answers every prompt, then asks for a better answer. Both are trained on; the text between them is not."""

    def __init__(self, request: str = "Again, and better.") -> None:
        self.request = request

    def __call__(self, llm: Any, prompts: Any, sampling_params: Any) -> Any:
        """Return the second drafts: a `RequestOutput` for each prompt."""
        chats = [list(prompt.messages) for prompt in prompts]
        for chat, draft in zip(
            chats, llm.chat(messages=chats, sampling_params=sampling_params), strict=True
        ):
            chat.append({"role": "assistant", "content": draft.outputs[0].text})
            chat.append({"role": "user", "content": self.request})
        return llm.chat(messages=chats, sampling_params=sampling_params)
