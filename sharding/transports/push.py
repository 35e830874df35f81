"""The buckets of an update: gathered into one buffer while the workers read the other."""

from collections.abc import Callable, Iterator
from typing import Any

from sharding.send.buckets import BucketPlan, gather
from sharding.send.source import WeightSource
from sharding.transports.base import Transport
from sharding.wire.staging import BUFFERS
from sharding.workers import Workers


def push(
    source: WeightSource,
    plan: BucketPlan,
    transport: Transport,
    workers: Workers,
    kind: str,
    stamps: Iterator[int],
) -> list[list[dict[str, Any]]]:
    """Gather each bucket into one buffer while the workers read the other, and return their answers
    for each bucket.

    Collective over the trainer's ranks: gathering continues when a worker, or the transport, has
    failed.
    """
    answers = []

    def reuse(buffer: int) -> None:
        answers.append(workers.collect())  # they are done with the buffer's former content
        _note_failure(workers, transport.wait, buffer)

    for number, bucket in enumerate(plan.buckets):
        # Gather the bucket into the buffer that the workers have finished with.
        buffer = number % BUFFERS
        mark = next(stamps)
        if number >= BUFFERS:
            reuse(buffer)
        gather(source, bucket, transport.buffers[buffer], mark)

        # Offer it to them, and go on without waiting for their answers.
        fields: dict[str, Any] = {
            "buffer": buffer,
            "nbytes": bucket.nbytes,
            "stamp": mark,
            "pieces": [(p.name, p.dtype, p.shape, p.offset) for p in bucket.pieces()],
            "stretches": [(s.name, s.dtype, s.first, s.count, s.offset) for s in bucket.stretches()],
        }
        where = _note_failure(workers, transport.send, kind, fields, workers.error is not None)
        workers.post(kind, **(fields | (where or {})))

    # Wait for the last answers.
    for number in range(max(len(plan.buckets) - BUFFERS, 0), len(plan.buckets)):
        reuse(number % BUFFERS)
    return answers


def _note_failure(workers: Workers, action: Callable[..., Any], *arguments: Any) -> Any:
    """Call an action and note its error, since this rank has to go on gathering with the others."""
    try:
        return action(*arguments)
    except Exception as error:
        workers.fail(error)
