"""A module's prompts and batches: by tokens, never by characters, and never cut at the end that asks for an answer."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STEP_REMEDY = "return self.execute_step(data) from forward_step, and vLLM schedules by itself"
_SCHEDULED = ("seq_group_metadata_list", "blocks_to_swap_in", "blocks_to_swap_out", "blocks_to_copy")


class PromptPipeline:
    """Prompts with their ids, as a dataset: each item is `{"input_ids": …, "prompt": …}`.

    Attributes:
        dropped: how many prompts were left out for having too many tokens.
    """

    prompts_ids: list[dict[str, Any]]

    def __init__(
        self, prompts: Sequence[str], max_prompt_length: int, tokenizer: "PreTrainedTokenizerBase", cut: bool = False
    ) -> None:
        """Prompts with more than `max_prompt_length` tokens are dropped, or cut at their beginning where `cut` is set.

        Raises:
            ValueError: a prompt is empty, or `max_prompt_length` is no whole number above 0.
        """
        if not isinstance(max_prompt_length, int) or max_prompt_length < 1:
            raise ValueError("Prompt length for RLHF/OnlineDPO/GRPO trainer must be an integer greater than 0")
        if empty := [index for index, prompt in enumerate(prompts) if not prompt]:
            raise ValueError(f"Got empty prompt: number {empty[0]}")
        self.tokenizer = tokenizer
        items: list[dict[str, Any]] = [{"input_ids": tokenizer.encode(prompt), "prompt": prompt} for prompt in prompts]
        for item in items if cut else ():
            # The end is what asks for an answer, so it stays.
            if len(item["input_ids"]) > max_prompt_length:
                item["input_ids"] = item["input_ids"][-max_prompt_length:]
                item["prompt"] = tokenizer.decode(item["input_ids"])
        self.prompts_ids = [item for item in items if len(item["input_ids"]) <= max_prompt_length]
        self.dropped = len(items) - len(self.prompts_ids)

    def __len__(self) -> int:
        return len(self.prompts_ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.prompts_ids[index]


class ModuleTokenizer:
    """A tokenizer under the two names that modules know it by: `self.tokenizer`, and `self.tokenizer.tokenizer`."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self.tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)


class ScheduledData(dict[str, Any]):
    """A batch as `forward_step` gets it. What schedulers added to it once is refused with a remedy."""

    def __missing__(self, key: str) -> Any:
        if key in _SCHEDULED:
            raise ValueError(f"data[{key!r}] belonged to vLLM's scheduler, which hands it out no more: {STEP_REMEDY}")
        raise KeyError(key)


def load_tokenizer(engine: Mapping[str, Any]) -> "PreTrainedTokenizerBase":
    """The tokenizer that the hyper-parameters name, or the model's own."""
    from transformers import AutoTokenizer

    if not (name := engine.get("tokenizer") or engine.get("model")):
        raise ValueError("tokenizer is missing: set it or model, or give the module an llm")
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name)
    return tokenizer


def check_tokenizer(tokenizer: "PreTrainedTokenizerBase", training: "PreTrainedTokenizerBase") -> None:
    """Raise ValueError unless two tokenizers have the same tokens under the same ids: else ids mean something else."""
    digests = [
        hashlib.blake2b(json.dumps(sorted(t.get_vocab().items())).encode(), digest_size=16).digest()
        for t in (tokenizer, training)
    ]
    if digests[0] != digests[1]:
        names = tokenizer.name_or_path, training.name_or_path
        raise ValueError(f"tokenizer {names[0]} has other tokens than {names[1]}, which the policy is trained with")


def columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """A batch as a mapping of lists, from the rows of a dataset."""
    return {key: [row[key] for row in rows] for key in rows[0]} if rows else {}
