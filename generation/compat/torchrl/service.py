"""`AsyncVLLM`: several engines behind one blocking `generate`, apart from a trainer: local processes or Ray actors.

Prefix caching is on unless `enable_prefix_caching=False` is among the engine's arguments; the cache is emptied after
every weight update.
"""

import logging
import random
import sys
import threading
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, as_completed, wait
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Self

from generation.compat.load_balancer import LoadBalancer
from generation.compat.torchrl import arguments
from generation.compat.torchrl.replicas import LocalReplica, RayReplica, ServiceEngine, ServiceReplica, gpu_count
from generation.compat.torchrl.weights import NO_DEVICE_LEFT, WeightUpdates
from generation.engine.replicas import Actor, join_once
from generation.engine.thread import EngineThread
from generation.engine.vllm_compat import engine_arguments
from generation.undoing import undone_by

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams

log = logging.getLogger(__name__)

CLOSE_SECONDS = 30.0
"""Longest wait for engines to stop."""

_TORCHRL = "torchrl.modules.llm.backends.vllm"


class AsyncVLLM(WeightUpdates):
    """A service of engines of one model. May be used from several threads; a context manager.

    `weight_version` is that of the weights that answers are given with, 0 for the checkpoint's; outputs carry theirs.
    Where a program has imported TorchRL's `vLLMWrapper` or `vLLMUpdaterV2` before, these take a service for an engine:
    the former looks for the name `AsyncVLLM` in a module of TorchRL's, the latter for an `RLvLLMEngine`.
    """

    def __new__(cls, *_: Any, **__: Any) -> Self:
        if "torchrl" not in sys.modules:  # which is never imported here
            return super().__new__(cls)
        if (base := sys.modules.get(f"{_TORCHRL}.base")) is not None:
            base.RLvLLMEngine.register(cls)
        return super().__new__(type("AsyncVLLM", (cls,), {"__module__": _TORCHRL}))

    def __init__(
        self,
        engine_args: Any,
        num_replicas: int = 1,
        actor_class: type | None = None,
        enable_prefix_caching: bool | None = None,
        *,
        backend: Literal["local", "ray"] | None = None,
        carriers: Any = None,
    ) -> None:
        """Nothing is started yet; `start` does it.

        Args:
            engine_args: vLLM's `AsyncEngineArgs`, or `EngineSettings`; not changed.
            actor_class: a subclass of `ServiceEngine` for Ray's actors; implies `backend="ray"`.
            enable_prefix_caching: overrides `engine_args`; None leaves it at what they say.
            backend: "local" runs replicas as processes of this machine, "ray" as actors on the cluster that the program
                has joined; else on that of RAY_ADDRESS, or a private one of this machine until `shutdown`.
            carriers: the package that carries weights, by default `sharding`.
        """
        super().__init__(carriers)
        arguments.require_vllm()
        if num_replicas < 1:
            raise ValueError(f"num_replicas must be at least 1, not {num_replicas}")
        if actor_class is not None and backend == "local":
            raise ValueError("actor_class is for Ray's actors: leave it out, or set backend to ray")
        settings = arguments.as_settings(engine_args)
        if enable_prefix_caching is not None:
            settings = replace(settings, extra=settings.extra | {"enable_prefix_caching": enable_prefix_caching})
        settings = replace(settings, worker_extension=settings.worker_extension or self._carriers.WORKER_EXTENSION)
        self.settings = settings
        self.num_replicas = num_replicas
        self.backend = backend or ("local" if actor_class is None else "ray")
        self.service_id = uuid.uuid4().hex[:8]
        self.actors: list[ServiceReplica] = []
        self.weight_version = 0
        self._actor_class = actor_class
        self._random = random.Random(settings.seed)
        self._thread: EngineThread | None = None
        self._owner = True
        self._leave_cluster: Callable[[], object] = bool  # what leaves a cluster that was joined here
        self._load_balancer: LoadBalancer | None = None
        self._balancing: tuple[Any, dict[str, Any]] | None = None  # arguments of `create_load_balancer`
        self._lock = threading.Lock()  # choosing an engine and counting the request on it are one step
        self._unfinished: set[Future[Any]] = set()

    @classmethod
    def launch(cls, engine_args: Any, num_replicas: int = 1, **options: Any) -> Self:
        """A started service with a load balancer; `options` are those of the constructor."""
        service = cls(engine_args, num_replicas, **options)
        service.start()
        service.create_load_balancer()
        return service

    @classmethod
    def from_pretrained(
        cls,
        model_name: str,
        num_devices: int | None = None,
        num_replicas: int = 1,
        verbose: bool = True,
        compile: bool = True,
        enable_fp32_output: bool = False,
        **options: Any,
    ) -> "AsyncVLLM":
        """A started service for a model; arguments are those of `make_async_vllm_engine`."""
        options |= {"num_devices": num_devices, "num_replicas": num_replicas, "verbose": verbose, "compile": compile}
        return make_async_vllm_engine(model_name=model_name, enable_fp32_output=enable_fp32_output, **options)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy for another process of the cluster, which generates as this one does; this one remains the owner."""
        if self.backend == "local":
            raise TypeError("local processes are this process's own, and not to be pickled: set backend to ray")
        self._require_launched("pickling")
        actors = [(replica.name, replica.actor) for replica in self.actors]  # type: ignore[attr-defined]
        state = self.settings, self.service_id, actors, self.weight_version, self._balancing
        importable: Any = next(kind for kind in type(self).__mro__ if not kind.__module__.startswith("torchrl."))
        return importable._copy, state

    @classmethod
    def _copy(cls, settings: Any, service_id: str, actors: list[Any], weight_version: int, balancing: Any) -> Self:
        service = cls(settings, len(actors), backend="ray")
        service._owner, service.service_id, service.weight_version = False, service_id, weight_version
        service._thread = thread = EngineThread(f"async-vllm-{service_id}")
        for name, actor in actors:
            service.actors.append(replica := RayReplica(actor, thread, name))
            thread.submit(replica.watch())
        if balancing is not None:
            service.create_load_balancer(balancing[0], **balancing[1])
        return service

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.shutdown(drain_seconds=CLOSE_SECONDS if kind is None else 0.0)

    @property
    def launched(self) -> bool:
        """True if the engines are running."""
        return self._thread is not None

    def start(self) -> None:
        """Start all engines and wait until each has generated a token; nothing if they are running. TimeoutError names
        the environment variable that allows more time.
        """
        if self.launched:
            log.warning("AsyncVLLM %s is launched already", self.service_id)
            return
        if not self._owner:
            raise RuntimeError("this copy of a service has let go of its engines: take another from the owner")
        timeout = arguments.start_timeout()
        self._thread = EngineThread(f"async-vllm-{self.service_id}")
        starts: list[Future[Any]] = []
        try:
            if self.backend == "ray":
                self._leave_cluster = join_once(self.num_replicas * arguments.gpus_per_replica(self.settings))
            gpus = gpu_count(self.backend)
            replicas = arguments.of_replicas(self.settings, self.num_replicas, gpus, self.backend == "local")
            self._taken = (
                {index for replica in replicas for index in replica.device_indices}
                if self.backend == "local"
                else set()
            )
            if gpus and len(self._taken) == gpus:
                log.warning("%s: new weights can come by load_weights_from_storage only", NO_DEVICE_LEFT)
            for number, settings in enumerate(replicas):
                if self.backend == "local":
                    self.actors.append(LocalReplica(settings, self._thread))
                else:
                    name, kind = f"async-vllm-replica-{self.service_id}-{number}", self._actor_class or ServiceEngine
                    gpus_here = len(settings.device_indices)
                    actor = Actor(kind, settings, cpus=1, gpus=gpus_here, name=name, namespace="hotbunk")
                    self.actors.append(RayReplica(actor, self._thread, name))
            starts += [replica.launch() for replica in self.actors]
            arguments.wait_until_started(starts, timeout)
        except BaseException:
            for unfinished in starts:
                unfinished.cancel()
            self.shutdown(drain_seconds=0.0)
            raise
        self.weight_version = 0

    def shutdown(self, drain_seconds: float = CLOSE_SECONDS) -> None:
        """Stop all engines, cancelling requests in flight after `drain_seconds`. Safe to call twice and in any state;
        the service can be started again. A copy only lets go of them.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self.close_weights_group()
        for future in wait(list(self._unfinished), drain_seconds).not_done:
            future.cancel()
        closing = [thread.submit(replica.close()) for replica in self.actors if self._owner]
        self.actors.clear()
        for future in wait(closing, CLOSE_SECONDS).done:
            if (error := future.exception()) is not None:
                log.warning("an engine did not stop cleanly: %s", error)
        thread.close()
        leave, self._leave_cluster = self._leave_cluster, bool
        leave()

    def generate(
        self,
        prompts: Any = None,
        sampling_params: "SamplingParams | Sequence[SamplingParams] | None" = None,
        *,
        prompt_token_ids: Any = None,
        use_tqdm: bool = False,
        lora_request: Any = None,
        timeout_seconds: float | None = None,
        actor_index: int | None = None,
        return_exceptions: bool = False,
        **removed: Any,
    ) -> Any:
        """Answer prompts as vLLM's `LLM.generate` does, each on the engine the load balancer chooses; blocks.

        Args:
            prompts: a text, token ids, a prompt dictionary of vLLM's, or a list or tuple of these.
            sampling_params: for all prompts, or one for each.
            timeout_seconds: of each prompt; where it expires, the engine drops the request. None or 0: no limit.
            actor_index: the engine to use, instead of the load balancer's choice.
            return_exceptions: put errors in their prompts' places instead of raising.

        Returns:
            A `RequestOutput` for one prompt that was not in a list, else a list of them in the order of the prompts.

        Raises:
            ValueError: before anything is submitted, for prompts or parameters of no known form.
            PromptErrors: some prompts of a list failed; it holds the others' outputs. One by itself raises its own.
            PromptTimeouts: these only timed out; a TimeoutError with the same `exceptions` and `outputs`.
        """
        for name, value in removed.items():
            if name not in _GONE:
                raise TypeError(f"generate has no argument {name!r}")
            if value is not None:
                raise ValueError(f"{name}: {_GONE[name]}")
        from tqdm.auto import tqdm  # type: ignore[import-untyped]

        listed, single = arguments.prompt_dictionaries(prompts, prompt_token_ids)
        by_prompt = arguments.sampling_for_each(sampling_params, len(listed))
        futures: list[Future[RequestOutput]] = []
        with undone_by(lambda: [future.cancel() for future in futures]):
            for prompt, params in zip(listed, by_prompt, strict=True):
                futures.append(self._submit(prompt, params, actor_index, timeout_seconds, lora_request))
            for _ in tqdm(as_completed(futures), total=len(futures), desc="Processed prompts", disable=not use_tqdm):
                pass  # each ends by its own deadline
        results = [arguments.answer_or_error(future, place) for place, future in enumerate(futures)]
        return arguments.answers(results, single, return_exceptions)

    def submit(
        self, prompt: Any, sampling_params: "SamplingParams | None" = None, timeout_seconds: float | None = None
    ) -> "Future[RequestOutput]":
        """Start answering one prompt, in any form; cancelling the future drops the request in the engine."""
        listed, single = arguments.prompt_dictionaries(prompt)
        if not single:
            raise ValueError("submit takes one prompt, not a list of them")
        return self._submit(listed[0], arguments.sampling_for_each(sampling_params, 1)[0], None, timeout_seconds)

    def _submit(
        self,
        prompt: dict[str, Any],
        params: "SamplingParams",
        actor_index: int | None,
        timeout: float | None,
        lora_request: Any = None,
    ) -> "Future[RequestOutput]":
        self._require_launched("generating")
        limit = timeout if timeout is not None and timeout > 0 else None
        with self._lock:
            replica = self.actors[self._checked_index(self._route(prompt) if actor_index is None else actor_index)]
            replica.submitted()
        with undone_by(replica.finished):
            future = replica.submit("generate", prompt, params, self.weight_version, limit, lora_request)
        self._unfinished.add(future)
        future.add_done_callback(self._unfinished.discard)
        future.add_done_callback(lambda _: replica.finished())
        return future

    def _route(self, prompt: dict[str, Any]) -> int:
        if self._load_balancer is not None:
            return self._load_balancer.select_actor(prompt)
        if len(self.actors) == 1:
            return 0
        where = "using AsyncVLLM.create_load_balancer before calling generate."
        raise RuntimeError(f"LoadBalancer is not created. Create a LoadBalancer {where}")

    def create_load_balancer(self, strategy: str | Sequence[str] | None = None, **options: Any) -> LoadBalancer:
        """Make, keep and return the balancer that `generate` asks; `options` are those of `LoadBalancer`."""
        self._require_launched("creating load balancer")
        self._load_balancer = LoadBalancer(self, strategy, **({"seed": self.settings.seed} | options))
        self._balancing = strategy, options
        return self._load_balancer

    def get_num_unfinished_requests(self, actor_index: int | None = None) -> Any:
        """Requests submitted and not finished: of one engine, or a list of those of all; no engine is asked."""
        return self._of_actors("getting request counts", actor_index, ServiceReplica.get_num_unfinished_requests)

    def get_cache_usage(self, actor_index: int | None = None) -> Any:
        """Share of the KV cache in use, or None where it is not known: of one engine, or a list of those of all."""
        return self._of_actors("getting cache usage", actor_index, lambda replica: replica.get_cache_usage())

    def _of_actors(self, action: str, actor_index: int | None, read: Callable[[ServiceReplica], Any]) -> Any:
        self._require_launched(action)
        if actor_index is not None:
            return read(self.actors[self._checked_index(actor_index)])
        return [read(replica) for replica in self.actors]

    def get_random_actor_index(self) -> int:
        """The index of any engine, from a generator with a seed."""
        return self._random.randrange(self.num_replicas)

    @property
    def engine_args(self) -> Any:
        """The `AsyncEngineArgs` that engines start with."""
        from vllm import AsyncEngineArgs

        return AsyncEngineArgs(**engine_arguments(self.settings))

    def get_tp_size(self) -> int:
        """Workers of one engine that share each of its layers."""
        return self.settings.tensor_parallel_size

    def get_tokenizer(self) -> Any:
        """The engines' tokenizer."""
        from transformers import AutoTokenizer

        name = self.settings.tokenizer or self.settings.model
        return AutoTokenizer.from_pretrained(name, trust_remote_code=self.settings.trust_remote_code)

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[list[Any]]:
        """Call a method of every worker of every engine; waits. One list of results, in worker order, per engine.
        TimeoutError where one did not answer in `timeout` seconds (without: the service's time to start).
        """
        calls = self._calls("submit", method, timeout, args, kwargs)
        return arguments.results_of(calls, timeout or arguments.start_timeout(), f"the workers' {method}")

    def collective_rpc_futures(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """As `collective_rpc`, without waiting: one future per engine, with Ray an ObjectRef."""
        return self._calls("refer", method, timeout or arguments.start_timeout(), args, kwargs)

    def _calls(self, way: str, method: str, timeout: float | None, args: Any, kwargs: Any) -> list[Any]:
        self._require_launched("calling workers")
        if "timeout" in (kwargs or {}):
            raise ValueError("kwargs has timeout, which is an argument of the call itself: pass timeout=... beside it")
        named = {"timeout": timeout, **(kwargs or {})}
        calls = [getattr(replica, way)("call_workers", method, *args, **named) for replica in self.actors]

        def note(future: Future[Any]) -> None:
            """Where a call has brought an engine's last weight, the service is of its version from then on."""
            outcome = {} if future.cancelled() or future.exception() else future.result()[0]
            self.weight_version = max(self.weight_version, 0 if outcome.get("error") else outcome.get("version", 0))

        for future in calls if method in ("update_weight", "load_weights_from_storage") else []:
            (future if isinstance(future, Future) else future.future()).add_done_callback(note)
        return calls

    def _require_launched(self, action: str, owner: bool = False) -> None:
        if not self.launched:
            raise RuntimeError(f"AsyncVLLM service must be launched before {action}")
        if owner and not self._owner:
            raise RuntimeError(f"{action} is for the process that launched the service, of which this is a copy")

    def _checked_index(self, index: int) -> int:
        if not 0 <= index < len(self.actors):
            raise IndexError(f"Actor index {index} out of range [0, {len(self.actors)})")
        return index


_GONE = {
    "prompt_adapter_request": "vLLM has no prompt adapters any more; leave it out",
    "guided_options_request": "set SamplingParams(structured_outputs=...) instead",
}


def make_async_vllm_engine(
    *,
    model_name: str,
    num_devices: int | None = None,
    num_replicas: int = 1,
    verbose: bool = True,
    compile: bool = True,
    enable_fp32_output: bool = False,
    backend: Literal["local", "ray"] = "local",
    carriers: Any = None,
    **engine_args: Any,
) -> AsyncVLLM:
    """A started `AsyncVLLM` for a model.

    Args:
        num_devices: of each replica; the same as `tensor_parallel_size`.
        verbose: let vLLM log what it does, throughput included, every ten seconds.
        compile: torch.compile and CUDA graphs; without, engines start sooner and generate slower.
        enable_fp32_output: compute logits in float32, whatever the weights' dtype.
        engine_args: fields of vLLM's `AsyncEngineArgs`, by name.
    """
    arguments.require_vllm()
    if verbose:
        engine_args = {"disable_log_stats": False, "log_level": "INFO"} | engine_args
    settings = arguments.resolve(model_name, num_devices, compile, enable_fp32_output, **engine_args)
    return AsyncVLLM.launch(settings, num_replicas, backend=backend, carriers=carriers)
