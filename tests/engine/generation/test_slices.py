"""Answer cut into slices on real engines have the tokens of uncut answers, each with its version.

Weights are packed, as by default: with plain ones, log-probabilities agree only to rounding, cut or not, when requests
share forward passes in other ways.
"""

import asyncio
import copy
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import openai
import pytest
from transformers import AutoTokenizer

from generation.engine.engine import Leader
from generation.engine.sampling import SamplingSettings
from generation.engine.slices import Turnstile, Unfinished
from generation.exact_ids import Generation
from generation.rollouts.agent import Agent, environment_rollout, tool_rollout
from generation.rollouts.client import ClientRollout
from generation.rollouts.episode import (
    PolicyLLM,
    RolloutFunction,
    RolloutSettings,
    custom_rollout,
    one_shot,
)
from generation.rollouts.episodes import run_episode
from generation.rollouts.tools import ToolCall, ToolLimits, ToolRunner, make_tool, tools_by_name
from generation.trajectory import Trajectory
from tests.support.colocated import Colocated, start_engine, stop
from tests.support.sliced import Episode, Episodes
from trainer.engines import start_server

PROMPTS = [[14 + 3 * i, *range(20, 24 + 5 * i)] for i in range(8)]
SAMPLED = SamplingSettings(80)
CONTEXT = 512


@pytest.fixture(scope="module")
def both(tiny_qwen2: Path) -> Iterator[Colocated]:
    """Yield a policy of version 0, and an engine that is asleep and without a version."""
    with Colocated(tiny_qwen2, plain=False, max_model_len=CONTEXT, keyed_noise=True) as both:
        both.manager.sleep()
        yield both


@pytest.fixture(scope="module")
def leaders(tiny_qwen2: Path) -> Iterator[dict[str, Leader]]:
    """Engines with the same weights; one has no prefix cache, and less room than eight answers need."""
    small: dict[str, Any] = {
        "kv_cache_bytes": 1 << 18,
        "extra": {"enable_prefix_caching": False, "block_size": 32},
    }
    settings: dict[str, dict[str, Any]] = {
        "float32": {},
        "bfloat16": {"dtype": "bfloat16"},
        "no cache": small | {"max_model_len": 160},
    }
    leaders = {
        name: start_engine(
            tiny_qwen2, plain=False, **({"max_model_len": CONTEXT, "keyed_noise": True} | options)
        )
        for name, options in settings.items()
    }
    for leader in leaders.values():
        leader.engine.state.adopt_checkpoint(0)
    yield leaders
    for leader in leaders.values():
        stop(leader)


def answer(
    leader: Leader, prompt: list[int], sampling: SamplingSettings = SAMPLED, **more: Any
) -> Episode[Generation]:
    """Return an episode that samples one answer, with a seed that depends on the prompt."""

    async def episode(turnstile: Turnstile | None) -> Generation:
        place = {"seed": 90 + len(prompt), "policy_version": 0, "turnstile": turnstile}
        return await leader.engine.complete(prompt, sampling, **(place | more))

    return episode


def answers(leader: Leader, sampling: SamplingSettings = SAMPLED) -> list[Episode[Generation]]:
    """Return an episode for each of PROMPTS."""
    return [answer(leader, prompt, sampling) for prompt in PROMPTS]


def uncut(leader: Leader, sampling: SamplingSettings = SAMPLED) -> list[Generation]:
    """Sample an answer to each of PROMPTS without slices."""

    async def go() -> list[Generation]:
        return list(await asyncio.gather(*(episode(None) for episode in answers(leader, sampling))))  # type: ignore[arg-type]

    return leader.thread.run(go(), 120, "answers")


@pytest.mark.parametrize(
    ("name", "temperature"), [("float32", 1.0), ("bfloat16", 1.0), ("no cache", 1.0), ("float32", 0.0)]
)
def test_an_answer_in_slices_is_the_uncut_one_bit_for_bit(
    leaders: dict[str, Leader], name: str, temperature: float
) -> None:
    """Log-probabilities are equal, too, with a prefix cache and without, and when vLLM runs out of room."""
    leader = leaders[name]
    expected = uncut(leader, replace(SAMPLED, temperature=temperature))
    assert (
        max(len(one.token_ids) for one in expected) == 80 > min(len(one.token_ids) for one in expected)
    )
    for tokens in (1, 7, 64):
        with Episodes(
            leader, tokens, answers(leader, replace(SAMPLED, temperature=temperature))
        ) as episodes:
            assert episodes.results() == expected
        assert episodes.slices.opening == -(-80 // tokens)


def test_preempted_answers_are_counted(leaders: dict[str, Leader]) -> None:
    assert uncut(leaders["no cache"]) == uncut(leaders["float32"])
    assert leaders["no cache"].engine.preemptions > 0
    assert leaders["float32"].engine.preemptions == 0


def test_an_answer_continues_after_a_sleep_and_on_another_engine(
    both: Colocated, leaders: dict[str, Leader]
) -> None:
    """The tokens are equal, first in one batch with weights sent before each slice, then alone on another engine."""
    results, other = uncut(leaders["float32"]), leaders["no cache"]
    with Episodes(both.leader, 7, answers(both.leader)) as episodes:
        for _ in range(3):
            with both.manager.generation_shift(both.policy):
                assert episodes.one_slice()
            assert both.leader.engine.state.version is None
        kept = [turnstile.unfinished for turnstile in episodes.turnstiles]
        stored = [part and json.loads(json.dumps(asdict(part))) for part in kept]
        with both.manager.generation_shift(both.policy):
            assert episodes.results() == results
    longer = sum(len(result.token_ids) > 21 for result in results)
    assert [len(part["token_ids"]) for part in stored if part] == [21] * longer
    for expected, saved in reversed(list(zip(results, stored, strict=True))):
        if saved is not None:
            episode = answer(other, saved["prompt_ids"], unfinished=Unfinished(**saved))
            with Episodes(other, 11, [episode]) as alone:
                assert alone.results() == [expected]


def test_each_token_has_the_version_that_sampled_it(both: Colocated) -> None:
    """A segment's log-probabilities are the trainer's with the weights of its version, and not with others."""
    states, policy = dict[int, dict[str, Any]](), both.policy
    with Episodes(both.leader, 20, answers(both.leader)) as episodes:
        for version in (0, 1, 1, 2):  # two slices of version 1
            if version != policy.version:
                policy.randomise(version)
            states[version] = copy.deepcopy(policy.model.state_dict())
            with both.manager.generation_shift(policy):
                episodes.one_slice(version)
        done = episodes.results(2)
    assert max(len(result.token_ids) for result in done) == 80
    for result in done:
        segments = [(0, 0), (1, 20), (2, 60)][
            : 1 + sum(len(result.token_ids) > start for start in (20, 60))
        ]
        assert (result.versions, result.weight_version) == (segments, segments[-1][0])
    gaps: dict[bool, list[float]] = {True: [], False: []}
    for version, state in reversed(states.items()):
        policy.model.load_state_dict(state)
        policy.version = version
        for result in done:
            expected = policy.logprobs(result.ids)[len(result.prompt_ids) - 1 :]
            sampled_by = [
                max(v for v, start in result.versions if start <= i) for i in range(len(expected))
            ]
            for mine, theirs, by in zip(expected, result.logprobs, sampled_by, strict=True):
                gaps[by == version].append(abs(mine - theirs))
    assert max(gaps[True]) < 1e-5
    assert sum(gap > 1e-2 for gap in gaps[False]) > 0.9 * len(gaps[False])


def test_an_answer_ends_where_it_would_end_uncut(leaders: dict[str, Leader]) -> None:
    """An answer ends by its budget, by a stop token that is the last of a slice, or by the end of the context."""
    leader, small = leaders["float32"], leaders["no cache"]
    long = next(one for one in uncut(leader) if len(one.token_ids) == 80)
    stop_at = next(i for i in range(5, 80) if long.token_ids[i] not in long.token_ids[:i])
    stopped = replace(SAMPLED, stop_token_ids=[long.token_ids[stop_at]])
    filled = [20 + i % 50 for i in range(150)]
    for engine, tokens, prompt, sampling, openings, length, reason in [
        (leader, 5, long.prompt_ids, replace(SAMPLED, max_tokens=25), 5, 25, "length"),
        (leader, 5, long.prompt_ids, replace(SAMPLED, max_tokens=27), 6, 27, "length"),
        (leader, stop_at + 1, long.prompt_ids, stopped, 1, stop_at + 1, "stop"),
        (small, 5, filled, replace(SAMPLED, temperature=0.0), 2, 10, "length"),
    ]:
        with Episodes(engine, tokens, [answer(engine, prompt, sampling)]) as episodes:
            (done,) = episodes.results()
            assert (len(done.token_ids), done.finish_reason, episodes.slices.opening) == (
                length,
                reason,
                openings,
            )
        assert done == engine.thread.run(answer(engine, prompt, sampling)(None), 60, "an answer")  # type: ignore


def test_an_evaluation_samples_while_answers_of_the_training_are_parked(
    leaders: dict[str, Leader],
) -> None:
    """Its answers have no turnstile, so the closed gate does not hold them, and the parked answers do not change."""
    leader = leaders["float32"]
    expected = uncut(leader)
    with Episodes(leader, 7, answers(leader)) as episodes:
        parked = episodes.one_slice()
        assert uncut(leader) == expected
        assert (episodes.slices.parked, episodes.slices.opening, episodes.slices.version) == (
            parked,
            1,
            None,
        )
        assert episodes.results() == expected


def test_stop_conditions_that_could_lie_across_a_cut_are_refused(leaders: dict[str, Leader]) -> None:
    leader = leaders["float32"]
    with Episodes(leader, 5, [answer(leader, [5], replace(SAMPLED, stop=["ab"]))]) as episodes:
        with pytest.raises(ValueError, match="can lie across two slices"):
            episodes.results()
    refused = list[str]()

    async def client(base_url: str, api_key: str, model: str, _: Any) -> None:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as api:
            for options in (
                {"stop": "ab"},
                {"extra_body": {"repetition_detection": {"max_pattern_size": 3, "min_count": 3}}},
            ):
                with pytest.raises(openai.BadRequestError, match="lie across two slices") as error:
                    await api.completions.create(model=model, prompt="?", **options)  # type: ignore[call-overload]
                refused.append(str(error.value))
            await api.completions.create(model=model, prompt="?")

    run = ClientRollout(client, start_server)

    async def episode(turnstile: Turnstile) -> list[Trajectory]:
        llm = PolicyLLM(
            leader.engine,
            tokenizer,
            RolloutSettings(1, SAMPLED, 0, 1, 2),
            0,
            0,
            [5],
            turnstile=turnstile,
        )
        return await run(llm, {}, SAMPLED)

    tokenizer = AutoTokenizer.from_pretrained(leader.engine.settings.model)
    with Episodes(leader, 5, [episode]) as asked:
        ((trajectory,),) = asked.results()
    assert trajectory.turns == 1 and len(refused) == 2
    leader.thread.run(run.aclose(), 60, "stopping the server")
    with Episodes(leader, 5, [answer(leader, [5], unfinished=Unfinished([6], 1, 9))]) as episodes:
        with pytest.raises(ValueError, match="continues its own prompt"):
            episodes.results()


def test_carried_prompts_may_be_more_than_a_step_holds(leaders: dict[str, Leader]) -> None:
    """On a CPU, vLLM would split a prompt, and then fail."""
    leader = leaders["float32"]
    prompts = [[14 + i % 50, *[20 + (i + j) % 50 for j in range(90 + i)]] for i in range(48)]
    assert (
        sum(map(len, prompts))
        > 2048
        == leader.engine.llm.vllm_config.scheduler_config.max_num_batched_tokens
    )
    short = replace(SAMPLED, max_tokens=12)
    with Episodes(leader, 12, [answer(leader, prompt, short) for prompt in prompts]) as episodes:
        expected = episodes.results()
    with Episodes(leader, 5, [answer(leader, prompt, short) for prompt in prompts]) as episodes:
        assert episodes.results() == expected


STOPPING = SamplingSettings(60, stop_token_ids=list(range(2, 200, 8)))
"""Settings for answers of about eight tokens, ended at random."""


class FourTurns:
    """Rollouts of four turns at each level, whatever the policy says. `calls` counts the calls of their tools."""

    def __init__(self, tokenizer: Any) -> None:
        self.calls, self.seen = 0, list[Any]()
        agent = Agent(ToolRunner(ToolLimits(), tokenizer), lambda _: [ToolCall("look")], 4)
        kit = self

        async def look() -> str:
            await asyncio.sleep(0.01)
            self.calls += 1
            return "seen"

        class Room:
            def reset(self) -> str:
                return "You are in a room."

            async def look(self) -> str:
                kit.calls += 1
                return "seen"

        async def custom(
            llm: PolicyLLM, row: dict[str, Any], sampling: SamplingSettings
        ) -> list[Trajectory]:
            """Have two conversations of four turns; the second's trajectory is assembled by hand."""

            async def talk() -> Any:
                chat = llm.conversation()
                for _ in range(4):
                    await chat.sample(sampling)
                    chat.add([{"role": "tool", "content": "seen"}])
                    kit.calls += 1
                return chat

            first, second = await talk(), await talk()
            parts = {name: getattr(second, name) for name in ("response_ids", "loss_mask", "logprobs")}
            return [first, Trajectory(0, 0, second.prompt_ids, **parts)]

        async def client(base_url: str, api_key: str, model: str, row: dict[str, Any]) -> float:
            async with openai.AsyncOpenAI(
                base_url=base_url, api_key=api_key, max_retries=0, timeout=120
            ) as api:
                messages: list[Any] = [{"role": "user", "content": row["question"]}]
                for turn in range(4):
                    options: dict[str, Any] = (
                        {"logprobs": True, "top_logprobs": 2} if turn == 1 else {"n": 1 + turn % 2}
                    )
                    answer = await api.chat.completions.create(model=model, messages=messages, **options)
                    self.seen.append(
                        [(c.message.content, c.logprobs and c.logprobs.content) for c in answer.choices]
                    )
                    messages += [answer.choices[0].message, {"role": "user", "content": await look()}]
                stream = await api.chat.completions.create(model=model, messages=messages, stream=True)
                self.seen.append("".join([part.choices[0].delta.content or "" async for part in stream]))
            return 0.5

        self.client = ClientRollout(client, start_server)
        self.functions: dict[int, RolloutFunction] = {
            1: one_shot,
            2: tool_rollout(replace(agent, tools=tools_by_name([make_tool(look)]))),
            3: environment_rollout(Room, {}, agent),
            4: custom_rollout(custom, {}),
            6: self.client,
        }


def test_a_tool_that_hangs_ends_by_its_time_out_between_slices(
    leaders: dict[str, Leader], tiny_qwen2: Path
) -> None:
    leader, tokenizer = leaders["float32"], AutoTokenizer.from_pretrained(tiny_qwen2)
    settings = RolloutSettings(2, STOPPING, policy_version=0, seed=1, step=2)

    async def hang() -> str:
        await asyncio.Event().wait()
        return "never"

    limits, tools = ToolLimits(timeout_s=0.3), tools_by_name([make_tool(hang)])
    function = tool_rollout(Agent(ToolRunner(limits, tokenizer), lambda _: [ToolCall("hang")], 3, tools))

    async def episode(turnstile: Turnstile) -> list[Trajectory]:
        messages = [{"role": "user", "content": "?"}]
        llm = PolicyLLM(leader.engine, tokenizer, settings, 0, 0, [5, 6], messages, turnstile=turnstile)
        return await run_episode(function, llm, {})

    with Episodes(leader, 5, [episode, *answers(leader)]) as episodes:
        [done], *rest = episodes.results()
    assert rest == uncut(leader)
    assert (done.error, done.turns, done.metrics["tools/errors/timeout"]) == ("", 3, 2)
    assert tokenizer.decode(done.response_ids).count("hang took longer than 0.3 s") == 2


@pytest.mark.parametrize("level", [1, 2, 3, 4, 6])
def test_rollouts_in_slices_equal_uncut_ones_and_make_as_many_calls(
    leaders: dict[str, Leader], tiny_qwen2: Path, level: int
) -> None:
    leader, tokenizer = leaders["float32"], AutoTokenizer.from_pretrained(tiny_qwen2)
    settings = RolloutSettings(2, STOPPING, policy_version=0, seed=1, step=2)

    def episode(kit: FourTurns, place: int) -> Episode[list[Trajectory]]:
        async def run(turnstile: Turnstile | None) -> list[Trajectory]:
            ids, messages = [5, 6 + place], [{"role": "user", "content": "?"}]
            llm = PolicyLLM(
                leader.engine, tokenizer, settings, place, 1, ids, messages, turnstile=turnstile
            )
            done = await run_episode(kit.functions[level], llm, {"question": f"{place} + 2?"})
            for trajectory in done:
                trajectory.metrics.pop("tools/seconds", None)
            return done

        return run

    async def one_by_one(kit: FourTurns) -> list[list[Trajectory]]:
        return [await episode(kit, place)(None) for place in range(3)]  # type: ignore[arg-type]

    plain, cut = FourTurns(tokenizer), FourTurns(tokenizer)
    expected = leader.thread.run(one_by_one(plain), 120, "episodes")
    with Episodes(leader, 5, [episode(cut, place) for place in range(3)]) as episodes:
        assert episodes.results() == expected
        assert episodes.slices.opening > 2
    assert not [trajectory.error for done in expected for trajectory in done if trajectory.error]
    assert (plain.calls > 8 or level == 1) and cut.calls == plain.calls
    assert sorted(map(str, cut.seen)) == sorted(map(str, plain.seen))
    for kit in (plain, cut):
        leader.thread.run(kit.client.aclose(), 60, "stopping the server")
