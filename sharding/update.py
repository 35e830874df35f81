"""An update of the workers' weights: announce it, have them brought, finish, verify, and end; or abort it.

It is the same for a rank's own worker, for all workers of engines apart, and where nobody answers; and for every way:
how the bytes get to the workers is the way's own `transfer`.

Every rank enters the same collectives, whatever happens to its own worker: a rank whose worker failed continues to
gather without sending, and the failure is raised on all ranks together at the next agreement.
"""

import itertools
from collections.abc import Collection, Sequence
from typing import Any

from sharding.ranks import RemoteError, agree, agreed, dead_ranks, exchange, rank
from sharding.report import AdapterFormat, SyncReport, SyncSettings
from sharding.send.buckets import BucketPlan
from sharding.send.push import DigestCheck
from sharding.send.source import WeightSource
from sharding.transports.base import Transport, as_transport
from sharding.transports.push import push
from sharding.wire.channel import SyncError
from sharding.wire.manifest import SourceParameter, first_names, manifest_of
from sharding.wire.staging import BUFFERS
from sharding.workers import Workers

ABORT_SECONDS = 5.0
"""Longest wait for workers to leave an update that failed; they answer at once, unless they hang."""


class Update:
    """Brings workers the weights of a source, by one way, again and again. See `Transfer` for what ways see of it.

    Attributes:
        settings: may be replaced between updates.
        workers, report: of the latest update.
    """

    def __init__(
        self,
        source: WeightSource,
        transport: Transport,
        settings: SyncSettings,
        adapter: AdapterFormat | None = None,
        keep_buffers: bool = False,
    ) -> None:
        """`adapter`: weights are the factors of one. `keep_buffers`: keep the buffers between updates."""
        self.settings = settings
        self.transport = as_transport(transport)
        self._adapter = adapter
        self._keep_buffers = keep_buffers
        self._stamps = itertools.count(1)
        self.use(source)

    def use(self, source: WeightSource) -> None:
        """Take weights from this source from the next update on; on all ranks."""
        self.source = source
        self.parameters = source.parameters()

    def run(self, report: SyncReport, workers: Workers, session: int = 0, calls: Sequence[Any] = ()) -> list[Any]:
        """Bring the workers to `report.version`, and verify that they hold it. Collective.

        Args:
            report: is filled in.
            session: a number that no update had before.
            calls: of the engines, futures that end with the update.

        Returns the results of the calls. Raises RemoteError: on all ranks, naming the worker and the weight.
        """
        self.report = report
        self.workers = workers
        self.session = session
        self._repeatable = getattr(self.source, "repeatable", True)  # else weights are gone once they are sent
        self._verify = self.settings.verify if self._repeatable else "off"
        self._capacity = 0
        self._last_sent = self.transport.last_sent
        if self._last_sent is not None and (self._verify == "off" or not hasattr(self.source, "own_values")):
            self._last_sent.forget("digests did not compare all weights of the update before")
            self._last_sent = None  # since nothing would prove a patch
        try:
            if not self._bring():
                self._bring()
            return self._end(calls)
        except BaseException as error:
            if self._last_sent is not None:
                self._last_sent.forget("the update before broke off")
            self._abort(error)
            if isinstance(error, RuntimeError) and not isinstance(error, RemoteError) and (whom := dead_ranks()):
                raise RemoteError(f"rank {rank()} lost contact with {whom} during a weight update: {error}") from error
            raise

    def _bring(self) -> bool:
        """Bring the weights. Returns False if workers that patched them hold something else: they need all of them."""
        again, verify = self._verify, self._verify
        if self._last_sent is not None:  # a wrong word would stay, as long as it does not change
            verify = "full"
        check = DigestCheck(self.source, self.parameters, verify, self.report.version, again)
        self._terms = self._announce(check.request)
        self.transport.transfer(self)
        return self._finish(check)

    def _announce(self, verify: dict[str, Any]) -> list[dict[str, Any]]:
        """Announce the update. Returns the terms of each worker:

        `plain`: it keeps weights as they are sent, so that they can be compared; `views`: what it reads of the weights
        to `verify`; `whole`: weights that have to arrive whole, None: all; `records`: it notes down in this update what
        it can replay in later ones.
        """
        # The session is a number that no adapter had before, so nothing cached by number or name can be an old one's.
        adapter = None if self._adapter is None else {"number": self.session, "config": self._adapter.config}
        fields = {"version": self.report.version, "replay": self.settings.replay, "adapter": adapter, "verify": verify}
        self.workers.post("begin", weights=manifest_of(self.parameters), **fields)
        return self.workers.collect()

    def post(self, kind: str, **fields: Any) -> None:
        """Send this rank's workers a message."""
        self.workers.post(kind, **fields)

    def needed_whole(self) -> set[str] | None:
        """Return the weights that the loaders of some worker need whole; None: all. Collective."""
        asked = [names for of_rank in exchange([term["whole"] for term in self._terms]) for names in of_rank]
        return None if None in asked else set().union(*asked)

    def push_all(self) -> None:
        """Bring every parameter through buckets. Collective."""
        larger = any(parameter.nbytes > self.settings.bucket_bytes for parameter in self.parameters)
        cuts = larger and self.transport.cuts and self._repeatable  # alike on all ranks
        parameters, whole = self.parameters, self.needed_whole() if cuts or self._last_sent is not None else None
        if self._last_sent is not None:
            self._last_sent.begin(parameters, whole)
            self.report.unpatched = self._last_sent.unpatched
            if whole:  # first, so that they share few buckets with weights that can be patched
                parameters = sorted(parameters, key=lambda p: whole.isdisjoint(piece.name for piece in p.pieces))
        self.push(parameters, whole if cuts else None)
        self.report.spared += 0 if self._last_sent is None else self._last_sent.spared

    def push(self, parameters: list[SourceParameter], unsplit: Collection[str] | None) -> None:
        """Bring these parameters through buckets, as `Transfer.push` says. Collective."""
        plan = BucketPlan(parameters, self.settings.bucket_bytes, unsplit)
        with agreed("preparing the buffers"):
            self.transport.begin(self.report.version, plan, self.workers.error is None)
        self._capacity, self.report.staging_bytes = plan.capacity, BUFFERS * plan.capacity
        self._push(plan, "bucket")

    def _push(self, plan: BucketPlan, kind: str) -> list[list[dict[str, Any]]]:
        self.report.nbytes += plan.nbytes
        return push(self.source, plan, self.transport, self.workers, kind, self._stamps)

    def _finish(self, check: DigestCheck) -> bool:
        """Check that every weight is accounted for, and compare them. Returns what `_bring` does.

        Weights that workers leave to their loaders are sent again, for those to compare, unless they are re-processed:
        that takes a probe.
        """
        self.workers.post("finish")
        check.expect(self._terms)  # while the workers finish
        answers = self.workers.collect_last()
        agree(self.workers.error, "sending weights")
        if self._verify == "off":
            return True
        different = check.different(answers)
        if check.undigested:
            plan = BucketPlan(check.undigested, self._capacity)  # they may be packed otherwise than among all
            for answers in self._push(plan, "compare"):
                for names, answer in zip(different, answers, strict=False):
                    names += answer["different"]
        wrong = "; ".join(
            f"the worker on {link.worker} does not hold what was sent: {first_names(names)} differ"
            for link, names in zip(self.workers.links, different, strict=False)
            if names
        )
        if self._last_sent is not None:
            agree(self.workers.error, "verifying weights")
            if any(exchange(bool(wrong and self._last_sent.spared))):
                self._last_sent.forget(wrong)
                return False
        agree(self.workers.error or (SyncError(wrong) if wrong else None), "verifying weights")
        self.report.verified = self._verify if check.comparable else ""
        return True

    def _end(self, calls: Sequence[Any]) -> list[Any]:
        # On CUDA the KV cache needs the buffers' place; on CPU fresh pages cost more than kept ones.
        less = self.transport.shares or any(term["records"] for term in self._terms)  # will do from now on
        release = less or not self._keep_buffers
        self.workers.post("end", close=release)
        for answer in self.workers.collect()[:1]:
            self.report.staging_opened, self.report.staging_closed = answer.get("opened", 0), answer.get("closed", 0)
        self.report.messages = self.workers.messages
        agree(self.workers.error, "ending the update")
        with agreed("finishing the update"):
            results = [call.result(self.settings.timeout) for call in calls]
            self.transport.finish(release)
        if self._last_sent is not None:
            self.report.resent = self._last_sent.commit()
        return results

    def _abort(self, error: BaseException) -> None:
        """Get the workers out of their receive loops, and the way out of the update; never raises."""
        reason = str(self.workers.error or error) or type(error).__name__
        patience = self.settings.timeout if self.transport.survives else ABORT_SECONDS
        if self.workers.abort(reason, patience):
            self.transport.leave(reason)
        else:
            self.transport.abort(reason)
