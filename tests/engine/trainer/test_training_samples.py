"""`hotbunk.Training` with engines: samples between calls that train, in any order, and snapshots."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from generation.exact_ids import Generation
from hotbunk import Datum, Training, UserError
from tests.support.training_checks import assert_equal, make, random_data, weights_of

ENGINE = {"max_model_len": 64, "kv_cache_gib": 0.0625}
PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]


def start(model: Path, plain: bool = True, **settings: Any) -> Training:
    return make(model, engine=ENGINE | {"plain_cpu_weights": plain}, **settings)


@pytest.fixture(scope="module", params=[None, 4], ids=["full", "adapters"])
def training(request: pytest.FixtureRequest, model: Path) -> Iterator[Training]:
    with start(model, lora_rank=request.param) as training:
        yield training


def step(training: Training, seed: int) -> None:
    training.forward_backward(random_data(4, seed))
    training.optim_step(1e-3)


def ids(answers: list[list[Generation]]) -> list[list[int]]:
    return [answer.token_ids for group in answers for answer in group]


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_answers_have_the_trainers_logprobs(training: Training, temperature: float) -> None:
    step(training, 1)
    for weights in (None, training.snapshot()):
        step(training, 2)
        answers = training.sample(PROMPTS, 2, max_tokens=8, temperature=temperature, weights=weights)
        assert [len(group) for group in answers] == [2, 2, 2]
        assert len({*map(tuple, ids(answers))}) == 6
        data = [Datum.answer(a.prompt_ids, a.token_ids) for group in answers for a in group]
        scores = training.logprobs(data, temperature=temperature, weights=weights)
        for score, answer in zip(scores, [a for group in answers for a in group], strict=True):
            got = torch.tensor(answer.logprobs)
            torch.testing.assert_close(score[-len(got) :], got, rtol=0, atol=1e-5)


def test_snapshots_stay_and_training_goes_on_as_if_none_was_used(training: Training) -> None:
    data = random_data(3)
    first: list[Any] = []
    for seed in range(3):
        weights = training.snapshot()
        answers = training.sample(PROMPTS, max_tokens=8, temperature=0)
        first.append((weights, ids(answers), training.logprobs(data)))
        step(training, seed)
    before = weights_of(training)
    for weights, answers, scores in reversed(first):
        assert ids(training.sample(PROMPTS, max_tokens=8, temperature=0, weights=weights)) == answers
        for got, wanted in zip(training.logprobs(data, weights=weights), scores, strict=True):
            assert torch.equal(got, wanted)
    assert not torch.equal(first[0][2][0], first[1][2][0])
    training.forward_backward(data)  # which brings the weights in training back
    training._drop()
    assert_equal(weights_of(training), before)


def test_weights_are_sent_once_for_each_change(training: Training) -> None:
    training.logprobs(random_data(1))
    shifts = len(training.shifts)
    for _ in range(2):
        training.sample(PROMPTS, max_tokens=4)
        training.sample(PROMPTS, max_tokens=4, weights=None)
    assert len(training.shifts) == shifts  # the engine is awake
    training.logprobs(random_data(1))
    assert len(training.shifts) == shifts + 1
    assert training.shifts[-1].keys() >= {"offload", "wake", "sync", "sleep", "onload", "offloaded"}


def test_coroutines_sample_while_others_run_and_training_waits_for_them(training: Training) -> None:
    async def both() -> list[Any]:
        first = asyncio.create_task(training.sample_async(PROMPTS, 4, max_tokens=40))
        second = asyncio.create_task(training.sample_async(PROMPTS, 4, max_tokens=4))
        await second
        step(training, 5)  # puts the engine to sleep once the first answers are there
        return [await first, await second]

    long, short = asyncio.run(both())
    assert sum(map(len, ids(long))) > sum(map(len, ids(short))) > 0
    assert all(answer.weight_version == training.version - 1 for group in long for answer in group)


def program(training: Training) -> tuple[list[list[int]], dict[str, torch.Tensor], list[list[float]]]:
    answers = []
    logprobs = []
    for _ in range(2):
        groups = training.sample(PROMPTS, 2, max_tokens=8)
        answers += ids(groups)
        logprobs += [a.logprobs for group in groups for a in group]
        data = [
            Datum.answer(
                a.prompt_ids, a.token_ids, advantage=len({*a.token_ids}) - 4, logprobs=a.logprobs
            )
            for group in groups
            for a in group
        ]
        training.forward_backward(data, "ppo")
        training.optim_step(1e-3)
    return answers, weights_of(training), logprobs


def test_a_program_run_twice_or_continued_from_a_save_has_the_same_bits(
    model: Path, tmp_path: Path
) -> None:
    with start(model, plain=False, lora_rank=4) as training:  # answers do not depend on the batch
        first = program(training)
        training.save(tmp_path)
        second = program(training)
    assert first[0] != second[0]
    with start(model, plain=False, lora_rank=4) as training:  # answers do not depend on the batch
        again = program(training)
        assert again[0] == first[0]
        assert again[2] == first[2]
        assert_equal(again[1], first[1])
    with start(model, plain=False, lora_rank=4) as training:  # answers do not depend on the batch
        training.load(tmp_path)
        continued = program(training)
        assert continued[0] == second[0]
        assert_equal(continued[1], second[1])


@pytest.mark.parametrize(
    ("prompts", "keys", "sentence"),
    [
        ("text", {}, "prompts is 'text': give a list of prompts"),
        ([[5], []], {}, "prompt 1 has 0 tokens: give at least one, and at most 63"),
        ([[5] * 64], {}, "prompt 0 has 64 tokens: give at least one, and at most 63"),
        ([[10**6]], {}, "prompt 0 contains 1000000, but the vocabulary has the ids 0 to"),
        ([[5, "a"]], {}, r"prompt 0 is \[5, 'a'\]: give ids, a text or a list of messages"),
        ([[{"no": "role"}]], {}, "prompt 0 cannot be rendered by the chat template"),
        ([[5]], {"n": 0}, "n and max_tokens are .0, 1024.: give whole numbers above 0"),
        ([[5]], {"temperature": -1.0}, "temperature is -1.0: give a finite number from 0 on"),
    ],
)
def test_bad_prompts_end_in_a_sentence(
    training: Training, prompts: Any, keys: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        training.sample(prompts, **keys)


def test_messages_and_texts_are_prompts(training: Training) -> None:
    tokenizer = training.tokenizer
    messages = [{"role": "user", "content": "hi"}]
    [[chat], [text]] = training.sample([messages, "hi"], max_tokens=4)
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert chat.prompt_ids == tokenizer(rendered, add_special_tokens=False)["input_ids"]
    assert text.prompt_ids == tokenizer("hi")["input_ids"]
    assert chat.text == tokenizer.decode(chat.token_ids, skip_special_tokens=True)
