"""Rows of completions.jsonl and tokens.jsonl with some of a step's answers, and the console's lines
about failures.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import msgspec
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from generation.images import thumbnail
from generation.trajectory import Trajectory
from sharding.ranks import all_to_all_bytes, is_main, world_size
from trainer.data import Prompt
from trainer.learning.answers import Answer, failed_episodes
from trainer.learning.groups import MiniBatch
from trainer.types import MicroBatch, Outputs

_LONGEST = 2000  # most tokens of an answer in tokens.jsonl


def answer_rows(
    answers: Sequence[Answer], prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase
) -> list[dict[str, Any]]:
    """Return the rows of completions.jsonl on rank 0, which writes the file; empty on other ranks.
    Collective.
    """
    local: dict[int, dict[str, Any]] = {}
    for n, answer in enumerate(answers):
        t = answer.trajectory
        if t is not None:
            scored = {
                "text": shown_text(t, tokenizer),
                "reward": t.reward,
                "parts": t.reward_parts,
                "finish_reason": t.finish_reason,
            }
            # Not the dataset's, since a client may add to it
            scored["prompt"] = tokenizer.decode(t.prompt_ids)
            local[n] = scored | {"tokens": len(t.response_ids), "weight_version": t.weight_version}
            local[n]["error"] = t.error or t.reward_error
            if t.abstained:
                local[n]["reward"] = None
            if t.group:
                local[n]["group"] = t.group
            if t.images:
                local[n]["images"] = [thumbnail(image) for image in t.images]
            if not all(t.loss_mask):
                local[n]["pieces"] = text_by_author(t, tokenizer)
    payloads = [msgspec.msgpack.encode(local), *[b""] * (world_size() - 1)]
    gathered: dict[int, dict[str, Any]] = {}
    for part in filter(None, all_to_all_bytes(payloads)):
        gathered |= msgspec.msgpack.decode(part, type=dict[int, dict[str, Any]])
    rows = []
    for n, row in sorted(gathered.items()):
        answer = answers[n]
        prompt = prompts[answer.prompt_index]
        first = {"prompt_id": prompt.id, "sample": answer.sample_index, "prompt": row.pop("prompt")}
        rows.append(first | {"text": row.pop("text"), "answer": prompt.row.get("answer")} | row)
    return rows


def of_many_prompts(answers: Sequence[Answer], count: int) -> list[Answer]:
    """Return up to `count` answers to as many prompts as possible: the first to each, then the
    second, and so on.
    """
    ordered = sorted(answers, key=lambda answer: (answer.sample_index, answer.prompt_index))
    return ordered[:count]


def failure_lines(
    answers: Sequence[Answer], metrics: dict[str, float], fate: str = "are left out"
) -> Iterator[str]:
    """Yield a line about answers on which reward functions failed, with their `fate`, and one about
    other failures.

    A third one says that all functions abstained from every answer. `metrics` have the
    `reward_errors` of the answers.
    """
    if misjudged := [answer for answer in answers if answer.misjudged]:
        out = sum(bool(answer.error) for answer in misjudged)
        first = misjudged[0].misjudged[:200]
        named = [
            (key.partition("/errors/")[2], count)
            for key, count in metrics.items()
            if "reward/errors/" in key
        ]
        counts = ", ".join(f"{name} {count:.0f}" for name, count in named)
        yield (
            f"rewards failed on {len(misjudged)} answers ({counts}), {out} of which {fate}; the first: "
            f"{first}"
        )
    if errors := failed_episodes(answers):
        yield f"{len(errors)} episodes failed, the first by {errors[0][:200]}"
    if answers and all(answer.abstained for answer in answers):
        yield "all reward functions abstained from every answer: look at what they return for these rows"


def text_by_author(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, bool]]:
    """Split a response into pieces, in order: the text of each, and True if the policy sampled
    it.
    """
    return [
        (_decoded(ids, tokenizer, marks=sampled), sampled) for ids, sampled in _by_author(trajectory)
    ]


def shown_text(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text that rewards saw, or one with the special tokens that were sampled before an
    answer's end.
    """
    if trajectory.decoded is not None or trajectory.error:
        return trajectory.text
    shown = [text for text, _ in text_by_author(trajectory, tokenizer)]
    hidden = [_decoded(ids, tokenizer, marks=False) for ids, _ in _by_author(trajectory)]
    return trajectory.text if shown == hidden else "".join(shown)


def _by_author(trajectory: Trajectory) -> Iterator[tuple[list[int], bool]]:
    """Yield the runs of a response's tokens that the policy sampled, and of those that it did
    not.
    """
    pairs = zip(trajectory.response_ids, trajectory.loss_mask, strict=True)
    for sampled, part in groupby(pairs, lambda pair: pair[1]):
        yield [token for token, _ in part], bool(sampled)


def _decoded(ids: list[int], tokenizer: PreTrainedTokenizerBase, marks: bool) -> str:
    """Decode tokens of one author; with `marks`, special tokens are part of the text, except one at
    its end.
    """
    last = tokenizer.decode(ids[-1:], skip_special_tokens=True)
    part = ids[:-1] if marks and not last else ids
    return str(tokenizer.decode(part, skip_special_tokens=not marks))


@dataclass
class Watched:
    """The tokens of one trajectory with their metrics; K is the number of tokens from the first
    trained one on.
    """

    answer: Answer
    ids: list[int] = field(default_factory=list)  # [K]
    # [K] for each; None where nothing was trained
    metrics: dict[str, list[float | None]] = field(default_factory=dict)


class TokenMetrics:
    """Collects, on rank 0, token metrics of the first trajectories that it trains on in a step, in
    the first pass.

    It only reads: results are the same with and without it. On other ranks it does nothing.
    """

    def __init__(self, count: int, minibatches: list[MiniBatch]) -> None:
        """Choose up to `count` trajectories of the step's first update."""
        self._wanted: dict[int, Watched] = {}
        self._noted: list[tuple[Watched, list[Tensor]]] = []
        if is_main() and count and minibatches:
            answers = [t for group in minibatches[0].groups for episode in group for t in episode]
            share = sorted(minibatches[0].shares[0], key=lambda number: answers[number].sample_index)
            self._wanted = {number: Watched(answers[number]) for number in share[:count]}

    def note(self, batch: MicroBatch, outputs: Outputs) -> None:
        """Keep the metrics of chosen trajectories in a micro-batch; tensors stay on the device
        until `take`.
        """
        for row, number in enumerate(batch.rows):
            if (watched := self._wanted.pop(number, None)) is not None:
                tensors = (
                    batch.input_ids[:, 1:],
                    batch.loss_mask,
                    batch.engine_logprobs,
                    batch.advantages,
                    outputs.logprobs,
                    outputs.entropy,
                )
                size = batch.lengths[row] - 1
                kept = [tensor[row, :size].detach().clone() for tensor in tensors]
                self._noted.append((watched, kept))

    def take(self) -> list[Watched]:
        """Return the chosen trajectories with gap (nats, trainer minus engine), entropy (nats) and
        advantage per token.
        """
        for watched, tensors in self._noted:
            ids, mask, engine, advantages, logprobs, entropy = (tensor.tolist() for tensor in tensors)
            start = next((index for index, trained in enumerate(mask) if trained), len(mask))
            part = slice(start, start + _LONGEST)
            gaps = [trainer - sampled for trainer, sampled in zip(logprobs, engine, strict=True)]
            watched.ids = ids[part]
            for name, values in (("gap", gaps), ("entropy", entropy), ("advantage", advantages)):
                pairs = zip(values[part], mask[part], strict=True)
                watched.metrics[name] = [value if trained else None for value, trained in pairs]
        return [watched for watched, _ in self._noted]


def token_rows(
    watched: list[Watched], prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase
) -> list[dict[str, Any]]:
    """Return the rows of tokens.jsonl for a step on `prompts`."""
    rows = []
    for trace in watched:
        row: dict[str, Any] = {
            "prompt_id": prompts[trace.answer.prompt_index].id,
            "sample": trace.answer.sample_index,
            "reward": trace.answer.reward,
            "tokens": [_text(token, tokenizer) for token in trace.ids],
        }
        for name, values in trace.metrics.items():
            row[name] = [_rounded(value) for value in values]
        rows.append(row)
    return rows


def _rounded(value: float | None) -> float | None:
    """Round to four digits; None if the value is not finite, which JSON cannot express."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.4g}")


def _text(token: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of one token, with the leading space that SentencePiece's decoders drop from
    a first word.
    """
    text = tokenizer.decode([token])
    piece = tokenizer.convert_ids_to_tokens(token)
    if isinstance(piece, str) and piece.startswith("▁") and not text.startswith(" "):
        return f" {text}"
    return text
