"""A step's trajectories as every rank knows them: rewards, lengths and groups.

Ids, masks and log-probabilities stay on the rank whose engine sampled them until some rank trains on them, and go to
that rank alone. Beside its share a rank receives `ROW.itemsize` bytes for each trajectory of the step, rewards of turns
where there are any, and a few bytes from each rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import torch

from generation.images import Image, Spans, StoredImage
from generation.trajectory import Trajectory, by_episode
from sharding.ranks import agreed, all_to_all_bytes, rank, send_to_all, world_size
from trainer.errors import UserError
from trainer.types import RouteFormat, Sample

ROW = np.dtype("<i4, <u2, <f8, <i4, <i4, <u2, <u2, u1")
"""Prompt, sample, reward, length, sampled tokens, turns, runs of sampled tokens, and flags of an `Answer`."""

_FAILED, _CUT, _FIRST, _MISJUDGED = 1, 2, 4, 8


@dataclass
class Answer:
    """A trajectory as every rank knows it; see `Trajectory` for what has the same name there."""

    rank: int  # where its tokens are
    prompt_index: int
    sample_index: int
    reward: float
    length: int  # tokens of prompt and response
    sampled: int  # tokens that the policy sampled; what tools said is not its own
    turns: int
    runs: int  # of sampled tokens, with others in between: what the trainer counts as turns
    cut: bool  # finish_reason is "length"
    begins: bool  # whether the very first token was sampled, which nothing comes before
    misjudged: str  # not empty where a reward function failed on it, as `error`
    error: str  # not empty for a trajectory that has failed; its words, if they are known here
    turn_rewards: list[float]
    old: int = 0  # of the sampled tokens those that earlier versions of the policy sampled
    trajectory: Trajectory | None = None  # the whole of it, where its tokens are
    stored_images: Sequence[StoredImage] = ()  # of the prompt's row, which every rank can read
    reward_parts: dict[str, float] = field(default_factory=dict)  # only where they were asked for, as is the vote
    vote: str | None = None

    def trainable(self, overlong_filter: bool = False, mask_old: bool = False) -> int:
        """Tokens that are learned; see `Sample.trainable` and `to_sample`."""
        if overlong_filter and self.cut:
            return 0
        return self.sampled - (self.old or self.begins if mask_old else self.begins)


def gather_answers(own: Sequence[Trajectory], details: bool = False, version: int | None = None) -> list[Answer]:
    """The answers of all ranks, ordered by prompt and sample, the same on every rank. Collective.

    `own` is what this rank's engine sampled; with `details`, reward_parts and votes travel, which are of any size. The
    words of the first error, a reward function's and another, are known on all ranks, those of the others where they
    happened. `version` is the policy's present one; None: no answer has tokens of an earlier one.
    """
    with agreed("telling of the answers"):  # a rollout function may have put anything into a trajectory
        rows = np.array([_row(t) for t in own], dtype=ROW).tobytes()
        turns = {index: t.turn_rewards for index, t in enumerate(own) if t.turn_rewards}
        parts = [(t.reward_parts, t.vote) for t in own] if details else []
        old = {index: count for index, t in enumerate(own) if (count := sum(t.loss_mask[: old_tokens(t, version)]))}
        packed = msgspec.msgpack.encode((rows, turns, old, parts))
    answers = [answer for who, told in enumerate(send_to_all(packed)) for answer in _decoded(who, told, own)]
    answers.sort(key=lambda answer: (answer.prompt_index, answer.sample_index))
    for name in ("error", "misjudged"):
        if first := next((a for a in answers if getattr(a, name) and (name == "misjudged" or not a.misjudged)), None):
            words = send_to_all(getattr(first, name).encode(errors="replace"))[first.rank].decode()
            setattr(first, name, words)
    return answers


def failed_episodes(answers: Sequence[Answer]) -> list[str]:
    """The error of each episode that has failed for another reason than a reward function."""
    episodes = [episode for episode in by_episode(answers) if not any(t.misjudged for t in episode)]
    return [error for episode in episodes if (error := next((t.error for t in episode if t.error), ""))]


def old_tokens(trajectory: Trajectory, version: int | None) -> int:
    """As many of the response's first tokens were there before the policy had that version; None: none was."""
    if version is None:
        return 0
    return next((start for own, start in trajectory.versions if own == version), len(trajectory.response_ids))


def token_ages(trajectory: Trajectory, version: int | None) -> list[int]:
    """Of each response token the updates between the policy that sampled it and `version`; None: there is none."""
    if version is None:
        return [0] * len(trajectory.response_ids)
    ends = [start for _, start in trajectory.versions[1:]] + [len(trajectory.response_ids)]
    segments = zip(trajectory.versions, ends, strict=True)
    return [max(0, version - own) for (own, start), end in segments for _ in range(start, end)]


def _row(trajectory: Trajectory) -> tuple[Any, ...]:
    mask = trajectory.loss_mask
    flags = _FAILED * bool(trajectory.error) + _CUT * (trajectory.finish_reason == "length")
    flags += _FIRST * bool(not trajectory.prompt_ids and mask and mask[0])
    flags += _MISJUDGED * bool(trajectory.reward_error)
    length = len(trajectory.prompt_ids) + len(mask)
    place = trajectory.prompt_index, trajectory.sample_index
    return *place, trajectory.reward, length, sum(mask), trajectory.turns, count_turns(mask), flags


def _decoded(who: int, told: bytes, own: Sequence[Trajectory]) -> list[Answer]:
    """The answers of one rank; `own`: the trajectories of this one."""
    rows, turns, old, parts = msgspec.msgpack.decode(
        told, type=tuple[bytes, dict[int, list[float]], dict[int, int], list[tuple[dict[str, float], str | None]]]
    )
    answers, afar = [], f"an error on rank {who}"
    for index, row in enumerate(np.frombuffer(rows, dtype=ROW).tolist()):
        prompt, sample, reward, length, sampled, count, runs, flags = row
        trajectory = own[index] if who == rank() else None
        reward_parts, vote = parts[index] if parts else ({}, None)
        answer = Answer(
            rank=who,
            prompt_index=prompt,
            sample_index=sample,
            reward=reward,
            length=length,
            sampled=sampled,
            turns=count,
            runs=runs,
            cut=bool(flags & _CUT),
            begins=bool(flags & _FIRST),
            misjudged=(trajectory.reward_error if trajectory else afar) if flags & _MISJUDGED else "",
            error=(trajectory.error if trajectory else afar) if flags & _FAILED else "",
            turn_rewards=turns.get(index, []),
            old=old.get(index, 0),
            trajectory=trajectory,
            reward_parts=reward_parts,
            vote=vote,
        )
        answers.append(answer)
    return answers


def count_turns(loss_mask: list[int]) -> int:
    """Runs of ones."""
    return sum(now > before for before, now in zip([0, *loss_mask], loss_mask, strict=False))


def hand_over(
    answers: list[list[Answer]],
    shares: list[list[list[int]]],
    sample: Callable[[Trajectory], Sample],
    routes: RouteFormat | None = None,
) -> list[list[Sample]]:
    """The samples that this rank trains on, for each optimizer step in the order of `shares`. Collective: one exchange.

    `answers` are those of each optimizer step, the same on all ranks; `shares` of each step and rank the positions in
    them that it trains on. A sample is made where its trajectory is; with `routes` it has those of this format.
    """
    row_bytes = 0 if routes is None else routes.row_bytes
    outgoing = [bytearray() for _ in range(world_size())]
    sent: list[list[tuple[Answer, Sample]]] = [[] for _ in range(world_size())]
    with agreed("handing over the answers"):
        for step, by_rank in zip(answers, shares, strict=True):
            for payload, own, positions in zip(outgoing, sent, by_rank, strict=True):
                for answer in (step[position] for position in positions):
                    if answer.trajectory is not None:
                        own.append((answer, sample(answer.trajectory)))
                        payload += _packed(own[-1][1])
        for payload, own in zip(outgoing, sent, strict=True):
            payload += _packed_images(own)
    streams, ends = all_to_all_bytes([bytes(payload) for payload in outgoing]), [0] * world_size()
    came: list[list[tuple[Answer, Sample]]] = [[] for _ in range(world_size())]
    mine: list[list[Sample]] = []
    for step, by_rank in zip(answers, shares, strict=True):
        mine.append([])
        for answer in (step[position] for position in by_rank[rank()]):
            begin = ends[answer.rank]
            ends[answer.rank] = begin + _TOKEN_BYTES * answer.length + row_bytes * (answer.length - 1)
            mine[-1].append(_unpacked(streams[answer.rank][begin : ends[answer.rank]], answer.length, routes))
            came[answer.rank].append((answer, mine[-1][-1]))
    for stream, end, pairs in zip(streams, ends, came, strict=True):
        _unpack_images(stream[end:], pairs)
    return mine


_TOKEN_BYTES = 9  # id, log-probability and flags: the mask is the lowest bit
_OLDEST = 127  # updates: what fits into the other bits, which are the token's age


def _packed(sample: Sample) -> bytes:
    ids, logprobs = np.array(sample.input_ids, dtype="<i4"), np.array(sample.engine_logprobs, dtype="<f4")
    flags = np.array(sample.loss_mask, dtype="u1")
    if sample.ages:
        flags |= np.minimum(sample.ages, _OLDEST).astype("u1") << 1
    rows = b"" if sample.routes is None else sample.routes.numpy().tobytes()
    return ids.tobytes() + logprobs.tobytes() + flags.tobytes() + rows


def _packed_images(pairs: list[tuple[Answer, Sample]]) -> bytes:
    """Where images stand in the samples that go to a rank, and those that it cannot read itself, each once.

    Nothing where no sample has any.
    """
    if not any(sample.images for _, sample in pairs):
        return b""
    files: dict[str, tuple[bytes, tuple[int, int]]] = {}
    for answer, sample in pairs:
        known = {image.digest for image in answer.stored_images}
        files |= {image.digest: (image.data, image.size) for image in sample.images if image.digest not in known}
    places = [([image.digest for image in sample.images], sample.image_spans) for _, sample in pairs]
    return msgspec.msgpack.encode((files, places))


def _unpack_images(data: bytes, pairs: list[tuple[Answer, Sample]]) -> None:
    """Give the samples that came from a rank their images. Raises UserError where one of the data is not what it was.

    Files are by digest, with their sizes; of each sample there are the digests, and the places.
    """
    if not data:
        return
    form = tuple[dict[str, tuple[bytes, tuple[int, int]]], list[tuple[list[str], Spans]]]
    files, places = msgspec.msgpack.decode(data, type=form)
    images = {digest: Image(file, digest, size) for digest, (file, size) in files.items()}
    for (answer, sample), (digests, spans) in zip(pairs, places, strict=True):
        for stored in answer.stored_images:
            if stored.digest in digests and stored.digest not in images:
                try:
                    images[stored.digest] = stored.read()
                except ValueError as error:
                    raise UserError(str(error)) from error
        sample.images, sample.image_spans = tuple(images[digest] for digest in digests), spans


def _unpacked(data: bytes, length: int, routes: RouteFormat | None) -> Sample:
    ids, logprobs = np.frombuffer(data, "<i4", length), np.frombuffer(data, "<f4", length, 4 * length)
    flags = np.frombuffer(data, "u1", length, 8 * length)
    ages = (flags >> 1).tolist() if flags.max(initial=0) > 1 else []
    sample = Sample(ids.tolist(), (flags & 1).tolist(), logprobs.tolist(), ages=ages)
    if routes is not None:
        rows = torch.frombuffer(bytearray(data[_TOKEN_BYTES * length :]) or bytearray(1), dtype=torch.uint8)
        shape = length - 1, len(routes.layers), routes.top_k
        sample.routes = rows[: (length - 1) * routes.row_bytes].view(routes.dtype).view(shape)
    return sample
