"""An engine of several replicas in Ray actors, wherever a cluster has room for them
(`engine.placement: ray`).

Replicas are not ranks of the run, which could then neither lose nor gain one. Instead, one rank
holds all replicas behind the methods of a single `Engine`, so that rollouts, slices, tools and
servers do not know of them. A request goes to the replica that has the fewest requests; if that
replica dies, the request goes to another one, with the same seed. A replica that has died is
replaced. One that has started gets weights with the next update (`sharding.remote.orders`), and
requests from then on. Ray carries calls and answers; it is imported when the first replica is made,
not before.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from generation.engine.engine import Engine, Stream
from generation.engine.lifecycle import EngineLifecycle
from generation.engine.settings import EngineSettings
from generation.engine.vllm_compat import frontend
from generation.exact_ids import first_not_finite
from generation.undoing import undone_by

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

log = logging.getLogger(__name__)

_ANSWER_SECONDS = 15.0  # more than `Engine.death` takes
_LOOK_SECONDS = 0.5  # between checks of which replicas have started
_ROOM_SECONDS = 20.0  # time within which Ray places an actor if there is room for it
_HOUR = 3600.0
_STOP_SECONDS = 20.0  # time within which an actor that answers has stopped its engine


class ReplicaDied(RuntimeError):
    """The process of a replica, or its engine, has ended."""


class ActorEngine(Engine):
    """The `Engine` inside a Ray actor, whose event loop runs all coroutines of the engine."""

    async def shutdown(self) -> None:
        """Stop the engine's processes; safe to call twice."""
        await asyncio.to_thread(self.close)  # on a thread, since it also stops a task of this loop


class Actor:
    """The caller's end of an engine in a Ray actor. `handle` is Ray's handle of the actor.

    The engine's workers are children of the actor's process. Their devices are one bundle, and so
    on one node, where Ray names them in CUDA_VISIBLE_DEVICES. Requests are queued by the engine,
    not by Ray. Ray is imported by the methods here, and not before.
    """

    def __init__(
        self, kind: type[Engine], *arguments: Any, cpus: int, gpus: float, **options: Any
    ) -> None:
        """Ask Ray for an actor that runs `kind(*arguments)`. `options` are Ray's, such as a
        name.
        """
        import ray

        options |= {"num_cpus": cpus, "num_gpus": gpus, "max_concurrency": 1 << 16}
        self.handle = ray.remote(kind).options(**options).remote(*arguments)

    def submit(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Start a method of the engine, and return Ray's ObjectRef of its result."""
        return getattr(self.handle, method).remote(*args, **kwargs)

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Return the result of a coroutine method of the engine; cancelling the call cancels the
        method.

        Raises the errors of the method, and Ray's.
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
        """Stop the engine's processes, then the actor; one that has died, or does not answer, is
        not an error.

        The end of an actor, too, ends its engine.
        """
        import ray

        try:
            async with asyncio.timeout(_STOP_SECONDS):
                await self.call("shutdown")
        except TimeoutError:
            log.warning("an actor did not stop its engine within %.0f s, and is killed", _STOP_SECONDS)
        except ray.exceptions.RayError as error:
            log.warning("an actor did not stop its engine: %s", error)
        with suppress(ray.exceptions.RayError):  # the cluster may have been ended by its owner
            self.kill()


class Replica(Actor):
    """One replica, in an actor of its own.

    Attributes:
        requests: the number of requests that it is answering.
        placed: a future that is done when Ray has placed the actor.
        started: a future that is done when the engine can answer.
    """

    def __init__(self, settings: EngineSettings, name: str) -> None:
        """Ask Ray for the actor and start its engine. Call it on the event loop that will use the
        replica.
        """
        workers = settings.tensor_parallel_size
        super().__init__(
            ActorEngine, settings, cpus=workers, gpus=workers if settings.device_indices else 0
        )
        self.name = name
        self.requests = 0
        self.placed = asyncio.ensure_future(self.call("__ray_ready__"))
        self.started = asyncio.ensure_future(self.call("start"))

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method as `Actor.call` does. Raises ReplicaDied where the actor or its engine has
        ended.
        """
        import ray
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            return await super().call(method, *args, **kwargs)
        except EngineDeadError as error:
            raise ReplicaDied(f"{self.name}: its engine has ended") from error
        except ray.exceptions.RayError as error:
            raise ReplicaDied(f"{self.name}: {str(error).splitlines()[0].rstrip('.')}") from error

    def kill(self) -> None:
        """Cancel the start, and kill the actor as `Actor.kill` does."""
        for task in (self.placed, self.started):
            task.cancel()
        super().kill()


class ReplicatedEngine(Engine):
    """Replicas acting as one engine. `members` are those that answer: they have the latest weights,
    or get the next.
    """

    def __init__(self, settings: EngineSettings, count: int, restarts: int) -> None:
        """Create an engine of `count` replicas with equal settings; at most `restarts` deaths an
        hour are allowed.
        """
        super().__init__(settings)
        self._count = count
        self._restarts = restarts
        self.members: list[Replica] = []
        self._starting: list[Replica] = []  # they become members in `join`, before an update
        self._numbers = itertools.count()
        self._calls: list[asyncio.Future[Any]] = []
        self._deaths: list[float] = []
        self._changed = False  # True if members have come or gone since `join`
        self._closed = True

    async def start(self, stat_loggers: list[Any] | None = None) -> None:
        """Start all replicas; return when those that the cluster has room for can answer, and at
        least one can.
        """
        self.state = EngineLifecycle()
        self.adapter = None
        self._closed = False
        for _ in range(self._count):
            self._start_another()
        no_room = asyncio.get_running_loop().call_later(_ROOM_SECONDS, self._log_no_room)
        try:
            while True:
                started = [r for r in self._starting if r.started.done()]
                placed = [r for r in self._starting if r.placed.done()]
                if started and len(started) >= len(placed):
                    break
                await asyncio.wait([r.started for r in self._starting], timeout=_LOOK_SECONDS)
                for replica in [r for r in self._starting if r.started.done() and r.started.exception()]:
                    await replica.started  # raises: settings that vLLM rejects would fail again
        finally:
            no_room.cancel()

    def _log_no_room(self) -> None:
        if not any(replica.placed.done() for replica in self._starting):
            import ray

            workers = self.settings.tensor_parallel_size
            on_gpus = bool(self.settings.device_indices)
            needed = f"{workers} {'GPUs and CPUs' if on_gpus else 'CPUs'} on one machine"
            has = {
                name: amount
                for name, amount in ray.available_resources().items()
                if name in ("CPU", "GPU")
            }
            log.warning(
                "waiting for room on the Ray cluster: an engine needs %s, the cluster has %s free",
                needed,
                has,
            )

    def _start_another(self) -> None:
        replica = Replica(self.settings, f"engine {next(self._numbers)}")
        replica.started.add_done_callback(lambda _: self._log_start(replica))
        self._starting.append(replica)

    def _log_start(self, replica: Replica) -> None:
        """Log that a replica has started, unless the run itself is still starting."""
        if (
            self.state.latest >= 0
            and not replica.started.cancelled()
            and replica.started.exception() is None
        ):
            starts = [
                r.started for r in self._starting if r.started.done() and not r.started.cancelled()
            ]
            ready = len(self.members) + sum(start.exception() is None for start in starts)
            log.warning(
                "%s has started: %d of %d replicas from the next update on",
                replica.name,
                ready,
                self._count,
            )

    async def join(self) -> bool:
        """Make members of the replicas that have started; wait for one if there is no member yet.

        Returns True if members have come or gone since the last call. Raises RuntimeError if too
        many have died.
        """
        while True:
            for replica in [r for r in self._starting if r.started.done()]:
                try:
                    await replica.started
                except ReplicaDied as death:
                    self._lose(replica, str(death))
                else:
                    self._starting.remove(replica)
                    self.members.append(replica)
                    self._changed = True
            if self.members:
                changed = self._changed
                self._changed = False
                return changed
            await asyncio.wait([r.started for r in self._starting], return_when=asyncio.FIRST_COMPLETED)

    def _lose(self, replica: Replica, death: str) -> None:
        """Replace a replica that has died, unless it has been replaced. Raises RuntimeError if too
        many have died.
        """
        if replica not in (*self.members, *self._starting):
            return
        replicas = self.members if replica in self.members else self._starting
        replicas.remove(replica)
        replica.kill()
        self._changed, now = True, time.monotonic()
        self._deaths = [at for at in self._deaths if now - at < _HOUR] + [now]
        left = self._restarts - len(self._deaths)
        if left < 0:
            deaths = f"{len(self._deaths)} replicas have died within an hour"
            raise RuntimeError(
                f"{deaths}, more than engine.restarts={self._restarts} allows; the last: {death}"
            )
        log.warning("%s: starting another, %d of engine.restarts left in this hour", death, left)
        self._start_another()

    async def settle(self) -> bool:
        """Recover from a failed call to all members: wait until it has ended on each, and replace
        those that have died.

        Returns True if members have come or gone since `join`.
        """
        await asyncio.gather(*self._calls, return_exceptions=True)
        for replica in [*self.members]:
            try:
                reason = await asyncio.wait_for(replica.call("death"), _ANSWER_SECONDS)
                death = reason and f"{replica.name}: {reason}"
            except (ReplicaDied, TimeoutError) as error:
                death = str(error) or f"{replica.name} does not answer"
            if death:
                self._lose(replica, death)
        return self._changed

    async def _gather(self, calls: list[Coroutine[Any, Any, Any]]) -> list[Any]:
        """Return the results of calls to all members. Raises the first error at once; `settle`
        awaits the others.
        """
        self._calls = [asyncio.ensure_future(call) for call in calls]
        return await asyncio.gather(*self._calls)

    async def submit(
        self, prompt: dict[str, Any], params: "SamplingParams", request_id: str, **options: Any
    ) -> Stream:
        """Sample one request on the least busy replica, as `Engine.submit` does, but yield only the
        final output.
        """
        options.pop("lora_request", None)  # a replica knows the adapter of the latest update
        final = params.clone()
        final.output_kind = type(final.output_kind).FINAL_ONLY
        while True:
            if not self.members:
                raise RuntimeError(
                    "all replicas of the engine have died, and with them the weights of this step"
                )
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
        """Return the log-probabilities of a prompt's tokens, one list per replica."""
        return await self._gather([member.call("prompt_logprobs", token_ids) for member in self.members])

    async def call_workers(
        self, method: str, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call a method of all workers, and return the results in the order of replicas and of
        their workers.
        """
        kwargs["timeout"] = timeout
        results = await self._gather(
            [member.call("call_workers", method, *args, **kwargs) for member in self.members]
        )
        return [*itertools.chain(*results)]

    async def join_group(
        self, ip: str, port: int, world_size: int, train_world_size: int, timeout: float
    ) -> None:
        """Have the workers of all members join a weights group, in order. Raises the first error at
        once.
        """
        size = self.settings.tensor_parallel_size
        group = (ip, port, world_size, train_world_size, timeout)
        members = enumerate(self.members)
        await self._gather(
            [member.call("ask_workers", "init_collective", n * size, *group) for n, member in members]
        )

    async def receive(self, method: str, *args: Any, version: int | None = None) -> list[dict[str, Any]]:
        """Update the weights of all replicas, as `Engine.receive` does; here `version` is
        required.
        """
        assert version is not None
        self.state.begin_sync()
        with undone_by(self.state.fail_sync):
            results = await self._gather(
                [m.call("receive", method, *args, version=version) for m in self.members]
            )
        self.state.finish_sync(version)
        outcomes = [*itertools.chain(*results)]
        self.adapter = next((outcome.get("adapter") for outcome in outcomes), None)
        return outcomes

    @property
    def llm(self) -> "AsyncLLM":
        """The `AsyncLLM` that a server asks for everything except answers, such as the
        tokenizer.
        """
        if self._llm is None:
            self._llm = frontend(self.settings)
        return self._llm

    async def death(self) -> str:
        """Return the reason why the engine has ended; "" while a replica runs or is starting."""
        return "" if self.members or self._starting else "all its replicas have died"

    @property
    def is_closed(self) -> bool:
        """True after `close`."""
        return self._closed

    def close(self) -> None:
        """Stop all replicas, and the cluster if this run has started it; safe to call twice."""
        if not self._closed:
            import ray

            self._closed = True
            replicas = [*self.members, *self._starting]
            self.members = []
            self._starting = []
            with suppress(ray.exceptions.RayError):
                ray.wait(
                    [r.submit("shutdown") for r in replicas],
                    num_returns=len(replicas),
                    timeout=_ANSWER_SECONDS,
                )
            for replica in replicas:
                with suppress(ray.exceptions.RayError):
                    replica.kill()
            self.state.close()
            ray.shutdown()
