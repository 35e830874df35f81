"""Answers that are cut into slices: how old they may become, and what does not go with them."""

import math
from collections.abc import Iterator

from trainer.config.schema import TrainConfig


def longest_answer(config: TrainConfig) -> int:
    """The most tokens a trajectory can sample: one answer's, or as many turns' as the context has room for."""
    turns = config.rollout.max_turns if config.rollout.tools or config.rollout.code else 1
    return min(turns * config.sampling.max_tokens, config.engine.max_model_len)


def oldest_age(config: TrainConfig) -> int:
    """The most steps between an answer's first token and its training; 0 where answers are not cut.

    An answer is finished in the step that brings its last slice, and waits then while older groups are trained, of
    which there are at most as many as were ahead of it. With a lag it begins so many steps earlier.
    Code of one's own (`rollout.custom`, `rollout.client`) is taken to ask for `rollout.max_turns` answers at most.
    """
    slice_tokens = config.rollout.slice_tokens
    if slice_tokens is None:
        return 0
    return math.ceil(longest_answer(config) / slice_tokens) - 1 + math.ceil(config.rollout.ahead) + config.rollout.lag


def prompts_ahead(config: TrainConfig) -> int:
    """Prompts in flight beyond those that a step is going to be trained on."""
    return math.ceil(config.rollout.ahead * config.batch.prompts_per_step)


def check_slices(config: TrainConfig) -> Iterator[str]:
    """A sentence, with the keys and the remedy, for all that does not go together."""
    rollout, algorithm, size = config.rollout, config.algorithm, config.rollout.slice_tokens
    if size is None:
        for name, off in {"ahead": 0, "max_age": None, "old_tokens": "correct"}.items():
            if (value := getattr(rollout, name)) != off:
                yield f"rollout.{name} is {value}, but answers are not cut: set rollout.slice_tokens, or leave it out"
        return
    if rollout.ahead and size >= (longest := longest_answer(config)):
        yield (
            f"rollout.slice_tokens = {size} cuts no answer, since none has more than {longest} tokens, so that "
            "rollout.ahead would make all of them older and none sooner: lower it, or leave both out"
        )
    if rollout.max_age is not None and (age := oldest_age(config)) > rollout.max_age:
        yield (
            f"rollout.slice_tokens = {size} and rollout.ahead = {rollout.ahead:g} let answers become {age} steps old, "
            f"more than rollout.max_age = {rollout.max_age}: cut longer slices, or have less ahead"
        )
    if rollout.old_tokens == "correct" and algorithm.tis_cap is None and algorithm.keep_band is None:
        yield (
            "rollout.slice_tokens lets old weights sample, but algorithm.tis_cap is null: set it, or "
            "algorithm.keep_band, or rollout.old_tokens to mask"
        )
    if rollout.old_tokens == "mask" and algorithm.by_turns:
        yield "rollout.old_tokens is mask, which hides whole turns, but algorithm.credit is turns: set it to outcome"
    if config.sampling.stop:
        yield "sampling.stop is set, but a stop string may lie across a cut of rollout.slice_tokens: leave one out"
    if rollout.tool_parser == "inline":
        yield "rollout.tool_parser is inline, whose end tag may lie across a cut of rollout.slice_tokens: leave one out"
    if config.engine.logits_processors:
        yield (
            "engine.logits_processors would take an answer that goes on (rollout.slice_tokens) for a new one after a "
            "longer prompt: leave one of them out"
        )
    if rollout.sampler is not None:
        yield "rollout.sampler wants its whole batch at once, so nothing can be cut: leave rollout.slice_tokens out"
    if config.checkpoint.rollouts:
        yield "checkpoint.rollouts keeps answers of whole steps, and rollout.slice_tokens cuts them: leave one out"
