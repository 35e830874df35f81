"""An engine whose answers a function scripts, and a tokenizer in which the same text has many tokenisations."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from generation.engine.sampling import SamplingSettings
from generation.exact_ids import Generation
from generation.rollouts.episode import PolicyLLM, RolloutFunction, RolloutSettings
from generation.rollouts.episodes import EpisodeSetup, rollout
from generation.trajectory import Trajectory

TEMPLATE = (
    "{% if tools %}<|start|>tools\n{{ tools | tojson }}<|end|>\n{% endif %}"
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
END = 1
MERGES = [
    ("h", "e"),
    ("l", "l"),
    ("he", "ll"),
    ("hell", "o"),
    ("<", "/"),
    ("c", "t"),
    ("i", "o"),
    ("n", ">"),
]
Answers = Callable[[list[int], int], "Awaitable[list[int]] | list[int]"]
"""A function from a prompt's ids and seed to the ids that are sampled."""


def merging_tokenizer(pad_is_eos: bool = False) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes and a few merges: `hello` is one token, or two, or five. Ids 0 and 1 are pad and end."""
    special = ["<|pad|>", "<|end|>", "<|start|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = special + alphabet + ["".join(pair) for pair in MERGES]
    tokenizer = Tokenizer(BPE(vocab={word: index for index, word in enumerate(words)}, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, normalized=False) for word in special])
    pad = "<|end|>" if pad_is_eos else "<|pad|>"
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=TEMPLATE, pad_token=pad, eos_token="<|end|>"
    )


class Counting:
    """A tokenizer that counts the calls to encode and to decode."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer, self.calls = tokenizer, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self._tokenizer(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in ("decode", "batch_decode", "encode"):
            self.calls += 1
        return getattr(self._tokenizer, name)


class ScriptedEngine:
    """Stands in for an engine in rollouts; `prompts`, `sampling` and `seeds` record its requests."""

    def __init__(self, answers: Answers, max_model_len: int = 4096, max_num_seqs: int = 64) -> None:
        self.settings = SimpleNamespace(max_model_len=max_model_len, max_num_seqs=max_num_seqs)
        self.state = SimpleNamespace(check_can_generate=lambda version: None)
        self.prompts: list[list[int]] = []
        self.sampling: list[SamplingSettings] = []
        self.seeds: list[int] = []
        self._answers = answers

    async def complete(
        self,
        prompt_ids: list[int],
        sampling: SamplingSettings,
        *,
        seed: int,
        policy_version: int,
        **_: Any,
    ) -> Generation:
        """Record the request, and return the scripted answer, cut at `max_tokens`."""
        assert len(prompt_ids) < self.settings.max_model_len
        self.prompts.append(prompt_ids)
        self.sampling.append(sampling)
        self.seeds.append(seed)
        await asyncio.sleep(0)
        scripted = self._answers(prompt_ids, seed)
        ids = scripted if isinstance(scripted, list) else await scripted
        cut = ids[: sampling.max_tokens]
        reason = "stop" if cut == ids else "length"
        return Generation(cut, [-0.25 * (i + 1) for i in range(len(cut))], reason)


def settings(group: int = 1, max_tokens: int = 1000) -> RolloutSettings:
    """Settings of a rollout of `group` samples a prompt, at version 0."""
    return RolloutSettings(group, SamplingSettings(max_tokens), policy_version=0, seed=1, step=2)


def handle(
    engine: ScriptedEngine, tokenizer: Any, prompt_ids: Sequence[int] = (5, 6), **fields: Any
) -> PolicyLLM:
    """Return the handle of one trajectory."""
    return PolicyLLM(engine, tokenizer, settings(), 0, 0, list(prompt_ids), **fields)  # type: ignore[arg-type]


def run(
    engine: ScriptedEngine,
    function: RolloutFunction,
    prompts: Sequence[Sequence[int]],
    tokenizer: Any = None,
    group: int = 1,
    **episodes: Any,
) -> list[Trajectory]:
    """Run a rollout; the trajectories are in the order in which they finish."""

    async def score(trajectory: Trajectory) -> None:
        await asyncio.sleep(0)

    work = rollout(
        engine,  # type: ignore[arg-type]
        prompts,
        settings(group),
        partial(next, iter(range(len(prompts))), None),
        score,
        EpisodeSetup(function, tokenizer, **episodes),
    )
    return asyncio.run(work)


def spelled(tokenizer: Any, text: str, end: bool = True) -> list[int]:
    """Encode text one token a byte, as no tokenizer would; with the end token by default."""
    vocabulary = tokenizer.get_vocab()
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[
        0
    ][0]
    return [vocabulary[letter] for letter in letters] + [END] * end
