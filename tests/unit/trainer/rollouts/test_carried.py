"""Rollouts in slices, by engines that only draw numbers: which groups are trained when, from which tokens, and how old.

Tokens are a function of a sample's seed and of their position, as they are with noise keyed by position; each
log-probability says which version sampled the token.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from generation.engine.engine import Leader
from generation.engine.sampling import SamplingSettings
from generation.engine.slices import Turnstile, Unfinished
from generation.engine.thread import EngineThread
from generation.exact_ids import Generation
from generation.rollouts.episode import PolicyLLM, RolloutFunction, RolloutSettings, one_shot
from generation.rollouts.episodes import CarriedGroup
from generation.trajectory import Trajectory
from sharding.ranks import RemoteError, rank, world_size
from tests.support.learning_steps import on_ranks
from tests.support.recipes import make_config
from trainer.config.answer_age import oldest_age
from trainer.config.schema import TrainConfig
from trainer.data import Prompt, PromptDataset
from trainer.rewards import RewardResult
from trainer.rollouts.answer_source import Source
from trainer.rollouts.carried import CarriedPool
from trainer.rollouts.local import LocalSource
from trainer.rollouts.pool import Pool, StepAbandoned, Terms
from trainer.rollouts.round import Order, Round, packed, read_groups
from trainer.rollouts.step_batch import StepBatch

PROMPTS = PromptDataset([Prompt(index, (3, index), {}) for index in range(300)])
GROUP, LONGEST, MEAN = 2, 64, 14


def config(slice_tokens: int | None = 8, ahead: float = 1, **sections: Any) -> TrainConfig:
    cut = {"slice_tokens": slice_tokens, "ahead": ahead} if slice_tokens else {}
    rollout = cut | sections.pop("rollout", {})
    base: dict[str, Any] = {"batch": {"prompts_per_step": 4}, "sampling": {"max_tokens": LONGEST}}
    algorithm = {"group_size": GROUP} | sections.pop("algorithm", {})
    return make_config(rollout=rollout, algorithm=algorithm, run={"seed": 3}, **base, **sections)


def drawn(prompt_ids: list[int], seed: int, most: int) -> list[int]:
    """Return the whole answer: geometric lengths, with a long tail; the last token is 1 unless the answer was cut."""
    dice = random.Random(f"{prompt_ids}/{seed}")
    ids: list[int] = []
    while len(ids) < most:
        ids.append(1 if dice.random() < 1 / MEAN else dice.randrange(2, 1000))
        if ids[-1] == 1:
            break
    return ids


class DrawingEngine:
    """The part that rollouts use of an engine that continues where a slice ended. `running` counts its requests."""

    def __init__(self) -> None:
        self.settings = SimpleNamespace(max_model_len=4096, max_num_seqs=3)
        self.state = SimpleNamespace(check_can_generate=lambda version: None)
        self.not_finite, self.preemptions, self.requests = None, 0, 0
        self.prompts: list[int] = []  # in the order in which they begin
        self.most: int | None = None  # requests; one more never ends
        self.dies: int | None = None  # at this request

    async def complete(
        self,
        prompt_ids: list[int],
        sampling: SamplingSettings,
        *,
        seed: int,
        policy_version: int,
        turnstile: Turnstile | None = None,
        unfinished: Unfinished | None = None,
        **_: Any,
    ) -> Generation:
        full_answer = drawn(prompt_ids, unfinished.seed if unfinished else seed, sampling.max_tokens)
        reason = "stop" if full_answer[-1] == 1 else "length"
        if turnstile is None:
            await asyncio.sleep(0)
            return Generation(
                full_answer,
                [-1.0 - policy_version] * len(full_answer),
                reason,
                weight_version=policy_version,
            )
        if unfinished is None:
            self.prompts.append(prompt_ids[1])
        answer = unfinished or Unfinished(prompt_ids, seed, sampling.max_tokens)
        while len(answer.token_ids) < len(full_answer):
            async with turnstile.slice(answer) as (version, tokens):
                if self.requests == self.most:
                    await asyncio.Event().wait()
                if self.requests == self.dies:
                    raise ConnectionError("the engine has died")
                self.requests += 1
                await asyncio.sleep(0)
                begin = len(answer.token_ids)
                part = full_answer[begin : begin + tokens]
            answer.add(Generation(part, [-1.0 - version] * len(part), "length", weight_version=version))
        return answer.finished(reason)


class Crew:
    """One rank of a run: its engine and its rollouts. A step's version is the number of steps before it."""

    def __init__(
        self,
        config: TrainConfig,
        function: RolloutFunction = one_shot,
        start: Path | None = None,
        step: int = 0,
    ) -> None:
        self.config, self.engine, self.thread = config, DrawingEngine(), EngineThread()
        counts = {"calls": 0.0, "errors": 0.0}
        rewards = SimpleNamespace(
            labels=[], take_counts=lambda: counts, check_error_rate=lambda counts: None
        )
        level = SimpleNamespace(
            function=function, messages=lambda prompts: None, image_rules=None, aclose=aclose
        )
        tokenizer: Any = SimpleNamespace(decode=lambda *_, **__: "", eos_token_id=1)
        leader: Any = Leader(self.engine, self.thread)  # type: ignore[arg-type]
        prompts = partial(PROMPTS.take, seed=3)
        self.pool = Pool(
            leader, tokenizer, rewards, Store(), level, engines=world_size(), prompts=prompts
        )  # type: ignore[arg-type]
        self.step, self.position = step, 0
        self.give_up: Callable[[], bool] = lambda: False
        self.carried: CarriedPool | None = None
        if config.rollout.slice_tokens is not None:
            self.carried = CarriedPool(config, self.pool, start)
        sampling, give_up = SamplingSettings(LONGEST), lambda: self.give_up()
        self.source: Source = LocalSource(
            config, self.pool, self.carried or self.pool, PROMPTS, sampling, give_up=give_up
        )
        self.produce = self.source.produce

    def do(self) -> "Step":
        """Run a step as `RLTrainer.sample` does."""
        batch = self.produce(Order(self.step + 1, self.step, self.position))
        self.position = batch.position
        self.step += 1
        return Step(batch)

    def close(self) -> None:
        self.source.close()
        self.thread.close()


class Step:
    """A rank's record of a finished step: prompts by id, its trajectories by prompt id and sample, figures."""

    def __init__(self, sampled: StepBatch) -> None:
        self.prompts = [prompt.id for prompt in sampled.prompts]
        self.trained = [
            sampled.prompts[i].id for i in sorted({a.prompt_index for a in sampled.kept()[0]})
        ]
        self.answers = [
            (self.prompts[a.prompt_index], a.sample_index, a.length, a.error) for a in sampled.answers
        ]
        self.trajectories = {
            (self.prompts[a.prompt_index], a.sample_index): a.trajectory
            for a in sampled.answers
            if a.trajectory
        }
        self.figures = dict(sampled.rounds[-1].figures)
        self.sampling = {
            key: value for key, value in sampled.metrics().items() if key.startswith("sampling/")
        }


class Store:
    """The claims of a single rank, and whether its rollout has failed."""

    def __init__(self) -> None:
        self.claims: Counter[str] = Counter()

    def set(self, key: str, value: str) -> None:
        self.claims[key] += 1

    def check(self, keys: list[str]) -> bool:
        return all(key in self.claims for key in keys)

    def add(self, key: str, amount: int) -> int:
        self.claims[key] += amount
        return self.claims[key]


async def aclose() -> None:
    """Close the server of level 6, which does not exist here."""


def run(
    config: TrainConfig, steps: int, ranks: int = 1, function: RolloutFunction = one_shot
) -> list[list[Step]]:
    """Return the steps of each rank."""

    def one() -> list[Step]:
        crew = Crew(config, function)
        try:
            return [crew.do() for _ in range(steps)]
        finally:
            crew.close()

    return on_ranks(ranks, one) if ranks > 1 else [one()]


def together(steps: list[list[Step]], index: int) -> dict[tuple[int, int], Trajectory]:
    """Return all ranks' trajectories of a step."""
    trajectories: dict[tuple[int, int], Trajectory] = {}
    for of_rank in steps:
        trajectories |= of_rank[index].trajectories
    return trajectories


def test_each_prompt_is_trained_once_with_the_tokens_it_has_without_slices() -> None:
    plain, cut = run(config(None), 12), run(config(), 13)
    reference = {place: t for index in range(12) for place, t in together(plain, index).items()}
    trained: Counter[tuple[int, int]] = Counter()
    crossing = 0
    for index in range(12):
        step = together(cut, index)
        assert len(step) == 4 * GROUP and all((prompt, 1 - sample) in step for prompt, sample in step)
        sampled = [logprob for trajectory in step.values() for logprob in trajectory.logprobs]
        old = sum(logprob != -1.0 - index for logprob in sampled)
        assert cut[0][index].figures["stale/share"] == old / len(sampled)
        for place, trajectory in step.items():
            trained[place] += 1
            crossing += len(trajectory.versions) > 1
            starts = [*trajectory.versions, (0, len(trajectory.response_ids))]
            for (version, begin), (_, end) in pairwise(starts):
                assert set(trajectory.logprobs[begin:end]) == {-1.0 - version}
            if place in reference:
                assert trajectory.response_ids == reference[place].response_ids
                assert trajectory.finish_reason == reference[place].finish_reason
    assert set(trained.values()) == {1} and crossing > 10
    assert len(reference.keys() & trained.keys()) >= 40 * GROUP  # all but those in flight


def test_more_ranks_train_the_same_trajectories_in_the_same_steps() -> None:
    one, two = run(config(), 8), run(config(), 8, ranks=2)
    assert all(any(step.trajectories for step in of_rank) for of_rank in two)
    for index in range(8):
        assert together(two, index) == together(one, index)
        assert one[0][index].figures == two[0][index].figures == two[1][index].figures
        assert one[0][index].answers == two[0][index].answers == two[1][index].answers


@pytest.mark.parametrize(("slice_tokens", "ahead"), [(8, 1), (8, 2), (16, 0.5), (5, 1), (8, 0)])
def test_ages_are_as_great_on_average_as_is_ahead_and_never_above_the_bound(
    slice_tokens: int, ahead: float
) -> None:
    recipe = config(slice_tokens, ahead)
    [steps] = run(recipe, 40)
    ages = [step.figures["stale/age_mean"] for step in steps[4:]]
    assert abs(sum(ages) / len(ages) - ahead) <= 0.25
    greatest = max(step.figures["stale/age_max"] for step in steps)
    assert (greatest > 1) >= (ahead >= 1) and greatest <= oldest_age(recipe)
    assert any(step.figures["carry/answers"] for step in steps) == (ahead > 0)


def test_the_oldest_complete_groups_are_trained_and_as_many_new_prompts_begin() -> None:
    crew = Crew(config())
    place = {prompt.id: place for place, prompt in enumerate(PROMPTS.take(0, 300, 3))}
    begun: list[int] = []
    flying: list[int] = []
    while len(begun) < 60:
        step = crew.do()
        new = [prompt for prompt in dict.fromkeys(crew.engine.prompts) if prompt not in begun]
        assert [place[prompt] for prompt in new] == list(
            range(len(begun), len(begun) + (4 if begun else 8))
        )
        begun, flying = begun + new, flying + new
        assert [place[prompt] for prompt in step.prompts] == sorted(
            place[prompt] for prompt in step.prompts
        )
        flying = [prompt for prompt in flying if prompt not in step.prompts]
        assert len(flying) == 4  # a step's, since that many are ahead
        groups = crew.carried._episodes.groups  # type: ignore[union-attr]
        waiting = [p for p in flying if len(groups[place[p]].done) == GROUP]
        assert len(waiting) == step.figures["carry/groups_waiting"]
        assert all(place[p] > max(map(place.__getitem__, step.prompts)) for p in waiting)
    crew.close()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kills", [[3], [1, 2, 5]])
def test_a_run_that_is_resumed_on_one_or_two_ranks_trains_the_same(
    tmp_path: Path, ranks: int, kills: list[int]
) -> None:
    [straight] = run(config(), 8)
    written, position, done = None, 0, 0
    for number, until in enumerate([*kills, 8]):
        folder = tmp_path / str(number)
        folder.mkdir()

        def session(
            start: Path | None = written,
            at: int = position,
            begin: int = done,
            end: int = until,
            to: Path = folder,
        ) -> tuple[list[Step], int]:
            crew = Crew(config(), start=start, step=begin)
            crew.position = at
            steps = [crew.do() for _ in range(begin, end)]
            (to / f"carried_{rank()}.msgpack").write_bytes(crew.source.carried())
            crew.close()
            return steps, crew.position

        count = ranks if number % 2 else 3 - ranks
        results = on_ranks(count, session) if count > 1 else [session()]
        for index in range(done, until):
            rank_steps = [steps for steps, _ in results]
            assert together(rank_steps, index - done) == straight[index].trajectories
            assert rank_steps[0][index - done].figures == straight[index].figures
        written, position, done = folder, results[0][1], until


def test_carried_groups_are_trained_once_by_a_run_with_smaller_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    crew = Crew(config(5, algorithm={"group_size": 4}))
    for _ in range(3):
        crew.do()
    (tmp_path / "carried_0.msgpack").write_bytes(crew.source.carried())
    crew.close()
    groups = read_groups(tmp_path)
    assert any(len(group.done) == 4 for group in groups) and any(group.unfinished for group in groups)
    again = Crew(config(5), start=tmp_path, step=3)
    again.position = crew.position
    trained = Counter(place for _ in range(3) for place in again.do().trajectories)
    again.close()
    carried = {prompt.id for group in groups for prompt in PROMPTS.take(group.place, 1, 3)}
    assert set(trained.values()) == {1} and all(
        (prompt, n) in trained for prompt in carried for n in range(GROUP)
    )
    assert "start again" not in capsys.readouterr().err  # each of them had begun


def test_a_step_that_is_given_up_leaves_what_the_one_before_it_did(tmp_path: Path) -> None:
    straight = run(config(), 6)[0]
    crew = Crew(config())
    for _ in range(3):
        crew.do()
    kept, requests, at = crew.source.carried(), crew.engine.requests, crew.position
    crew.engine.most = requests + 7  # some of them have grown
    crew.give_up = lambda: crew.engine.requests == crew.engine.most
    with pytest.raises(StepAbandoned, match="step 4"):
        crew.do()
    crew.source.take_back(4)
    assert crew.source.carried() == kept and crew.position == at
    crew.close()
    (tmp_path / "carried_0.msgpack").write_bytes(kept)
    again = Crew(config(), start=tmp_path, step=3)
    again.position = at
    assert [again.do().trajectories for _ in range(3)] == [step.trajectories for step in straight[3:]]
    again.close()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("requests", [[5], [30, 34, 60], [75, 90, 91]])
def test_steps_in_which_engines_die_are_sampled_anew_and_train_the_same(
    ranks: int, requests: list[int]
) -> None:
    """In the first step, twice in one, and after a step's answers are there, as an engine may die while it falls
    asleep: what is in flight is each time what the step before has left. Nothing is trained twice, nothing lost.
    """
    straight = run(config(), 8, ranks)

    def one() -> list[Step]:
        crew, deaths = Crew(config()), [*requests, "asleep"]
        steps: list[Step] = []
        while len(steps) < 8:
            crew.source.take_back(crew.step + 1)
            crew.engine.dies = deaths[0] if deaths and rank() == 0 else None  # type: ignore[assignment]
            at = crew.position, crew.step
            try:
                step = crew.do()
            except RemoteError:
                deaths.pop(0)
                continue
            if len(steps) == 5 and deaths:
                deaths.clear()
                crew.position, crew.step = at
                continue
            steps.append(step)
        assert not deaths
        crew.close()
        return steps

    rank_steps = on_ranks(ranks, one) if ranks > 1 else [one()]
    for index in range(8):
        assert together(rank_steps, index) == together(straight, index)
        assert [steps[index].figures for steps in rank_steps] == [
            steps[index].figures for steps in straight
        ]
        assert rank_steps[0][index].answers == straight[0][index].answers


@pytest.mark.parametrize("ranks", [1, 2])
def test_groups_without_a_signal_are_replaced_and_counted_once(ranks: int) -> None:
    recipe = config(algorithm={"sampling_rounds": 8})

    async def score(trajectory: Trajectory, prompt: Prompt, voting: bool = False) -> None:
        # Every third prompt is always answered right.
        trajectory.reward = float(trajectory.sample_index or prompt.id % 3 == 0)

    def one() -> list[Step]:
        crew = Crew(recipe)
        crew.pool.score = score  # type: ignore[method-assign]
        steps = [crew.do() for _ in range(10)]
        crew.close()
        return steps

    rank_steps = [one()] if ranks == 1 else on_ranks(ranks, one)
    sampled = [prompt for step in rank_steps[0] for prompt in step.prompts]
    trained = [prompt for step in rank_steps[0] for prompt in step.trained]
    assert len(set(sampled)) == len(sampled) and trained == [prompt for prompt in sampled if prompt % 3]
    assert all(
        len(step.trained) == 4 and step.sampling["sampling/shortfall"] == 0 for step in rank_steps[0]
    )
    assert (
        sum(step.sampling["sampling/dropped"] for step in rank_steps[0])
        == sum(prompt % 3 == 0 for prompt in sampled)
        > 3
    )
    assert max(step.figures["stale/age_max"] for step in rank_steps[0]) <= oldest_age(recipe)


def test_evaluation_between_steps_is_not_cut_and_changes_nothing() -> None:
    held_out = [Prompt(1000 + index, (9, index), {}) for index in range(5)]
    plain, cut, alone = Crew(config(None)), Crew(config()), Crew(config())
    for _ in range(6):
        trajectories, evaluated = cut.do().trajectories, []
        for crew in (plain, cut):
            settings = RolloutSettings(GROUP, SamplingSettings(LONGEST), cut.step, seed=3, step=-1)
            evaluated.append(
                [answer.trajectory for answer in crew.pool.run(held_out, settings, Terms(60))]
            )
        assert evaluated[0] == evaluated[1]
        assert trajectories == alone.do().trajectories
    for crew in (plain, cut, alone):
        crew.close()


class Tools:
    """An episode of several answers with a slow tool between them; counts its calls."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.calls: Counter[tuple[int, ...]] = Counter()
        self.under_way, self.seconds = 0, seconds
        self.look: Callable[[], str] = str
        self.replies: list[tuple[int, str]] = []  # in tools, how many were, and what `look` told

    async def __call__(
        self, llm: PolicyLLM, row: dict[str, Any], sampling: SamplingSettings
    ) -> Trajectory:
        ids = list(llm.prompt_ids)
        done = llm.trajectory()
        for turn in range(4):
            generation = await llm.sample(ids, SamplingSettings(20))
            done.extend(generation.token_ids, generation.logprobs)
            if turn == 3:
                break
            self.calls[*llm.prompt_ids, llm.sample_index, turn] += 1
            self.under_way += 1
            async with llm.away():
                self.replies.append((self.under_way, self.look()))
                await asyncio.sleep(self.seconds)
            self.under_way -= 1
            done.extend([7, 7])
            ids = list(llm.prompt_ids) + done.response_ids
        return done


def test_episodes_with_tools_give_the_same_ids_and_call_as_often() -> None:
    plain_tools, tools = Tools(), Tools()
    [plain], [cut] = run(config(None), 4, function=plain_tools), run(config(3, 3), 8, function=tools)
    reference = {place: t for step in plain for place, t in step.trajectories.items()}
    trajectories = {
        place: t for step in cut for place, t in step.trajectories.items() if place in reference
    }
    assert trajectories.keys() == reference.keys()
    for place, trajectory in trajectories.items():
        assert trajectory.response_ids == reference[place].response_ids
        assert trajectory.loss_mask == reference[place].loss_mask
    assert max(len(t.versions) for t in trajectories.values()) > 2
    assert set(tools.calls.values()) == {1}
    assert all(tools.calls[call] == count for call, count in plain_tools.calls.items())


def test_an_episode_in_a_tool_is_waited_for_when_all_others_are_parked() -> None:
    tools = Tools(seconds=0.1)
    crew = Crew(config(5), tools)
    tools.look = lambda: crew.source.waits_for()
    for _ in range(3):
        crew.do()
        assert tools.under_way == 0 and crew.source.waits_for() == ""
    crew.close()
    assert all(int(words.split()[0]) >= count for count, words in tools.replies)
    assert (3, "3 episodes in tools or reward functions") in tools.replies
    assert (1, "1 episode in tools or reward functions") in tools.replies


def test_a_slice_waits_for_work_of_an_episode_beside_its_answer() -> None:
    under_way = 0

    async def beside(llm: PolicyLLM, row: dict[str, Any], sampling: SamplingSettings) -> Trajectory:
        answer = asyncio.ensure_future(one_shot(llm, row, sampling))

        async def tool() -> None:
            nonlocal under_way
            under_way += 1
            async with llm.away():
                await asyncio.sleep(0.02)
                # Beside what parks, which no other waits for
                await asyncio.sleep(0.0 if answer.done() else 0.3)
            under_way -= 1

        return (await asyncio.gather(answer, tool()))[0]

    crew = Crew(config(24), beside)
    carried = 0.0
    for _ in range(3):
        carried += crew.do().figures["carry/answers"]
        assert under_way == 0
    assert carried
    crew.close()


@pytest.mark.parametrize("function", [one_shot, Tools()])
def test_answers_that_wait_or_are_unfinished_can_be_measured_at_every_level(
    function: RolloutFunction,
) -> None:
    crew = Crew(config(3, 2), function)
    cut = 0
    for step in range(12):
        trained = crew.do().trajectories
        for answer in crew.source.untrained():
            t = answer.trajectory
            assert t is not None and t.weight_version == step and 0 < answer.sampled > answer.old
            new = next(start for version, start in t.versions if version == step)
            new_logprobs = [
                logprob
                for logprob, mask in zip(t.logprobs[new:], t.loss_mask[new:], strict=True)
                if mask
            ]
            assert set(new_logprobs) == {-1.0 - step} and (answer.old > 0) == (new > 0)
            assert not any(t is other for other in trained.values())
            cut += new > 0
    assert cut  # some have tokens of several versions
    crew.close()


def test_episodes_of_several_answers_begin_anew_after_a_kill(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [straight] = run(config(5), 8, function=Tools())
    crew = Crew(config(5), Tools())
    steps = [crew.do() for _ in range(3)]
    (tmp_path / "carried_0.msgpack").write_bytes(crew.source.carried())
    crew.close()
    unfinished = sum(GROUP - len(group.done) for group in read_groups(tmp_path))
    again = Crew(config(5), Tools(), start=tmp_path, step=3)
    again.position = crew.position
    steps += [again.do() for _ in range(5)]
    again.close()
    assert f"{unfinished} unfinished episodes start again from their prompts" in capsys.readouterr().err
    ids = {place: t.response_ids for step in steps for place, t in step.trajectories.items()}
    reference = {place: t.response_ids for step in straight for place, t in step.trajectories.items()}
    assert unfinished and all(ids[place] == reference[place] for place in ids.keys() & reference.keys())
    assert len(ids.keys() & reference.keys()) > 5 * 4 * GROUP


def test_a_failed_episode_ends_its_group_like_any_other() -> None:
    async def fails(llm: PolicyLLM, row: dict[str, Any], sampling: SamplingSettings) -> Trajectory:
        done = await one_shot(llm, row, sampling)
        if llm.prompt_ids[1] % 5 == 0 and llm.sample_index:
            raise ValueError("broken")
        return done

    [steps] = run(config(rollout={"max_error_rate": 1.0}), 8, function=fails)
    answers = [answer for step in steps for answer in step.answers]
    assert len(answers) == 8 * 4 * GROUP
    for prompt, sample, _, error in answers:
        assert bool(error) == (prompt % 5 == 0 and sample == 1)


class Checks:
    """Stands for a pool that fails to judge the answers whose tokens say so."""

    labels = ("check",)

    async def score(self, *, trajectory: Trajectory, **seen: Any) -> RewardResult:
        await asyncio.sleep(0)
        if sum(trajectory.response_ids) % 4 == 0:
            return RewardResult(0.0, {}, "check took longer", True, {"check": "timeout"})
        return RewardResult(1.0, {"check": 1.0})

    def take_counts(self) -> dict[str, float]:
        return {"reward/calls": 0.0}

    def check_error_rate(self, counts: dict[str, float]) -> None:
        """Accepts every rate, which is not tested here."""


def judged(crew: Crew, steps: int) -> list[dict[tuple[int, int], Any]]:
    """Return, for each step, the fields that rewards have set in its answers."""
    crew.pool._rewards = Checks()  # type: ignore[assignment]
    outcomes = []
    for step in (crew.do() for _ in range(steps)):
        assert all(
            bool(error) == bool(step.trajectories[p, s].error)
            for p, s, _, error in step.answers
            if (p, s) in step.trajectories
        )
        counted = {
            place: t.metrics.get("reward/errors/check/timeout") for place, t in step.trajectories.items()
        }
        outcomes.append(
            {p: (t.reward, t.error, t.reward_error, counted[p]) for p, t in step.trajectories.items()}
        )
    return outcomes


@pytest.mark.parametrize("ranks", [1, 2])
def test_answers_whose_reward_failed_stay_failed_in_later_steps_and_after_a_kill(
    tmp_path: Path, ranks: int
) -> None:
    """Checkpoints keep failed answers while they wait; the reward function is not called again."""
    crew = Crew(config(ahead=2))
    straight = judged(crew, 8)
    crew.close()
    failed = [fate for step in straight for fate in step.values() if fate[1]]
    assert failed and set(failed) == {(0.0, "reward: check took longer", "check took longer", 1.0)}

    def begin() -> tuple[Any, int]:
        crew = Crew(config(ahead=2))
        steps = judged(crew, 4)
        (tmp_path / f"carried_{rank()}.msgpack").write_bytes(crew.source.carried())
        crew.close()
        return steps, crew.position

    def go_on(position: int) -> Any:
        crew = Crew(config(ahead=2), start=tmp_path, step=4)
        crew.position = position
        steps = judged(crew, 4)
        crew.close()
        return steps

    before = on_ranks(ranks, begin) if ranks > 1 else [begin()]
    waiting = [
        t
        for group in read_groups(tmp_path)
        for trajectories in group.done.values()
        for t in trajectories
    ]
    assert any(t.reward_error and t.error for t in waiting)
    after = on_ranks(ranks, lambda: go_on(before[0][1])) if ranks > 1 else [go_on(before[0][1])]
    for index, expected in enumerate(straight):
        steps = (
            [outcomes[index] for outcomes, _ in before]
            if index < 4
            else [outcomes[index - 4] for outcomes in after]
        )
        assert {place: fate for step in steps for place, fate in step.items()} == expected


def test_an_exception_in_scoring_ends_the_step_and_all_episodes() -> None:
    crew = Crew(config())
    crew.do()

    async def raises(*_: Any) -> None:
        raise RuntimeError("no reward")

    crew.pool.score = raises  # type: ignore[method-assign]
    with pytest.raises(RemoteError, match="no reward"):
        crew.do()
    assert crew.carried._episodes.unfinished == 0  # type: ignore[union-attr]
    crew.close()


def test_routes_of_answers_that_wait_are_kept_and_unfinished_ones_have_none(tmp_path: Path) -> None:
    """Checkpoints keep the routes; where routes are replayed, the gap is measured only on answers that have them."""
    routed = Trajectory(0, 0, [3, 1], [5, 6], [1, 1], [-1.0, -2.0], versions=[(2, 0)])
    for dtype in (np.uint8, np.uint16):
        routed.routes = np.arange(12, dtype=dtype).reshape(3, 2, 2)
        unfinished = {1: Unfinished([3, 1], 9, 8)}
        group = CarriedGroup(4, 2, done={0: [routed]}, unfinished=unfinished)
        (tmp_path / "carried_0.msgpack").write_bytes(packed([Round(groups=[group])]))
        [read] = read_groups(tmp_path)
        [again] = read.done[0]
        assert read == group and again.routes is not None
        assert again.routes.dtype == dtype and np.array_equal(again.routes, routed.routes)
    untrained = {}
    for routes in ("own", "engine"):
        crew = Crew(config(model={"path": "m", "routes": routes}))
        while crew.do().figures["carry/groups_waiting"] == 0:
            pass
        untrained[routes] = crew.source.untrained()
        finished = [t for group in crew.carried.groups() for done in group.done.values() for t in done]  # type: ignore[union-attr]
        finished_ids = {(tuple(t.prompt_ids), tuple(t.response_ids)) for t in finished}
        untrained_ids = {
            (tuple(a.trajectory.prompt_ids), tuple(a.trajectory.response_ids))
            for a in untrained[routes]
            if a.trajectory
        }
        assert (untrained_ids <= finished_ids) == (routes == "engine")
        crew.close()
