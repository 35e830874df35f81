"""The training loop. One step is read here from top to bottom; everything else is machinery behind names.

Left out on purpose: a scheduler, roles, workers and controllers. Every rank that trains runs this file, under torchrun
or alone; what one rank decides is decided by all alike, or exchanged in one of the few collectives that the parts
document.
"""

import gc
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import Any, TypeVar

from generation.engine.sampling import NotFiniteError
from sharding.manager import ShardingManager
from sharding.ranks import RemoteError, is_main, world_size
from trainer.build import build_models, build_sharding, build_source
from trainer.config.schema import TrainConfig
from trainer.data import Prompt
from trainer.engines import rank_device
from trainer.evaluation import evaluation_metrics
from trainer.learning import Learner, Metrics, StepSampling, reward_errors, rollout_metrics
from trainer.learning.answer_rows import answer_rows, failure_lines, token_rows
from trainer.learning.answers import Answer
from trainer.rollouts.journal import Journal
from trainer.rollouts.pool import StepAbandoned, note_answers
from trainer.rollouts.round import Order, Round
from trainer.rollouts.sampling import prompts_at, random_states_kept
from trainer.run.checkpoint import load
from trainer.run.finish import export_and_report
from trainer.run.keeper import Keeper, make_run_tracker
from trainer.run.meters import PhaseMeter, StepProfiler
from trainer.run.screen import ANSWERS_SHOWN
from trainer.run.watchdog import Watchdog
from trainer.start import Start, begin
from trainer.types import culprits

T = TypeVar("T")


class RLTrainer:
    """Reinforcement learning of one policy on the prompts of one recipe."""

    def __init__(self, config: TrainConfig, watchdog: Watchdog, resources: ExitStack) -> None:
        """Build everything, cheapest and likeliest to fail first. `resources` closes it again, however the run ends."""
        self.watchdog = watchdog
        # Some rows of the latest evaluation, or of the latest step where there is none; on rank 0.
        self.last_answers: list[dict[str, Any]] = []
        self.left_out: list[str] = []  # weights that the engines take nothing of
        start = begin(config, watchdog, resources, self.doing)
        self.config, self.screen, self.state, self.restarts = start.config, start.screen, start.state, start.restarts
        self.tokenizer, self.rewards = start.tokenizer, start.rewards
        self.prompts, self.held_outs = start.prompts, start.held_outs
        self.build(resources, start)
        gc.collect()
        gc.freeze()  # the collections of each shift, 0.4 s each, need not look again at what is there by now

    def build(self, resources: ExitStack, start: Start) -> None:
        """The models, their way to the engines, and all that a step needs; as they were in the checkpoint, if any."""
        config, watchdog, device = self.config, self.watchdog, rank_device(self.config)
        self.screen.note(f"loading {config.model.path} for training")
        self.policy, reference, critic = build_models(config, device)
        # Whose memory a generation shift can do without, besides the policy's.
        self.tenants = [critic] if critic is not None else []
        self.sharding = resources.enter_context(closing(build_sharding(config, self.policy, start.leader)))
        if isinstance(self.sharding, ShardingManager):  # engines apart are not started again
            self.restarts.sharding = self.sharding
            try:
                self.sharding.connect()
                self.sharding.sleep()
            except RemoteError as failure:
                self.restarts.after(failure, self.policy, *self.tenants)
        self.source = build_source(start, self.sharding, resources, give_up=lambda: self.keeper.late_to_leave())
        self.produce = self.source.produce
        if config.checkpoint.rollouts:
            self.produce = Journal(self.source, config, start.identity).produce
        pad_id, weights, untrained = self.tokenizer.pad_token_id, self.rewards.weights, self.source.untrained
        self.learner = Learner(config, self.policy, reference, pad_id, weights, critic=critic, untrained=untrained)
        parts = {"policy": self.policy} | ({"critic": critic} if critic is not None else {})
        if start.checkpoint is not None:
            load(start.checkpoint, parts)
        carried = self.source.carried  # answers that are not trained yet
        keeper = Keeper(config, watchdog, self.state, parts=parts, identity=start.identity, carried=carried)
        self.keeper = resources.enter_context(closing(keeper))
        self.tracker = resources.enter_context(closing(make_run_tracker(config, self.state)))
        works = {id(m.work): m.work for m in (self.policy, reference, critic) if m is not None}  # a base is its policy
        self.meter = PhaseMeter(config, device, start.leader, watchdog, *works.values())
        self.profiler = StepProfiler(config.run.profile, config.run.folder / "profile", device, enabled=is_main())

    def doing(self) -> str:
        """This rank's phase, for the screen."""
        phase = self.watchdog.current_phase()
        return f"{phase}, {self.source.finished} answers" if phase.endswith(("rollout", "eval")) else phase

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
                    self.source.take_back(state.step + 1)
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
        sampled, last = self.in_shift(partial(self.sample, step), may_leave=True)
        self.state.prompts = last.position
        with self.meter.phase("update"):
            metrics = rollout_metrics(sampled.answers) | sampled.metrics() | last.figures
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
                self.restarts.after(failure, self.policy, *self.tenants, may_leave=may_leave)

    @contextmanager
    def generation_shift(self) -> Iterator[None]:
        """The engines awake at the policy's version; afterwards asleep, with the shift's own cost on the meter."""
        with self.watchdog.phase("generation shift", self.config.run.first_step_deadline_s):
            try:
                with self.sharding.generation_shift(self.policy, *self.tenants):
                    yield
                    gc.collect()  # an OpenAI client, say, leaves cycles with 200 KiB of certificates, unknown to Python
                    self.meter.note_engine_memory("awake")
            except NotFiniteError as error:
                self.sharding.sleep()  # all ranks are still in step, and the policy's weights in their place again
                raise NotFiniteError(f"{error}; {culprits(self.policy)}") from None
            self.meter.note_engine_memory("asleep")
        report = self.sharding.report
        self.meter.note_shift(report.seconds, report.offloaded)
        self.state.syncs_verified += bool(report.verified)
        if report.left_out != self.left_out:
            self.left_out = report.left_out
            weights = f"{len(self.left_out)} weight{'s' * (len(self.left_out) != 1)}"
            self.screen.note(f"vLLM leaves out {weights} of this model: {', '.join(self.left_out)}")

    def sample(self, step: int) -> tuple[StepSampling, Round]:
        """The step's prompts, from where the last step stopped, and all engines' answers to them with their rewards.

        In rounds, where that is asked; also the last of these.
        """
        order = Order(step, self.policy.version, self.state.prompts)
        sampled, lengths = StepSampling(self.config), self.state.lengths
        with self.meter.phase("rollout", self.source.waits_for):
            rounds = self.produce(order)
            for each in rounds:
                prompts = prompts_at(self.prompts, self.config, each)
                sampled.add(prompts, self.checked_answers(each, order, prompts, lengths))
        return sampled, rounds[-1]

    def checked_answers(
        self, sampled: Round, order: Order, prompts: list[Prompt], lengths: dict[int, int] | None = None
    ) -> list[Answer]:
        """All ranks' answers of a round, if not too many have failed; their lengths are noted. Collective."""
        rollout = self.config.rollout
        aged = not order.evaluates and (rollout.lag > 0 or rollout.slice_tokens is not None)
        details = order.evaluates or self.config.algorithm.rewards_apart
        answers = sampled.answers(details, order.version if aged else None)
        note_answers(answers, prompts, rollout.max_error_rate, lengths if rollout.order == "longest_first" else None)
        return answers

    def sample_held_outs(self) -> dict[str, list[Answer]]:
        """All engines' answers to the held-out prompts, by dataset."""
        order = Order(-1 - self.state.step, self.policy.version, self.state.prompts)
        answers: dict[str, list[Answer]] = {}
        self.last_answers = []
        with self.meter.phase("eval"):
            rounds = self.produce(order)
            for held_out, sampled in zip(self.held_outs, rounds, strict=True):
                answers[held_out.name] = self.checked_answers(sampled, order, list(held_out.prompts))
        for held_out in self.held_outs:
            found = answers[held_out.name]
            for line in failure_lines(found, reward_errors(found), "count as wrong"):
                self.screen.note(f"evaluation {held_out.name}: {line}")
            self.last_answers += answer_rows(found[:ANSWERS_SHOWN], list(held_out.prompts), self.tokenizer)
        return answers

    def evaluate(self) -> Metrics:
        """Answers to the held-out prompts with evaluation's own sampling settings, in a shift of their own.

        Nothing that is drawn here changes what training and other datasets get.
        """
        with random_states_kept():
            answers = self.in_shift(self.sample_held_outs)
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
