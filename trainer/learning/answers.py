"""Summaries of a step's trajectories, which every rank has, and the exchange of their tokens
between ranks.

Ids, masks and log-probabilities stay on the rank whose engine sampled them until a rank trains on
them, and go to that rank alone. Besides its share a rank receives `ROW.itemsize` bytes for each
trajectory of the step, rewards of turns and names of groups if there are any, and a few bytes from
each rank.
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
"""The encoding of an `Answer`: prompt, sample, reward, length, sampled tokens, turns, runs of
sampled tokens, flags.
"""

_FAILED = 1
_CUT = 2
_FIRST = 4
_MISJUDGED = 8
_ABSTAINED = 16


@dataclass
class Answer:
    """The summary of a trajectory that every rank has; fields of the same name are described in
    `Trajectory`.
    """

    rank: int  # the rank that has its tokens
    prompt_index: int
    sample_index: int
    reward: float
    length: int  # tokens of prompt and response
    sampled: int  # number of tokens that the policy sampled, without those of tools
    turns: int
    # Number of runs of sampled tokens with others in between, which the trainer counts as turns
    runs: int
    cut: bool  # finish_reason is "length"
    begins: bool  # True if the very first token was sampled, which no token predicts
    # Why a reward function failed, generic if it failed on another rank; empty: none failed
    misjudged: str
    error: str  # why the trajectory failed; generic if it failed on another rank; empty: it did not fail
    turn_rewards: list[float]
    abstained: bool = False
    old: int = 0  # number of tokens that earlier versions of the policy sampled
    group: str = ""
    trajectory: Trajectory | None = None  # on the rank that has its tokens
    stored_images: Sequence[StoredImage] = ()  # those of the prompt's row, which every rank can read
    reward_parts: dict[str, float] = field(default_factory=dict)  # like the vote, only with `details`
    vote: str | None = None

    def trainable(self, overlong_filter: bool = False, mask_old: bool = False) -> int:
        """Return the number of tokens to train on; see `Sample.trainable` and `to_sample`."""
        if overlong_filter and self.cut:
            return 0
        return self.sampled - (self.old or self.begins if mask_old else self.begins)


def gather_answers(
    local: Sequence[Trajectory], details: bool = False, version: int | None = None
) -> list[Answer]:
    """Return the answers of all ranks, ordered by prompt and sample, the same on every rank.
    Collective.

    `local` are the trajectories that this rank's engine sampled. With `details`, reward_parts and
    votes, which can have any size, travel too. All ranks get the text of the first error of a
    reward function and of the first other error; the texts of further errors stay where they
    happened. `version` is the policy's current version; None: no answer has tokens of an earlier
    one.
    """
    with agreed("gathering the answers"):  # a rollout function may have put anything into a trajectory
        rows = np.array([_row(t) for t in local], dtype=ROW).tobytes()
        turns = {index: t.turn_rewards for index, t in enumerate(local) if t.turn_rewards}
        names = {index: t.group for index, t in enumerate(local) if t.group}
        parts = [(t.reward_parts, t.vote) for t in local] if details else []
        old = {}
        for index, trajectory in enumerate(local):
            count = sum(trajectory.loss_mask[: old_tokens(trajectory, version)])
            if count:
                old[index] = count
        packed = msgspec.msgpack.encode((rows, turns, old, names, parts))
    answers: list[Answer] = []
    for source, data in enumerate(send_to_all(packed)):
        answers += _decoded(source, data, local)
    answers.sort(key=lambda answer: (answer.prompt_index, answer.sample_index))
    for name in ("error", "misjudged"):
        failed = (a for a in answers if getattr(a, name) and (name == "misjudged" or not a.misjudged))
        if first := next(failed, None):
            words = send_to_all(getattr(first, name).encode(errors="replace"))[first.rank].decode()
            setattr(first, name, words)
    return answers


def failed_episodes(answers: Sequence[Answer]) -> list[str]:
    """Return the errors of the episodes that failed for another reason than a reward function, one
    for each episode.
    """
    errors = []
    for episode in by_episode(answers):
        misjudged = any(answer.misjudged for answer in episode)
        error = next((answer.error for answer in episode if answer.error), "")
        if error and not misjudged:
            errors.append(error)
    return errors


def old_tokens(trajectory: Trajectory, version: int | None) -> int:
    """Return the number of leading response tokens that were sampled before `version`; 0 if it is
    None.
    """
    if version is None:
        return 0
    return next(
        (start for number, start in trajectory.versions if number == version),
        len(trajectory.response_ids),
    )


def token_ages(trajectory: Trajectory, version: int | None) -> list[int]:
    """Return the age of each response token, in updates from the policy that sampled it to
    `version`; all 0 if it is None.
    """
    if version is None:
        return [0] * len(trajectory.response_ids)
    ends = [start for _, start in trajectory.versions[1:]] + [len(trajectory.response_ids)]
    segments = zip(trajectory.versions, ends, strict=True)
    return [max(0, version - sampler) for (sampler, start), end in segments for _ in range(start, end)]


def _row(trajectory: Trajectory) -> tuple[Any, ...]:
    mask = trajectory.loss_mask
    flags = 0
    if trajectory.error:
        flags += _FAILED
    if trajectory.finish_reason == "length":
        flags += _CUT
    if not trajectory.prompt_ids and mask and mask[0]:
        flags += _FIRST
    if trajectory.reward_error:
        flags += _MISJUDGED
    if trajectory.abstained:
        flags += _ABSTAINED
    length = len(trajectory.prompt_ids) + len(mask)
    indices = trajectory.prompt_index, trajectory.sample_index
    return *indices, trajectory.reward, length, sum(mask), trajectory.turns, count_turns(mask), flags


def _decoded(source: int, data: bytes, local: Sequence[Trajectory]) -> list[Answer]:
    """Return the answers of rank `source` from its message; `local` are the trajectories of this
    rank.
    """
    rows, turns, old, names, parts = msgspec.msgpack.decode(
        data,
        type=tuple[
            bytes,
            dict[int, list[float]],
            dict[int, int],
            dict[int, str],
            list[tuple[dict[str, float], str | None]],
        ],
    )
    answers = []
    generic = f"an error on rank {source}"
    for index, row in enumerate(np.frombuffer(rows, dtype=ROW).tolist()):
        prompt, sample, reward, length, sampled, count, runs, flags = row
        trajectory = local[index] if source == rank() else None
        reward_parts, vote = parts[index] if parts else ({}, None)
        misjudged = error = ""
        if flags & _MISJUDGED:
            misjudged = trajectory.reward_error if trajectory else generic
        if flags & _FAILED:
            error = trajectory.error if trajectory else generic
        answer = Answer(
            rank=source,
            prompt_index=prompt,
            sample_index=sample,
            reward=reward,
            length=length,
            sampled=sampled,
            turns=count,
            runs=runs,
            cut=bool(flags & _CUT),
            begins=bool(flags & _FIRST),
            misjudged=misjudged,
            error=error,
            turn_rewards=turns.get(index, []),
            abstained=bool(flags & _ABSTAINED),
            old=old.get(index, 0),
            group=names.get(index, ""),
            trajectory=trajectory,
            reward_parts=reward_parts,
            vote=vote,
        )
        answers.append(answer)
    return answers


def count_turns(loss_mask: list[int]) -> int:
    """Return the number of runs of ones in a loss mask."""
    return sum(now > before for before, now in zip([0, *loss_mask], loss_mask, strict=False))


def exchange_samples(
    answers: list[list[Answer]],
    shares: list[list[list[int]]],
    sample: Callable[[Trajectory], Sample],
    routes: RouteFormat | None = None,
) -> list[list[Sample]]:
    """Return the samples that this rank trains on, per optimizer step and in the order of `shares`.
    Collective: one exchange.

    `answers` has the answers of each optimizer step, the same on all ranks; `shares` has, for each
    step and rank, the positions of the answers that the rank trains on. `sample` makes a sample on
    the rank that has the trajectory; with `routes`, samples have routes in this format.
    """
    row_bytes = 0 if routes is None else routes.row_bytes
    outgoing = [bytearray() for _ in range(world_size())]
    sent: list[list[tuple[Answer, Sample]]] = [[] for _ in range(world_size())]
    with agreed("exchanging the samples"):
        for step, by_rank in zip(answers, shares, strict=True):
            for payload, pairs, positions in zip(outgoing, sent, by_rank, strict=True):
                for position in positions:
                    answer = step[position]
                    if answer.trajectory is not None:
                        pairs.append((answer, sample(answer.trajectory)))
                        payload += _packed(pairs[-1][1])
        for payload, pairs in zip(outgoing, sent, strict=True):
            payload += _packed_images(pairs)
    streams = all_to_all_bytes([bytes(payload) for payload in outgoing])
    ends = [0] * world_size()
    received: list[list[tuple[Answer, Sample]]] = [[] for _ in range(world_size())]
    samples: list[list[Sample]] = []
    for step, by_rank in zip(answers, shares, strict=True):
        samples.append([])
        for position in by_rank[rank()]:
            answer = step[position]
            begin = ends[answer.rank]
            end = begin + _TOKEN_BYTES * answer.length + row_bytes * (answer.length - 1)
            ends[answer.rank] = end
            samples[-1].append(_unpacked(streams[answer.rank][begin:end], answer.length, routes))
            received[answer.rank].append((answer, samples[-1][-1]))
    for stream, end, pairs in zip(streams, ends, received, strict=True):
        _unpack_images(stream[end:], pairs)
    return samples


_TOKEN_BYTES = 9  # id, log-probability and flags: the mask is the lowest bit
_OLDEST = 127  # updates: the greatest age that fits into the other bits


def _packed(sample: Sample) -> bytes:
    ids = np.array(sample.input_ids, dtype="<i4")
    logprobs = np.array(sample.engine_logprobs, dtype="<f4")
    flags = np.array(sample.loss_mask, dtype="u1")
    if sample.ages:
        flags |= np.minimum(sample.ages, _OLDEST).astype("u1") << 1
    rows = b"" if sample.routes is None else sample.routes.numpy().tobytes()
    return ids.tobytes() + logprobs.tobytes() + flags.tobytes() + rows


def _packed_images(pairs: list[tuple[Answer, Sample]]) -> bytes:
    """Return the places of images in the samples for a rank, with the images that it cannot read
    itself, each once.

    Empty if no sample has images.
    """
    if not any(sample.images for _, sample in pairs):
        return b""
    files: dict[str, tuple[bytes, tuple[int, int]]] = {}
    contents = []
    for answer, sample in pairs:
        stored = {image.digest for image in answer.stored_images}
        for image in sample.images:
            if image.digest not in stored:
                files[image.digest] = image.data, image.size
        digests = [image.digest for image in sample.images]
        contents.append((digests, sample.image_spans))
    return msgspec.msgpack.encode((files, contents))


def _unpack_images(data: bytes, pairs: list[tuple[Answer, Sample]]) -> None:
    """Give the samples from a rank their images. Raises UserError if an image of the data has
    changed meanwhile.

    `data` has files by digest with their sizes, and for each sample the digests and places of its
    images.
    """
    if not data:
        return
    form = tuple[dict[str, tuple[bytes, tuple[int, int]]], list[tuple[list[str], Spans]]]
    files, contents = msgspec.msgpack.decode(data, type=form)
    images = {digest: Image(file, digest, size) for digest, (file, size) in files.items()}
    for (answer, sample), (digests, spans) in zip(pairs, contents, strict=True):
        for stored in answer.stored_images:
            if stored.digest in digests and stored.digest not in images:
                try:
                    images[stored.digest] = stored.read()
                except ValueError as error:
                    raise UserError(str(error)) from error
        sample.images = tuple(images[digest] for digest in digests)
        sample.image_spans = spans


def _unpacked(data: bytes, length: int, routes: RouteFormat | None) -> Sample:
    ids = np.frombuffer(data, "<i4", length)
    logprobs = np.frombuffer(data, "<f4", length, 4 * length)
    flags = np.frombuffer(data, "u1", length, 8 * length)
    ages = (flags >> 1).tolist() if flags.max(initial=0) > 1 else []
    sample = Sample(ids.tolist(), (flags & 1).tolist(), logprobs.tolist(), ages=ages)
    if routes is not None:
        rows = torch.frombuffer(
            bytearray(data[_TOKEN_BYTES * length :]) or bytearray(1), dtype=torch.uint8
        )
        shape = length - 1, len(routes.layers), routes.top_k
        sample.routes = rows[: (length - 1) * routes.row_bytes].view(routes.dtype).view(shape)
    return sample
