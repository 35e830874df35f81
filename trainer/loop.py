"""The training loop. One step is read here from top to bottom; everything else is machinery behind names.

Left out on purpose: a scheduler, roles, workers and controllers. Every rank runs this file, under torchrun or alone;
what one rank decides is decided by all alike, or exchanged in one of the few collectives that the parts document.
"""

import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from generation.engine.sampling import NotFiniteError
from generation.rollouts.episode import RolloutSettings
from sharding.manager import ShardingManager
from sharding.ranks import EVERYBODY, RemoteError, agreed, is_main, world_size
from trainer.build import (
    build_models,
    build_rollouts,
    build_sharding,
    check_budget,
    check_model,
    check_teacher,
    rank_device,
    start_server,
)
from trainer.config.machine import resolve_device
from trainer.config.placement import engine_workers
from trainer.config.schema import TrainConfig
from trainer.config.ways import local_ranks, settled
from trainer.data import load_prompts, load_tokenizer
from trainer.engines import end_token_ids, fetch_model, processor_arguments, stop_engine, training_sampling
from trainer.evaluation import evaluation_metrics, load_held_outs, random_states_kept, sample_held_out
from trainer.learning import Learner, Metrics, StepSampling, reward_errors, rollout_metrics
from trainer.learning.answers import Answer
from trainer.learning.shown import answer_rows, failure_lines, token_rows
from trainer.restarts import EngineRestarts
from trainer.rewards.pool import RewardPool
from trainer.rollouts import RolloutLevel, StepAbandoned, Terms
from trainer.run.checkpoint import load
from trainer.run.finish import export_and_report
from trainer.run.keeper import Identity, Keeper, find_checkpoint, make_run_tracker, run_identity
from trainer.run.meters import PhaseMeter, StepProfiler
from trainer.run.screen import ANSWERS_SHOWN, Progress
from trainer.run.watchdog import Watchdog
from trainer.types import culprits

T = TypeVar("T")


class RLTrainer:
    """Reinforcement learning of one policy on the prompts of one recipe."""

    def __init__(self, config: TrainConfig, watchdog: Watchdog, resources: ExitStack) -> None:
        """Build everything, cheapest and likeliest to fail first. `resources` closes it again, however the run ends."""
        config, way = settled(config, world_size(), local_ranks(os.environ, world_size()))
        self.config, self.watchdog = config, watchdog
        # Some rows of the latest evaluation, or of the latest step where there is none; on rank 0.
        self.last_answers: list[dict[str, Any]] = []
        self.left_out: list[str] = []  # weights that the engines take nothing of
        self.screen = Progress(config.run.steps, enabled=is_main())
        if way:
            self.screen.note(way)
        resources.enter_context(self.screen.follow(self.doing))
        level = self.load_inputs()
        identity = run_identity(config, self.prompts.fingerprint, self.tokenizer)
        start, self.state = find_checkpoint(config, identity)  # of the run besides the policy; checkpoints keep both
        self.start_engine(resources)
        self.build(resources, level, start, identity)
        gc.collect()
        gc.freeze()  # the collections of each shift, 0.4 s each, need not look again at what is there by now

    def build(self, resources: ExitStack, level: RolloutLevel, start: Path | None, identity: Identity) -> None:
        """The models, their way to the engines, and all that a step needs; as they were in the checkpoint `start`."""
        config, watchdog, device = self.config, self.watchdog, rank_device(self.config)
        self.screen.note(f"loading {config.model.path} for training")
        self.policy, reference, critic = build_models(config, device)
        self.others = [critic] if critic is not None else []  # whose memory a generation shift can do without, too
        self.sharding = build_sharding(config, self.policy, self.leader)
        resources.callback(self.sharding.close)
        if isinstance(self.sharding, ShardingManager):  # engines apart are not started again
            self.restarts.sharding = self.sharding
        try:
            self.sharding.connect()
            self.sharding.sleep()
        except RemoteError as failure:
            self.restarts.after(failure, self.policy, *self.others)
        again = start if self.state.prompts else None  # a checkpoint of other data says nothing of these prompts
        others: dict[str, Any] = {"start": again, "identity": identity, "sharding": self.sharding}
        self.rollouts = build_rollouts(config, self.leader, self.tokenizer, self.rewards, level, **others)
        resources.callback(self.rollouts.close)
        pad_id, weights = self.tokenizer.pad_token_id, self.rewards.weights
        known: dict[str, Any] = {"pad_id": pad_id, "reward_weights": weights, "untrained": self.rollouts.untrained}
        self.learner = Learner(config, self.policy, reference, critic=critic, **known)
        parts = {"policy": self.policy} | ({"critic": critic} if critic is not None else {})
        if start is not None:
            load(start, parts)
        carried = self.rollouts.carried  # answers that are not trained yet
        self.keeper = Keeper(config, watchdog, self.state, parts=parts, identity=identity, carried=carried)
        resources.callback(self.keeper.close)
        self.tracker = make_run_tracker(config, self.state)
        resources.callback(self.tracker.close)
        works = {id(m.work): m.work for m in (self.policy, reference, critic) if m is not None}  # a base is its policy
        deadline, dtype = config.run.first_step_deadline_s, config.policy.dtype
        self.meter = PhaseMeter(device, self.leader, watchdog, deadline, works=[*works.values()], dtype=dtype)
        self.profiler = StepProfiler(config.run.profile, config.run.folder / "profile", device, enabled=is_main())

    @property
    def version(self) -> int:
        """Of the weights that sample."""
        return self.policy.version

    def late_to_leave(self) -> bool:
        """True where rollouts are to be given up, since the run is asked to end."""
        return self.keeper.late_to_leave()

    def doing(self) -> str:
        """This rank's phase, for the screen."""
        phase = self.watchdog.current_phase()
        return f"{phase}, {self.rollouts.finished} answers" if phase.endswith(("rollout", "eval")) else phase

    def load_inputs(self) -> RolloutLevel:
        """Tokenizer, prompts and reward functions; the models are tried without their weights. Raises UserError."""
        config = self.config
        processor_arguments(config, resolve_device(config) == "cuda")
        self.tokenizer = load_tokenizer(config.model)
        check_model(config)
        check_budget(config)
        check_teacher(config, self.tokenizer)
        level = RolloutLevel(config, self.tokenizer, start_server)
        self.rewards = RewardPool(config.reward)
        level.data = self.rewards.columns(level.data)
        self.prompts = load_prompts(level.data, self.tokenizer, level.image_rules)
        found, dropped = len(self.prompts), self.prompts.dropped
        self.screen.note(f"{found} prompts from {config.data.path}, {dropped} too long and left out")
        self.end_ids = ends = end_token_ids(config.model.path, self.tokenizer)
        self.held_outs = load_held_outs(config, level, self.tokenizer, ends) if config.eval.every else []
        return level

    def start_engine(self, resources: ExitStack) -> None:
        """This rank's engine, if it leads one, and reward workers beside it.

        Before the policy: vLLM measures free memory while it starts, and asserts that none is freed
        (https://github.com/vllm-project/vllm/issues/56830).
        """
        config, size = self.config, self.config.engine.tensor_parallel_size
        count = engine_workers(config, world_size()) // size
        self.screen.note(f"starting {count} engine(s) for {config.model.path}")
        with agreed("fetching the model", among=EVERYBODY):
            fetch_model(config)
        self.restarts = EngineRestarts(config, rank_device(config), self.watchdog)
        self.leader = self.restarts.first_start()
        resources.callback(stop_engine, self.leader)
        if self.leader is not None:
            resources.enter_context(self.rewards)

    def train(self) -> None:
        """Every step to the last, with evaluations and checkpoints where they are due; then the exports."""
        config, state = self.config, self.state
        deadline = config.run.first_step_deadline_s
        self.keeper.hold_signals(signal.SIGTERM)
        if self.held_outs and config.eval.before and state.step == 0:
            with self.watchdog.phase("first evaluation", deadline):
                self.log(0, self.evaluate() | self.meter.take())
        while state.step < config.run.steps:
            with self.watchdog.phase(f"step {state.step + 1}", deadline):
                try:
                    with self.profiler.step(state.step + 1):
                        self.train_step(state.step + 1)
                except StepAbandoned:
                    self.sharding.sleep()  # all ranks are still in step, and the memory is the trainer's again
                    self.rollouts.take_back(state.step + 1)
                    self.keeper.leave()
            deadline = config.run.step_deadline_s
        with self.watchdog.phase("finish", config.run.first_step_deadline_s):
            self.keeper.finish()
            record: dict[str, Any] = {"tracker": self.tracker, "screen": self.screen, "answers": self.last_answers}
            export_and_report(config, self.policy, self.tokenizer, self.prompts, state=state, **record)

    def train_step(self, step: int) -> None:
        """Sample, score, credit, update, log."""
        config, began = self.config, time.perf_counter()
        # By the engine; reward functions score each answer as soon as it is there.
        # Only then are its prompts taken: a step that is given up, or sampled anew, has taken none.
        sampled, self.state.prompts = self.in_shift(partial(self.sample, step), may_leave=True)
        with self.meter.phase("update"):
            metrics = rollout_metrics(sampled.answers) | sampled.metrics() | self.rollouts.figures()
            metrics |= self.learner.learn(*sampled.kept(), step)  # scores by the models, credit, updates
        metrics |= {"time/step": time.perf_counter() - began}
        self.state.count_step(metrics)
        if self.held_outs and (step % config.eval.every == 0 or step == config.run.steps):
            metrics |= self.evaluate()
        most = max(config.tracking.completions_per_step, ANSWERS_SHOWN)
        rows = answer_rows(sampled.answers[:most], sampled.prompts, self.tokenizer)
        self.tracker.completions(step, rows)
        self.tracker.tokens(step, token_rows(self.learner.watched, sampled.prompts, self.tokenizer))
        self.last_answers = self.last_answers if self.held_outs else rows
        for line in failure_lines(sampled.answers, metrics):
            self.screen.note(f"step {step}: {line}")
        self.log(step, metrics | self.meter.take())
        # After the row, so that whenever the run is killed, the files have the steps that a checkpoint has.
        with self.meter.phase("checkpoint"):
            self.keeper.step_done(metrics)

    def in_shift(self, work: Callable[[], T], may_leave: bool = False) -> T:
        """The result of `work` in a generation shift; all of it is done anew when an engine has died.

        With `may_leave`, StepAbandoned is raised instead where the run is asked to end.
        """
        while True:
            try:
                with self.generation_shift():
                    return work()
            except RemoteError as failure:
                self.restarts.after(failure, self.policy, *self.others, may_leave=may_leave)

    @contextmanager
    def generation_shift(self) -> Iterator[None]:
        """The engines awake at the policy's version; afterwards asleep, with the shift's own cost on the meter."""
        with self.watchdog.phase("generation shift", self.config.run.first_step_deadline_s):
            try:
                with self.sharding.generation_shift(self.policy, *self.others):
                    yield
                    gc.collect()  # an OpenAI client, say, leaves cycles with 200 KiB of certificates, unknown to Python
                    self.meter.note_engine_memory("awake")
            except NotFiniteError as error:
                self.sharding.sleep()  # all ranks are still in step, and the policy's weights in their place again
                raise NotFiniteError(f"{error}; {culprits(self.policy)}") from None
            self.meter.note_engine_memory("asleep")
        report = self.sharding.report
        self.meter.add_seconds(report.seconds)
        self.meter.note_offloaded(report.offloaded)
        self.state.syncs_verified += bool(report.verified)
        if report.left_out != self.left_out:
            self.left_out = report.left_out
            count = len(self.left_out)
            weights = f"{count} weight{'s' * (count != 1)}"
            self.screen.note(f"vLLM leaves out {weights} of this model: {', '.join(self.left_out)}")

    def sample(self, step: int) -> tuple[StepSampling, int]:
        """The step's prompts, from where the last step stopped, and all engines' answers to them with their rewards.

        In rounds, where that is asked. Also the position in the data of the prompt that comes next.
        """
        config, sampled = self.config, StepSampling(self.config)
        self.rollouts.take_back(step)
        position, sampling = self.state.prompts, training_sampling(config, self.end_ids)
        group, version, template = config.algorithm.group_size, self.version, config.data.chat_template_kwargs
        lengths = self.state.lengths if config.rollout.order == "longest_first" else None
        late, apart = self.late_to_leave, config.algorithm.rewards_apart
        terms = Terms(config.run.first_step_deadline_s, late, apart, lengths)
        source = partial(self.prompts.take, seed=config.run.seed)
        while sampled.missing:
            settings = RolloutSettings(
                group, sampling, version, seed=sampled.seed(step), step=step, chat_template_kwargs=template
            )
            with self.meter.phase("rollout", self.rollouts.waits_for):
                prompts, answers, position = self.rollouts.take(source, position, sampled.missing, settings, terms)
            sampled.add(prompts, answers)
        return sampled, position

    def evaluate(self) -> Metrics:
        """Answers to the held-out prompts with evaluation's own sampling settings, in a shift of their own.

        Nothing that is drawn here changes what training and other datasets get.
        """
        version, step = self.version, -1 - self.state.step

        def sample() -> dict[str, list[Answer]]:
            answers: dict[str, list[Answer]] = {}
            self.last_answers = []
            for held_out in self.held_outs:
                with self.meter.phase("eval"):
                    found = sample_held_out(self.config, self.rollouts, held_out, version=version, step=step)
                answers[held_out.name] = found
                for line in failure_lines(found, reward_errors(found), "count as wrong"):
                    self.screen.note(f"evaluation {held_out.name}: {line}")
                self.last_answers += answer_rows(found[:ANSWERS_SHOWN], list(held_out.prompts), self.tokenizer)
            return answers

        with random_states_kept():
            answers = self.in_shift(sample)
        # The recipe's first reward function is the one that tells right from wrong.
        metrics = evaluation_metrics(answers, next(iter(self.rewards.labels), None), self.config.eval)
        self.state.count_evaluation(metrics["eval/reward"])
        return metrics

    def log(self, step: int, metrics: Metrics) -> None:
        """One row of figures: on disk, in Weights & Biases, on the screen."""
        if "time/rollout" in metrics and "rollout_tokens" in metrics:
            metrics["throughput/rollout_tokens_per_s"] = metrics["rollout_tokens"] / metrics["time/rollout"]
            metrics["throughput/train_tokens_per_s"] = metrics.get("train_tokens", 0.0) / metrics["time/update"]
            metrics["throughput/tokens_per_s"] = metrics["rollout_tokens"] / metrics["time/step"]
            metrics["throughput/tokens_per_s_per_device"] = metrics["throughput/tokens_per_s"] / world_size()
        metrics |= {"sync/version": float(self.policy.version), "sync/verified": float(self.state.syncs_verified)}
        self.tracker.log(step, metrics)
        self.screen.step(step, metrics)
