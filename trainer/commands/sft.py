"""Supervised fine-tuning: the warm start before reinforcement, with the same policy, packed batches and output head.

A row is a conversation in `data.messages_key`, every assistant turn of which is learned, or a prompt (string or
messages) with its completion in `sft.completion_key`. Left out on purpose: evaluation, checkpoints in between; a run is
short and ends with an ordinary Hugging Face folder.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from sharding.ranks import agreed, is_main, rank, world_size
from trainer.algorithms.aggregation import token_mean_weights
from trainer.build import check_model, joined, rank_device
from trainer.config.schema import BatchConfig, TrainConfig
from trainer.data import in_chunks, load_rows, load_tokenizer, prompt_content, prompt_messages, take
from trainer.errors import UserError
from trainer.learning.batching import assign_to_ranks, micro_batches
from trainer.policy import LossFn, Outputs, Policy, UpdateStats, make_policy
from trainer.policy.attention import require_packing
from trainer.policy.lora import save_adapter
from trainer.rollouts import RolloutLevel
from trainer.run.lock import RunLock
from trainer.run.tracking import make_tracker
from trainer.run.watchdog import Watchdog
from trainer.types import MicroBatch, Sample

Piece = tuple[str, bool]  # a stretch of a transcript's text, and whether the assistant wrote it


@dataclass
class Transcripts:
    """Tokenised conversations; `dropped` counts those that were too long."""

    samples: list[Sample]
    dropped: int


def main(config: TrainConfig, lock: RunLock | None = None) -> None:
    """Train `model.path` for `sft.steps` steps and write it to the run's folder, whose lock rank 0 has taken."""
    with joined(config, config.run.step_deadline_s, lock) as watchdog:
        with watchdog.phase("start-up", config.run.first_step_deadline_s):
            tokenizer = load_tokenizer(config.model)
            check_model(config)
            transcripts = load_transcripts(config, tokenizer)
            settings = config.policy.model_copy(update={"lr": config.sft.lr, "warmup_steps": config.sft.warmup_steps})
            policy = make_policy(config.model, settings, rank_device(config), config.sft.steps, lora=config.lora)
            if config.batch.packing:
                require_packing(policy.model)
        if is_main():
            print(f"{len(transcripts.samples)} samples, {transcripts.dropped} rows dropped", flush=True)
        train(config, policy, transcripts, tokenizer.pad_token_id, watchdog)
        with watchdog.phase("export", config.run.first_step_deadline_s):
            policy.save_pretrained(config.run.folder / "model")
            if config.lora.rank:
                save_adapter(policy.model, config.lora, config.model.path, config.run.folder / "adapter")
            with agreed("writing the tokenizer"):
                if is_main():
                    tokenizer.save_pretrained(config.run.folder / "model")


def train(config: TrainConfig, policy: Policy, transcripts: Transcripts, pad_id: int, watchdog: Watchdog) -> None:
    """All steps; a row in metrics.jsonl for each, a line on the terminal for some."""
    # A warm start of a minute needs no run of its own in Weights & Biases.
    tracker = make_tracker(config.run.folder, {}, name=config.run.name, wandb="disabled")
    steps = config.sft.steps
    for step in range(1, steps + 1):
        began = time.perf_counter()
        with watchdog.phase(f"step {step}", config.run.step_deadline_s):
            size = config.sft.batch_size
            samples = take(transcripts.samples, (step - 1) * size, size, config.run.seed)
            stats = train_step(policy, samples, config.batch, pad_id, step - 1)
        seconds = time.perf_counter() - began
        figures = {"loss": stats.loss, "grad_norm": stats.grad_norm, "lr": stats.learning_rate, "time/update": seconds}
        tracker.log(step, figures)
        if is_main() and (step % 50 == 0 or step in (1, steps)):
            print(f"sft {step:>6}/{steps}  loss {stats.loss:8.4f}  {seconds:7.3f} s/step", flush=True)
    tracker.close()


def train_step(policy: Policy, samples: list[Sample], config: BatchConfig, pad_id: int, done: int) -> UpdateStats:
    """One update on `samples`, which every rank passes alike and takes its share of, after `done` others."""
    # All ranks know all samples, so the counts need no exchange.
    shares = assign_to_ranks([len(sample.input_ids) for sample in samples], world_size())
    tokens = sum(sample.trainable for sample in samples)
    mine = [samples[i] for i in shares[rank()]]
    batches = micro_batches(mine, config.tokens_per_micro_batch, pad_id, policy.device, packing=config.packing)
    return policy.update(batches, cross_entropy(tokens), temperature=1.0, place=done)


def cross_entropy(tokens: int) -> LossFn:
    """Mean negative log-probability over the step's `tokens` trainable tokens."""

    def loss_fn(batch: MicroBatch, outputs: Outputs) -> tuple[Tensor, dict[str, Tensor]]:
        logprobs = torch.where(batch.loss_mask.bool(), outputs.logprobs, 0.0)
        return -(logprobs * token_mean_weights(batch.loss_mask, tokens)).sum(), {}

    return loss_fn


def load_transcripts(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> Transcripts:
    """The rows as samples; those with more than data.max_prompt_tokens + sft.max_tokens tokens are dropped and counted.

    Raises UserError naming the row that does not fit, or when no row is left.
    """
    # Tools that the recipe describes are described to the warm start, too.
    config = config.model_copy(update={"data": RolloutLevel(config, tokenizer).data})
    rows = load_rows(config.data.path, config.data.subset, config.data.split)
    limit = config.data.max_prompt_tokens + config.sft.max_tokens
    templated = config.data.apply_chat_template and tokenizer.chat_template is not None
    samples: list[Sample] = []
    for chunk in in_chunks(rows, config.data.path, lambda row: split_by_author(row, config, tokenizer, templated)):
        samples += encode([pieces for _, _, pieces in chunk], tokenizer, templated)
    kept = [sample for sample in samples if len(sample.input_ids) <= limit and sample.trainable]
    if not kept:
        raise UserError(f"no row of {config.data.path} has an assistant's words within {limit} tokens to learn from")
    return Transcripts(kept, dropped=len(rows) - len(kept))


def split_by_author(
    row: dict[str, Any], config: TrainConfig, tokenizer: PreTrainedTokenizerBase, templated: bool
) -> list[Piece]:
    """A row's text in pieces, in turn what the assistant was given and what it wrote; the first is given.

    Raises ValueError, a sentence about the row, when it lacks a prompt or a completion.
    """
    prompt, completion = prompt_content(row, config.data, templated), row.get(config.sft.completion_key)
    if isinstance(prompt, str) and completion is None:
        raise ValueError(f"has a prompt, but no completion in {config.sft.completion_key!r} (sft.completion_key)")
    if not templated:
        return [(prompt, False), (str(completion), True)]
    messages = prompt_messages(row, config.data)
    if completion is not None:
        messages.append({"role": "assistant", "content": str(completion)})
    # The template is rendered up to each assistant turn and through it: the difference is the turn, markers and all.
    pieces: list[Piece] = []
    done = ""
    for index in [index for index, message in enumerate(messages) if message["role"] == "assistant"]:
        for end, mine in ((index, False), (index + 1, True)):
            settings = {"add_generation_prompt": not mine, **config.data.chat_template_kwargs}
            text = str(tokenizer.apply_chat_template(messages[:end], tokenize=False, **settings))
            if not text.startswith(done):
                raise ValueError(f"cannot be learned from: the chat template changes what came before message {end}")
            pieces.append((text[len(done) :], mine))
            done = text
    return pieces


def encode(transcripts: list[list[Piece]], tokenizer: PreTrainedTokenizerBase, templated: bool) -> Iterator[Sample]:
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
        input_ids = list(next(firsts))
        mask = [0] * len(input_ids)
        for _, mine in pieces[1:]:
            piece = next(others)
            sampled = len(piece) if mine else 0
            if mine and eos in piece:
                sampled = piece.index(eos) + 1
            input_ids += piece
            mask += [1] * sampled + [0] * (len(piece) - sampled)
        end = len(mask) - mask[::-1].index(1) if 1 in mask else len(mask)
        if input_ids[end - 1] != eos:  # a template without one; yet the model has to learn to stop
            input_ids, mask, end = [*input_ids[:end], eos], [*mask[:end], 1], end + 1
        yield Sample(input_ids[:end], mask[:end], [0.0] * end, advantage=0.0)


def _ids(texts: list[str], tokenizer: PreTrainedTokenizerBase, add_special_tokens: bool) -> list[list[int]]:
    return tokenizer(texts, add_special_tokens=add_special_tokens)["input_ids"] if texts else []
