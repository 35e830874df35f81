"""Answers that are cut into slices on real engines: the tokens of answers that are not, each with its version.

Weights are packed, as by default: with plain ones, log-probabilities agree to rounding only, cut or not, whenever
requests share forward passes in another way.
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
from generation.rollouts.episode import PolicyLLM, RolloutFunction, RolloutSettings, custom_rollout, one_shot
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
    """A policy of version 0 and an engine, asleep, of no version."""
    with Colocated(tiny_qwen2, plain=False, max_model_len=CONTEXT, keyed_noise=True) as both:
        both.manager.sleep()
        yield both


@pytest.fixture(scope="module")
def leaders(tiny_qwen2: Path) -> Iterator[dict[str, Leader]]:
    """Engines of the same weights, of which one has no prefix cache, and less room than eight answers need."""
    small: dict[str, Any] = {"kv_cache_bytes": 1 << 18, "extra": {"enable_prefix_caching": False, "block_size": 32}}
    settings: dict[str, dict[str, Any]] = {
        "float32": {},
        "bfloat16": {"dtype": "bfloat16"},
        "no cache": small | {"max_model_len": 160},
    }
    leaders = {
        name: start_engine(tiny_qwen2, plain=False, **({"max_model_len": CONTEXT, "keyed_noise": True} | own))
        for name, own in settings.items()
    }
    for leader in leaders.values():
        leader.engine.state.adopt_checkpoint(0)
    yield leaders
    for leader in leaders.values():
        stop(leader)


def answer(leader: Leader, prompt: list[int], sampling: SamplingSettings = SAMPLED, **own: Any) -> Episode[Generation]:
    """An answer with a seed of its prompt's."""

    async def episode(turnstile: Turnstile | None) -> Generation:
        place = {"seed": 90 + len(prompt), "policy_version": 0, "turnstile": turnstile}
        return await leader.engine.complete(prompt, sampling, **(place | own))

    return episode


def answers(leader: Leader, sampling: SamplingSettings = SAMPLED) -> list[Episode[Generation]]:
    return [answer(leader, prompt, sampling) for prompt in PROMPTS]


def uncut(leader: Leader, sampling: SamplingSettings = SAMPLED) -> list[Generation]:
    async def go() -> list[Generation]:
        return list(await asyncio.gather(*(episode(None) for episode in answers(leader, sampling))))  # type: ignore[arg-type]

    return leader.thread.run(go(), 120, "answers")


@pytest.mark.parametrize(
    ("name", "temperature"), [("float32", 1.0), ("bfloat16", 1.0), ("no cache", 1.0), ("float32", 0.0)]
)
def test_an_answer_in_slices_is_the_one_that_is_not_cut(
    leaders: dict[str, Leader], name: str, temperature: float
) -> None:
    """Bit for bit, log-probabilities included: with a prefix cache and without, and where vLLM runs out of room."""
    leader = leaders[name]
    whole = uncut(leader, replace(SAMPLED, temperature=temperature))
    assert max(len(each.token_ids) for each in whole) == 80 > min(len(each.token_ids) for each in whole)
    for tokens in (1, 7, 64):
        with Episodes(leader, tokens, answers(leader, replace(SAMPLED, temperature=temperature))) as episodes:
            assert episodes.results() == whole
        assert episodes.slices.opening == -(-80 // tokens)


def test_answers_that_lost_their_place_in_the_cache_are_counted(leaders: dict[str, Leader]) -> None:
    assert uncut(leaders["no cache"]) == uncut(leaders["float32"])
    assert leaders["no cache"].engine.preemptions > 0
    assert leaders["float32"].engine.preemptions == 0


def test_an_answer_goes_on_after_a_sleep_and_on_another_engine(both: Colocated, leaders: dict[str, Leader]) -> None:
    """The same tokens: first in one batch, each slice with the weights sent anew; then by itself, elsewhere."""
    whole, other = uncut(leaders["float32"]), leaders["no cache"]
    with Episodes(both.leader, 7, answers(both.leader)) as episodes:
        for _ in range(3):
            with both.manager.generation_shift(both.policy):
                assert episodes.one_slice()
            assert both.leader.engine.state.version is None
        kept = [turnstile.unfinished for turnstile in episodes.turnstiles]
        stored = [each and json.loads(json.dumps(asdict(each))) for each in kept]
        with both.manager.generation_shift(both.policy):
            assert episodes.results() == whole
    assert [len(each["token_ids"]) for each in stored if each] == [21] * sum(len(each.token_ids) > 21 for each in whole)
    for expected, own in reversed(list(zip(whole, stored, strict=True))):
        if own is not None:
            episode = answer(other, own["prompt_ids"], unfinished=Unfinished(**own))
            with Episodes(other, 11, [episode]) as alone:
                assert alone.results() == [expected]


def test_each_token_has_the_version_that_sampled_it(both: Colocated) -> None:
    """The log-probabilities of each segment are the trainer's own by its version's weights, and by no other's."""
    states, policy = dict[int, dict[str, Any]](), both.policy
    with Episodes(both.leader, 20, answers(both.leader)) as episodes:
        for version in (0, 1, 1, 2):  # two slices of version 1
            if version != policy.version:
                policy.randomise(version)
            states[version] = copy.deepcopy(policy.model.state_dict())
            with both.manager.generation_shift(policy):
                episodes.one_slice(version)
        done = episodes.results(2)
    assert max(len(each.token_ids) for each in done) == 80
    for each in done:
        segments = [(0, 0), (1, 20), (2, 60)][: 1 + sum(len(each.token_ids) > start for start in (20, 60))]
        assert (each.versions, each.weight_version) == (segments, segments[-1][0])
    gaps: dict[bool, list[float]] = {True: [], False: []}
    for version, state in reversed(states.items()):
        policy.model.load_state_dict(state)
        policy.version = version
        for each in done:
            own = policy.logprobs(each.ids)[len(each.prompt_ids) - 1 :]
            sampled_by = [max(v for v, start in each.versions if start <= i) for i in range(len(own))]
            for mine, theirs, by in zip(own, each.logprobs, sampled_by, strict=True):
                gaps[by == version].append(abs(mine - theirs))
    assert max(gaps[True]) < 1e-5
    assert sum(gap > 1e-2 for gap in gaps[False]) > 0.9 * len(gaps[False])


def test_an_answer_ends_where_it_would_end_uncut(leaders: dict[str, Leader]) -> None:
    """By its budget, counted once; by a token that ends it and is the last of a slice; by the end of the context."""
    leader, small = leaders["float32"], leaders["no cache"]
    long = next(each for each in uncut(leader) if len(each.token_ids) == 80)
    stop_at = next(i for i in range(5, 80) if long.token_ids[i] not in long.token_ids[:i])
    stopped = replace(SAMPLED, stop_token_ids=[long.token_ids[stop_at]])
    filled = [20 + i % 50 for i in range(150)]
    for engine, tokens, prompt, sampling, openings, length, reason in [
        (leader, 5, long.prompt_ids, replace(SAMPLED, max_tokens=25), 5, 25, "length"),
        (leader, 5, long.prompt_ids, replace(SAMPLED, max_tokens=27), 6, 27, "length"),
        (leader, stop_at + 1, long.prompt_ids, stopped, 1, stop_at + 1, "stop"),
        (small, 5, filled, replace(SAMPLED, temperature=0.0), 2, 10, "length"),
    ]:  # fmt: skip
        with Episodes(engine, tokens, [answer(engine, prompt, sampling)]) as episodes:
            (done,) = episodes.results()
            assert (len(done.token_ids), done.finish_reason, episodes.slices.opening) == (length, reason, openings)
        assert done == engine.thread.run(answer(engine, prompt, sampling)(None), 60, "an answer")  # type: ignore


def test_answers_without_a_turnstile_pass_by_the_gate(leaders: dict[str, Leader]) -> None:
    """An evaluation while others are parked, and nothing may pass."""
    leader = leaders["float32"]
    whole = uncut(leader)
    with Episodes(leader, 7, answers(leader)) as episodes:
        parked = episodes.one_slice()
        assert uncut(leader) == whole
        assert (episodes.slices.parked, episodes.slices.opening, episodes.slices.version) == (parked, 1, None)
        assert episodes.results() == whole


def test_what_could_lie_across_a_cut_is_refused(leaders: dict[str, Leader]) -> None:
    leader = leaders["float32"]
    with Episodes(leader, 5, [answer(leader, [5], replace(SAMPLED, stop=["ab"]))]) as episodes:
        with pytest.raises(ValueError, match="can lie across a cut"):
            episodes.results()
    refused = list[str]()

    async def client(base_url: str, api_key: str, model: str, _: Any) -> None:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as api:
            for options in (
                {"stop": "ab"},
                {"extra_body": {"repetition_detection": {"max_pattern_size": 3, "min_count": 3}}},
            ):
                with pytest.raises(openai.BadRequestError, match="lie across a cut") as error:
                    await api.completions.create(model=model, prompt="?", **options)  # type: ignore[call-overload]
                refused.append(str(error.value))
            await api.completions.create(model=model, prompt="?")

    run = ClientRollout(client, start_server)

    async def episode(turnstile: Turnstile) -> list[Trajectory]:
        llm = PolicyLLM(leader.engine, tokenizer, RolloutSettings(1, SAMPLED, 0, 1, 2), 0, 0, [5], turnstile=turnstile)
        return await run(llm, {}, SAMPLED)

    tokenizer = AutoTokenizer.from_pretrained(leader.engine.settings.model)
    with Episodes(leader, 5, [episode]) as asked:
        ((trajectory,),) = asked.results()
    assert trajectory.turns == 1 and len(refused) == 2
    leader.thread.run(run.aclose(), 60, "stopping the server")
    with Episodes(leader, 5, [answer(leader, [5], unfinished=Unfinished([6], 1, 9))]) as episodes:
        with pytest.raises(ValueError, match="goes on after its own prompt"):
            episodes.results()


def test_carried_prompts_may_be_more_than_a_step_holds(leaders: dict[str, Leader]) -> None:
    """On CPU vLLM would cut a prompt in two where it may, and die of it."""
    leader = leaders["float32"]
    prompts = [[14 + i % 50, *[20 + (i + j) % 50 for j in range(90 + i)]] for i in range(48)]
    assert sum(map(len, prompts)) > 2048 == leader.engine.llm.vllm_config.scheduler_config.max_num_batched_tokens
    short = replace(SAMPLED, max_tokens=12)
    with Episodes(leader, 12, [answer(leader, prompt, short) for prompt in prompts]) as episodes:
        whole = episodes.results()
    with Episodes(leader, 5, [answer(leader, prompt, short) for prompt in prompts]) as episodes:
        assert episodes.results() == whole


STOPPING = SamplingSettings(60, stop_token_ids=list(range(2, 200, 8)))
"""Answers of some eight tokens, at random."""


class Kit:
    """Rollouts of four turns, whatever the policy says, and how often their tools have run."""

    def __init__(self, tokenizer: Any) -> None:
        self.calls, self.said = 0, list[Any]()
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

        async def own(llm: PolicyLLM, row: dict[str, Any], sampling: SamplingSettings) -> list[Trajectory]:
            """Two conversations of four turns; the second's trajectory is put together by hand."""

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
            async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=120) as api:
                messages: list[Any] = [{"role": "user", "content": row["question"]}]
                for turn in range(4):
                    options: dict[str, Any] = (
                        {"logprobs": True, "top_logprobs": 2} if turn == 1 else {"n": 1 + turn % 2}
                    )
                    answer = await api.chat.completions.create(model=model, messages=messages, **options)
                    self.said.append([(c.message.content, c.logprobs and c.logprobs.content) for c in answer.choices])
                    messages += [answer.choices[0].message, {"role": "user", "content": await look()}]
                stream = await api.chat.completions.create(model=model, messages=messages, stream=True)
                self.said.append("".join([part.choices[0].delta.content or "" async for part in stream]))
            return 0.5

        self.client = ClientRollout(client, start_server)
        self.functions: dict[int, RolloutFunction] = {
            1: one_shot,
            2: tool_rollout(replace(agent, tools=tools_by_name([make_tool(look)]))),
            3: environment_rollout(Room, {}, agent),
            4: custom_rollout(own, {}),
            6: self.client,
        }


def test_a_tool_that_hangs_ends_by_its_own_time_out(leaders: dict[str, Leader], tiny_qwen2: Path) -> None:
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
        [done], *others = episodes.results()
    assert others == uncut(leader)
    assert (done.error, done.turns, done.metrics["tools/errors/timeout"]) == ("", 3, 2)
    assert tokenizer.decode(done.response_ids).count("hang took longer than 0.3 s") == 2


@pytest.mark.parametrize("level", [1, 2, 3, 4, 6])
def test_rollouts_are_the_same_in_slices_and_call_their_tools_as_often(
    leaders: dict[str, Leader], tiny_qwen2: Path, level: int
) -> None:
    leader, tokenizer = leaders["float32"], AutoTokenizer.from_pretrained(tiny_qwen2)
    settings = RolloutSettings(2, STOPPING, policy_version=0, seed=1, step=2)

    def episode(kit: Kit, place: int) -> Episode[list[Trajectory]]:
        async def run(turnstile: Turnstile | None) -> list[Trajectory]:
            ids, messages = [5, 6 + place], [{"role": "user", "content": "?"}]
            llm = PolicyLLM(leader.engine, tokenizer, settings, place, 1, ids, messages, turnstile=turnstile)
            done = await run_episode(kit.functions[level], llm, {"question": f"{place} + 2?"})
            for each in done:
                each.metrics.pop("tools/seconds", None)
            return done

        return run

    async def one_by_one(kit: Kit) -> list[list[Trajectory]]:
        return [await episode(kit, place)(None) for place in range(3)]  # type: ignore[arg-type]

    plain, cut = Kit(tokenizer), Kit(tokenizer)
    whole = leader.thread.run(one_by_one(plain), 120, "episodes")
    with Episodes(leader, 5, [episode(cut, place) for place in range(3)]) as episodes:
        assert episodes.results() == whole
        assert episodes.slices.opening > 4
    assert not [each.error for done in whole for each in done if each.error]
    assert (plain.calls > 8 or level == 1) and cut.calls == plain.calls
    assert sorted(map(str, cut.said)) == sorted(map(str, plain.said))
    for kit in (plain, cut):
        leader.thread.run(kit.client.aclose(), 60, "stopping the server")
