"""The training loop, in which one step can be read from top to bottom.

There is no scheduler and no controller. Every rank that trains runs this file, under torchrun or
alone; one that only generates runs `trainer/generator.py`. All ranks take the same decisions,
either from the same data or through one of the collectives that the called modules document.
"""

import gc
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

from generation.engine.sampling import NotFiniteError
from sharding.ranks import RemoteError, world_size
from sharding.report import SyncReport
from trainer.build import build_run
from trainer.config.schema import TrainConfig
from trainer.evaluation import evaluation_metrics
from trainer.learning import Metrics, reward_errors, rollout_metrics
from trainer.learning.answer_rows import answer_rows, failure_lines, of_many_prompts, token_rows
from trainer.learning.answers import Answer
from trainer.learning.metrics import check_first_gap
from trainer.rollouts.local import random_states_kept
from trainer.rollouts.pool import StepAbandoned
from trainer.rollouts.round import Order
from trainer.rollouts.step_batch import StepBatch
from trainer.run.finish import export_and_report
from trainer.run.screen import ANSWERS_SHOWN
from trainer.run.watchdog import Watchdog
from trainer.start import begin
from trainer.types import culprits

T = TypeVar("T")


class RLTrainer:
    """Trains one policy by reinforcement learning on the prompts of one recipe."""

    def __init__(self, config: TrainConfig, watchdog: Watchdog, resources: ExitStack) -> None:
        """Build all parts, starting with those that are cheap and likely to fail. However the run
        ends, `resources` closes them.
        """
        # First of all, since `doing` reads it while the other parts are built.
        self.watchdog = watchdog
        # Inputs are cheap and likely to fail; the engine measures free memory, so it starts before
        # the models.
        start = begin(config, watchdog, resources, self.doing)
        self.config = start.config
        self.screen = start.screen
        self.state = start.state
        self.restarts = start.restarts
        self.tokenizer = start.tokenizer
        self.rewards = start.rewards
        self.prompts = start.prompts
        self.held_outs = start.held_outs
        # Models take memory that the sleeping engine has left. Everything else needs one of them.
        run = build_run(start, watchdog, resources)
        self.policy = run.policy
        self.tenants = run.tenants
        self.learner = run.learner
        self.sharding = run.sharding
        self.source = run.source
        self.produce = run.produce
        self.keeper = run.keeper
        self.tracker = run.tracker
        self.meter = run.meter
        self.profiler = run.profiler
        # Some rows of the latest evaluation, or of the latest step if the recipe has no evaluation;
        # on rank 0 only.
        self.last_answers: list[dict[str, Any]] = []
        self.last_sync = SyncReport(version=-1)
        # The collection in each shift spares the objects that exist by now, which would take it 0.4
        # s.
        gc.collect()
        gc.freeze()

    def doing(self) -> str:
        """Describe this rank's phase, for the screen."""
        phase = self.watchdog.current_phase()
        return (
            f"{phase}, {self.source.finished} answers" if phase.endswith(("rollout", "eval")) else phase
        )

    def train(self) -> None:
        """Run all remaining steps, with evaluations and checkpoints where they are due, and then
        export the model.
        """
        config = self.config
        state = self.state
        deadline = config.run.first_step_deadline_s
        # From here on there is something to save, so SIGTERM no longer ends the run at once.
        self.keeper.hold_signals(signal.SIGTERM)
        # The untrained model is measured only by a run that begins with it, and not by one that
        # resumes.
        if self.held_outs and config.eval.before and state.step == 0:
            with self.watchdog.phase("first evaluation", deadline):
                self.log(0, self.evaluate() | self.meter.take())
        # The first step may last longer than the others, since kernels are compiled in it.
        while state.step < config.run.steps:
            with self.watchdog.phase(f"step {state.step + 1}", deadline):
                try:
                    with self.profiler.step(state.step + 1):
                        self.train_step(state.step + 1)
                except StepAbandoned:
                    # All ranks raise it together, since one was asked to end. The trainer needs the
                    # memory again, and `leave` saves the run as the step before has left it.
                    self.sharding.sleep()
                    self.source.take_back(state.step + 1)
                    self.keeper.leave()
            deadline = config.run.step_deadline_s
        # The last checkpoint comes before the export, so that a run whose export fails need not
        # train again.
        with self.watchdog.phase("finish", config.run.first_step_deadline_s):
            self.keeper.finish()
            record: dict[str, Any] = {
                "tracker": self.tracker,
                "screen": self.screen,
                "answers": self.last_answers,
            }
            export_and_report(config, self.policy, self.tokenizer, self.prompts, state=state, **record)

    def train_step(self, step: int) -> None:
        """Run one step: sample and score answers, assign credit, update the policy, and log."""
        config = self.config
        began = time.perf_counter()
        # Answers: engines sample in a shift, and rewards score each answer as soon as it is
        # finished.
        batch = self.in_shift(partial(self.sample, step), may_leave=True)
        # Only now: an abandoned or repeated step must not consume prompts
        self.state.prompts = batch.position
        # Learning: log-probabilities, advantages and updates, now that engines on these devices are
        # asleep.
        with self.meter.phase("update"):
            metrics = rollout_metrics(batch.answers) | batch.metrics()
            metrics |= self.learner.learn(*batch.kept(), step)
        metrics |= {"time/step": time.perf_counter() - began}
        # The step is counted before the evaluation, which is one of the model after so many steps.
        first_gap = self.state.largest_gap is None
        self.state.count_step(metrics)
        if self.held_outs and (step % config.eval.every == 0 or step == config.run.steps):
            metrics |= self.evaluate()
        # Records: some answers with their texts, and a line about each kind of failure. The last
        # answers are shown when the run ends; those of an evaluation have precedence.
        most = max(config.tracking.completions_per_step, ANSWERS_SHOWN)
        rows = answer_rows(of_many_prompts(batch.answers, most), batch.prompts, self.tokenizer)
        self.tracker.completions(step, rows)
        self.tracker.tokens(step, token_rows(self.learner.watched, batch.prompts, self.tokenizer))
        self.last_answers = self.last_answers if self.held_outs else rows
        for line in failure_lines(batch.answers, metrics):
            self.screen.note(f"step {step}: {line}")
        # The row has the time and the memory of all phases so far, the evaluation's too. A gap that
        # ends the run is checked after it, so that the files show the gap.
        self.log(step, metrics | self.meter.take())
        if first_gap:
            check_first_gap(metrics, config)
        # The checkpoint comes last: whenever the run is killed, its files have all steps that a
        # checkpoint has.
        with self.meter.phase("checkpoint"):
            self.keeper.step_done(metrics)

    def in_shift(self, work: Callable[[], T], may_leave: bool = False) -> T:
        """Run `work` in a generation shift and return its result; repeat the shift if an engine has
        died.

        With `may_leave`, raises StepAbandoned instead of repeating if the run was asked to end.
        """
        while True:
            try:
                with self.generation_shift():
                    return work()
            except RemoteError as failure:
                self.restarts.after(failure, self.policy, *self.tenants, may_leave=may_leave)

    @contextmanager
    def generation_shift(self) -> Iterator[None]:
        """Wake the engines at the policy's version for the block, put them to sleep, and record the
        shift's cost.

        Raises NotFiniteError, naming a parameter that is not finite, if a sampled log-probability
        is not.
        """
        # Weights and memory go to the engines before the block; the memory comes back after it.
        with self.watchdog.phase("generation shift", self.config.run.first_step_deadline_s):
            try:
                with self.sharding.generation_shift(self.policy, *self.tenants):
                    yield
                    # Frees cycles such as OpenAI clients, whose 200 KiB of certificates Python
                    # cannot see
                    gc.collect()
                    self.meter.note_engine_memory("awake")
            except NotFiniteError as error:
                # All ranks raise this together. The policy's weights are in place again, to be
                # searched for culprits.
                self.sharding.sleep()
                raise NotFiniteError(f"{error}; {culprits(self.policy)}") from None
            self.meter.note_engine_memory("asleep")
        # What the shift has cost and what it has verified is known once it is over.
        report = self.sharding.report
        self.meter.note_shift(report.seconds, report.offloaded)
        self.state.syncs_verified += bool(report.verified)
        for line in report.notes(previous=self.last_sync):
            self.screen.note(line)
        self.last_sync = report

    def sample(self, step: int) -> StepBatch:
        """Sample the step's prompts, from where the last step stopped. Collective."""
        order = Order(step, self.policy.version, self.state.prompts)
        with self.meter.phase("rollout", self.source.waits_for):
            return self.produce(order)

    def sample_held_outs(self) -> dict[str, list[Answer]]:
        """Sample all engines' answers to the held-out prompts, and return them by dataset."""
        order = Order(-1 - self.state.step, self.policy.version, self.state.prompts)
        # All datasets are sampled in one shift, so if an engine dies, all are sampled again.
        answers: dict[str, list[Answer]] = {}
        self.last_answers = []
        with self.meter.phase("eval"):
            rounds = self.source.evaluate(order)
            for held_out, sampled in zip(self.held_outs, rounds, strict=True):
                answers[held_out.name] = sampled.answers(details=True)
        # Lines and examples for the screen, outside of the phase whose time is measured.
        for held_out in self.held_outs:
            replies = answers[held_out.name]
            for line in failure_lines(replies, reward_errors(replies), "count as wrong"):
                self.screen.note(f"evaluation {held_out.name}: {line}")
            examples = of_many_prompts(replies, ANSWERS_SHOWN)
            self.last_answers += answer_rows(examples, list(held_out.prompts), self.tokenizer)
        return answers

    def evaluate(self) -> Metrics:
        """Sample and score the held-out prompts in a shift of their own, and return the
        evaluation's metrics.

        The global random states are restored afterwards, so that an evaluation does not change
        training.
        """
        with random_states_kept():
            answers = self.in_shift(self.sample_held_outs)
        metrics = evaluation_metrics(answers, self.rewards.labels, self.config.eval)
        self.state.count_evaluation(metrics["eval/reward"])
        return metrics

    def log(self, step: int, metrics: Metrics) -> None:
        """Write one row of metrics to metrics.jsonl, to the trackers and to the screen."""
        if "time/rollout" in metrics and "rollout_tokens" in metrics:
            metrics["throughput/rollout_tokens_per_s"] = (
                metrics["rollout_tokens"] / metrics["time/rollout"]
            )
            metrics["throughput/train_tokens_per_s"] = (
                metrics.get("train_tokens", 0.0) / metrics["time/update"]
            )
            metrics["throughput/tokens_per_s"] = metrics["rollout_tokens"] / metrics["time/step"]
            metrics["throughput/tokens_per_s_per_device"] = (
                metrics["throughput/tokens_per_s"] / world_size()
            )
        metrics |= {
            "sync/version": float(self.policy.version),
            "sync/verified": float(self.state.syncs_verified),
        }
        if self.config.sync.delta:
            metrics["sync/bytes"] = float(self.sharding.report.sent_bytes)
        self.tracker.log(step, metrics)
        self.screen.step(step, metrics)
