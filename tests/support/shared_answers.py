"""Sample with common beginnings: groups of answers, and trees of turns."""

import random

from trainer.types import Sample

VOCABULARY = 61
LEAST = 3  # tokens in common that are shared


def make_sample(prompt: list[int], answer: list[int]) -> Sample:
    """Return a sample whose answer is trained, except every fourth token."""
    mask = [0] * len(prompt) + [int(place % 4 != 3) for place in range(len(answer))]
    return Sample([*prompt, *answer], mask, [-4.0 * bit for bit in mask])


def group(
    size: int, prompt_length: int, lengths: list[int], seed: int = 0, prompt: list[int] | None = None
) -> list[Sample]:
    """Return `size` answers to a prompt, of these lengths in turn."""
    draw = random.Random(seed)
    prompt = prompt or [draw.randrange(VOCABULARY) for _ in range(prompt_length)]
    sizes = [lengths[number % len(lengths)] for number in range(size)]
    return [make_sample(prompt, [draw.randrange(VOCABULARY) for _ in range(length)]) for length in sizes]


def turns(depth: int, seed: int = 0) -> list[Sample]:
    """Trajectories that branch at every level; of each two levels one is trained, and one is given."""
    draw = random.Random(seed)

    def grow(ids: list[int], mask: list[int], level: int) -> list[Sample]:
        if level == depth:
            return [Sample(ids, mask, [-4.0 * bit for bit in mask])]
        samples = []
        for _ in range(draw.randint(1, 3)):
            run = [draw.randrange(VOCABULARY) for _ in range(draw.randint(4, 12))]
            samples += grow(ids + run, mask + [level % 2] * len(run), level + 1)
        return samples

    return grow([], [], 0)


_ANSWER = random.Random(5).choices(range(VOCABULARY), k=12)
_PROMPT = random.Random(6).choices(range(VOCABULARY), k=20)
CASES = {
    "one level": group(6, 40, [12, 7, 20, 12]),
    "five levels": turns(5, seed=3),
    "identical answers": [make_sample(_PROMPT, _ANSWER)] * 3,
    "an answer that begins another": [make_sample(_PROMPT, _ANSWER[:size]) for size in (5, 12, 6)],
    "answers of one token": [make_sample(_PROMPT, [token]) for token in (3, 9, 3)],
    "nothing in common": group(1, 9, [8]) + group(1, 12, [5], seed=1) + group(1, 7, [9], seed=2),
    "two prompts": group(4, 30, [10, 6]) + group(5, 22, [8, 15], seed=1),
    "empty answers": [*group(2, 20, [7]), make_sample(_PROMPT, []), make_sample(_PROMPT, [])],
    "one sample": group(1, 20, [12]),
    "one token": [make_sample([4], [])],
}
"""Samples by what is special about them."""
