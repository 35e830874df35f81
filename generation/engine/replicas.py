"""One engine that is several: replicas in Ray actors, wherever a cluster has room (`engine.placement: ray`).

Two ways were weighed. Each replica could be a rank of the run, which could then neither lose nor gain one. Or, as here,
one rank holds them all behind the methods of a single `Engine`: rollouts, slices, tools and servers know nothing of it.
A request goes to the replica that has the fewest; where that one dies, it is asked of another, with the same seed. One
that has died is started anew, and one that has started gets weights with the next update (`sharding.apart.orders`),
and requests from then on. Ray carries calls and answers; it is imported when the first replica is made, not before.
"""

import asyncio
import itertools
import logging
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from generation.engine.devices import device_names
from generation.engine.engine import Engine, Stream, first_not_finite
from generation.engine.lifecycle import EngineLifecycle
from generation.engine.settings import EngineSettings
from generation.engine.vllm_compat import frontend
from generation.undoing import undone_by

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

log = logging.getLogger(__name__)

_ANSWER_SECONDS = 15.0  # more than `Engine.death` takes
_LOOK_SECONDS = 0.5
_ROOM_SECONDS = 20.0  # in which an actor is placed where there is room
_HOUR = 3600.0
_OF_ONE_MACHINE = {
    "RAY_worker_niceness": "0",  # else its processes yield to whatever else the machine does
    # Else it takes the machine's address on the network for 127.0.0.1, and listens there and everywhere
    # (ray/_private/services.py, get_node_ip_address).
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}
_LONGEST_FOLDER = 45  # of characters: Ray has sockets 60 below it, of which Linux takes paths of 107


class ReplicaDied(RuntimeError):
    """The process of a replica, or its engine, has ended."""


class ActorEngine(Engine):
    """The engine in an actor, on whose event loop all of its coroutines run."""

    async def shutdown(self) -> None:
        """Stop the engine's processes; safe to call twice."""
        await asyncio.to_thread(self.close)  # it stops a task of this loop, too


class Actor:
    """An engine in a Ray actor, called by awaiting, or for ObjectRefs. `handle`: Ray's own.

    Its engine's workers are its children, and all their devices its one bundle, so that they are on one node, where Ray
    tells it which by CUDA_VISIBLE_DEVICES. The engine queues requests, not Ray. Ray is imported here, and not before.
    """

    def __init__(self, kind: type[Engine], *arguments: Any, cpus: int, gpus: float, **options: Any) -> None:
        """Ask Ray for an actor that makes a `kind` of `arguments`. `options` are Ray's own, such as a name."""
        import ray

        options |= {"num_cpus": cpus, "num_gpus": gpus, "max_concurrency": 1 << 16}
        self.handle = ray.remote(kind).options(**options).remote(*arguments)

    def submit(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Start a method of the engine; what Ray calls the ObjectRef of its result."""
        return getattr(self.handle, method).remote(*args, **kwargs)

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """The result of a coroutine method of the engine; cancelling the call cancels the method. Raises what it
        raises, and Ray's own errors.
        """
        import ray

        answer = self.submit(method, *args, **kwargs)
        try:
            return await answer
        except asyncio.CancelledError:
            ray.cancel(answer)
            raise
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error

    def kill(self) -> None:
        """End the actor, and its engine with it."""
        import ray

        ray.kill(self.handle)

    async def close(self) -> None:
        """Stop the engine's processes, then the actor; one that has died already is not an error."""
        import ray

        try:
            await self.call("shutdown")
        except ray.exceptions.RayError as error:
            log.warning("an actor did not stop its engine: %s", error)
        with suppress(ray.exceptions.RayError):  # whoever started the cluster may have ended it
            self.kill()


class Replica(Actor):
    """An engine in an actor. `requests`: that it is answering; `started`: when it has been placed and can answer."""

    def __init__(self, settings: EngineSettings, name: str) -> None:
        """Ask Ray for the actor and start its engine; on the loop that will use it."""
        workers = settings.tensor_parallel_size
        super().__init__(ActorEngine, settings, cpus=workers, gpus=workers if settings.device_indices else 0)
        self.name, self.requests = name, 0
        self.placed = asyncio.ensure_future(self.call("__ray_ready__"))
        self.started = asyncio.ensure_future(self.call("start"))

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method as `Actor.call`. Raises ReplicaDied where the actor or its engine has ended."""
        import ray
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            return await super().call(method, *args, **kwargs)
        except EngineDeadError as error:
            raise ReplicaDied(f"{self.name}: its engine has ended") from error
        except ray.exceptions.RayError as error:
            raise ReplicaDied(f"{self.name}: {str(error).splitlines()[0].rstrip('.')}") from error

    def kill(self) -> None:
        """Cancels the start, and kills the actor as `Actor.kill`."""
        for task in (self.placed, self.started):
            task.cancel()
        super().kill()


class ReplicatedEngine(Engine):
    """Replicas as one engine. `members`: those that have the weights of the latest update, or are to get them."""

    def __init__(self, settings: EngineSettings, count: int, restarts: int) -> None:
        """`count` replicas with these settings each, of which `restarts` may die within an hour and are replaced."""
        super().__init__(settings)
        self._count = count
        self._restarts = restarts
        self.members: list[Replica] = []
        self._coming: list[Replica] = []
        self._numbers = itertools.count()
        self._calls: list[asyncio.Future[Any]] = []
        self._deaths: list[float] = []
        self._changed = False  # since `join`
        self._closed = True

    async def start(self, stat_loggers: list[Any] | None = None) -> None:
        """Start all replicas that there is room for; others when there is."""
        self.state = EngineLifecycle()
        self.adapter = None
        self._closed = False
        for _ in range(self._count):
            self._begin_another()
        no_room = asyncio.get_running_loop().call_later(_ROOM_SECONDS, self._note_no_room)
        while not (started := [r for r in self._coming if r.started.done()]) or len(started) < sum(
            r.placed.done() for r in self._coming
        ):
            await asyncio.wait([r.started for r in self._coming], timeout=_LOOK_SECONDS)
            for replica in [r for r in self._coming if r.started.done() and r.started.exception()]:
                await replica.started  # settings that vLLM does not take are not mended by another start
        no_room.cancel()

    def _note_no_room(self) -> None:
        if not any(replica.placed.done() for replica in self._coming):
            import ray

            workers, on_gpus = self.settings.tensor_parallel_size, bool(self.settings.device_indices)
            needed = f"{workers} {'GPUs and CPUs' if on_gpus else 'CPUs'}, all of one machine"
            has = {name: amount for name, amount in ray.available_resources().items() if name in ("CPU", "GPU")}
            log.warning("waiting for room on the Ray cluster: an engine needs %s, and free are %s in all", needed, has)

    def _begin_another(self) -> None:
        replica = Replica(self.settings, f"engine {next(self._numbers)}")
        replica.started.add_done_callback(lambda _: self._note_start(replica))
        self._coming.append(replica)

    def _note_start(self, replica: Replica) -> None:
        """Say so in the midst of a run."""
        if self.state.latest >= 0 and not replica.started.cancelled() and replica.started.exception() is None:
            ready = len(self.members) + sum(coming.started.done() for coming in self._coming)
            log.warning("%s has started: %d of %d from the next update on", replica.name, ready, self._count)

    async def join(self) -> bool:
        """Make members of those that have started, and wait for one where there is none; whether members are others
        than at the last call. Raises RuntimeError: too many have died.
        """
        while True:
            for replica in [r for r in self._coming if r.started.done()]:
                try:
                    await replica.started
                except ReplicaDied as death:
                    self._lose(replica, str(death))
                else:
                    self._coming.remove(replica)
                    self.members.append(replica)
                    self._changed = True
            if self.members:
                changed, self._changed = self._changed, False
                return changed
            await asyncio.wait([r.started for r in self._coming], return_when=asyncio.FIRST_COMPLETED)

    def _lose(self, replica: Replica, how: str) -> None:
        """Replace a replica that has died, if it was not done yet. Raises RuntimeError: too many have."""
        if replica not in (*self.members, *self._coming):
            return
        replicas = self.members if replica in self.members else self._coming
        replicas.remove(replica)
        replica.kill()
        self._changed, now = True, time.monotonic()
        self._deaths = [at for at in self._deaths if now - at < _HOUR] + [now]
        left = self._restarts - len(self._deaths)
        if left < 0:
            deaths = f"{len(self._deaths)} replicas have died within an hour"
            raise RuntimeError(f"{deaths}, more than engine.restarts={self._restarts} allows; the last: {how}")
        log.warning("%s: another is started, %d of engine.restarts left in this hour", how, left)
        self._begin_another()

    async def settle(self) -> bool:
        """After a call to all that has failed: wait for its end on each, and replace those that have died; whether any
        has since `join`.
        """
        await asyncio.gather(*self._calls, return_exceptions=True)
        for replica in [*self.members]:
            try:
                died = await asyncio.wait_for(replica.call("death"), _ANSWER_SECONDS)
            except (ReplicaDied, TimeoutError) as error:
                died = str(error) or f"{replica.name} does not answer"
            if died:
                self._lose(replica, died)
        return self._changed

    async def _all(self, calls: list[Coroutine[Any, Any, Any]]) -> list[Any]:
        """Returns the results of calls to all members. Raises the first error at once; `settle` waits for the rest."""
        self._calls = [asyncio.ensure_future(call) for call in calls]
        return await asyncio.gather(*self._calls)

    async def submit(self, prompt: dict[str, Any], params: "SamplingParams", request_id: str, **options: Any) -> Stream:
        """Samples one request as `Engine.submit`, on the least busy replica; gives only the complete output."""
        options.pop("lora_request", None)  # a replica knows the adapter that the latest update has brought
        final = params.clone()
        final.output_kind = type(final.output_kind).FINAL_ONLY
        while True:
            if not self.members:
                raise RuntimeError("all replicas of the engine have died, and with them the weights of this step")
            replica = min(self.members, key=lambda member: member.requests)
            replica.requests += 1
            try:
                version = self.state.usable_version()
                output = await replica.call("request", prompt, final, policy_version=version, **options)
                break
            except ReplicaDied as death:
                self._lose(replica, str(death))
            finally:
                replica.requests -= 1
        if self.not_finite is None:
            self.not_finite = first_not_finite(output)
        yield output

    async def prompt_logprobs_of_all(self, token_ids: list[int]) -> list[list[float]]:
        """Returns the log-probabilities of a prompt's tokens, one list per replica."""
        return await self._all([member.call("prompt_logprobs", token_ids) for member in self.members])

    async def call_workers(self, method: str, *args: Any, timeout: float | None = None, **kwargs: Any) -> list[Any]:
        """Calls a method of all workers, as `Engine.call_workers`; results in order of replicas and workers."""
        kwargs["timeout"] = timeout
        results = await self._all([member.call("call_workers", method, *args, **kwargs) for member in self.members])
        return [*itertools.chain(*results)]

    async def join_group(self, ip: str, port: int, world_size: int, train_world_size: int, timeout: float) -> None:
        """Have the workers of all members join a weights group, in the order of the members. Raises as `_all`."""
        size, group = self.settings.tensor_parallel_size, (ip, port, world_size, train_world_size, timeout)
        places = enumerate(self.members)
        await self._all([member.call("ask_workers", "init_collective", n * size, *group) for n, member in places])

    async def receive(self, method: str, *args: Any, version: int | None = None) -> list[dict[str, Any]]:
        """Updates the weights of all replicas, as `Engine.receive`; here `version` is required."""
        assert version is not None
        self.state.begin_sync()
        with undone_by(self.state.fail_sync):
            results = await self._all([m.call("receive", method, *args, version=version) for m in self.members])
        self.state.finish_sync(version)
        outcomes = [*itertools.chain(*results)]
        self.adapter = next((outcome.get("adapter") for outcome in outcomes), None)
        return outcomes

    @property
    def llm(self) -> "AsyncLLM":
        """The `AsyncLLM` that a server asks for everything except answers, such as the tokenizer."""
        if self._llm is None:
            self._llm = frontend(self.settings)
        return self._llm

    async def death(self) -> str:
        """Returns why all replicas have ended, in words; "" while at least one runs or is starting."""
        return "" if self.members or self._coming else "all its replicas have died"

    @property
    def is_closed(self) -> bool:
        """True after `close`."""
        return self._closed

    def close(self) -> None:
        """Stop all replicas, and the cluster where it is this run's own; safe to call twice."""
        if not self._closed:
            import ray

            self._closed, replicas = True, [*self.members, *self._coming]
            self.members = []
            self._coming = []
            with suppress(ray.exceptions.RayError):
                ray.wait([r.submit("shutdown") for r in replicas], num_returns=len(replicas), timeout=_ANSWER_SECONDS)
            for replica in replicas:
                with suppress(ray.exceptions.RayError):
                    replica.kill()
            self.state.close()
            ray.shutdown()


def ray_module() -> Any:
    """Ray, imported now; ImportError with the remedy, where it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise ImportError("ray is not installed. Please install it with `pip install ray`.") from error
    return ray


def join_cluster(cpus: int, taken: int = 0) -> None:
    """Connect this process to the cluster of RAY_ADDRESS, or to one of this machine and this process alone.

    The latter is on loopback, has no dashboard, takes nobody who does not know its secret, and ends with the thread
    that calls this (prctl(2), PR_SET_PDEATHSIG). It has the machine's GPUs but for the first `taken`, which other
    ranks train on; this process sees no others from then on.

    Raises:
        ImportError: Ray is not installed; with the remedy.
        ValueError: all GPUs are taken.
    """
    alone = not os.environ.get("RAY_ADDRESS")
    if alone and taken:
        names = device_names()
        if not names[taken:]:
            raise ValueError(f"all {len(names)} GPUs of this machine train: start fewer ranks, or name a Ray cluster")
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[taken:])
    if alone:
        os.environ |= _OF_ONE_MACHINE
        if "ray" not in sys.modules:  # it reads these once
            os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    ray = ray_module()
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "CRITICAL", "namespace": "hotbunk"}
    if not alone:
        ray.init(**quiet)
        return
    from ray._private import ray_constants

    ray_constants.ENABLE_RAY_CLUSTER = False  # where somebody has imported it before
    folder = f"{tempfile.gettempdir()}/ray"
    options = {"_temp_dir": folder} if len(folder) <= _LONGEST_FOLDER else {}
    cores = max(cpus, os.cpu_count() or 1)
    ray.init("local", num_cpus=cores, include_dashboard=False, _node_ip_address="127.0.0.1", **options, **quiet)


def join_once(cpus: int) -> Callable[[], None]:
    """Join as `join_cluster`, unless this process is in a cluster already; returns what leaves one that it joined."""
    if (ray := sys.modules.get("ray")) and ray.is_initialized():
        return lambda: None
    join_cluster(cpus)
    return sys.modules["ray"].shutdown  # type: ignore[no-any-return]


def cluster_address() -> str:
    """Where the cluster's other machines reach its first one, HOST:PORT; "" where there is no other machine."""
    import ray

    nodes = [node for node in ray.nodes() if node["Alive"]]
    return ray.get_runtime_context().gcs_address if len({node["NodeManagerHostname"] for node in nodes}) > 1 else ""
