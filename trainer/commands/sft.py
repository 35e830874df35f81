"""Supervised fine-tuning: the warm start before reinforcement, with the same policy, packed batches and output head.

A row is a conversation in `data.messages_key`, all assistant turns of which are trained on, or a prompt (string or
messages) with its completion in `sft.completion_key`. Held-out rows, whose loss is measured (`eval.every`), are alike.
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
    RenderedRow,
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
from trainer.learning.batching import deal
from trainer.learning.groups import make_batches
from trainer.learning.prefixes import Prefixes, token_bytes
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

_COMPARED = ("data", "model", "tokenizer", "run.seed")  # the parts of a run's identity besides lora, sft.batch_size
_NO_ENGINE = ("memory/engine_gib_awake", "memory/engine_gib_asleep", "memory/offloaded_gib")
_SILENCE_SECONDS = 10.0  # between lines on the screen

Pieces = list[tuple[str, bool]]
"""The pieces of a transcript's text in order, each with True if the assistant wrote it."""


@dataclass
class Transcript(Sample):
    """A conversation; its images are read at the time, and on the rank, of its training."""

    stored: tuple[StoredImage, ...] = ()

    def with_images(self) -> Sample:
        """A copy with its images read. Raises UserError if an image has changed since it was loaded."""
        try:
            return replace(self, images=tuple(image.read() for image in self.stored)) if self.stored else self
        except ValueError as error:
            raise UserError(str(error)) from error


@dataclass
class Transcripts:
    """Tokenised conversations; `dropped` counts rows that were too long."""

    samples: list["Transcript"]
    dropped: int

    def fingerprint(self) -> str:
        """A digest of all tokens and masks; a position in the data is valid only in data with the same digest."""
        digest = hashlib.blake2b(digest_size=16)
        for sample in self.samples:
            digest.update(np.array([sample.input_ids, sample.loss_mask], np.int32).tobytes())
            digest.update("".join(image.digest for image in sample.stored).encode())
            digest.update(b"/")
        return digest.hexdigest()


def main(config: TrainConfig, lock: RunLock | None = None) -> None:
    """Trains `model.path` for `sft.steps` steps and writes it to the run's folder, whose lock rank 0 has taken."""
    config = config.model_copy(update={"run": config.run.model_copy(update={"steps": config.sft.steps})})
    with joined(config, lock) as watchdog, ExitStack() as resources:
        with watchdog.phase("start-up", config.run.first_step_deadline_s):
            training = SftRun(config, watchdog, resources)
        training.train()


class SftRun:
    """A warm start, which like a reinforcement run has a record, checkpoints, evaluations and exact resume."""

    def __init__(self, config: TrainConfig, watchdog: Watchdog, resources: ExitStack) -> None:
        """Loads everything, and continues the run from its newest checkpoint, if there is one. Collective."""
        self.watchdog = watchdog
        self.screen = Progress(config.run.steps, enabled=is_main())
        resources.enter_context(self.screen.follow(watchdog.current_phase))
        self.tokenizer = load_tokenizer(config.model)
        self.config = config = check_model(config, "sft")
        self.transcripts = load_transcripts(config, self.tokenizer)
        count, dropped = len(self.transcripts.samples), self.transcripts.dropped
        self.screen.note(f"{count} samples from {config.data.path}, {dropped} rows dropped")
        held_out = config.eval.datasets if config.eval.every else {}
        self.held_out = {
            name: load_transcripts(config, self.tokenizer, dataset).samples for name, dataset in held_out.items()
        }
        with agreed("fetching the model"):
            fetch_model(config)
        entire = run_identity(config, self.transcripts.fingerprint(), self.tokenizer)
        identity = {key: entire[key] for key in entire if key in _COMPARED or key.startswith("lora.")}
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
        self._last_note = -math.inf

    def train(self) -> None:
        """Runs all steps, with evaluations and checkpoints when they are due, then writes the results."""
        config, state = self.config, self.state
        deadline = config.run.first_step_deadline_s
        self.keeper.hold_signals(signal.SIGTERM, signal.SIGINT)  # a step is short, and only the step itself is lost
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
        """Runs one update, logs it, and saves a checkpoint if one is due."""
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
        """The mean negative log-probability of held-out tokens, named as in `evaluation_metrics`. Collective."""
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
        """Logs a row to metrics.jsonl, and at the ends, with evaluations and every ten seconds a line to the screen."""
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
        """Writes the model, curves and summary, and prints the model's folder. Collective; rank 0 writes."""
        config, folder = self.config, self.config.run.folder

        def summarise() -> None:
            rows = read_rows(folder / "metrics.jsonl")
            ends = {f"{key}_after": series(rows, key)[1][-1:] for key in ("loss", "eval/loss")}
            summary = {key.replace("/", "_"): value[0] for key, value in ends.items() if value}
            seconds, transcripts = round(self.state.seconds, 3), self.transcripts
            counts = {"samples": len(transcripts.samples), "rows_dropped": transcripts.dropped}
            self.tracker.summary({"steps": self.state.step, "train_seconds": seconds} | summary | counts)

        export(config, self.policy, self.tokenizer, summarise)
        where = folder / "model" if config.checkpoint.export_hf else folder / "checkpoints"
        self.screen.note(f"{self.state.step} steps in {duration(self.state.seconds)}; the model is in {where}")


def update(policy: Policy, samples: list[Transcript], config: TrainConfig, pad_id: int, done: int) -> UpdateStats:
    """Runs one update on `samples`, the same on all ranks, each of which takes its share, after `done` updates."""
    tokens = sum(sample.trainable for sample in samples)  # all ranks have all samples, so no exchange is needed
    batches = batches_of(samples, config, pad_id, policy)
    return policy.update(batches, cross_entropy(tokens), temperature=1.0, place=done)


def batches_of(samples: list[Transcript], config: TrainConfig, pad_id: int, policy: Policy) -> list[MicroBatch]:
    """This rank's share of `samples`, the same on all ranks, in micro-batches on the device. Collective."""
    least, sizes = config.batch.shared_min, policy.work.of
    prefixes = None if least is None else Prefixes.of([token_bytes(sample.input_ids) for sample in samples], least)
    lengths = [len(sample.input_ids) for sample in samples]
    shares = deal(lengths, sizes.tokens_worth, config.policy.sequence_parallel, prefixes)
    with agreed("reading the images of the samples") if any(sample.stored for sample in samples) else nullcontext():
        share = [samples[i].with_images() for i in shares[rank()]]
    return make_batches(share, config, pad_id, policy.device, sizes.tokens_worth, sizes.image_token)


def cross_entropy(tokens: int) -> LossFn:
    """The loss function of the mean negative log-probability over the step's `tokens` trainable tokens."""

    def loss_fn(batch: MicroBatch, outputs: Outputs) -> tuple[Tensor, dict[str, Tensor]]:
        logprobs = torch.where(batch.loss_mask.bool(), outputs.logprobs, 0.0)
        return -(logprobs * token_mean_weights(batch.loss_mask, tokens)).sum(), {}

    return loss_fn


def load_transcripts(
    config: TrainConfig, tokenizer: PreTrainedTokenizerBase, held_out: HeldOutConfig | None = None
) -> Transcripts:
    """Load the training rows, or those of `held_out`, as samples.

    Rows with more than data.max_prompt_tokens + sft.max_tokens tokens are dropped and counted. Raises UserError naming
    a row that is not valid, or if no row is left.
    """
    samples = []
    dropped = 0
    for row in transcript_rows(config, tokenizer, held_out):
        if row.dropped:
            dropped += 1
        else:
            samples.append(_transcript(row))
    if not samples:
        path = config.data.path if held_out is None else held_out.path
        limit = config.data.max_prompt_tokens + config.sft.max_tokens
        raise UserError(f"every row of {path} has over {limit} tokens or no assistant turn: raise sft.max_tokens")
    return Transcripts(samples, dropped)


def transcript_rows(
    config: TrainConfig, tokenizer: PreTrainedTokenizerBase, held_out: HeldOutConfig | None = None
) -> Iterator[RenderedRow]:
    """Yield each row of the training data, or of `held_out`, as a warm start sees it, in the file's order.

    Rows that are too long or have no assistant turn are among them, as dropped; those without one have no `token_ids`.
    The prompts describe the recipe's tools, as those of a run do. Raises UserError that names the file, and the row, if
    data cannot be read or a row cannot be used.
    """
    level = RolloutLevel(config, tokenizer)
    data, rules = level.data, level.image_rules
    if held_out is not None:
        keys = held_out.model_dump(include={"prompt_key", "image_key"}, exclude_none=True)
        data = data.model_copy(update=held_out.model_dump(include={"path", "subset", "split"}) | keys)
    config = config.model_copy(update={"data": data})
    rows = load_rows(data.path, data.subset, data.split, None if held_out is None else held_out.size)
    templated = data.apply_chat_template and tokenizer.chat_template is not None
    if rules is None:
        rendered = _rows_without_images(rows, config, tokenizer, templated)
    else:
        rendered = _rows_with_images(encoded_images(rows), config, rules, templated)
    for row in rendered:
        dropped = ""
        if not any(row.learned[1:]):
            dropped = "has no assistant turn"
        elif len(row.token_ids) > data.max_prompt_tokens + config.sft.max_tokens:
            dropped = "is longer than data.max_prompt_tokens and sft.max_tokens together"
        yield replace(row, dropped=dropped)


def _rows_without_images(
    rows: "Dataset", config: TrainConfig, tokenizer: PreTrainedTokenizerBase, templated: bool
) -> Iterator[RenderedRow]:
    """Yield rows that have no images, tokenised a chunk at a time."""
    for chunk in in_chunks(rows, config.data.path, lambda row: split_by_author(row, config, tokenizer, templated)):
        samples = encode([pieces for _, _, pieces in chunk], tokenizer, templated)
        for index, row, pieces in chunk:
            sample = next(samples) if pieces else None
            yield _rendered(index, row, pieces, sample, config, templated)


def _rendered(
    index: int, row: dict[str, Any], pieces: Pieces, sample: Transcript | None, config: TrainConfig, templated: bool
) -> RenderedRow:
    rendered = RenderedRow(
        index,
        row,
        messages=_messages(row, config) if templated else None,
        tools=config.data.chat_template_kwargs.get("tools") or [],
        text="".join(text for text, _ in pieces),
        token_ids=(),
    )
    if sample is None:
        return rendered
    return replace(
        rendered,
        token_ids=tuple(sample.input_ids),
        learned=tuple(sample.loss_mask),
        images=sample.stored,
        image_spans=sample.image_spans,
    )


def _transcript(row: RenderedRow) -> Transcript:
    ids = list(row.token_ids)
    return Transcript(ids, list(row.learned), [0.0] * len(ids), image_spans=row.image_spans, stored=row.images)


def _rows_with_images(
    rows: "Dataset", config: TrainConfig, rules: ImageRules, templated: bool
) -> Iterator[RenderedRow]:
    """Yield rows that may have images; each image is decoded once here, and not kept."""
    data = config.data

    def sources(row: dict[str, Any]) -> list[Any]:
        """Return the images up to the last assistant turn; nothing is learned from later ones."""
        if not templated:
            return row_images(row, data, data.path)
        messages, images = messages_and_images(_messages(row, config), row, data, data.path)
        last = max((index for index, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
        contents = [message.get("content") for message in messages[: last + 1]]
        parts = [part for content in contents if isinstance(content, list) for part in content]
        return images[: sum(part["type"] == "image" for part in parts)]

    def read(row: dict[str, Any]) -> tuple[Pieces, Transcript | None, tuple[Image, ...]]:
        pieces = split_by_author(row, config, rules.processor, templated)
        if not pieces:
            return [], None, ()
        images = rules.read(sources(row))
        return pieces, _encode_with_images(pieces, images, rules.processor, templated), images

    for chunk in in_chunks(rows, data.path, read):
        for index, row, (pieces, sample, images) in chunk:
            if sample is not None:
                stored = stored_images(rows, index, data.path, sources, images, rules)
                sample.stored = stored[: len(sample.image_spans)]
            yield _rendered(index, row, pieces, sample, config, templated)


def _encode_with_images(
    pieces: Pieces, images: tuple[Image, ...], processor: ImageProcessor, templated: bool
) -> Transcript:
    """Tokenises one row with images, as `encode` does without. Images within an assistant turn are context, too."""
    if (count := sum(text.count(processor.image_token) for text, _ in pieces)) != len(images):
        mark = processor.image_token
        raise ValueError(f"has {len(images)} images, but {count} placeholders ({mark}) for them in its text")
    encoded, spans, begin, rest = [], list[tuple[int, int]](), 0, images
    for number, (text, _) in enumerate(pieces):
        first, rest = rest[: (count := text.count(processor.image_token))], rest[count:]
        ids, places = processor.expand(text, first, special=number == 0 and not templated)
        spans += [(begin + start, length) for start, length in places]
        encoded.append(ids)
        begin += len(ids)
    sample = _masked(encoded, [learned for _, learned in pieces], processor.tokenizer.eos_token_id)
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
) -> Pieces:
    """Splits a row's text into pieces of context and of the assistant in turn, beginning with context.

    Images are placeholders. Raises ValueError with a sentence about the row if it lacks a prompt or a completion.
    """
    prompt, completion = prompt_content(row, config.data, templated), row.get(config.sft.completion_key)
    if isinstance(prompt, str) and completion is None:
        raise ValueError(f"has a prompt, but no completion in {config.sft.completion_key!r} (sft.completion_key)")
    if not templated:
        return [(prompt, False), (str(completion), True)]
    messages = _messages(row, config)
    if isinstance(renderer, ImageProcessor):
        messages, _ = messages_and_images(messages, row, config.data, config.data.path)
    # The template is rendered without and with each assistant turn: the difference is the turn with its markers.
    pieces: Pieces = []
    done = ""
    for index in [index for index, message in enumerate(messages) if message["role"] == "assistant"]:
        for end, learned in ((index, False), (index + 1, True)):
            settings = {"add_generation_prompt": not learned, **config.data.chat_template_kwargs}
            if isinstance(renderer, ImageProcessor):
                text = renderer.render(messages[:end], **settings)
            else:
                text = str(renderer.apply_chat_template(messages[:end], tokenize=False, **settings))
            if not text.startswith(done):
                raise ValueError(f"cannot be used: the chat template changes the text before message {end}")
            pieces.append((text[len(done) :], learned))
            done = text
    return pieces


def encode(transcripts: list[Pieces], tokenizer: PreTrainedTokenizerBase, templated: bool) -> Iterator[Transcript]:
    """Tokenises piece by piece, so that prompts have the same ids as in a rollout; the mask is by position.

    The mask is 1 on the tokens of an assistant's piece up to its first end-of-sequence token, which the assistant would
    sample; a newline that the template adds after it is context. Tokens after the last masked one are cut off, since
    nothing depends on them.
    """
    eos = tokenizer.eos_token_id
    transcripts = [pieces for pieces in transcripts if pieces]
    # A template writes its own special tokens; plain text still needs the tokenizer's, before the prompt.
    firsts = iter(_ids([pieces[0][0] for pieces in transcripts], tokenizer, add_special_tokens=not templated))
    later = iter(_ids([text for pieces in transcripts for text, _ in pieces[1:]], tokenizer, add_special_tokens=False))
    for pieces in transcripts:
        encoded = [next(firsts), *(next(later) for _ in pieces[1:])]
        yield _masked(encoded, [learned for _, learned in pieces], eos)


def _masked(pieces: list[list[int]], learned: list[bool], eos: int) -> Transcript:
    """Joins tokenised pieces to one sample with the mask that `encode` describes."""
    input_ids, mask = list[int](), list[int]()
    for piece, by_assistant in zip(pieces, learned, strict=True):
        sampled = 0 if not by_assistant else piece.index(eos) + 1 if eos in piece else len(piece)
        input_ids += piece
        mask += [1] * sampled + [0] * (len(piece) - sampled)
    end = len(mask) - mask[::-1].index(1) if 1 in mask else len(mask)
    if input_ids[end - 1] != eos:  # a template without one; the model must still learn to stop
        input_ids, mask, end = [*input_ids[:end], eos], [*mask[:end], 1], end + 1
    return Transcript(input_ids[:end], mask[:end], [0.0] * end)


def _ids(texts: list[str], tokenizer: PreTrainedTokenizerBase, add_special_tokens: bool) -> list[list[int]]:
    return tokenizer(texts, add_special_tokens=add_special_tokens)["input_ids"] if texts else []
