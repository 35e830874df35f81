"""The record that rollouts produce and the trainer consumes."""

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

    `response_ids`, `loss_mask` and `logprobs` have the same length. The mask is by position: 1 on
    every token the policy sampled, its EOS included, whatever its id; 0 on tokens that came from
    elsewhere (tools, environments).

    Attributes: prompt_index: position of the prompt in the step's batch. sample_index: index of the
        sample in its group, from 0. Trajectories with equal indices belong to one episode.
        logprobs: the engine's log-probability (nats) of each response token under the distribution
        it was sampled from (temperature applied); 0.0 where `loss_mask` is 0. weight_version: the
        policy version that generated it; the newest one, if there were several. versions: (weight
        version, index of the first response token sampled by it), both ascending, from index 0 on.
        By default `weight_version` has sampled all tokens; if `versions` are passed, it is set to
        the last of them. finish_reason: "stop", "length" (an answer or the context was cut),
        "max_turns" or "error". turns: the number of the policy's answers. answer_start: index in
        `response_ids` at which the last answer begins; reward functions see the text from there.
        text: the complete response, decoded without special tokens; or `decoded`, if there is one.
        decoded: the text that a sampler returned, displayed and rewarded instead of the decoded
        ids; None: no text. vote: the value by which the last answer takes part in a majority vote;
        None: it takes no part. reward: the reward from the environment or the rollout function; the
        trainer adds the sum of the reward functions. An episode's reward is that of its last
        trajectory. turn_rewards: the reward of each answer, in order, if the environment rewards
        turns; they are part of `reward`. metrics: numbers about this trajectory, by name. Over a
        step, those that begin with "tools/" or "server/" are summed, and those with "client/" are
        averaged. "reward/errors/FUNCTION/KIND" is 1 where a function failed. routes: the experts
        that a mixture's routers chose, if the engine reports them; see `Generation`. images: the
        images, in the order of their tokens in prompt and response. image_spans: (index in
        `prompt_ids + response_ids`, count) of each image's tokens. Other tokens with the same id
        belong to no image, since the policy may sample them
        (https://github.com/modelscope/ms-swift/issues/9287). reward_parts: the values that make up
        the reward, by name: of reward functions, before their weights, and of an environment or a
        client. reward_error: why a reward function failed on it; empty if none has failed.
        abstained: True if every reward function abstained and the episode gave no reward of its
        own, so that nothing has judged the answer. Such an answer leaves its group, but has not
        failed. group: the name of those that this trajectory is compared with: the trajectories of
        the same prompt, of any episode, with the same name; it then counts by itself, with its own
        reward. Up to the first slash, the name is a role, by which figures are reported. Empty: it
        belongs to its episode. error: not empty when generation of this sample failed; such a
        sample is counted and left out of the loss.
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
    abstained: bool = False
    group: str = ""
    images: tuple[Image, ...] = ()
    image_spans: tuple[tuple[int, int], ...] = ()
    routes: np.ndarray | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        name = f"prompt {self.prompt_index} sample {self.sample_index}"
        ids = len(self.response_ids)
        mask = len(self.loss_mask)
        logprobs = len(self.logprobs)
        if not ids == mask == logprobs:
            lengths = f"{ids} response ids, {mask} mask entries and {logprobs} log-probabilities"
            raise ValueError(f"{name}: {lengths} must be equal in number")
        self.versions = checked_versions(self.versions or [(self.weight_version, 0)], ids, name)
        self.weight_version = self.versions[-1][0]

    def extend(self, token_ids: Sequence[int], logprobs: Sequence[float] | None = None) -> None:
        """Append sampled tokens to the response, or, without log-probabilities, tokens that came
        from elsewhere.
        """
        self.response_ids += token_ids
        self.loss_mask += [int(logprobs is not None)] * len(token_ids)
        self.logprobs += [0.0] * len(token_ids) if logprobs is None else logprobs


def checked_versions(versions: Iterable[Sequence[int]], tokens: int, name: str) -> list[tuple[int, int]]:
    """Return `versions`, pairs of a version and the index of its first token, checked to cover
    `tokens` tokens.

    Raises ValueError, whose message begins with `name`, where the first version does not begin at
    0, one begins after the last token, or versions or indices do not ascend.
    """
    pairs = [(int(version), int(start)) for version, start in versions]
    starts = [start for _, start in pairs]
    if not pairs or starts[0] != 0:
        raise ValueError(
            f"{name}: versions {pairs} leave the first tokens out: the first must begin at 0"
        )
    if starts[-1] >= max(tokens, 1):
        raise ValueError(
            f"{name}: a version begins at token {starts[-1]}, but there are {tokens} tokens"
        )
    if any(after <= before for pair in pairwise(pairs) for before, after in zip(*pair, strict=True)):
        raise ValueError(
            f"{name}: versions {pairs} must ascend, and so must the tokens at which they begin"
        )
    return pairs


def merged_versions(versions: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return versions without those that only repeat the one before."""
    merged: list[tuple[int, int]] = []
    for version, start in versions:
        if not merged or version != merged[-1][0]:
            merged.append((version, start))
    return merged


def checked_reward(value: Any, description: str) -> float:
    """Return a reward as a number, checked to be finite as a float32. Raises ValueError, whose
    message begins with `description`: "the client returned nan, which is not a finite float32".
    """
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        number = float(value)
    except OverflowError:  # a large int
        number = math.inf
    except (TypeError, ValueError, RuntimeError) as error:  # arrays and tensors raise the last two
        raise ValueError(f"{description} {type(value).__name__}, which is not a number") from error
    with np.errstate(over="ignore"):  # a number beyond any float32
        if np.isfinite(np.float32(number)):
            return number
    raise ValueError(f"{description} {number}, which is not a finite float32")


def check_rewards(trajectory: Trajectory, source: str) -> None:
    """Replace all rewards of a trajectory by their `checked_reward`, in place. Raises ValueError,
    naming `source`, for a reward that fails that check, for a group that is no text, and for names
    that are not valid Unicode.
    """
    if not isinstance(trajectory.group, str):
        raise ValueError(f"{source}: the group is {trajectory.group!r}: give a name")
    for name in (trajectory.group, *trajectory.reward_parts, *trajectory.metrics):
        if name != name.encode(errors="replace").decode():
            raise ValueError(f"{source}: the name {name!r} is not valid Unicode")
    parts = trajectory.reward_parts.items()
    turns = enumerate(trajectory.turn_rewards, start=1)
    trajectory.reward_parts = {
        name: checked_reward(value, f"{source}: reward_parts[{name!r}] is") for name, value in parts
    }
    trajectory.turn_rewards = [
        checked_reward(value, f"{source}: the reward of turn {turn} is") for turn, value in turns
    ]
    trajectory.reward = checked_reward(trajectory.reward, f"{source}: the reward is")


class Placed(Protocol):
    """An object with the two indices that identify a sample of a prompt."""

    prompt_index: int
    sample_index: int


P = TypeVar("P", bound=Placed)


def by_episode(trajectories: Iterable[P]) -> list[list[P]]:
    """Return trajectories grouped by episode; episodes, and the trajectories of each, keep their
    order.

    Most episodes have one trajectory. A rollout function may return several, and an OpenAI client
    makes one for each conversation.
    """
    episodes: dict[tuple[int, int], list[P]] = {}
    for trajectory in trajectories:
        episodes.setdefault((trajectory.prompt_index, trajectory.sample_index), []).append(trajectory)
    return list(episodes.values())


def plain(value: Any) -> Any:
    """Return a value of a trajectory as plain types, for `msgspec` to write."""
    if isinstance(value, np.ndarray):
        return value.dtype.name, value.shape, value.tobytes()
    return value.item()  # a NumPy number


def array(_: type, packed: tuple[str, list[int], bytes]) -> np.ndarray:
    """Return the array that `plain` has packed, for `msgspec` to read. The type that it asks for is
    ignored.
    """
    dtype, shape, data = packed
    return np.frombuffer(data, dtype).reshape(shape)
