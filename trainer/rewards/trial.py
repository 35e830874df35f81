"""Try the built-in rewards on what a right answer would look like, before anything is trained.

A reward that can never be 1 goes unnoticed otherwise: training runs, and its figure is 0.
"""

import asyncio
import re
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.config.schema import RewardConfig, RewardFunction
from trainer.errors import UserError, quoted
from trainer.rewards.functions import (
    FormatRegex,
    accepted_answers,
    exact_match,
    math_verify,
    numeric_match,
    spellings,
)
from trainer.rewards.loading import BoundReward, TrlReward
from trainer.rewards.reward_pool import RewardPool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from trainer.data import PromptDataset

_COMPARE = (exact_match, numeric_match, math_verify)
_ROWS = 200  # tried in each dataset
_SECONDS = 60.0  # after which no more rows of a dataset are tried
_TAG = re.compile(r"(?<!\?P)</?[\w:]+>")
_OPENED = re.compile(r"<([\w:]+)>\s*(?:</\1>\s*)?\Z")
_OPENED_TOKENS = 32  # more than a tag and the white space after it take


class Judgement(NamedTuple):
    """The verdict on a row: `reason` says why its reward is never 1, and is empty if it can be."""

    row: int
    label: str
    answer: Any
    reason: str


def opened_tag(tokenizer: "PreTrainedTokenizerBase", token_ids: Sequence[int]) -> str:
    """Return the tag that the chat template has opened at the end of these ids, before the model's
    answer begins.

    It is "<think>\\n", for example, or "<think>\\n\\n</think>\\n\\n" if the template has closed it
    again, and "" if there is none. A special token is not a tag, since completions do not show it.
    """
    end = list(token_ids[-_OPENED_TOKENS:])
    match = _OPENED.search(tokenizer.decode(end, skip_special_tokens=False))
    if match is None or not tokenizer.decode(end, skip_special_tokens=True).endswith(match[0]):
        return ""
    return match[0]


def judge_answers(
    functions: Sequence[BoundReward],
    rows: Iterable[tuple[int, Mapping[str, Any]]],
    tokenizer: "PreTrainedTokenizerBase",
    timeout_s: float = 10,
) -> Generator[Judgement, None, None]:
    """Yield for each row, and each built-in function that compares with an answer, whether it can
    be 1.

    The function judges what a model would write for the answer: 42 for 42.0, each item of a list,
    all as it reads after the tokenizer. Functions of the user's own are not called. math_verify,
    which may hang, runs in a process of its own that is killed after `timeout_s` seconds for a
    text.
    """
    compare = [reward for reward in functions if reward.function in _COMPARE]
    needs_process = any(reward.function is math_verify for reward in compare)
    config = RewardConfig(functions=[RewardFunction(name="math_verify")], workers=1, timeout_s=timeout_s)
    with asyncio.Runner() as runner, RewardPool(config) if needs_process else nullcontext() as pool:

        def judged(reward: BoundReward, text: str, answer: Any) -> tuple[float, str]:
            """Return a text's reward, and an error's sentence."""
            if reward.function is not math_verify:
                return reward.function(text, answer=answer, **reward.kwargs), ""
            assert pool is not None
            result = runner.run(
                pool.score(prompt="", completion=text, row={"answer": answer}, finish_reason="stop")
            )
            return result.reward, result.error

        for number, row in rows:
            answer = row.get("answer")
            for reward in compare:
                reason = _obstacle(reward, answer, tokenizer, judged)
                yield Judgement(number, reward.label, answer, reason)


def _obstacle(
    reward: BoundReward,
    answer: Any,
    tokenizer: "PreTrainedTokenizerBase",
    judged: Callable[[BoundReward, str, Any], tuple[float, str]],
) -> str:
    """Return why a reward can never be 1 for this answer; "" if it can."""
    reason = ""
    try:
        for accepted in accepted_answers(answer):
            for text in spellings(accepted):
                written = _written(text, tokenizer)
                value, error = judged(reward, written, answer)
                if value == 1.0:
                    return ""
                if written.strip() != text:
                    error = f"the tokenizer makes {quoted(written)} of the answer {quoted(text)}"
                reason = reason or error or f"it gives {value:g} to the answer {quoted(text)} itself"
    except ValueError as error:
        return str(error)
    return reason


def _written(text: str, tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return a text as reward functions see it once the model has written it: without special
    tokens.
    """
    return str(
        tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=True)
    )


def check_rewards(
    rewards: RewardPool,
    datasets: Mapping[str, "PromptDataset"],
    tokenizer: "PreTrainedTokenizerBase",
    seed: int,
    timeout_s: float = 10,
) -> list[str]:
    """Return a sentence for each kind of answer, and each format, for which a built-in reward can
    never be 1.

    Of each dataset, by name, up to 200 rows drawn by the seed are tried. If a function fits some
    rows only, the run may be meant so, and the sentence is a warning. If it fits none of all rows,
    it teaches nothing: raises UserError.
    """
    lines = []
    for path, prompts in datasets.items():
        for reward in rewards.functions:
            if reward.function in _COMPARE:
                lines += _check_answers(reward, path, prompts, tokenizer, seed, timeout_s)
    first = next(iter(datasets.values()))[0]
    opened = opened_tag(tokenizer, first.token_ids)
    offered = {"prompt": "", "row": first.row, "opened": opened}
    for reward in rewards.functions:
        lines += _check_format(reward, offered, tokenizer)
    return lines


def _check_answers(
    reward: BoundReward,
    path: str,
    prompts: "PromptDataset",
    tokenizer: "PreTrainedTokenizerBase",
    seed: int,
    timeout_s: float,
) -> list[str]:
    """Return the sentences about one function and one dataset. Raises UserError if it fits no
    row.
    """
    in_order = (prompts.take(position, 1, seed)[0] for position in range(len(prompts)))
    rows = ((prompt.id, prompt.row) for prompt in in_order)
    kinds: dict[str, list[Judgement]] = {}
    tried = 0
    failed = 0
    began = time.monotonic()
    with closing(judge_answers([reward], rows, tokenizer, timeout_s)) as judgements:
        for judgement in judgements:
            tried += 1
            if judgement.reason:
                failed += 1
                kinds.setdefault(type(judgement.answer).__name__, []).append(judgement)
            # Beyond the sample only a first row that fits is looked for: a function may be for a
            # few rows of many.
            if (tried >= _ROWS and failed < tried) or time.monotonic() > began + _SECONDS:
                break
    if failed == len(prompts):
        first = next(iter(kinds.values()))[0]
        raise UserError(
            f"reward {reward.label!r} can never be 1 in {path}, as in row {first.row}: {first.reason}; "
            "correct the answers, name their column by data.answer_key, or use another function"
        )
    return [
        f"reward {reward.label!r} can never be 1 on {len(kind)} of {tried} rows of {path} that were "
        f"tried, as on row {kind[0].row}: {kind[0].reason}"
        for kind in kinds.values()
    ]


def _check_format(
    reward: BoundReward, offered: dict[str, Any], tokenizer: "PreTrainedTokenizerBase"
) -> Iterator[str]:
    """Yield a sentence if an answer in the format of a format function's pattern gets less than 1.

    The answer continues where the chat template ends. It is made of the pattern's tags; if that
    does not match the pattern, the function cannot be tried.
    """
    function = reward.function
    if isinstance(function, FormatRegex):
        tags = list(dict.fromkeys(_TAG.findall(function.pattern)))  # a look-ahead may repeat one
    elif isinstance(function, TrlReward) and function.judges_format:
        tags = ["<think>", "</think>"]
    else:
        return
    opened = offered["opened"]
    template_tags = _TAG.findall(opened)
    failures = []
    for text in _tagged_texts(tags):
        if reward(text, offered | {"opened": ""}) < 1:
            continue
        rest = text
        if template_tags and template_tags[-1] in text:
            rest = text.partition(template_tags[-1])[2]
        written = _written(rest, tokenizer)
        if reward(written, offered) == 1:
            return
        failures.append((text, written))
    if failures:
        text, written = failures[0]
        template = f", after {opened!r} from the chat template" if opened else ""
        yield (
            f"reward {reward.label!r} can hardly be 1: it gets a well-formed answer, {quoted(text)}, "
            f"without special tokens as {quoted(written)}{template}"
        )


def _tagged_texts(tags: Sequence[str]) -> Iterator[str]:
    """Yield short texts with these tags in order, which differ in white space and in what follows
    the last tag.
    """
    for inner, between, end in product(("1", "\n1\n"), ("\n", "", "\n\n"), ("", "1")):
        text = ""
        for tag in tags:
            text += tag + (between if tag.startswith("</") else inner)
        if tags:
            yield text.rstrip() + end
