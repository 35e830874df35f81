"""An update of the workers' weights. It is announced, the weights are transferred, each worker
finishes loading, the weights are verified, and the update ends; or it is aborted.

The update is the same whether a rank speaks to its own worker, to all workers of engines on other
devices, or to none. It is also the same for every transport, whose method `transfer` decides how
the bytes reach the workers.

Every rank enters the same collectives, whatever happens to its own worker: a rank whose worker
failed continues to gather without sending, and the failure is raised on all ranks together at the
next agreement.
"""

import itertools
from collections.abc import Collection, Sequence
from typing import Any

from sharding.ranks import RemoteError, agree, agreed, dead_ranks, exchange, rank
from sharding.report import AdapterFormat, SyncReport, SyncSettings
from sharding.send.buckets import BucketPlan
from sharding.send.source import StreamSource, WeightSource
from sharding.tenants import VersionedPolicy
from sharding.transports.base import Transport, as_transport
from sharding.transports.push import push
from sharding.verify import Probe, Verification, can_digest
from sharding.wire.channel import SyncError
from sharding.wire.manifest import SourceParameter, manifest_of
from sharding.wire.staging import BUFFERS
from sharding.workers import Workers

ABORT_SECONDS = 5.0
"""Longest wait for workers to leave an update that failed; they answer at once, unless they
hang.
"""


class Update:
    """Updates of workers through one transport. The caller's lines for each update:

        report = SyncReport(version)
        # Collective; raises RemoteError on all ranks:
        results = update.run(report, Workers(link), session=number)
        probe = update.probe(policy)  # None, unless nothing else could verify it

    Attributes: settings: may be replaced between updates. transport: carries the bytes to the
        workers; it sees the part of an update that is in `Transfer`. parameters: the parameters of
        the source. workers, report, session, verification: those of the latest update.
    """

    def __init__(
        self,
        source: WeightSource,
        transport: Transport,
        settings: SyncSettings,
        adapter: AdapterFormat | None = None,
        keep_buffers: bool = False,
    ) -> None:
        """Prepare updates from `source`. `adapter`: the format, if the weights are the factors of
        an adapter. `keep_buffers`: keep the buffers between updates.
        """
        self.settings = settings
        self.transport = as_transport(transport)
        self.workers = Workers()
        self.report = SyncReport(version=-1)
        self.session = 0
        self._adapter = adapter
        self._keep_buffers = keep_buffers
        self._stamps = itertools.count(1)
        self._terms: list[dict[str, Any]] = []  # of each worker, see `_announce`
        self._capacity = 0  # bytes of a bucket
        self.use(source)
        self.verification = Verification(source, self.parameters, settings.verify, version=-1)

    def use(self, source: WeightSource) -> None:
        """Send the weights of this source from the next update on. All ranks must call it."""
        self.source = source
        self.parameters = source.parameters()

    def run(
        self, report: SyncReport, workers: Workers, session: int = 0, calls: Sequence[Any] = ()
    ) -> list[Any]:
        """Bring the workers to `report.version`, and verify that they hold it. Collective.

        Args:
            report: is filled in.
            workers: those that this rank speaks to.
            session: a number that no update had before.
            calls: of the engines, futures that end with the update.

        Returns the results of the calls. Raises RemoteError: on all ranks, naming the worker and
        the weight.
        """
        self.report = report
        self.workers = workers
        self.session = session
        self._capacity = 0
        # One update, or two if patches do not lead to the right weights.
        try:
            if not self._bring():
                # Patches have left a worker with wrong weights: this time everything is sent.
                self._bring()
            return self._end(calls)
        except BaseException as error:
            # Workers wait for messages, so they are told to leave before the error is raised. The
            # error of a lost connection says little, so the ranks that have ended are named.
            self._abort(error)
            unexplained = isinstance(error, RuntimeError) and not isinstance(error, RemoteError)
            if unexplained and (culprits := dead_ranks()):
                lost = f"rank {rank()} lost contact with {culprits} during a weight update"
                raise RemoteError(f"{lost}: {error}") from error
            raise

    def _bring(self) -> bool:
        """Send the weights and verify them. Return False if the transport has to send all of them
        again.
        """
        # Announce names, shapes and dtypes, and the weights to digest. From here on the workers
        # hold no version.
        verify = self.settings.verify
        digest_all = self.transport.needs_proof(can_digest(self.source, verify))
        version = self.report.version
        verification = Verification(self.source, self.parameters, verify, version, digest_all=digest_all)
        self.verification = verification
        self._terms = self._announce(verification.request)

        # Transfer the weights, in buckets or otherwise; workers load each bucket while the next one
        # is gathered.
        self.transport.transfer(self)

        # Finish: every worker accounts for every weight, and digests its own while this rank does
        # the same.
        self.workers.post("finish")
        verification.expect(self._terms)
        answers = self.workers.collect_last()
        agree(self.workers.error, "sending weights")

        # Verify: no worker may hold anything else than was sent.
        if not verification.compares:
            return True
        wrong = verification.verdict(self.workers, answers, self._send_again)
        if self.transport.begins_again(wrong, self.workers.error):
            return False
        agree(self.workers.error or (SyncError(wrong) if wrong else None), "verifying weights")
        self.report.verified = verification.verified
        return True

    def _announce(self, verify: dict[str, Any]) -> list[dict[str, Any]]:
        """Announce the update, and return the terms of each worker.

        `plain`: the worker keeps weights unchanged, so that they can be compared; `views`: the
        elements that it reads of the weights to `verify`; `whole`: weights that have to arrive
        whole, None: all; `records`: it records in this update the copies that it can replay in
        later ones.
        """
        # The session is a number that no adapter had before, so nothing cached by number or name
        # can be an old one's.
        adapter = (
            None if self._adapter is None else {"number": self.session, "config": self._adapter.config}
        )
        fields = {
            "version": self.report.version,
            "replay": self.settings.replay,
            "adapter": adapter,
            "verify": verify,
        }
        self.workers.post("begin", weights=manifest_of(self.parameters), **fields)
        return self.workers.collect()

    def post(self, kind: str, **fields: Any) -> None:
        """Send this rank's workers a message."""
        self.workers.post(kind, **fields)

    def needed_whole(self) -> set[str] | None:
        """Return the weights that the loaders of some worker need whole; None: all. Collective."""
        needs = []
        for of_rank in exchange([term["whole"] for term in self._terms]):
            needs += of_rank
        return None if None in needs else set().union(*needs)

    def push_all(self) -> None:
        """Bring every parameter through buckets. Collective."""
        # Weights are cut if one is larger than a bucket, the transport can cut, and the source can
        # read a weight twice. All ranks decide alike, and only then exchange the loaders' needs.
        larger = any(parameter.nbytes > self.settings.bucket_bytes for parameter in self.parameters)
        repeatable = not isinstance(self.source, StreamSource)
        cuts = larger and self.transport.cuts and repeatable
        self.push(self.parameters, self.needed_whole() if cuts else None)

    def push(self, parameters: list[SourceParameter], unsplit: Collection[str] | None) -> None:
        """Bring these parameters through buckets, as `Transfer.push` says. Collective."""
        plan = BucketPlan(parameters, self.settings.bucket_bytes, unsplit)
        with agreed("preparing the buffers"):
            self.transport.begin(self.report.version, plan, self.workers.error is None)
        self._capacity = plan.capacity
        self.report.staging_bytes = BUFFERS * plan.capacity
        self._push(plan, "bucket")

    def _send_again(self, parameters: list[SourceParameter]) -> list[list[dict[str, Any]]]:
        """Send parameters for the workers' loaders to compare, and return the answers for each
        bucket. Collective.
        """
        plan = BucketPlan(parameters, self._capacity)  # they may be packed otherwise than among all
        return self._push(plan, "compare")

    def _push(self, plan: BucketPlan, kind: str) -> list[list[dict[str, Any]]]:
        self.report.nbytes += plan.nbytes
        return push(self.source, plan, self.transport, self.workers, kind, self._stamps)

    def _end(self, calls: Sequence[Any]) -> list[Any]:
        """Let the workers leave the update, and return the results of the engines' calls.
        Collective.
        """
        # On CUDA the KV cache needs the buffers' place; on CPU fresh pages cost more than kept
        # ones. Buffers are also given back where the next update needs smaller ones or none.
        shrinks = self.transport.shares or any(term["records"] for term in self._terms)
        release = shrinks or not self._keep_buffers
        self.workers.post("end", close=release)
        # The first worker's counts stand for all.
        for answer in self.workers.collect()[:1]:
            self.report.staging_opened = answer.get("opened", 0)
            self.report.staging_closed = answer.get("closed", 0)
        self.report.messages = self.workers.messages
        # The engines' calls end only now, since a worker has to leave its receive loop first.
        agree(self.workers.error, "ending the update")
        with agreed("finishing the update"):
            results = [call.result(self.settings.timeout) for call in calls]
            self.transport.finish(release)
        return results

    def _abort(self, error: BaseException) -> None:
        """Get the workers out of their receive loops, and the transport out of the update; never
        raises.
        """
        reason = str(self.workers.error or error) or type(error).__name__
        # A transport that survives is worth a long wait: it does not have to be connected again.
        patience = self.settings.timeout if self.transport.survives else ABORT_SECONDS
        if self.workers.abort(reason, patience):
            self.transport.leave(reason)
        else:
            self.transport.abort(reason)

    def probe(self, policy: VersionedPolicy) -> Probe | None:
        """Draw a probe for the latest update, if neither digests nor loaders could verify it; else
        None. Collective.
        """
        return self.verification.probe(policy, self._adapter)
