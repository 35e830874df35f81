"""The loop of a rank that only generates: wait for an order, receive weights, sample, and send the
answers.
"""

import json
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from generation.engine.sampling import NotFiniteError
from sharding.ranks import EVERYBODY, RemoteError, rank, world_size
from sharding.remote.orders import Trainers
from trainer.build import build_local_source, sync_settings
from trainer.config.placement import training_ranks
from trainer.config.schema import TrainConfig
from trainer.distributed import store
from trainer.engines import rank_device
from trainer.rollouts.local import LocalSource
from trainer.rollouts.pool import StepAbandoned
from trainer.rollouts.remote import send_rounds
from trainer.rollouts.round import GIVEN_UP, Order, Round
from trainer.run import processes
from trainer.run.checkpoint import random_states, restore_random_states
from trainer.run.keeper import late_to_leave
from trainer.run.meters import PhaseMeter
from trainer.run.watchdog import Watchdog
from trainer.start import begin


def generate(config: TrainConfig, watchdog: Watchdog, resources: ExitStack) -> Callable[[], None]:
    """Build this rank's engine and the receiver of its weights, and return the loop that carries
    out orders.

    The loop returns when the training ranks have no more orders. It raises RemoteError if they have
    failed.
    """
    start = begin(config, watchdog, resources, watchdog.current_phase)
    config = start.config
    trainers = Trainers(start.leader, store(), rank(EVERYBODY), sync_settings(config))

    def late() -> bool:
        # Never with a lag: the checkpoint needs these answers, since their weights will be gone
        return not config.rollout.lag and late_to_leave(config.checkpoint, watchdog)

    source = build_local_source(start, resources, late)
    meter = PhaseMeter(config, rank_device(config), start.leader, watchdog)

    def run() -> None:
        if grace := config.checkpoint.grace_s:
            processes.hold_signals(grace, watchdog.call_all)
        deadline = config.run.first_step_deadline_s
        while True:
            # The training ranks may need this long for a step and for their start or end.
            with watchdog.phase("waiting for weights", 2 * deadline):
                order = trainers.hear()
            if order["kind"] == "end":
                break
            with watchdog.phase(f"{order['kind']} {abs(order['step'])}", deadline):
                carry_out(order, config, trainers, source, meter)
        if order["failed"]:
            if watchdog.called_at is not None:
                processes.interrupt_now()
            raise RemoteError("the training ranks have failed: see their output above")

    return run


def carry_out(
    message: dict[str, Any],
    config: TrainConfig,
    trainers: Trainers,
    source: LocalSource,
    meter: PhaseMeter,
) -> None:
    """Receive the order's weights, sample or evaluates with them, and send the answers to the
    training ranks.
    """
    trainers.receive(message["version"])
    if states := message["random_states"].get(rank(EVERYBODY)):
        restore_random_states(json.loads(states), "an order")
    order = Order(message["step"], message["version"], message["prompts"])
    rounds: list[Round] = []
    failure: Exception | None = None
    try:
        if order.evaluates:
            with meter.phase("eval", source.waits_for):
                rounds = source.evaluate(order)
        else:
            with meter.phase("rollout", source.waits_for):
                rounds = source.produce(order).rounds
            source.add_state(rounds[-1], json.dumps(random_states()))
    except StepAbandoned:
        rounds = [Round(order.step, word=GIVEN_UP)]
    except NotFiniteError as error:
        rounds = [Round(order.step, word=str(error))]
    except Exception as error:
        failure = error
    meter.take()
    send_rounds(training_ranks(config, world_size(EVERYBODY)), rounds, failure)
