"""Some of a step's answers for people to look at: rows of completions.jsonl and tokens.jsonl, lines about failures."""

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

_LONGEST = 2000  # tokens of an answer that are kept


def answer_rows(
    answers: Sequence[Answer], prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase
) -> list[dict[str, Any]]:
    """The rows of completions.jsonl, on rank 0, where it is written; on other ranks nothing. Collective."""
    own: dict[int, dict[str, Any]] = {}
    for n, t in ((n, answer.trajectory) for n, answer in enumerate(answers)):
        if t is not None:
            scored = {"text": t.text, "reward": t.reward, "parts": t.reward_parts, "finish_reason": t.finish_reason}
            scored["prompt"] = tokenizer.decode(t.prompt_ids)  # which is not the dataset's where a client adds to it
            own[n] = scored | {"tokens": len(t.response_ids), "weight_version": t.weight_version}
            own[n]["error"] = t.error or t.reward_error
            if t.images:
                own[n]["images"] = [thumbnail(image) for image in t.images]
            if not all(t.loss_mask):
                own[n]["pieces"] = text_by_author(t, tokenizer)
    payloads = [msgspec.msgpack.encode(own), *[b""] * (world_size() - 1)]
    found: dict[int, dict[str, Any]] = {}
    for part in filter(None, all_to_all_bytes(payloads)):
        found |= msgspec.msgpack.decode(part, type=dict[int, dict[str, Any]])
    rows = []
    for answer, row in ((answers[n], row) for n, row in sorted(found.items())):
        prompt = prompts[answer.prompt_index]
        asked = {"prompt_id": prompt.id, "sample": answer.sample_index, "prompt": row.pop("prompt")}
        rows.append(asked | {"text": row.pop("text"), "answer": prompt.row.get("answer")} | row)
    return rows


def failure_lines(answers: Sequence[Answer], figures: dict[str, float], fate: str = "are left out") -> Iterator[str]:
    """A line for the answers on which reward functions failed, of whose `fate` it tells, and one for other failures.

    `figures` hold `reward_errors` of the answers.
    """
    if misjudged := [answer for answer in answers if answer.misjudged]:
        out = sum(bool(answer.error) for answer in misjudged)
        first = misjudged[0].misjudged[:200]
        named = [(key.partition("/errors/")[2], count) for key, count in figures.items() if "reward/errors/" in key]
        counts = ", ".join(f"{name} {count:.0f}" for name, count in named)
        yield f"rewards failed on {len(misjudged)} answers ({counts}), {out} of which {fate}; the first: {first}"
    if errors := failed_episodes(answers):
        yield f"{len(errors)} episodes failed, the first by {errors[0][:200]}"


def text_by_author(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, bool]]:
    """The response in pieces, in order: each one's text, and whether the policy sampled it."""
    pairs = zip(trajectory.response_ids, trajectory.loss_mask, strict=True)
    parts = [(bool(mine), [token for token, _ in part]) for mine, part in groupby(pairs, key=lambda pair: pair[1])]
    return [(tokenizer.decode(ids, skip_special_tokens=True), mine) for mine, ids in parts]


@dataclass
class Watched:
    """One trajectory on the way through its update; K is the number of its tokens from the first trained one on."""

    answer: Answer
    ids: list[int] = field(default_factory=list)  # K
    figures: dict[str, list[float | None]] = field(default_factory=dict)  # K each; None where nothing was trained


class TokenFigures:
    """Keeps the figures of the first trajectories that rank 0 trains on in a step, as its first pass leaves them.

    It only reads: what is computed is the same with and without it. On other ranks it does nothing.
    """

    def __init__(self, count: int, minibatches: list[MiniBatch]) -> None:
        """Watch up to `count` trajectories, of the step's first update."""
        self._wanted: dict[int, Watched] = {}
        self._found: list[tuple[Watched, list[Tensor]]] = []
        if is_main() and count and minibatches:
            answers = [t for group in minibatches[0].groups for episode in group for t in episode]
            self._wanted = {place: Watched(answers[place]) for place in minibatches[0].shares[0][:count]}

    def note(self, batch: MicroBatch, outputs: Outputs) -> None:
        """Take what there is of a micro-batch of the first update; tensors stay on the device until `take`."""
        for row, place in enumerate(batch.rows):
            if (watched := self._wanted.pop(place, None)) is not None:
                tensors = (batch.input_ids[:, 1:], batch.loss_mask, batch.engine_logprobs, batch.advantages)
                own = [each[row, : batch.lengths[row] - 1] for each in (*tensors, outputs.logprobs, outputs.entropy)]
                self._found.append((watched, [each.detach().clone() for each in own]))

    def take(self) -> list[Watched]:
        """Gap (nats, trainer less engine), entropy (nats) and advantage of each token that was trained."""
        for watched, tensors in self._found:
            ids, mask, engine, advantages, logprobs, entropy = (each.tolist() for each in tensors)
            start = next((place for place, trained in enumerate(mask) if trained), len(mask))
            part = slice(start, start + _LONGEST)
            gaps = [own - other for own, other in zip(logprobs, engine, strict=True)]
            watched.ids = ids[part]
            for name, values in (("gap", gaps), ("entropy", entropy), ("advantage", advantages)):
                told = zip(values[part], mask[part], strict=True)
                watched.figures[name] = [value if trained else None for value, trained in told]
        return [watched for watched, _ in self._found]


def token_rows(
    watched: list[Watched], prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase
) -> list[dict[str, Any]]:
    """The rows of tokens.jsonl, of a step on `prompts`."""
    return [
        {"prompt_id": prompts[each.answer.prompt_index].id, "sample": each.answer.sample_index}
        | {"reward": each.answer.reward, "tokens": [_text(token, tokenizer) for token in each.ids]}
        | {name: [_rounded(value) for value in values] for name, values in each.figures.items()}
        for each in watched
    ]


def _rounded(value: float | None) -> float | None:
    """To four digits; None where it is not finite, which JSON cannot say."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.4g}")


def _text(token: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """A token by itself. SentencePiece's decoders leave out the space that a first word begins with."""
    text = tokenizer.decode([token])
    piece = tokenizer.convert_ids_to_tokens(token)
    return f" {text}" if isinstance(piece, str) and piece.startswith("▁") and not text.startswith(" ") else text
