"""Suggestions for keys and commands that do not exist; test_migration.py has every key of other trainers."""

import random
from pathlib import Path

import pytest

from trainer.cli import parse
from trainer.config.recipe import known_keys, load_config
from trainer.config.suggestions import closest, edits, suggestion
from trainer.errors import UserError

KEYS = [key for key, _ in known_keys()]
LETTERS = "abcdefghijklmnopqrstuvwxyz_"


def misspelt(name: str, chance: random.Random) -> str:
    """Return the name after one random edit."""
    i = chance.randrange(len(name))
    letter = chance.choice(LETTERS)
    variants = [
        name[:i] + letter + name[i:],
        name[:i] + name[i + 1 :],
        name[:i] + letter + name[i + 1 :],
        name[:i] + name[i : i + 2][::-1] + name[i + 2 :],
    ]
    return chance.choice(variants) or name


def test_a_key_with_one_or_two_wrong_letters_is_named_or_none_is() -> None:
    """Draw 200 keys by seed. Long names are nearly always recognised; a wrong key is never named."""
    chance = random.Random(60)
    answers = []
    while len(answers) < 200:
        key = chance.choice(KEYS)
        section, _, name = key.rpartition(".")
        for _ in range(chance.choice([1, 2])):
            name = misspelt(name, chance)
        typed = f"{section}.{name}" if section else name
        if typed in KEYS:
            continue
        answer = suggestion(typed, KEYS)
        assert answer in ("", f"; did you mean {key}?"), typed
        answers.append(answer)
    assert answers.count("") < 40


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("algorithm.num_generations", "algorithm.group_size"),
        ("algorithm.epsilon", "algorithm.clip_low"),
        ("algorithm.beta", "algorithm.kl_coef"),
        ("policy.beta", "policy.betas"),  # the section's own key comes first
        ("algorithm.scale_rewards", "algorithm.normalize_std"),
        ("tracking.report_to", "tracking.wandb or tracking.also"),
        ("run.max_steps", "run.steps"),
        ("eval_steps", "eval.every"),
        ("eval.temprature", "eval.temperature"),
        ("rollout.n", "algorithm.group_size"),
        ("run.tensor_parallel_size", "engine.tensor_parallel_size"),
        ("policy.depth", ""),
        ("engine.n_gpus", ""),
    ],
)
def test_the_key_that_was_meant_is_named(typed: str, meant: str) -> None:
    answer = suggestion(typed, KEYS)
    assert answer in (f"; did you mean {meant}?", f"; here: {meant}") if meant else answer == ""


def test_a_section_of_another_trainer_is_answered_key_by_key(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("trainer: {nnodes: 2, save_freq: 5}\nquux: {a: 1, b: 2}\n")
    with pytest.raises(UserError) as refused:
        load_config(recipe, [])
    lines = str(refused.value).splitlines()
    assert "trainer.save_freq is not a known key; did you mean checkpoint.every?" in lines
    assert any(line.startswith("trainer.nnodes is not a known key; here: no key: ") for line in lines)
    assert "quux is not a known key; see --help for all of them" in lines


@pytest.mark.parametrize(
    ("typed", "meant"), [("trian", "train"), ("gnerate", "generate"), ("evl", "eval")]
)
def test_a_misspelt_command_is_named(typed: str, meant: str) -> None:
    with pytest.raises(UserError, match=f"'{typed}' is not a command of hotbunk; did you mean {meant}?"):
        parse([typed, "recipe.yaml"])


def test_edits_are_the_length_of_the_shortest_path_through_one_edit_at_a_time() -> None:
    """Compare with a breadth-first search over all strings of two letters."""
    texts = {""}
    for _ in range(4):
        texts |= {text + letter for text in texts for letter in "ab"}
    neighbours = {text: {other for other in texts if one_edit(text, other)} for text in texts}
    for start in texts:
        near, reached = {start}, {start: 0}
        for distance in (1, 2):
            near = {other for text in near for other in neighbours[text]} - reached.keys()
            reached |= dict.fromkeys(near, distance)
        for text, distance in reached.items():
            assert edits(start, text) == distance, (start, text)


def one_edit(text: str, other: str) -> bool:
    """Return True if one edit turns `text` into `other`."""
    for i in range(len(text) + 1):
        beginning = text[:i]
        inserted = {beginning + letter + text[i:] for letter in "ab"}
        replaced = {beginning + letter + text[i + 1 :] for letter in ("", "a", "b")}
        swapped = beginning + text[i : i + 2][::-1] + text[i + 2 :]
        if other in inserted | replaced | {swapped} and other != text:
            return True
    return False


def test_a_name_between_two_is_not_completed() -> None:
    assert closest("tops", ["topk", "topp"]) is None
    assert closest("quuxes", ["quux", "corge"]) is None  # too short for two edits
