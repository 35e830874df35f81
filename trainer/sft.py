"""Supervised fine-tuning: the warm start before reinforcement, with the same policy, packed batches
and output head.

`trainer.sft_rows` says what is learned from a row. Held-out rows, whose loss is measured
(`eval.every`), are alike.
"""

import math
import signal
import statistics
import time
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext

import torch
from torch import Tensor

from sharding.ranks import agreed, all_reduce_sum, is_main, rank
from trainer.algorithms.aggregation import token_mean_weights
from trainer.chat_template import end_tokens, unread_keys
from trainer.config.schema import TrainConfig
from trainer.data import load_tokenizer, take
from trainer.engines import fetch_model, rank_device
from trainer.learning.batching import Batcher
from trainer.model_checks import check_model
from trainer.policy import LossFn, Outputs, Policy, UpdateStats, make_policy
from trainer.run.checkpoint import load
from trainer.run.finish import export
from trainer.run.keeper import Keeper, find_checkpoint, make_run_tracker, run_identity
from trainer.run.meters import PhaseMeter
from trainer.run.records import read_rows, series
from trainer.run.screen import Progress, duration
from trainer.run.watchdog import Watchdog
from trainer.sft_rows import Transcript, load_transcripts
from trainer.start import with_settled_recomputation
from trainer.types import MicroBatch

# The parts of a run's identity besides lora, sft.batch_size
_COMPARED = ("data", "model", "tokenizer", "run.seed")
_NO_ENGINE = ("memory/engine_gib_awake", "memory/engine_gib_asleep", "memory/offloaded_gib")
_SILENCE_SECONDS = 10.0  # between lines on the screen


class SftRun:
    """A warm start, which like a reinforcement run has a record, checkpoints, evaluations and exact
    resume.
    """

    def __init__(self, config: TrainConfig, watchdog: Watchdog, resources: ExitStack) -> None:
        """Load everything, and continue the run from its newest checkpoint, if there is one.
        Collective.
        """
        self.watchdog = watchdog
        self.screen = Progress(config.run.steps, enabled=is_main())
        resources.enter_context(self.screen.follow(watchdog.current_phase))
        self.tokenizer = load_tokenizer(config.model)
        self.config = config = check_model(config, "sft")
        self.transcripts = load_transcripts(config, self.tokenizer)
        count = len(self.transcripts.samples)
        dropped = self.transcripts.dropped
        self.screen.note(f"{count} samples from {config.data.path}, {dropped} rows dropped")
        ends = end_tokens(config.model.path, self.tokenizer, config.data, config.sampling.stop_token_ids)
        for line in (*unread_keys(self.tokenizer, config.data), *ends.remarks):
            self.screen.note(line)
        for remark in self.transcripts.remarks:
            self.screen.note(remark)
        held_out = config.eval.datasets if config.eval.every else {}
        self.held_out = {
            name: load_transcripts(config, self.tokenizer, dataset).samples
            for name, dataset in held_out.items()
        }
        with agreed("fetching the model"):
            fetch_model(config)
        entire = run_identity(config, self.transcripts.fingerprint(), self.tokenizer)
        identity = {key: entire[key] for key in entire if key in _COMPARED or key.startswith("lora.")}
        identity["sft.batch_size"] = config.sft.batch_size
        start, self.state = find_checkpoint(config, identity)
        self.config = config = with_settled_recomputation(config, self.state, self.screen.note)
        settings = config.policy.model_copy(
            update={"lr": config.sft.lr, "warmup_steps": config.sft.warmup_steps}
        )
        self.policy = make_policy(
            config.model, settings, rank_device(config), config.sft.steps, lora=config.lora
        )
        self.batcher = Batcher.of(config, self.policy, self.tokenizer.pad_token_id)
        parts = {"policy": self.policy}
        if start is not None:
            load(start, parts)
        keeper = Keeper(config, watchdog, self.state, parts=parts, identity=identity)
        self.keeper = resources.enter_context(closing(keeper))
        self.tracker = resources.enter_context(closing(make_run_tracker(config, self.state)))
        self.meter = PhaseMeter(config, rank_device(config), None, watchdog, self.policy.work)
        self._last_note = -math.inf

    def train(self) -> None:
        """Run all steps, with evaluations and checkpoints when they are due, then write the
        results.
        """
        config = self.config
        state = self.state
        deadline = config.run.first_step_deadline_s
        # A step is short, and only the step itself is lost
        self.keeper.hold_signals(signal.SIGTERM, signal.SIGINT)
        if self.held_out and config.eval.before and state.step == 0:
            with self.watchdog.phase("first evaluation", deadline):
                self.log(0, self.evaluate())
        while state.step < config.run.steps:
            with self.watchdog.phase(f"step {state.step + 1}", deadline):
                self.train_step(state.step + 1)
            deadline = config.run.step_deadline_s
        with self.watchdog.phase("finish", config.run.first_step_deadline_s):
            self.keeper.finish()
            self.export()

    def train_step(self, step: int) -> None:
        """Run one update, log it, and save a checkpoint if one is due."""
        config = self.config
        began = time.perf_counter()
        size = config.sft.batch_size
        samples = take(self.transcripts.samples, self.state.prompts, size, config.run.seed)
        with self.meter.phase("update"):
            stats = update(self.policy, samples, self.batcher, step - 1)
        metrics = {"loss": stats.loss, "grad_norm": stats.grad_norm, "lr": stats.learning_rate}
        metrics |= {"time/step": time.perf_counter() - began}
        self.state.prompts += size
        self.state.count_step(metrics)
        if self.held_out and (step % config.eval.every == 0 or step == config.run.steps):
            metrics |= self.evaluate()
        self.log(step, metrics)
        self.keeper.step_done(metrics)

    def evaluate(self) -> dict[str, float]:
        """Return the mean negative log-probability of held-out tokens, named as in
        `evaluation_metrics`. Collective.
        """
        losses: dict[str, float] = {}
        for name, samples in self.held_out.items():
            with self.meter.phase("eval"):
                batches = batches_of(samples, self.batcher)
                scores = zip(batches, self.policy.score(batches, temperature=1.0), strict=True)
                logprobs = sum(
                    float(outputs.logprobs.sum()) for batch, outputs in scores if batch.counts
                )
            tokens = sum(sample.trainable for sample in samples)
            losses[name] = -all_reduce_sum({"logprobs": logprobs})["logprobs"] / tokens
        several = losses.items() if len(losses) > 1 else ()
        return {f"eval/{name}/loss": loss for name, loss in several} | {
            "eval/loss": statistics.fmean(losses.values())
        }

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Log a row to metrics.jsonl, and at the ends, with evaluations and every ten seconds a
        line to the screen.
        """
        metered = {key: value for key, value in self.meter.take().items() if key not in _NO_ENGINE}
        self.tracker.log(step, metrics := metrics | metered)
        last = step == self.config.run.steps
        if last or "time/eval" in metrics or time.monotonic() - self._last_note > _SILENCE_SECONDS:
            self._last_note = time.monotonic()
            losses = {key: f"{value:.4g}" for key, value in metrics.items() if key.endswith("loss")}
            spent = f"{metrics['time/step']:.3f} s/step" if "time/step" in metrics else ""
            figures = "  ".join([*(f"{key} {value}" for key, value in losses.items()), spent])
            self.screen.note(f"sft {step:>6}/{self.config.run.steps}  {figures}")

    def export(self) -> None:
        """Write the model and the summary, and print the model's folder. Collective; rank 0
        writes.
        """
        config = self.config
        folder = self.config.run.folder

        def summarise() -> None:
            rows = read_rows(folder / "metrics.jsonl")
            ends = {f"{key}_after": series(rows, key)[1][-1:] for key in ("loss", "eval/loss")}
            summary = {key.replace("/", "_"): value[0] for key, value in ends.items() if value}
            seconds = round(self.state.seconds, 3)
            transcripts = self.transcripts
            counts = {"samples": len(transcripts.samples), "rows_dropped": transcripts.dropped}
            self.tracker.summary({"steps": self.state.step, "train_seconds": seconds} | summary | counts)

        export(config, self.policy, self.tokenizer, summarise)
        where = folder / "model" if config.checkpoint.export_hf else folder / "checkpoints"
        self.screen.note(
            f"{self.state.step} steps in {duration(self.state.seconds)}; the model is in {where}"
        )


def update(policy: Policy, samples: list[Transcript], batcher: Batcher, done: int) -> UpdateStats:
    """Run one update on `samples`, the same on all ranks, each of which takes its share, after
    `done` updates.
    """
    # All ranks have all samples, so no exchange is needed
    tokens = sum(sample.trainable for sample in samples)
    return policy.update(
        batches_of(samples, batcher), cross_entropy(tokens), temperature=1.0, place=done
    )


def batches_of(samples: list[Transcript], batcher: Batcher) -> list[MicroBatch]:
    """Return this rank's share of `samples`, the same on all ranks, in micro-batches.
    Collective.
    """
    shares = batcher.deal_samples(samples)
    # Without images no rank can fail, and ranks need not agree
    together: AbstractContextManager[None] = nullcontext()
    if any(sample.stored for sample in samples):
        together = agreed("reading the images of the samples")
    with together:
        share = [samples[i].with_images() for i in shares[rank()]]
    return batcher.micro_batches(share)


def cross_entropy(tokens: int) -> LossFn:
    """Return the loss function of the mean negative log-probability over the step's `tokens`
    trainable tokens.
    """

    def loss_fn(batch: MicroBatch, outputs: Outputs) -> tuple[Tensor, dict[str, Tensor]]:
        logprobs = torch.where(batch.loss_mask.bool(), outputs.logprobs, 0.0)
        return -(logprobs * token_mean_weights(batch.loss_mask, tokens)).sum(), {}

    return loss_fn
