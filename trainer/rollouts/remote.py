"""Rollouts on engines of other ranks (`engine.placement`): training ranks send orders and receive
rounds of answers.

Three designs were considered. All ranks could run the whole loop and check at each line whether it
applies to them. A training rank could drive an engine request by request, which would need a
protocol for tools, environments and clients. Or, as here and with the fewest lines, the generating
ranks produce all rounds of an order by themselves and send them; dynamic sampling, evaluation,
metrics and learning then treat them like rounds sampled on the training rank.

With `rollout.lag: 1` the answers of the next step are ordered before the policy learns from those
of this step, and fetched afterwards. A checkpoint has to include them, since the weights that
sampled them no longer exist.

If answers grow in slices (`rollout.slice_tokens`), unfinished ones stay with the engines. The last
round of a step says which groups are complete, and contains the part of the other groups that a
checkpoint keeps.
"""

from functools import partial
from pathlib import Path

from generation.engine.sampling import NotFiniteError
from generation.trajectory import Trajectory
from sharding.ranks import EVERYBODY, agree, agreed, all_to_all_bytes, is_main, rank, world_size
from sharding.remote.orders import RemoteEngines
from trainer.config.schema import TrainConfig
from trainer.data import PromptDataset
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
from trainer.rollouts.step_batch import StepBatch


def send_rounds(training: int, rounds: list[Round], error: Exception | None) -> None:
    """Send a generating rank's answers to one of the `training` ranks, and the rounds without
    answers to the others.

    Collective among all ranks, of which the training ranks call `receive_rounds`. If any rank
    passes an `error`, all ranks raise RemoteError.
    """
    agree(error, "generating", among=EVERYBODY)
    full = packed(rounds)
    bare = packed([one_round.bare() for one_round in rounds])
    receiver = rank(EVERYBODY) % training
    payloads = [b""] * world_size(EVERYBODY)
    payloads[:training] = [bare] * training
    payloads[receiver] = full
    all_to_all_bytes(payloads, among=EVERYBODY)


def receive_rounds() -> list[Round]:
    """Receive on a training rank the rounds that generating ranks send, joined over engines.
    Collective as above.
    """
    agree(None, "generating", among=EVERYBODY)
    received = all_to_all_bytes([b""] * world_size(EVERYBODY), among=EVERYBODY)
    return together([unpacked(payload) for payload in received if payload])


class RemoteSource:
    """The `Source` of a training rank whose answers are sampled by engines on other ranks."""

    def __init__(
        self,
        config: TrainConfig,
        engines: RemoteEngines,
        dataset: PromptDataset,
        start: Path | None = None,
    ) -> None:
        """Prepare to order answers from `engines`. `dataset` has the training prompts; `start` is
        the checkpoint that the run resumes from.
        """
        self._config = config
        self._engines = engines
        self._dataset = dataset
        self._ordered: Order | None = None  # the order that engines are working on
        # Rounds that were received and not used yet, by the step of their order, which is below 0
        # for evaluations.
        self._ready: dict[int, list[Round]] = {} if start is None else read_ready(start)
        # Groups and random states of the generating ranks after the latest step that was fetched.
        self._after = Round()
        # True if generating ranks must restore the random states in `_after`
        self._restores = start is not None
        self._untrained: list[Trajectory] = []
        self._version = -1
        if start is not None:
            self._after.random_states = read_random_states(start)
            self._after.groups = read_groups(start) if is_main() else []

    @property
    def finished(self) -> int:
        """Always 0: the engines of other ranks do not report single answers."""
        return 0

    def produce(self, order: Order) -> StepBatch:
        """Return a step's batch, as `Source.produce`. With a lag, order the next step's when this
        shift ends.
        """
        rounds = self._rounds(order)
        last = rounds[-1]
        self._untrained = last.untrained
        self._version = order.version
        last.figures = self._aged(last, order.version)
        self._order_ahead(order.step, last.position)
        return StepBatch.of(rounds, order, self._config, self._dataset)

    def evaluate(self, order: Order) -> list[Round]:
        """Return an evaluation's rounds, as `Source.evaluate`."""
        return self._rounds(order)

    def _rounds(self, order: Order) -> list[Round]:
        """Return the rounds of an order, which engines may have worked on already. Collective."""
        # With a lag these are this step's rounds, unless a checkpoint has fetched them already
        self._fetch()
        if order.step not in self._ready:
            self._order(order)
            self._fetch()
        return self._ready.pop(order.step)

    def replayed(self, order: Order, rounds: list[Round], ahead: bool) -> StepBatch:
        """Continue as if the order had produced these rounds, as `Source.replayed`."""
        last = rounds[-1]
        self._ready.pop(last.step, None)
        self._after = Round(random_states=last.random_states)
        self._restores = True
        if ahead:
            self._order_ahead(last.step, last.position)
        return StepBatch.of(rounds, order, self._config, self._dataset)

    def take_back(self, step: int) -> None:
        """Do nothing, since an order that fails ends the run."""

    def carried(self) -> bytes:
        """Pack the next step's answers, if they were ordered, and the engines' unfinished groups
        and random states.
        """
        self._fetch()
        ready = [one_round for rounds in self._ready.values() for one_round in rounds]
        after = Round(
            groups=self._after.groups, random_states=self._after.random_states if is_main() else {}
        )
        return packed([after, *ready]) if ready or after.groups or after.random_states else b""

    def untrained(self) -> list[Answer]:
        """Return answers as `Source.untrained`. With a lag there are none of the present version
        after step 1.
        """
        if self._config.rollout.slice_tokens is None:
            return []
        present = [t for t in self._untrained if t.weight_version == self._version]
        return gather_answers(present, version=self._version)

    def waits_for(self) -> str:
        """Return "": the reason is not known on this rank."""
        return ""

    def _aged(self, last: Round, version: int) -> dict[str, float]:
        """Return the metrics of a step with slices; with a lag, all its tokens are of earlier
        weights.
        """
        if not last.figures or last.version == version:
            return last.figures
        lag = self._config.rollout.lag
        older = {key: last.figures[key] + lag for key in ("stale/age_mean", "stale/age_max")}
        return last.figures | {"stale/share": 1.0} | older

    def _order_ahead(self, step: int, position: int) -> None:
        """With a lag, have the answers of the next step ordered when this shift is over."""
        if self._config.rollout.lag and step < self._config.run.steps:
            self._engines.then = partial(self._order, Order(step + 1, -1, position))

    def _order(self, order: Order) -> None:
        """Send the engines an order and the weights of the shift."""
        self._fetch()
        states = self._after.random_states if self._restores and not order.evaluates else {}
        self._restores = self._restores and order.evaluates
        kind = "evaluate" if order.evaluates else "sample"
        version = self._engines.begin(
            kind, step=order.step, prompts=order.position, random_states=states
        )
        self._ordered = Order(order.step, version, order.position)

    def _fetch(self) -> None:
        """Wait for the rounds of the order under way, if any. Collective.

        Raises as `produce`, and EngineStateError if other weights than the order's have sampled
        them.
        """
        if self._ordered is None:
            return
        order = self._ordered
        self._ordered = None
        rounds = receive_rounds()
        cut = self._config.rollout.slice_tokens is not None
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
