"""Answers that are cut into slices (`rollout.slice_tokens`): their greatest age, and the checks of
their settings.
"""

import math
from collections.abc import Iterator

from trainer.config.schema import TrainConfig


def longest_answer(config: TrainConfig) -> int:
    """Return the most tokens that a trajectory can sample: those of its turns, as far as the
    context has room.
    """
    turns = config.rollout.max_turns if config.rollout.tools or config.rollout.code else 1
    return min(turns * config.sampling.max_tokens, config.engine.max_model_len)


def oldest_age(config: TrainConfig) -> int:
    """Return the most steps between an answer's first token and its training; 0 if answers are not
    cut.

    An answer is finished in the step that brings its last slice. It then waits until older groups
    have been trained on, of which there are at most as many as `rollout.ahead` keeps in flight.
    With `rollout.lag` it begins earlier by as many steps. The user's code (`rollout.custom`,
    `rollout.client`) is assumed to ask for at most `rollout.max_turns` answers.
    """
    slice_tokens = config.rollout.slice_tokens
    if slice_tokens is None:
        return 0
    return (
        math.ceil(longest_answer(config) / slice_tokens)
        - 1
        + math.ceil(config.rollout.ahead)
        + config.rollout.lag
    )


def prompts_ahead(config: TrainConfig) -> int:
    """Return the number of prompts in flight beyond those of the step."""
    return math.ceil(config.rollout.ahead * config.batch.prompts_per_step)


def check_slices(config: TrainConfig) -> Iterator[str]:
    """Yield a sentence, with keys and remedy, for each setting that does not work with slices."""
    rollout = config.rollout
    algorithm = config.algorithm
    size = config.rollout.slice_tokens
    if size is None:
        for name, off in {"ahead": 0, "max_age": None, "old_tokens": "correct"}.items():
            if (value := getattr(rollout, name)) != off:
                yield (
                    f"rollout.{name} is {value}, but answers are not cut: set rollout.slice_tokens, or "
                    "leave it out"
                )
        return
    if rollout.ahead and size >= (longest := longest_answer(config)):
        yield (
            f"rollout.slice_tokens = {size} cuts no answer, since none has more than {longest} tokens, "
            "and without cuts rollout.ahead only makes answers older: lower slice_tokens, or leave "
            "both out"
        )
    if rollout.max_age is not None and (age := oldest_age(config)) > rollout.max_age:
        yield (
            f"rollout.slice_tokens = {size} and rollout.ahead = {rollout.ahead:g} let answers become "
            f"{age} steps old, more than rollout.max_age = {rollout.max_age}: raise slice_tokens, or "
            "lower ahead"
        )
    if rollout.old_tokens == "correct" and algorithm.tis_cap is None and algorithm.keep_band is None:
        yield (
            "rollout.slice_tokens lets old weights sample, but algorithm.tis_cap is null: set it, or "
            "algorithm.keep_band, or rollout.old_tokens to mask"
        )
    if rollout.old_tokens == "mask" and algorithm.by_turns:
        yield (
            "rollout.old_tokens is mask, which hides whole turns, but algorithm.credit is turns: set "
            "it to outcome"
        )
    if config.sampling.stop:
        yield (
            "sampling.stop is set, but a stop string may lie across a cut of rollout.slice_tokens: "
            "leave one out"
        )
    if rollout.tool_parser == "inline":
        yield (
            "rollout.tool_parser is inline, whose end tag may lie across a cut of "
            "rollout.slice_tokens: leave one out"
        )
    if config.engine.logits_processors:
        yield (
            "engine.logits_processors would take an answer that continues (rollout.slice_tokens) for "
            "a new one after a longer prompt: leave one of them out"
        )
    if rollout.sampler is not None:
        yield (
            "rollout.sampler takes its whole batch at once, so nothing can be cut: leave "
            "rollout.slice_tokens out"
        )
    if config.checkpoint.rollouts:
        yield (
            "checkpoint.rollouts keeps answers of whole steps, and rollout.slice_tokens cuts them: "
            "leave one out"
        )
