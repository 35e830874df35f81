"""The buckets of an update: gathered into one buffer while the workers read the other."""

from collections.abc import Callable, Iterator
from typing import Any

from sharding.send.buckets import BucketPlan, gather
from sharding.send.source import WeightSource
from sharding.transports.base import Transport
from sharding.wire.staging import BUFFERS
from sharding.workers import Workers


def push(
    source: WeightSource, plan: BucketPlan, transport: Transport, workers: Workers, kind: str, stamps: Iterator[int]
) -> list[list[dict[str, Any]]]:
    """Gather each bucket into one buffer while the workers read the other; returns their answers for each bucket.
    Collective over the trainer's ranks: gathering continues when a worker, or the transport, has failed.
    """
    answers = []

    def reuse(buffer: int) -> None:
        answers.append(workers.collect())  # they are done with what this buffer held
        _note_failure(workers, transport.wait, buffer)

    for number, bucket in enumerate(plan.buckets):
        at, mark = number % BUFFERS, next(stamps)
        if number >= BUFFERS:
            reuse(at)
        gather(source, bucket, transport.buffers[at], mark)
        fields: dict[str, Any] = {
            "buffer": at,
            "nbytes": bucket.nbytes,
            "stamp": mark,
            "pieces": [(p.name, p.dtype, p.shape, p.offset) for p in bucket.pieces()],
            "stretches": [(s.name, s.dtype, s.first, s.count, s.offset) for s in bucket.stretches()],
        }
        where = _note_failure(workers, transport.send, kind, fields, workers.error is not None)
        workers.post(kind, **(fields | (where or {})))
    for number in range(max(len(plan.buckets) - BUFFERS, 0), len(plan.buckets)):
        reuse(number % BUFFERS)
    return answers


def _note_failure(workers: Workers, action: Callable[..., Any], *arguments: Any) -> Any:
    """Call it; an error is noted, since this rank has others to gather with and must not leave them alone."""
    try:
        return action(*arguments)
    except Exception as error:
        workers.fail(error)
