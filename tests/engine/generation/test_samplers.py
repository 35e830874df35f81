"""Level 5 on a real engine: samplers as people write them, ChatLearn modules, and logits processors."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from generation.compat.chatlearn.vllm_module import VLLMModule, get_model, print_rank_0
from generation.engine.engine import Leader
from generation.engine.logits import engine_arguments
from generation.engine.sampling import SamplingSettings
from generation.rollouts.episodes import RolloutSettings, rollout
from generation.rollouts.sampler import (
    FnCallRolloutSampler,
    OneShotRolloutSampler,
    make_sampler,
    sample_batch,
)
from generation.rollouts.sampler_llm import SamplerLLM
from generation.rollouts.sampler_prompts import PromptText, prompt_batch
from generation.trajectory import Trajectory
from tests.support.colocated import HfPolicy, start_engine, stop

PROMPTS = [[14, 50, 77], [20, 21, 22, 23, 24]]
SECONDS = 120.0


def scripted(params: Any) -> Callable[[list[int], torch.Tensor], torch.Tensor] | None:
    """Return a logits processor: requests with `extra_args={"say": ids}` get those ids, all others are unchanged."""
    script = (params.extra_args or {}).get("say")
    if script is None:
        return None

    def force(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(logits, -float("inf"))
        forced[script[min(len(output_ids), len(script) - 1)]] = 0.0
        return forced

    return force


@pytest.fixture(scope="module")
def leader(model: Path) -> Iterator[Leader]:
    """Yield an engine with that processor, which all tests of this file share."""
    leader = start_engine(
        model, max_model_len=640, extra=engine_arguments([f"{__file__}:scripted"], v2=False)
    )
    leader.engine.state.adopt_checkpoint(0)
    yield leader
    stop(leader)


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def settings(group: int = 1, **sampling: Any) -> RolloutSettings:
    return RolloutSettings(
        group, SamplingSettings(**({"max_tokens": 12} | sampling)), policy_version=0, seed=1, step=3
    )


def chats(tokenizer: Any, questions: list[str]) -> list[PromptText]:
    """Prompts, with the messages from which they were rendered."""
    messages = [[{"role": "user", "content": question}] for question in questions]
    texts = [
        tokenizer.apply_chat_template(m, tokenize=False, add_generation_prompt=True) for m in messages
    ]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    return prompt_batch(ids, range(len(ids)), tokenizer, 1, messages)


def sample(
    leader: Leader,
    tokenizer: Any,
    sampler: Any,
    batch: list[PromptText] | None = None,
    config: RolloutSettings | None = None,
    **limits: float,
) -> list[Trajectory]:
    """Run a rollout by a sampler, in which every trajectory is scored once."""
    config = config or settings()
    batch = prompt_batch(PROMPTS, [0, 1], tokenizer, config.group_size) if batch is None else batch
    scored: list[Trajectory] = []

    async def score(trajectory: Trajectory) -> None:
        scored.append(trajectory)

    work = sample_batch(leader.engine, tokenizer, sampler, batch, config, score, **limits)
    finished = leader.thread.run(work, SECONDS, "a rollout by a sampler")
    assert sorted(map(id, scored)) == sorted(map(id, finished))
    return finished


def facade(leader: Leader, tokenizer: Any, config: RolloutSettings | None = None) -> SamplerLLM:
    return SamplerLLM(
        leader.engine, tokenizer, config or settings(), leader.thread.loop, timeout=SECONDS
    )


def assert_on_policy(model: Path, trajectories: list[Trajectory], temperature: float = 1.0) -> None:
    """Every token that the mask calls sampled has the log-probability of a second pass through plain Transformers."""
    policy = HfPolicy(model)
    for t in trajectories:
        expected = policy.logprobs(t.prompt_ids + t.response_ids, temperature)[len(t.prompt_ids) - 1 :]
        gaps = [abs(a - b) for a, b, mask in zip(expected, t.logprobs, t.loss_mask, strict=True) if mask]
        assert max(gaps) < 1e-4
        assert all(b == 0 for b, mask in zip(t.logprobs, t.loss_mask, strict=True) if not mask)


def test_one_shot_samples_the_tokens_of_the_default(leader: Leader, tokenizer: Any) -> None:
    config = settings(group=3)
    waiting = [0, 1]

    async def ignore(trajectory: Trajectory) -> None: ...

    default = rollout(
        leader.engine, PROMPTS, config, lambda: waiting.pop(0) if waiting else None, ignore
    )
    expected = sorted(
        leader.thread.run(default, SECONDS, "a rollout"), key=lambda t: (t.prompt_index, t.sample_index)
    )
    trajectories = sample(leader, tokenizer, OneShotRolloutSampler(), config=config)
    assert [t.response_ids for t in trajectories] == [t.response_ids for t in expected]
    assert [(t.prompt_index, t.sample_index) for t in trajectories] == [
        (p, s) for p in (0, 1) for s in range(3)
    ]
    assert [t.finish_reason for t in trajectories] == [t.finish_reason for t in expected]


class ThreeCalls:
    """The sampler of verl's thread with its blanks filled in."""

    @property
    def tools(self) -> list[dict[str, Any]]:
        return [
            {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {}}}
        ]

    def __call__(self, llm: Any, prompts: Any, sampling_params: Any) -> Any:
        messages = [list(p.messages) for p in prompts]
        r1 = llm.chat(
            messages=messages, sampling_params=sampling_params, use_tqdm=False, tools=self.tools
        )
        for turn in range(2):
            for conversation, r in zip(messages, r1, strict=True):
                conversation.append({"role": "assistant", "content": r.outputs[0].text})
                conversation.append({"role": "tool", "content": f"result {turn}"})
            r1 = llm.chat(
                messages=messages, sampling_params=sampling_params, use_tqdm=False, tools=self.tools
            )
        return r1


def test_all_answers_of_a_sampler_with_three_calls_are_trained_on(
    leader: Leader, tokenizer: Any, model: Path
) -> None:
    trajectories = sample(leader, tokenizer, ThreeCalls(), chats(tokenizer, ["hi", "and you?", "hi"]))
    assert_on_policy(model, trajectories)
    for t in trajectories:
        assert t.turns == 3
        assert "look" in tokenizer.decode(t.prompt_ids)
        masked = [i for i, mask in zip(t.response_ids, t.loss_mask, strict=True) if not mask]
        between = tokenizer.decode(masked)
        assert between.count("<tool_response>") == 2
        assert [f"result {turn}" in between for turn in (0, 1)] == [True, True]
        assert 3 <= sum(t.loss_mask) <= 36
    # Equal questions have different seeds
    assert trajectories[0].response_ids != trajectories[2].response_ids


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def test_functions_are_called_between_chats(leader: Leader, tokenizer: Any) -> None:
    """Conversations are made to call a known function, an unknown one, something unreadable, or nothing."""
    texts = [
        '<tool_call>{"name": "add", "arguments": {"a": 20, "b": 22}}</tool_call>',
        '<tool_call>{"name": "sub", "arguments": {}}</tool_call>',
        "<tool_call>{add}</tool_call>",
        "no call at all",
    ]

    class Scripted(FnCallRolloutSampler):
        def __call__(self, llm: Any, prompts: Any, sampling_params: Any) -> Any:
            scripts = []
            for text in texts:
                params = sampling_params.clone()
                params.extra_args = {"say": [*tokenizer.encode(text), tokenizer.eos_token_id]}
                scripts.append(params)
            plain = llm.chat
            llm.chat = lambda messages, sampling_params, **options: plain(
                messages, scripts[: len(messages)], **options
            )
            return super().__call__(llm, prompts, sampling_params)

    config = settings(max_tokens=80)
    done = sample(
        leader, tokenizer, Scripted([add], max_turns=2), chats(tokenizer, ["a", "b", "c", "d"]), config
    )
    replies = [
        tokenizer.decode([i for i, m in zip(t.response_ids, t.loss_mask, strict=True) if not m])
        for t in done
    ]
    assert "42" in replies[0]
    assert "Error: Unknown function sub" in replies[1]
    assert "Error: the tool call is not valid JSON" in replies[2]
    assert replies[3] == ""
    assert [t.turns for t in done] == [2, 2, 2, 1]
    assert [t.metrics.get("tools/calls", 0) for t in done] == [1, 1, 1, 0]
    assert [t.metrics.get("tools/errors", 0) for t in done] == [0, 1, 1, 0]
    assert [t.error for t in done] == [""] * 4


class TrlEnvironment:
    """An environment as TRL defines it: it returns completion ids, not outputs."""

    def generate(self, llm: Any, prompts: Any, sampling_params: Any) -> list[list[int]]:
        outputs = llm.generate(prompts, sampling_params)
        return [o.outputs[0].token_ids for o in outputs]


def test_an_environment_may_return_ids(leader: Leader, tokenizer: Any) -> None:
    expected = sample(leader, tokenizer, OneShotRolloutSampler(), config=settings(group=2))
    trajectories = sample(leader, tokenizer, make_sampler(TrlEnvironment), config=settings(group=2))
    assert [t.response_ids for t in trajectories] == [t.response_ids for t in expected]


class Texts:
    """A coroutine that prompts with plain text, and continues the text of the answer."""

    async def __call__(self, llm: Any, prompts: Any, sampling_params: Any) -> Any:
        first = await llm.generate_async(prompts, sampling_params)
        second = [
            p + o.outputs[0].text + "<results>9</results>" for p, o in zip(prompts, first, strict=True)
        ]
        return await llm.generate_async(second, sampling_params)


def test_a_coroutine_may_prompt_with_texts_without_losing_exact_ids(
    leader: Leader, tokenizer: Any, model: Path
) -> None:
    """The tiny model samples bytes that are not text, which would change if they were decoded and encoded again."""
    trajectories = sample(leader, tokenizer, Texts(), config=settings(group=4))
    assert_on_policy(model, trajectories)
    once = sample(leader, tokenizer, OneShotRolloutSampler(), config=settings(group=4))
    assert [t.turns for t in trajectories] == [2] * 8
    assert [t.response_ids[: len(o.response_ids)] for t, o in zip(trajectories, once, strict=True)] == [
        o.response_ids for o in once
    ]


def test_a_processor_applies_to_the_requests_that_ask_for_it(leader: Leader, tokenizer: Any) -> None:
    llm = facade(leader, tokenizer)
    scripts = [[40, 41, 42, 43], None, [50, 51]]
    params = [llm.sampling_params.clone() for _ in scripts]
    for request_params, script in zip(params, scripts, strict=True):
        request_params.extra_args = None if script is None else {"say": script}
    asked = [list(o.outputs[0].token_ids) for o in llm.generate([PROMPTS[0]] * 3, params)]
    plain = [list(o.outputs[0].token_ids) for o in facade(leader, tokenizer).generate([PROMPTS[0]] * 3)]
    assert asked[0] == [40, 41, 42, *[43] * 9]
    assert asked[2] == [50, *[51] * 11]
    assert asked[1] == plain[1]


class OldProcessors:
    """A sampler that passes logits processors with the request, as older versions of vLLM allowed."""

    def __call__(self, llm: Any, prompts: Any, sampling_params: Any) -> Any:
        from vllm import SamplingParams

        return llm.generate(
            prompts, SamplingParams(logits_processors=[lambda ids, scores: scores], max_tokens=200)
        )


def test_processors_passed_with_a_request_are_refused_with_a_remedy(
    leader: Leader, tokenizer: Any
) -> None:
    for sampler in (
        OldProcessors(),
        lambda llm, prompts, params: llm.generate(prompts, {"logits_processors": [print]}),
        lambda llm, prompts, params: llm.generate(prompts, params, logits_processors=[print]),
    ):
        errors = {t.error for t in sample(leader, tokenizer, sampler)}
        assert len(errors) == 1
        assert "name a class or factory in the recipe, engine.logits_processors" in errors.pop()


def test_parameters_are_changed_within_a_block_and_restored(leader: Leader, tokenizer: Any) -> None:
    llm = facade(leader, tokenizer)
    before = llm.sampling_params
    with pytest.raises(ZeroDivisionError), llm.update_sampling_params(max_tokens=3, temperature=0.0):
        assert [len(o.outputs[0].token_ids) for o in llm.generate(PROMPTS)] == [3, 3]
        raise ZeroDivisionError
    assert llm.sampling_params is before
    assert (before.max_tokens, before.temperature) == (12, 1.0)
    with pytest.raises(ValueError, match="has no temprature"), llm.update_sampling_params(temprature=1):
        pass


def test_a_bad_prompt_does_not_affect_the_others(leader: Leader, tokenizer: Any) -> None:
    batch = prompt_batch([PROMPTS[0], [10**6], [5] * 700, PROMPTS[1]], range(4), tokenizer, 1)
    trajectories = sample(leader, tokenizer, OneShotRolloutSampler(), batch)
    assert [bool(t.error) for t in trajectories] == [False, True, True, False]
    assert "700 tokens" in trajectories[2].error


class Endless:
    """A sampler whose prompts grow until the context is full."""

    def __call__(self, llm: Any, prompts: Any, sampling_params: Any) -> Any:
        ids = [list(p.token_ids) for p in prompts]
        while True:
            outputs = llm.generate(ids, sampling_params)
            if not any(o.outputs[0].token_ids for o in outputs):
                return outputs
            ids = [[*o.prompt_token_ids, *o.outputs[0].token_ids, *[30] * 40] for o in outputs]


def test_a_full_context_ends_the_episode_but_not_the_run(leader: Leader, tokenizer: Any) -> None:
    for t in sample(leader, tokenizer, Endless()):
        assert (t.finish_reason, t.error) == ("length", "")
        assert t.loss_mask[-1] == 1
        assert 560 < len(t.prompt_ids) + len(t.response_ids) <= 640


def test_judging_calls_may_be_greedy_but_are_not_trained_on(leader: Leader, tokenizer: Any) -> None:
    def judged(llm: Any, prompts: Any, sampling_params: Any) -> Any:
        answers = llm.generate(prompts, sampling_params)
        with llm.update_sampling_params(temperature=0.0):
            llm.chat([[{"role": "user", "content": "good?"}]] * len(prompts))
        return answers

    def greedy(llm: Any, prompts: Any, sampling_params: Any) -> Any:
        with llm.update_sampling_params(temperature=0.0):
            return llm.generate(prompts)

    assert [t.turns for t in sample(leader, tokenizer, judged)] == [1, 1]
    with pytest.raises(
        ValueError, match=r"result 0 was not sampled as training asks: temperature is 0\.0"
    ):
        sample(leader, tokenizer, greedy)
    # Evaluation may be greedy
    assert sample(leader, tokenizer, greedy, config=settings(temperature=0.0))


def test_a_sampler_that_exceeds_its_time_is_abandoned(leader: Leader, tokenizer: Any) -> None:
    ended: list[str] = []

    def late(llm: Any, prompts: Any, sampling_params: Any) -> Any:
        time.sleep(1.0)
        try:
            llm.generate(prompts, sampling_params)
        except RuntimeError as error:
            ended.append(str(error))

    with pytest.raises(TimeoutError, match="the sampler: took longer than 0.2 s"):
        sample(leader, tokenizer, late, timeout=0.2)
    deadline = time.monotonic() + SECONDS
    while not ended and time.monotonic() < deadline:
        time.sleep(0.05)
    assert ended == ["this rollout has ended, so its llm samples no more"]


class FilledInPolicy(VLLMModule):
    """The class of ChatLearn's page with its blanks filled in as the text says, for today's vLLM."""

    def setup(self) -> None:
        self.model = get_model(self.model_provider, self.model_args)
        print_rank_0("ready")

    def build_dataset(self, train_prompts: Any, is_eval: bool = False) -> Any:
        max_prompt_length = self.model_args.get("seq_length") - self.model_args.get("max_new_tokens")
        tokenizer = self.tokenizer.tokenizer
        return [
            {"input_ids": tokenizer.encode(p)[-max_prompt_length:], "prompt": p} for p in train_prompts
        ]

    def model_provider(self) -> Any:
        return super().model_provider()

    def eval_forward(self, data: Any, iteration: int = 0) -> Any:
        return self._forward_step(data, iteration, eval_mode=True)

    def _add_request(self, data: Any, is_eval: bool = False) -> Any:
        return self._add_request_internal(data["prompt"], data["input_ids"], is_eval=is_eval)

    def forward_step(self, data: Any, iteration: int = 0) -> Any:
        return self._forward_step(data, iteration, eval_mode=False)

    def decode_internal(self, batched_outputs: Any) -> Any:
        return [
            (o.prompt, o.prompt_token_ids, completion)
            for o in batched_outputs
            for completion in o.outputs
        ]


MODULE = {
    "seq_length": 64,
    "max_new_tokens": 10,
    "n": 2,
    "ignore_eos": True,
    "prompt_logprobs": 1,
    "eval_temperature": 0,
}


def test_the_example_of_chatlearns_page_runs(leader: Leader, tokenizer: Any) -> None:
    module = FilledInPolicy(MODULE, facade(leader, tokenizer))
    module.setup()
    rows = module.build_dataset(["one", "three"])
    answers = module.generate(rows)
    assert [(prompt, ids) for prompt, ids, _ in answers] == [
        (r["prompt"], r["input_ids"]) for r in rows for _ in (0, 1)
    ]
    for number, (_, _, completion) in enumerate(answers):
        assert len(completion.token_ids) == len(completion.logprobs) == 10  # EOS is ignored
        assert completion.index == number % 2
        assert isinstance(completion.logprobs[0][completion.token_ids[0]].logprob, float)
    assert answers[0][2].token_ids != answers[1][2].token_ids
    greedy = module.generate(rows, is_eval=True)
    assert greedy[0][2].token_ids == greedy[1][2].token_ids
    outputs = module.execute_step(rows[0])
    assert all(isinstance(o.request_id, str) for o in outputs)
    assert outputs[0].prompt_logprobs[0] is None
    assert len(outputs[0].prompt_logprobs) == len(rows[0]["input_ids"])


def test_prompt_logprobs_are_complete_though_the_prefix_is_cached(
    leader: Leader, tokenizer: Any
) -> None:
    module = FilledInPolicy(MODULE | {"n": 1, "seq_length": 256}, facade(leader, tokenizer))
    row = module.build_dataset(
        ["a prompt that is longer than a block of the cache, so that it can be cached " * 2]
    )[0]
    first, second = (module.execute_step(row)[0] for _ in range(2))
    assert len(second.prompt_logprobs) == len(row["input_ids"])
    pairs = zip(first.prompt_logprobs[1:], second.prompt_logprobs[1:], row["input_ids"][1:], strict=True)
    assert max(abs(a[token].logprob - b[token].logprob) for a, b, token in pairs) < 1e-4


def test_engine_and_trainer_agree_at_another_temperature(
    leader: Leader, tokenizer: Any, model: Path
) -> None:
    config = settings(group=4, temperature=0.7)
    assert_on_policy(
        model, sample(leader, tokenizer, OneShotRolloutSampler(), config=config), temperature=0.7
    )


def test_a_module_samples_for_training_like_any_sampler(leader: Leader, tokenizer: Any) -> None:
    sizes = {"seq_length": 64, "max_new_tokens": 12}
    expected = sample(leader, tokenizer, OneShotRolloutSampler(), config=settings(group=2))
    module = make_sampler(VLLMModule, {"model_args": sizes | {"temperature": 1.0, "n": 2}})
    for _ in range(2):
        trajectories = sample(leader, tokenizer, module, config=settings(group=2))
        assert [t.response_ids for t in trajectories] == [t.response_ids for t in expected]
        texts = [
            tokenizer.decode(t.response_ids, skip_special_tokens=True).rstrip("\ufffd")
            for t in trajectories
        ]
        assert [t.decoded for t in trajectories] == texts  # vLLM waits for a character's last byte
    textless = {t.error for t in sample(leader, tokenizer, FilledInPolicy(sizes))}
    assert len(textless) == 1 and "not a mapping whose str_outputs has 2 texts" in textless.pop()
    with pytest.raises(
        ValueError, match="not sampled as training asks: temperature is 0.5 instead of 1.0"
    ):
        sample(leader, tokenizer, VLLMModule(sizes | {"temperature": 0.5}))


def test_a_modules_stop_settings_apply_in_training(leader: Leader, tokenizer: Any) -> None:
    """Each hyper-parameter changes where an answer ends, compared with the same answers without it."""
    config = settings(group=8, stop_token_ids=[2], max_tokens=40)
    sizes = {"seq_length": 64, "max_new_tokens": 40}
    plain = sample(leader, tokenizer, VLLMModule(sizes), config=config)
    longer = sample(leader, tokenizer, VLLMModule(sizes | {"ignore_eos": True}), config=config)
    assert {len(t.response_ids) for t in longer} == {40}
    for one, other in zip(plain, longer, strict=True):
        assert other.response_ids[: len(one.response_ids)] == one.response_ids
    inner = [token for t in plain for token in t.response_ids[1:-1]]
    words = {token: tokenizer.decode([token]) for token in inner}
    token = next(
        token for token in inner if tokenizer.encode(words[token], add_special_tokens=False) == [token]
    )
    shorter = sample(
        leader, tokenizer, VLLMModule(sizes | {"stop_token_list": words[token]}), config=config
    )
    for one, other in zip(plain, shorter, strict=True):
        assert other.response_ids == one.response_ids[: [*one.response_ids, token].index(token) + 1]
    assert sum(len(t.response_ids) for t in shorter) < sum(len(t.response_ids) for t in plain)
    evaluation = replace(settings(temperature=0.0), evaluation=True, step=-3)
    assert sample(
        leader,
        tokenizer,
        VLLMModule(sizes | {"temperature": 1.0, "eval_temperature": 0.0}),
        config=evaluation,
    )


def test_a_module_starts_and_stops_an_engine_of_its_own(model: Path) -> None:
    args = {
        "model": str(model),
        "seq_length": 96,
        "max_new_tokens": 8,
        "n": 3,
        "block_size": 32,
        "max_num_batched_tokens": 2048,
        "kv_cache_memory_bytes": 32 << 20,
        "generation_batch_size": 8,
        "stop_token_list": "<|im_end|>;zz",
    }
    with VLLMModule(args) as module:
        module.setup()
        rows = module.build_dataset(["hello", "you"])
        first = module.generate([rows[0], rows[1]])
        assert len(first["all_tokens"]) == 6
        assert all(
            len(mask) == len(ids)
            for mask, ids in zip(first["loss_mask"], first["all_tokens"], strict=True)
        )
        again, later = (module.generate([rows[0], rows[1]], iteration=i) for i in (0, 1))
        assert again["all_tokens"] == first["all_tokens"]  # the seed and the iteration decide
        assert later["all_tokens"] != first["all_tokens"]
        config = module._own.engine.llm.vllm_config  # type: ignore[union-attr]
        assert config.cache_config.block_size == 32
        assert config.scheduler_config.max_num_seqs == 8
    with pytest.raises(ValueError, match="has nothing to sample with"):
        module.generate([rows[0]])
