"""Random steps, a policy small enough to check by hand, and ranks as threads, for tests of the learner."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor

from generation.trajectory import Trajectory
from sharding.ranks import all_reduce_sum, exchange, rank, world_size
from trainer.config.schema import TrainConfig
from trainer.learning.answers import Answer, gather_answers
from trainer.learning.batching import Batcher
from trainer.learning.groups import Group, make_groups
from trainer.model_structure import ModelFlops, Work
from trainer.types import LossFn, MicroBatch, Outputs, UpdateStats

VOCABULARY = 11
T = TypeVar("T")


def make_batcher(config: TrainConfig) -> Batcher:
    """Return a recipe's batcher, for a policy whose work is its tokens."""
    batch, ways = config.batch, config.policy.sequence_parallel
    return Batcher(
        batch.tokens_per_micro_batch, 0, "cpu", batch.packing, ways, shared_min=batch.shared_min
    )


def random_trajectory(prompt: int, sample: int, generator: torch.Generator) -> Trajectory:
    """Draw one to three turns of one to four tokens, tool tokens between them, and rewards of functions and turns."""

    def integers(high: int, count: int = 1) -> list[int]:
        return torch.randint(1, high, (count,), generator=generator).tolist()

    mask: list[int] = []
    turns = integers(4)[0]
    for turn in range(turns):
        mask += [0] * (turn > 0) * integers(3)[0] + [1] * integers(5)[0]
    logprobs = (-2.4 + 0.2 * torch.randn(len(mask), generator=generator)) * torch.tensor(mask)
    parts = {"a": integers(3)[0] - 1.0, "b": integers(4)[0] / 4}
    turn_rewards = [integers(5)[0] / 10 for _ in range(turns)]
    return Trajectory(
        prompt,
        sample,
        integers(VOCABULARY, 2),
        integers(VOCABULARY, len(mask)),
        mask,
        logprobs.tolist(),
        finish_reason=("stop", "stop", "length")[integers(4)[0] - 1],
        turns=turns,
        turn_rewards=turn_rewards,
        reward=parts["a"] + 0.5 * parts["b"] + sum(turn_rewards),
        reward_parts=parts,
    )


def as_answers(trajectories: list[Trajectory]) -> list[Answer]:
    """Gathers answers as the learner does, with each rank as the sampler of every `world_size()`-th prompt."""
    local = [t for t in trajectories if t.prompt_index % world_size() == rank()]
    return gather_answers(local, details=True)


def as_step(trajectories: list[Trajectory]) -> tuple[list[Answer], list[Group]]:
    """Return a step's answers and their groups."""
    answers = as_answers(trajectories)
    return answers, make_groups(answers)


def random_step(prompts: int, samples: int, seed: int) -> list[Trajectory]:
    """Draw groups of episodes of one to three parts; one episode has failed, and one group has equal rewards."""
    generator = torch.Generator().manual_seed(seed)
    parts = torch.randint(-2, 4, (prompts, samples), generator=generator).clamp(min=1)
    places = [(p, s) for p in range(prompts) for s in range(samples) for _ in range(int(parts[p, s]))]
    step = [random_trajectory(prompt, sample, generator) for prompt, sample in places]
    for trajectory in step:
        if trajectory.prompt_index == 0:
            trajectory.reward, trajectory.turn_rewards = 1.0, []
    step[-1].error = "failed"
    return step


def by_part(batch: MicroBatch, values: Tensor) -> Tensor:
    """Return the same values, with gradients through this rank's own targets only, where ranks share a micro-batch."""
    local = batch.spread(batch.trained(values))
    return local + (values - local).detach()


class _Table:
    """A trainable table [VOCABULARY, VOCABULARY] in float64: gradient descent, with the gradient summed over ranks."""

    work = Work(ModelFlops(trunk=1000, trunk_learned=1000, head=0, head_learned=0, attention=100))

    def __init__(self, seed: int, rate: float) -> None:
        noise = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed))
        self.table, self.rate = 0.5 * noise.double(), rate

    def descend(
        self, batches: list[MicroBatch], loss_of: Callable[[Tensor, MicroBatch], Any]
    ) -> UpdateStats:
        """Make a step of gradient descent on the loss summed over micro-batches and ranks."""
        table = self.table.clone().requires_grad_()
        totals: dict[str, float] = {"loss": 0.0}
        for batch in batches:
            loss, sums = loss_of(table, batch)
            loss.backward()
            totals = {
                k: totals.get(k, 0.0) + batch.counts * v.item()
                for k, v in {"loss": loss, **sums}.items()
            }
        assert table.grad is not None
        parts = exchange(table.grad.numpy().tobytes())
        gradient = torch.stack(
            [torch.frombuffer(bytearray(part), dtype=torch.float64) for part in parts]
        ).sum(dim=0)
        self.table = self.table - self.rate * gradient.view_as(table)
        totals = all_reduce_sum(totals)
        return UpdateStats(totals.pop("loss"), gradient.norm().item(), self.rate, False, totals)


class TablePolicy(_Table):
    """A bigram model: a token's logits are the row of the previous token, and with `values` its value is their mean."""

    device = torch.device("cpu")
    routing = None

    def __init__(self, seed: int = 0, values: bool = False) -> None:
        super().__init__(seed, rate=0.5)
        self.values = values

    def outputs(self, table: Tensor, batch: MicroBatch, temperature: float) -> Outputs:
        """Return log-probabilities, entropies and values of a micro-batch, as the real policies give them."""
        logprobs = torch.log_softmax(table / temperature, dim=1)
        entropy = -(logprobs.exp() * logprobs).sum(dim=1)
        before, mask = batch.input_ids[:, :-1], batch.loss_mask
        values = table.mean(dim=1)[before] * mask if self.values else None
        tensors = (logprobs[before, batch.input_ids[:, 1:]] * mask, entropy[before] * mask, values)
        return Outputs(*(None if tensor is None else by_part(batch, tensor) for tensor in tensors))

    def score(self, batches: list[MicroBatch], temperature: float) -> list[Outputs]:
        return [self.outputs(self.table, batch, temperature) for batch in batches]

    def update(
        self, batches: list[MicroBatch], loss_fn: LossFn, temperature: float, place: float | None = None
    ) -> UpdateStats:
        return self.descend(
            batches, lambda table, batch: loss_fn(batch, self.outputs(table, batch, temperature))
        )


class TableCritic(_Table):
    """A critic for which a state's value is the first column in the row of the previous token."""

    def __init__(self) -> None:
        super().__init__(seed=5, rate=0.1)

    def values(self, table: Tensor, batch: MicroBatch) -> Tensor:
        return by_part(batch, table[:, 0][batch.input_ids[:, :-1]] * batch.loss_mask)

    def score(self, batches: list[MicroBatch]) -> list[Tensor]:
        return [self.values(self.table, batch) for batch in batches]

    def update(
        self, batches: list[MicroBatch], loss_fn: Callable[..., Any], place: float | None = None
    ) -> UpdateStats:
        return self.descend(batches, lambda table, batch: loss_fn(batch, self.values(table, batch)))


class _ThreadedRanks:
    """Stands in for torch.distributed where `sharding.ranks` uses it, with threads as ranks."""

    def __init__(self, count: int) -> None:
        self._count, self._local = count, threading.local()
        self.group = SimpleNamespace(WORLD=self)
        self._barrier = threading.Barrier(count, timeout=120)
        self._slots: list[Any] = [None] * count
        self._posted: list[list[SimpleQueue[Tensor | None]]] = [
            [SimpleQueue() for _ in range(count)] for _ in range(count)
        ]

    def is_initialized(self) -> bool:
        return True

    def get_rank(self) -> int:
        return self._local.rank

    def get_world_size(self) -> int:
        return self._count

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        self._posted[self.get_rank()][peer].put(tensors[0].clone())
        return SimpleNamespace(wait=lambda: None)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        def wait() -> None:
            tensor = self._posted[peer][self.get_rank()].get(timeout=120)
            if tensor is None:
                raise EOFError
            tensors[0].copy_(tensor)

        return SimpleNamespace(wait=wait)

    def _everyones(self, value: Any) -> list[Any]:
        self._slots[self.get_rank()] = value
        self._barrier.wait()
        values = list(self._slots)
        self._barrier.wait()
        return values

    def all_reduce(self, tensor: Tensor) -> None:
        tensor.copy_(torch.stack(self._everyones(tensor.clone())).sum(dim=0))

    def all_to_all_single(
        self,
        output: Tensor,
        sent: Tensor,
        incoming: list[int] | None = None,
        outgoing: list[int] | None = None,
    ) -> None:
        parts = sent.split(outgoing if outgoing is not None else len(sent) // self._count)
        output.copy_(torch.cat([part[self.get_rank()] for part in self._everyones(parts)]))

    def run(self, rank: int, function: Callable[[], T]) -> T:
        self._local.rank = rank
        try:
            return function()
        except BaseException:
            self._barrier.abort()
            for posted in self._posted[rank]:
                posted.put(None)
            raise


def on_ranks(count: int, function: Callable[[], T]) -> list[T]:
    """Run `function` on `count` ranks, which are threads that exchange what ranks would over gloo.

    Returns the results in the order of the ranks.
    """
    ranks = _ThreadedRanks(count)
    with patch("sharding.ranks.dist", ranks), ThreadPoolExecutor(count) as pool:
        ended = [pool.submit(ranks.run, rank, function) for rank in range(count)]
        errors = [error for error in (future.exception() for future in ended) if error is not None]
        for error in sorted(
            errors, key=lambda error: isinstance(error, threading.BrokenBarrierError | EOFError)
        ):
            raise error  # a broken barrier is last: it does not say why a rank failed
        return [future.result() for future in ended]
