"""The one record that rollouts produce and the trainer consumes."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol, TypeVar

import numpy as np

from generation.images import Image


@dataclass
class Trajectory:
    """The policy's answers to one prompt, token by token.

    `response_ids`, `loss_mask` and `logprobs` have the same length. The mask is by position: 1 on every token the
    policy sampled, its EOS included, whatever its id; 0 on tokens that came from elsewhere (tools, environments).

    Attributes:
        prompt_index: position of the prompt in the step's batch.
        sample_index: which of the group's samples, from 0. Trajectories with both indices in common are of one episode.
        logprobs: the engine's log-probability (nats) of each response token under the distribution it was sampled from
            (temperature applied); 0.0 where `loss_mask` is 0.
        weight_version: the policy version that generated it; the newest of them, where there were several.
        versions: (weight version, index of the first response token sampled by it), both ascending, from index 0 on. By
            default all is of `weight_version`; where they are given, that is the last of them.
        finish_reason: "stop", "length" (an answer or the context was cut), "max_turns" or "error".
        turns: how many times the policy answered.
        answer_start: where its last answer begins in `response_ids`; reward functions see the text from there on.
        text: the whole response, decoded, special tokens left out; or `decoded`.
        decoded: a sampler's own text of the answer, shown and rewarded in place of the ids'; None: it has none.
        vote: what the last answer comes down to where answers are put to the vote; None: nothing.
        reward: what the environment or the rollout function gave; the trainer adds the reward functions' sum. An
            episode's reward is that of its last trajectory.
        turn_rewards: of each answer, in order, where the environment rewards turns; they are part of `reward`.
        metrics: figures of this trajectory. Names that begin with "tools/" or "server/" are summed over a step;
            of those with "client/" it is the mean. Under "reward/errors/FUNCTION/KIND" stands 1 where one failed.
        routes: a mixture's, where the engine tells them; see `Generation`.
        images: in the order of their tokens in prompt and response.
        image_spans: (index in `prompt_ids + response_ids`, count) of each image's tokens. Others with the same id are
            not images' (https://github.com/modelscope/ms-swift/issues/9287): the policy may sample them.
        reward_error: why a reward function failed on it; empty where none did.
        error: not empty when generation of this sample failed; such a sample is counted and left out of the loss.
    """

    prompt_index: int
    sample_index: int
    prompt_ids: list[int]
    response_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    weight_version: int = 0
    versions: list[tuple[int, int]] = field(default_factory=list)
    finish_reason: str = "stop"
    turns: int = 1
    answer_start: int = 0
    text: str = ""
    decoded: str | None = None
    vote: str | None = None
    reward: float = 0.0
    reward_parts: dict[str, float] = field(default_factory=dict)
    turn_rewards: list[float] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    error: str = ""
    reward_error: str = ""
    images: tuple[Image, ...] = ()
    image_spans: tuple[tuple[int, int], ...] = ()
    routes: np.ndarray | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        place = f"prompt {self.prompt_index} sample {self.sample_index}"
        ids, mask, logprobs = len(self.response_ids), len(self.loss_mask), len(self.logprobs)
        if not ids == mask == logprobs:
            lengths = f"{ids} response ids, {mask} mask entries and {logprobs} log-probabilities"
            raise ValueError(f"{place}: {lengths} must be equally many")
        self.versions = checked_versions(self.versions or [(self.weight_version, 0)], ids, place)
        self.weight_version = self.versions[-1][0]

    def extend(self, token_ids: Sequence[int], logprobs: Sequence[float] | None = None) -> None:
        """Append sampled tokens to the response, or, without log-probabilities, tokens that came from elsewhere."""
        self.response_ids += token_ids
        self.loss_mask += [int(logprobs is not None)] * len(token_ids)
        self.logprobs += [0.0] * len(token_ids) if logprobs is None else logprobs


def checked_versions(versions: Iterable[Sequence[int]], tokens: int, place: str) -> list[tuple[int, int]]:
    """The versions that sampled `tokens` tokens, as (version, index of its first token), of which every token has one.

    Raises ValueError, which begins with `place`, where the first does not begin at 0, or one begins after the end, or
    versions or indices do not ascend.
    """
    pairs = [(int(version), int(start)) for version, start in versions]
    starts = [start for _, start in pairs]
    if not pairs or starts[0] != 0:
        raise ValueError(f"{place}: versions {pairs} leave the first tokens out: the first must begin at 0")
    if starts[-1] >= max(tokens, 1):
        raise ValueError(f"{place}: a version begins at token {starts[-1]}, but there are {tokens} tokens")
    if any(after <= before for pair in pairwise(pairs) for before, after in zip(*pair, strict=True)):
        raise ValueError(f"{place}: versions {pairs} must ascend, and so must the tokens at which they begin")
    return pairs


def merged_versions(versions: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Versions without those that only repeat the one before."""
    merged: list[tuple[int, int]] = []
    for version, start in versions:
        if not merged or version != merged[-1][0]:
            merged.append((version, start))
    return merged


def checked_reward(value: Any, description: str) -> float:
    """A reward that can be learned from: a number that is finite as a float32. Raises ValueError, which begins with
    `description`: "the client returned nan, which is not a finite float32".
    """
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        number = float(value)
    except OverflowError:  # of a large int
        number = math.inf
    except (TypeError, ValueError, RuntimeError) as error:  # the last two are of arrays and tensors
        raise ValueError(f"{description} {type(value).__name__}, which is not a number") from error
    with np.errstate(over="ignore"):  # of a number beyond any float32
        if np.isfinite(np.float32(number)):
            return number
    raise ValueError(f"{description} {number}, which is not a finite float32")


def check_rewards(trajectory: Trajectory, source: str) -> None:
    """Make `checked_reward`s of all that an episode was given, in place. Raises ValueError, naming `source`, for these
    and for names of rewards and figures that cannot be written.
    """
    for name in (*trajectory.reward_parts, *trajectory.metrics):
        if name != name.encode(errors="replace").decode():
            raise ValueError(f"{source}: the name {name!r} is not valid Unicode")
    parts, turns = trajectory.reward_parts.items(), enumerate(trajectory.turn_rewards, start=1)
    trajectory.reward_parts = {
        name: checked_reward(value, f"{source}: reward_parts[{name!r}] is") for name, value in parts
    }
    trajectory.turn_rewards = [
        checked_reward(value, f"{source}: the reward of turn {turn} is") for turn, value in turns
    ]
    trajectory.reward = checked_reward(trajectory.reward, f"{source}: the reward is")


class Placed(Protocol):
    """The numbers that identify a sample of a prompt."""

    prompt_index: int
    sample_index: int


P = TypeVar("P", bound=Placed)


def by_episode(trajectories: Iterable[P]) -> list[list[P]]:
    """Trajectories grouped by the episode they come from, both in the order given; no list is empty.

    Most episodes give one. A rollout function may give several, and an OpenAI client gives one for each conversation.
    """
    episodes: dict[tuple[int, int], list[P]] = {}
    for trajectory in trajectories:
        episodes.setdefault((trajectory.prompt_index, trajectory.sample_index), []).append(trajectory)
    return list(episodes.values())


def plain(value: Any) -> Any:
    """Returns a value of a trajectory as plain types, for `msgspec` to write."""
    if isinstance(value, np.ndarray):
        return value.dtype.name, value.shape, value.tobytes()
    return value.item()  # a number, of NumPy, say


def array(_: type, packed: tuple[str, list[int], bytes]) -> np.ndarray:
    """An array as `plain` has it, for `msgspec` to read."""
    dtype, shape, data = packed
    return np.frombuffer(data, dtype).reshape(shape)
