"""The training loop. One step is read here from top to bottom; everything else is machinery behind names.

Left out on purpose: a scheduler, roles, workers and controllers. Every rank runs this file, under torchrun or alone;
what one rank decides is decided by all alike, or exchanged in one of the few collectives that the parts document.
"""

import gc
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from generation.engine.sampling import NotFiniteError, SamplingSettings
from generation.rollouts.run import RolloutSettings
from sharding.ranks import agreed, all_reduce_sum, rank, world_size
from trainer.build import build_models, build_sharding, check_model, check_teacher, rank_device, start_server
from trainer.config.machine import resolve_device
from trainer.config.schema import TrainConfig
from trainer.data import Prompt, load_prompts, load_tokenizer
from trainer.distributed import destroy_process_group, init_process_group, store
from trainer.engines import end_token_ids, fetch_model, start_engine, stop_engine, training_sampling
from trainer.evaluation import evaluation_metrics, load_held_outs, random_states_kept
from trainer.learning import Learner, Metrics, StepSampling, rollout_metrics
from trainer.learning.answers import Answer
from trainer.rewards.pool import RewardPool
from trainer.rollouts import RolloutLevel, Rollouts, StepAbandoned, answer_rows
from trainer.run import processes
from trainer.run.checkpoint import load
from trainer.run.finish import export_and_report
from trainer.run.keeper import Keeper, find_checkpoint, make_run_tracker, run_identity
from trainer.run.lock import RunLock
from trainer.run.meters import PhaseMeter, StepProfiler
from trainer.run.screen import ANSWERS_SHOWN, Progress
from trainer.run.watchdog import Watchdog
from trainer.types import culprits


def main(config: TrainConfig, lock: RunLock | None = None) -> None:
    """One rank from start to end: join the others, train, leave with them. A failure on one rank ends all.

    `lock` is that of the run's folder, which rank 0 has taken.
    """
    # The watchdog keeps the deadlines of steps; collectives only have to outlast the longest of them.
    init_process_group(max(config.run.first_step_deadline_s, config.run.step_deadline_s), resolve_device(config))
    if lock is not None:
        lock.share(rank(), world_size())
    with Watchdog(store(), rank(), world_size()) as watchdog:
        processes.install_signal_handlers(watchdog.current_phase)
        with ExitStack() as resources:
            with watchdog.phase("start-up", config.run.first_step_deadline_s):
                trainer = RLTrainer(config, watchdog, resources)
            trainer.train()
    destroy_process_group()


class RLTrainer:
    """Reinforcement learning of one policy on the prompts of one recipe.

    Attributes:
        state: of the run besides the policy; checkpoints keep both.
        others: models beside the policy whose memory a generation shift can do without.
        last_answers: some rows of the latest evaluation, or of the latest step where there is none; on rank 0.
    """

    def __init__(self, config: TrainConfig, watchdog: Watchdog, resources: ExitStack) -> None:
        """Build everything, cheapest and likeliest to fail first. `resources` closes it again, however the run ends."""
        self.config, self.watchdog = config, watchdog
        device = rank_device(config)
        self.screen = Progress(config.run.steps, enabled=rank() == 0)
        self.tokenizer = load_tokenizer(config.model)
        check_model(config)
        check_teacher(config, self.tokenizer)
        self.level = RolloutLevel(config, self.tokenizer, start_server)
        data = self.level.data
        self.prompts = load_prompts(data, self.tokenizer)
        self.screen.note(
            f"{len(self.prompts)} prompts from {config.data.path}, {self.prompts.dropped} too long and left out"
        )
        self.end_ids = end_token_ids(config.model.path, self.tokenizer)
        self.held_outs = load_held_outs(config, data, self.tokenizer, self.end_ids) if config.eval.every else []
        identity = run_identity(config, self.prompts.fingerprint, self.tokenizer)
        start, self.state = find_checkpoint(config, identity)
        self.rewards = RewardPool(config.reward)
        # The engine before the policy: vLLM measures free memory while it starts, and asserts that none is freed
        # (https://github.com/vllm-project/vllm/issues/56830).
        self.screen.note(
            f"starting {world_size() // config.engine.tensor_parallel_size} engine(s) for {config.model.path}"
        )
        with agreed("fetching the model"):
            fetch_model(config)
        with agreed("starting the engine"):
            self.leader = start_engine(config, device.type == "cuda")
        resources.callback(stop_engine, self.leader)
        if self.leader is not None:
            resources.enter_context(self.rewards)
        self.policy, reference, critic = build_models(config, device)
        self.others = [critic] if critic is not None else []
        self.sharding = build_sharding(config, self.policy, self.leader)
        resources.callback(self.sharding.close)
        self.sharding.connect()
        self.sharding.sleep()
        engines = world_size() // config.engine.tensor_parallel_size
        self.rollouts = Rollouts(
            self.leader, self.tokenizer, self.rewards, store(), self.level, engines, config.rollout.max_error_rate
        )
        resources.callback(self.rollouts.close)
        self.learner = Learner(
            config, self.policy, reference, self.tokenizer.pad_token_id, self.rewards.weights, critic
        )
        parts = {"policy": self.policy} | ({"critic": critic} if critic is not None else {})
        if start is not None:
            load(start, parts)
        self.keeper = Keeper(config, watchdog, self.state, parts, identity)
        resources.callback(self.keeper.close)
        self.tracker = make_run_tracker(config, self.state)
        resources.callback(self.tracker.close)
        works = {id(m.work): m.work for m in (self.policy, reference, critic) if m is not None}  # a base is its policy
        self.meter = PhaseMeter(
            device, self.leader, watchdog, config.run.first_step_deadline_s, [*works.values()], config.policy.dtype
        )
        self.profiler = StepProfiler(config.run.profile, config.run.folder / "profile", device, rank() == 0)
        self.last_answers: list[dict[str, Any]] = []
        gc.collect()
        gc.freeze()  # what is there by now stays: the collections of each shift, 0.4 s each, need not look at it again

    def train(self) -> None:
        """Every step to the last, with evaluations and checkpoints where they are due; then the exports."""
        config, state = self.config, self.state
        deadline = config.run.first_step_deadline_s
        self.keeper.hold_sigterm()
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
                    self.keeper.leave()
            deadline = config.run.step_deadline_s
        with self.watchdog.phase("finish", config.run.first_step_deadline_s):
            self.keeper.finish()
            export_and_report(
                config, self.policy, self.tokenizer, self.prompts, state, self.tracker, self.screen, self.last_answers
            )

    def train_step(self, step: int) -> None:
        """Prompts, rollouts, rewards, advantages, update; then one row of figures."""
        config, began = self.config, time.perf_counter()
        with self.generation_shift():
            sampled = self.sample_groups(step)
        with self.meter.phase("update"):
            metrics = rollout_metrics(sampled.answers) | sampled.metrics()
            metrics |= self.learner.learn(*sampled.kept(), step)
        metrics |= {"time/step": time.perf_counter() - began}
        self.state.count_step(metrics)
        if self.held_outs and (step % config.eval.every == 0 or step == config.run.steps):
            metrics |= self.evaluate()
        shown = sampled.answers[: max(config.tracking.completions_per_step, ANSWERS_SHOWN)]
        rows = answer_rows(shown, sampled.prompts, self.tokenizer)
        self.tracker.completions(step, rows)
        self.last_answers = self.last_answers if self.held_outs else rows
        if error := next((t.error for t in sampled.answers if t.error), ""):
            self.screen.note(
                f"step {step}: {metrics['rollout/failed']:.0f} episodes failed, the first by {error[:200]}"
            )
        self.log(step, metrics | self.meter.take())
        # After the row, so that whenever the run is killed, the files have the steps that a checkpoint has.
        with self.meter.phase("checkpoint"):
            self.keeper.step_done(metrics)

    @contextmanager
    def generation_shift(self) -> Iterator[None]:
        """The engines awake at the policy's version; afterwards asleep, with the shift's own cost on the meter."""
        with self.watchdog.phase("generation shift", self.config.run.first_step_deadline_s):
            try:
                with self.sharding.generation_shift(self.policy, *self.others):
                    yield
                    self.meter.note_engine_memory("awake")
            except NotFiniteError as error:
                self.sharding.sleep()  # all ranks are still in step, and the policy's weights in their place again
                raise NotFiniteError(f"{error}; {culprits(self.policy)}") from None
            self.meter.note_engine_memory("asleep")
        self.meter.add_seconds(self.sharding.report.seconds)
        self.meter.note_offloaded(self.sharding.report.offloaded)
        self.state.syncs_verified += bool(self.sharding.report.verified)

    def sample_groups(self, step: int) -> StepSampling:
        """The step's prompts, from where the last step stopped, and their answers; in rounds, where that is asked."""
        config, sampled = self.config, StepSampling(self.config)
        sampling = training_sampling(config, self.end_ids)
        position = self.state.prompts
        while sampled.missing:
            prompts = self.prompts.take(position, sampled.missing, config.run.seed)
            position += len(prompts)
            sampled.add(prompts, self.sample(prompts, step, config.algorithm.group_size, sampling, sampled.seed(step)))
        self.state.prompts = position  # only now: an abandoned step has taken none
        return sampled

    def sample(
        self,
        prompts: list[Prompt],
        step: int,
        samples: int,
        sampling: SamplingSettings,
        seed: int,
        phase: str = "rollout",
    ) -> list[Answer]:
        """All engines' answers to all prompts, scored; the run ends here when reward functions fail too often."""
        template = self.config.data.chat_template_kwargs
        settings = RolloutSettings(samples, sampling, self.policy.version, seed, step, template)
        voting = phase == "eval" and bool(self.config.eval.k)
        deadline = self.config.run.first_step_deadline_s
        with self.meter.phase(phase):
            if phase == "eval":
                answers = self.rollouts.run(prompts, settings, deadline, voting, details=True)
            else:
                apart = self.config.algorithm.rewards_apart
                late = self.keeper.late_to_leave
                answers = self.rollouts.run(prompts, settings, deadline, give_up=late, details=apart)
        gc.collect()  # an OpenAI client, say, leaves cycles with 200 KiB of certificates that Python does not count
        self.rewards.check_error_rate(all_reduce_sum(self.rewards.take_counts()))
        return answers

    def evaluate(self) -> Metrics:
        """Answers to the held-out prompts with evaluation's own sampling settings, in a shift of their own.

        The random numbers drawn here do not change those of training or of other datasets.
        """
        answers: dict[str, list[Answer]] = {}
        seed, self.last_answers = self.config.run.seed, []
        with random_states_kept(), self.generation_shift():
            for held_out in self.held_outs:
                prompts, step = list(held_out.prompts), -1 - self.state.step
                found = self.sample(prompts, step, held_out.samples, held_out.sampling, seed, "eval")
                answers[held_out.name] = found
                self.last_answers += answer_rows(found[:ANSWERS_SHOWN], prompts, self.tokenizer)
        # The recipe's first reward function decides which answers are right.
        metrics = evaluation_metrics(answers, next(iter(self.rewards.labels), None), self.config.eval)
        self.state.count_evaluation(metrics["eval/reward"])
        return metrics

    def log(self, step: int, metrics: Metrics) -> None:
        """One row of figures: on disk, in Weights & Biases, on the screen."""
        seconds = metrics.get("time/step", 0.0)
        if "time/rollout" in metrics and "rollout_tokens" in metrics:
            metrics["throughput/rollout_tokens_per_s"] = metrics["rollout_tokens"] / metrics["time/rollout"]
            metrics["throughput/train_tokens_per_s"] = metrics.get("train_tokens", 0.0) / metrics["time/update"]
            metrics["throughput/tokens_per_s"] = metrics["rollout_tokens"] / seconds
            metrics["throughput/tokens_per_s_per_device"] = metrics["throughput/tokens_per_s"] / world_size()
        metrics |= {"sync/version": float(self.policy.version), "sync/verified": float(self.state.syncs_verified)}
        self.tracker.log(step, metrics)
        self.screen.step(step, metrics)
