"""What an engine sampled for one conversation, put together into trajectories by ids alone."""

from collections.abc import Sequence
from dataclasses import dataclass

from .trajectory import Trajectory


@dataclass(frozen=True)
class Generation:
    """One request's prompt, and what was sampled for it: ids and log-probabilities (nats), equally many."""

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    weight_version: int
    finish_reason: str

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.logprobs):
            raise ValueError(f"{len(self.token_ids)} sampled tokens cannot have {len(self.logprobs)} log-probabilities")

    @property
    def ids(self) -> list[int]:
        """Prompt and answer."""
        return self.prompt_ids + self.token_ids


class Capture:
    """The generations of one conversation, in the order they finished."""

    def __init__(self) -> None:
        self.generations: list[Generation] = []

    def add(self, generation: Generation) -> None:
        """Note one more."""
        self.generations.append(generation)

    def trajectories(self) -> list[Trajectory]:
        """One trajectory for each generation that no other continues, in the order of their ends.

        A generation continues the longest one whose prompt and answer its own prompt begins with. The loss mask is 1 on
        sampled tokens. Where conversations part after common answers, these are in every trajectory, but masked in all
        except the first, so that the masks sum to the number of sampled tokens.
        """
        before = [self._continued(i) for i in range(len(self.generations))]
        leaves = [i for i in range(len(before)) if i not in before]
        trained: set[int] = set()
        found = []
        for leaf in leaves:
            chain = [leaf]
            while (earlier := before[chain[0]]) is not None:
                chain.insert(0, earlier)
            found.append(_joined([(self.generations[i], i not in trained) for i in chain]))
            trained.update(chain)
        return found

    def _continued(self, index: int) -> int | None:
        """The generation that this one continues. No longer than its prompt, it finished before this one began."""
        prompt = self.generations[index].prompt_ids
        lengths = {
            i: len(g.ids)
            for i, g in enumerate(self.generations[:index])
            if g.token_ids and prompt[: len(g.ids)] == g.ids
        }
        return max(lengths, key=lambda i: (lengths[i], i)) if lengths else None


def _joined(chain: Sequence[tuple[Generation, bool]]) -> Trajectory:
    """One trajectory of generations each of which continues the one before; False leaves its tokens out of the loss."""
    ids, mask, logprobs = list[int](), list[int](), list[float]()
    start = len(chain[0][0].prompt_ids)
    for generation, counts in chain:
        between = generation.prompt_ids[start + len(ids) :]
        ids += between + generation.token_ids
        mask += [0] * len(between) + [int(counts)] * len(generation.token_ids)
        sampled = generation.logprobs if counts else [0.0] * len(generation.token_ids)
        logprobs += [0.0] * len(between) + sampled
    return Trajectory(
        prompt_index=0,
        sample_index=0,
        prompt_ids=chain[0][0].prompt_ids,
        response_ids=ids,
        loss_mask=mask,
        logprobs=logprobs,
        weight_version=min(generation.weight_version for generation, _ in chain),
        finish_reason=chain[-1][0].finish_reason,
        turns=len(chain),
        answer_start=len(ids) - len(chain[-1][0].token_ids),
    )
