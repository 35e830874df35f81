"""Rollouts by engines on ranks of their own (`engine.placement`): both ends of what is ordered and handed over.

Three ways were weighed. All ranks could run every line of the loop, which asks at each whether it is for them. An
engine could be driven request by request from a rank that trains, which takes a protocol for tools, environments and
clients. Or, as here with the fewest lines, the ranks that generate produce the rounds of an order by themselves and
hand them over, and those that train learn from them as if they were their own: dynamic sampling, evaluation, statistics
and learning know nothing of it.

With `rollout.lag: 1` the answers of the next step are ordered before the policy learns from those of this one, and are
fetched when it has. They belong to the checkpoint then, since the weights that sampled them are gone.

Where answers are cut, those that are unfinished stay with the engines. The last round of a step says which groups are
complete, and has what a checkpoint keeps of the others.
"""

from functools import partial
from pathlib import Path

from generation.engine.sampling import NotFiniteError
from generation.trajectory import Trajectory
from sharding.apart.orders import EnginesApart
from sharding.ranks import EVERYBODY, agree, agreed, all_to_all_bytes, is_main, rank, world_size
from trainer.config.schema import TrainConfig
from trainer.learning.answers import Answer, gather_answers
from trainer.rollouts.pool import StepAbandoned
from trainer.rollouts.round import (
    GIVEN_UP,
    Order,
    Round,
    check_version,
    in_order,
    packed,
    read_groups,
    read_random_states,
    read_ready,
    together,
    unpacked,
)


def send_rounds(training: int, rounds: list[Round], error: Exception | None) -> None:
    """On a rank that generates, after an order: give its answers to one of the `training` ranks that train, and all
    else to each of them. Collective among all ranks. Raises RemoteError on all ranks where one has an error.
    """
    agree(error, "generating", among=EVERYBODY)
    full, bare = packed(rounds), packed([each.bare() for each in rounds])
    mine, ranks = rank(EVERYBODY) % training, range(world_size(EVERYBODY))
    payloads = [b"" if other >= training else full if other == mine else bare for other in ranks]
    all_to_all_bytes(payloads, among=EVERYBODY)


def receive_rounds() -> list[Round]:
    """On a rank that trains: what comes here of `send_rounds`, of all engines together. Collective among all ranks."""
    agree(None, "generating", among=EVERYBODY)
    received = all_to_all_bytes([b""] * world_size(EVERYBODY), among=EVERYBODY)
    return together([unpacked(payload) for payload in received if payload])


class Apart:
    """The answers that engines of other ranks sample, as if they had been sampled here. See `Source`."""

    def __init__(self, config: TrainConfig, engines: EnginesApart, start: Path | None = None) -> None:
        """`start` is the checkpoint that the run resumes from."""
        self._config, self._engines = config, engines
        self._ordered: Order | None = None  # whose answers are under way
        # By step, from 1, or by evaluation, below 0.
        self._ready: dict[int, list[Round]] = {} if start is None else read_ready(start)
        # What the engines' ranks go on with after the latest step that was fetched, as they had it.
        self._after = Round()
        self._restores = start is not None  # the ranks that generate have other random states than those
        self._untrained: list[Trajectory] = []
        self._version = -1
        if start is not None:
            self._after.random_states = read_random_states(start)
            self._after.groups = read_groups(start) if is_main() else []

    @property
    def finished(self) -> int:
        """See `Source`."""
        return 0

    def produce(self, order: Order) -> list[Round]:
        """See `Source`. With a lag, the next step's are ordered when this one's shift is over."""
        self._fetch()  # with a lag it is this step's, unless a checkpoint has had it fetched
        if order.step not in self._ready:
            self._order(order)
            self._fetch()
        rounds = self._ready.pop(order.step)
        if not order.evaluates:
            self._untrained, self._version = rounds[-1].untrained, order.version
            rounds[-1].figures = self._aged(rounds[-1], order.version)
            self._order_ahead(order.step, rounds[-1].position)
        return rounds

    def replayed(self, rounds: list[Round], ahead: bool) -> None:
        """See `Source`."""
        last = rounds[-1]
        self._ready.pop(last.step, None)
        self._after, self._restores = Round(random_states=last.random_states), True
        if ahead:
            self._order_ahead(last.step, last.position)

    def take_back(self, step: int) -> None:
        """See `Source`: an order that fails ends the run."""

    def carried(self) -> bytes:
        """See `Source`. The answers of the next step, where they are sampled by now, and what engines go on with."""
        self._fetch()
        ready = [each for rounds in self._ready.values() for each in rounds]
        after = Round(groups=self._after.groups, random_states=self._after.random_states if is_main() else {})
        return packed([after, *ready]) if ready or after.groups or after.random_states else b""

    def untrained(self) -> list[Answer]:
        """See `Source`. With a lag engines have none of the present version, but in the first step."""
        if self._config.rollout.slice_tokens is None:
            return []
        present = [t for t in self._untrained if t.weight_version == self._version]
        return gather_answers(present, version=self._version)

    def waits_for(self) -> str:
        """See `Source`."""
        return ""

    def _aged(self, last: Round, version: int) -> dict[str, float]:
        """The figures of a step where answers are cut; with a lag, all tokens are of earlier weights."""
        if not last.figures or last.version == version:
            return last.figures
        lag = self._config.rollout.lag
        older = {key: last.figures[key] + lag for key in ("stale/age_mean", "stale/age_max")}
        return last.figures | {"stale/share": 1.0} | older

    def _order_ahead(self, step: int, position: int) -> None:
        """Order the answers of the next step when this shift is over, where there is a lag."""
        if self._config.rollout.lag and step < self._config.run.steps:
            self._engines.then = partial(self._order, Order(step + 1, -1, position))

    def _order(self, order: Order) -> None:
        """Send the engines an order, with the weights of the shift."""
        self._fetch()
        states = self._after.random_states if self._restores and not order.evaluates else {}
        self._restores = self._restores and order.evaluates
        kind = "evaluate" if order.evaluates else "sample"
        version = self._engines.begin(kind, step=order.step, prompts=order.position, random_states=states)
        self._ordered = Order(order.step, version, order.position)

    def _fetch(self) -> None:
        """Wait for what is under way. Collective. Raises as `produce`; EngineStateError for other weights."""
        if self._ordered is None:
            return
        order, self._ordered = self._ordered, None
        rounds, cut = receive_rounds(), self._config.rollout.slice_tokens is not None
        if rounds[0].word == GIVEN_UP:
            raise StepAbandoned(f"the rollouts of step {order.step} were given up")
        if rounds[0].word:
            raise NotFiniteError(rounds[0].word)
        with agreed("checking the versions of answers"):
            check_version(rounds, order.version, self._config.rollout.lag, cut)
        if not order.evaluates:
            last = rounds[-1]
            self._after = Round(groups=in_order(last.groups), random_states=last.random_states)
            last.groups = []
        self._ready[order.step] = rounds
