"""Supervised fine-tuning: the warm start before reinforcement, with the same policy, packed batches and output head.

A row is a conversation in `data.messages_key`, every assistant turn of which is learned, or a prompt (string or
messages) with its completion in `sft.completion_key`. So is a held-out row, whose loss is measured (`eval.every`).
"""

import hashlib
import math
import signal
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from generation.images import Image, ImageProcessor, ImageRules, StoredImage
from sharding.ranks import agreed, all_reduce_sum, is_main, rank
from trainer.algorithms.aggregation import token_mean_weights
from trainer.build import joined
from trainer.checks import check_model
from trainer.config.schema import HeldOutConfig, TrainConfig
from trainer.data import (
    encoded_images,
    in_chunks,
    load_rows,
    load_tokenizer,
    messages_and_images,
    prompt_content,
    prompt_messages,
    row_images,
    stored_images,
    take,
)
from trainer.engines import fetch_model, rank_device
from trainer.errors import UserError
from trainer.learning.batching import deal, micro_batches
from trainer.policy import LossFn, Outputs, Policy, UpdateStats, make_policy
from trainer.rollouts.level import RolloutLevel
from trainer.run.checkpoint import load
from trainer.run.finish import export
from trainer.run.keeper import Keeper, find_checkpoint, make_run_tracker, run_identity
from trainer.run.lock import RunLock
from trainer.run.meters import PhaseMeter
from trainer.run.records import read_rows, series
from trainer.run.screen import Progress, duration
from trainer.run.watchdog import Watchdog
from trainer.types import MicroBatch, Sample

if TYPE_CHECKING:
    from datasets import Dataset

_COMPARED = ("data", "model", "tokenizer", "run.seed")  # of a run's identity, besides lora and sft.batch_size
_NO_ENGINE = ("memory/engine_gib_awake", "memory/engine_gib_asleep", "memory/offloaded_gib")
_SILENCE_SECONDS = 10.0  # between lines on the screen

Piece = tuple[str, bool]  # a stretch of a transcript's text, and whether the assistant wrote it


@dataclass
class Transcript(Sample):
    """A conversation; its images are read when and where it is trained."""

    stored: tuple[StoredImage, ...] = ()

    def seen(self) -> Sample:
        """With its images. Raises UserError where one is not what it was."""
        try:
            return replace(self, images=tuple(image.read() for image in self.stored)) if self.stored else self
        except ValueError as error:
            raise UserError(str(error)) from error


@dataclass
class Transcripts:
    """Tokenised conversations; `dropped` counts those that were too long."""

    samples: list["Transcript"]
    dropped: int

    def fingerprint(self) -> str:
        """A digest of all tokens and masks: positions are only valid in data with the same one."""
        digest = hashlib.blake2b(digest_size=16)
        for sample in self.samples:
            digest.update(np.array([sample.input_ids, sample.loss_mask], np.int32).tobytes())
            digest.update("".join(image.digest for image in sample.stored).encode())
            digest.update(b"/")
        return digest.hexdigest()


def main(config: TrainConfig, lock: RunLock | None = None) -> None:
    """Train `model.path` for `sft.steps` steps and write it to the run's folder, whose lock rank 0 has taken."""
    config = config.model_copy(update={"run": config.run.model_copy(update={"steps": config.sft.steps})})
    with joined(config, lock) as watchdog, ExitStack() as resources:
        with watchdog.phase("start-up", config.run.first_step_deadline_s):
            training = SftRun(config, watchdog, resources)
        training.train()


class SftRun:
    """A warm start: a run as reinforcement is one, with its record, checkpoints, evaluation and exact resume."""

    def __init__(self, config: TrainConfig, watchdog: Watchdog, resources: ExitStack) -> None:
        """Load everything, and take up the run where its newest checkpoint left it. Collective."""
        self.config, self.watchdog = config, watchdog
        self.screen = Progress(config.run.steps, enabled=is_main())
        resources.enter_context(self.screen.follow(watchdog.current_phase))
        self.tokenizer = load_tokenizer(config.model)
        check_model(config)
        self.transcripts = load_transcripts(config, self.tokenizer)
        found, dropped = len(self.transcripts.samples), self.transcripts.dropped
        self.screen.note(f"{found} samples from {config.data.path}, {dropped} rows dropped")
        held_out = config.eval.datasets if config.eval.every else {}
        self.held_out = {
            name: load_transcripts(config, self.tokenizer, each).samples for name, each in held_out.items()
        }
        with agreed("fetching the model"):
            fetch_model(config)
        whole = run_identity(config, self.transcripts.fingerprint(), self.tokenizer)
        identity = {key: whole[key] for key in whole if key in _COMPARED or key.startswith("lora.")}
        identity["sft.batch_size"] = config.sft.batch_size
        start, self.state = find_checkpoint(config, identity)
        settings = config.policy.model_copy(update={"lr": config.sft.lr, "warmup_steps": config.sft.warmup_steps})
        self.policy = make_policy(config.model, settings, rank_device(config), config.sft.steps, lora=config.lora)
        parts = {"policy": self.policy}
        if start is not None:
            load(start, parts)
        keeper = Keeper(config, watchdog, self.state, parts=parts, identity=identity)
        self.keeper = resources.enter_context(closing(keeper))
        self.tracker = resources.enter_context(closing(make_run_tracker(config, self.state)))
        self.meter = PhaseMeter(config, rank_device(config), None, watchdog, self.policy.work)
        self._told = -math.inf

    def train(self) -> None:
        """Every step to the last, with evaluations and checkpoints where they are due; then the results."""
        config, state = self.config, self.state
        deadline = config.run.first_step_deadline_s
        self.keeper.hold_signals(signal.SIGTERM, signal.SIGINT)  # a step is short, and nothing but itself is lost
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
        """One update, its row, and a checkpoint if it is time for one."""
        config, began = self.config, time.perf_counter()
        size, pad_id = config.sft.batch_size, self.tokenizer.pad_token_id
        samples = take(self.transcripts.samples, self.state.prompts, size, config.run.seed)
        with self.meter.phase("update"):
            stats = update(self.policy, samples, config, pad_id, step - 1)
        metrics = {"loss": stats.loss, "grad_norm": stats.grad_norm, "lr": stats.learning_rate}
        metrics |= {"time/step": time.perf_counter() - began}
        self.state.prompts += size
        self.state.count_step(metrics)
        if self.held_out and (step % config.eval.every == 0 or step == config.run.steps):
            metrics |= self.evaluate()
        self.log(step, metrics)
        self.keeper.step_done(metrics)

    def evaluate(self) -> dict[str, float]:
        """The mean negative log-probability of held-out answers' tokens, named as `evaluation_metrics`. Collective."""
        pad_id = self.tokenizer.pad_token_id
        losses: dict[str, float] = {}
        for name, samples in self.held_out.items():
            with self.meter.phase("eval"):
                batches = batches_of(samples, self.config, pad_id, self.policy)
                scores = zip(batches, self.policy.score(batches, temperature=1.0), strict=True)
                logprobs = sum(float(outputs.logprobs.sum()) for batch, outputs in scores if batch.counts)
            tokens = sum(sample.trainable for sample in samples)
            losses[name] = -all_reduce_sum({"logprobs": logprobs})["logprobs"] / tokens
        several = losses.items() if len(losses) > 1 else ()
        return {f"eval/{name}/loss": loss for name, loss in several} | {"eval/loss": statistics.fmean(losses.values())}

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """A row in metrics.jsonl; a line on the screen for the first, the last, evaluations, and every ten seconds."""
        metered = {key: value for key, value in self.meter.take().items() if key not in _NO_ENGINE}
        self.tracker.log(step, metrics := metrics | metered)
        last = step == self.config.run.steps
        if last or "time/eval" in metrics or time.monotonic() - self._told > _SILENCE_SECONDS:
            self._told = time.monotonic()
            shown = {key: f"{value:.4g}" for key, value in metrics.items() if key.endswith("loss")}
            spent = f"{metrics['time/step']:.3f} s/step" if "time/step" in metrics else ""
            figures = "  ".join([*(f"{key} {value}" for key, value in shown.items()), spent])
            self.screen.note(f"sft {step:>6}/{self.config.run.steps}  {figures}")

    def export(self) -> None:
        """Write the model, curves and summary, and say where the model is. Collective; rank 0 writes."""
        config, folder = self.config, self.config.run.folder

        def tell() -> None:
            rows = read_rows(folder / "metrics.jsonl")
            ends = {f"{key}_after": series(rows, key)[1][-1:] for key in ("loss", "eval/loss")}
            summary = {key.replace("/", "_"): value[0] for key, value in ends.items() if value}
            seconds, transcripts = round(self.state.seconds, 3), self.transcripts
            counts = {"samples": len(transcripts.samples), "rows_dropped": transcripts.dropped}
            self.tracker.summary({"steps": self.state.step, "train_seconds": seconds} | summary | counts)

        export(config, self.policy, self.tokenizer, tell)
        where = folder / "model" if config.checkpoint.export_hf else folder / "checkpoints"
        self.screen.note(f"{self.state.step} steps in {duration(self.state.seconds)}; the model is in {where}")


def update(policy: Policy, samples: list[Transcript], config: TrainConfig, pad_id: int, done: int) -> UpdateStats:
    """One update on `samples`, which every rank passes alike and takes its share of, after `done` others."""
    tokens = sum(sample.trainable for sample in samples)  # all ranks know all samples, so it needs no exchange
    batches = batches_of(samples, config, pad_id, policy)
    return policy.update(batches, cross_entropy(tokens), temperature=1.0, place=done)


def batches_of(samples: list[Transcript], config: TrainConfig, pad_id: int, policy: Policy) -> list[MicroBatch]:
    """This rank's share of the samples, which every rank passes alike, in micro-batches on the device. Collective."""
    ways, sizes = config.policy.sequence_parallel, policy.work.of
    worth, more = sizes.tokens_worth, sizes.image_token
    shares = deal([len(sample.input_ids) for sample in samples], worth, ways)
    with agreed("reading the images of the samples") if any(sample.stored for sample in samples) else nullcontext():
        mine = [samples[i].seen() for i in shares[rank()]]
    budget, packing = config.batch.tokens_per_micro_batch, config.batch.packing
    return micro_batches(mine, budget, pad_id, policy.device, None, packing, ways, worth, more)


def cross_entropy(tokens: int) -> LossFn:
    """Mean negative log-probability over the step's `tokens` trainable tokens."""

    def loss_fn(batch: MicroBatch, outputs: Outputs) -> tuple[Tensor, dict[str, Tensor]]:
        logprobs = torch.where(batch.loss_mask.bool(), outputs.logprobs, 0.0)
        return -(logprobs * token_mean_weights(batch.loss_mask, tokens)).sum(), {}

    return loss_fn


def load_transcripts(
    config: TrainConfig, tokenizer: PreTrainedTokenizerBase, held_out: HeldOutConfig | None = None
) -> Transcripts:
    """The rows to learn from, or those held out, as samples; those with more than data.max_prompt_tokens +
    sft.max_tokens tokens are dropped and counted.

    Raises UserError naming the row that does not fit, or when no row is left.
    """
    # Tools that the recipe describes are described to the warm start, too.
    level = RolloutLevel(config, tokenizer)
    data, rules = level.data, level.image_rules
    if held_out is not None:
        own = held_out.model_dump(include={"prompt_key", "image_key"}, exclude_none=True)
        data = data.model_copy(update=held_out.model_dump(include={"path", "subset", "split"}) | own)
    config = config.model_copy(update={"data": data})
    rows = load_rows(data.path, data.subset, data.split, None if held_out is None else held_out.size)
    limit = config.data.max_prompt_tokens + config.sft.max_tokens
    templated = config.data.apply_chat_template and tokenizer.chat_template is not None
    samples: list[Transcript] = []
    if rules is None:
        for chunk in in_chunks(rows, config.data.path, lambda row: split_by_author(row, config, tokenizer, templated)):
            samples += encode([pieces for _, _, pieces in chunk], tokenizer, templated)
    else:
        samples += _seen_rows(encoded_images(rows), config, rules, templated)
    kept = [sample for sample in samples if len(sample.input_ids) <= limit and sample.trainable]
    if not kept:
        raise UserError(f"no row of {config.data.path} has an assistant's words within {limit} tokens to learn from")
    return Transcripts(kept, dropped=len(rows) - len(kept))


def _seen_rows(rows: "Dataset", config: TrainConfig, rules: ImageRules, templated: bool) -> Iterator[Transcript]:
    """Rows that may have images, each of which is decoded once here, and not kept."""
    data = config.data

    def sources(row: dict[str, Any]) -> list[Any]:
        """Up to the last assistant's turn: nothing is learned from others."""
        if not templated:
            return row_images(row, data, data.path)
        messages, found = messages_and_images(_messages(row, config), row, data, data.path)
        last = max((index for index, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
        contents = [message.get("content") for message in messages[: last + 1]]
        parts = [part for content in contents if isinstance(content, list) for part in content]
        return found[: sum(part["type"] == "image" for part in parts)]

    def read(row: dict[str, Any]) -> tuple[Transcript, tuple[Image, ...]] | None:
        pieces = split_by_author(row, config, rules.processor, templated)
        images = rules.read(sources(row))
        return (_encode_seen(pieces, images, rules.processor, templated), images) if pieces else None

    for chunk in in_chunks(rows, data.path, read):
        for index, _, (sample, images) in ((index, row, found) for index, row, found in chunk if found is not None):
            stored = stored_images(rows, index, data.path, sources, images, rules)
            yield replace(sample, stored=stored[: len(sample.image_spans)])


def _encode_seen(
    pieces: list[Piece], images: tuple[Image, ...], processor: ImageProcessor, templated: bool
) -> Transcript:
    """As `encode`, of one row. What the assistant was shown within its own turn is context, too."""
    if (found := sum(text.count(processor.image_token) for text, _ in pieces)) != len(images):
        mark = processor.image_token
        raise ValueError(f"has {len(images)} images, but {found} placeholders ({mark}) for them in its text")
    encoded, spans, begin, rest = [], list[tuple[int, int]](), 0, images
    for number, (text, _) in enumerate(pieces):
        own, rest = rest[: (count := text.count(processor.image_token))], rest[count:]
        ids, places = processor.expand(text, own, special=number == 0 and not templated)
        spans += [(begin + start, length) for start, length in places]
        encoded.append(ids)
        begin += len(ids)
    sample = _masked(encoded, [mine for _, mine in pieces], processor.tokenizer.eos_token_id)
    sample.image_spans = tuple(span for span in spans if sum(span) <= len(sample.input_ids))
    for start, length in sample.image_spans:
        sample.loss_mask[start : start + length] = [0] * length
    return sample


def _messages(row: dict[str, Any], config: TrainConfig) -> list[dict[str, Any]]:
    messages, completion = prompt_messages(row, config.data), row.get(config.sft.completion_key)
    if completion is not None:
        messages.append({"role": "assistant", "content": str(completion)})
    return messages


def split_by_author(
    row: dict[str, Any], config: TrainConfig, renderer: PreTrainedTokenizerBase | ImageProcessor, templated: bool
) -> list[Piece]:
    """A row's text in pieces, in turn what the assistant was given and what it wrote; the first is given.

    An image is a placeholder. Raises ValueError, a sentence about the row, when it lacks a prompt or a completion.
    """
    prompt, completion = prompt_content(row, config.data, templated), row.get(config.sft.completion_key)
    if isinstance(prompt, str) and completion is None:
        raise ValueError(f"has a prompt, but no completion in {config.sft.completion_key!r} (sft.completion_key)")
    if not templated:
        return [(prompt, False), (str(completion), True)]
    messages = _messages(row, config)
    if isinstance(renderer, ImageProcessor):
        messages, _ = messages_and_images(messages, row, config.data, config.data.path)
    # The template is rendered up to each assistant turn and through it: the difference is the turn, markers and all.
    pieces: list[Piece] = []
    done = ""
    for index in [index for index, message in enumerate(messages) if message["role"] == "assistant"]:
        for end, mine in ((index, False), (index + 1, True)):
            settings = {"add_generation_prompt": not mine, **config.data.chat_template_kwargs}
            if isinstance(renderer, ImageProcessor):
                text = renderer.render(messages[:end], **settings)
            else:
                text = str(renderer.apply_chat_template(messages[:end], tokenize=False, **settings))
            if not text.startswith(done):
                raise ValueError(f"cannot be learned from: the chat template changes what came before message {end}")
            pieces.append((text[len(done) :], mine))
            done = text
    return pieces


def encode(transcripts: list[list[Piece]], tokenizer: PreTrainedTokenizerBase, templated: bool) -> Iterator[Transcript]:
    """Tokenise piece by piece, so that prompts have the ids they have in a rollout; the mask goes by position.

    Of an assistant's piece only what it would sample counts, which ends with its first end-of-sequence token: a newline
    that the template adds after it is context. What comes after the last token that counts is cut off, as nothing
    depends on it.
    """
    eos = tokenizer.eos_token_id
    transcripts = [pieces for pieces in transcripts if pieces]
    # A template writes its own special tokens; plain text still needs the tokenizer's, before the prompt.
    firsts = iter(_ids([pieces[0][0] for pieces in transcripts], tokenizer, add_special_tokens=not templated))
    others = iter(_ids([text for pieces in transcripts for text, _ in pieces[1:]], tokenizer, add_special_tokens=False))
    for pieces in transcripts:
        encoded = [next(firsts), *(next(others) for _ in pieces[1:])]
        yield _masked(encoded, [mine for _, mine in pieces], eos)


def _masked(pieces: list[list[int]], mine: list[bool], eos: int) -> Transcript:
    """Pieces as one sample; see `encode`."""
    input_ids, mask = list[int](), list[int]()
    for piece, own in zip(pieces, mine, strict=True):
        sampled = 0 if not own else piece.index(eos) + 1 if eos in piece else len(piece)
        input_ids += piece
        mask += [1] * sampled + [0] * (len(piece) - sampled)
    end = len(mask) - mask[::-1].index(1) if 1 in mask else len(mask)
    if input_ids[end - 1] != eos:  # a template without one; yet the model has to learn to stop
        input_ids, mask, end = [*input_ids[:end], eos], [*mask[:end], 1], end + 1
    return Transcript(input_ids[:end], mask[:end], [0.0] * end)


def _ids(texts: list[str], tokenizer: PreTrainedTokenizerBase, add_special_tokens: bool) -> list[list[int]]:
    return tokenizer(texts, add_special_tokens=add_special_tokens)["input_ids"] if texts else []
