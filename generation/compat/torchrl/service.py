"""TorchRL's interface `AsyncVLLM`: several engines behind one blocking method `generate`. The
engines run in local processes, or in Ray actors.

Prefix caching is on unless `enable_prefix_caching=False` is among the engine's arguments. The
prefix cache is emptied after every weight update.
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
from generation.compat.torchrl.replicas import (
    UPDATE_SECONDS,
    LocalReplica,
    RayReplica,
    ServiceEngine,
    ServiceReplica,
    gpu_count,
)
from generation.compat.torchrl.weights import NO_DEVICE_LEFT, WeightUpdates
from generation.engine.ray_cluster import join_once
from generation.engine.ray_replicas import Actor
from generation.engine.thread import EngineThread
from generation.engine.vllm_compat import engine_arguments
from generation.undoing import undone_by

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams

log = logging.getLogger(__name__)

CLOSE_SECONDS = 30.0
"""The longest wait for engines to stop, in seconds."""

_TORCHRL = "torchrl.modules.llm.backends.vllm"


class AsyncVLLM(WeightUpdates):
    """A service of engines of one model. It is a context manager, and may be used from several
    threads.

    `weight_version` is the version of the engines' current weights, 0 for the checkpoint's; each
    output carries the version it was sampled with. TorchRL's `vLLMWrapper` accepts only a class
    `AsyncVLLM` from a TorchRL module, and its `vLLMUpdaterV2` only a subclass of `RLvLLMEngine`. If
    TorchRL was imported before this object is made, it passes as both.
    """

    def __new__(cls, *_: Any, **__: Any) -> Self:
        if "torchrl" not in sys.modules:  # this package never imports it
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
        """Prepare a service; `start` starts its engines.

        Args: engine_args: vLLM's `AsyncEngineArgs`, or `EngineSettings`; they are not changed.
            num_replicas: the number of engines. actor_class: a subclass of `ServiceEngine` for
            Ray's actors; implies `backend="ray"`. enable_prefix_caching: overrides `engine_args`;
            None keeps their value. backend: "local" runs replicas as processes of this machine,
            "ray" as actors. Actors are on the cluster that the program has joined, else on that of
            RAY_ADDRESS, else on a private one that ends with `shutdown`. carriers: the package that
            carries weights, by default `sharding`.
        """
        super().__init__(carriers)
        arguments.require_vllm()
        if num_replicas < 1:
            raise ValueError(f"num_replicas must be at least 1, not {num_replicas}")
        if actor_class is not None and backend == "local":
            raise ValueError("actor_class is for Ray's actors: leave it out, or set backend to ray")
        settings = arguments.as_settings(engine_args)
        if enable_prefix_caching is not None:
            settings = replace(
                settings, extra=settings.extra | {"enable_prefix_caching": enable_prefix_caching}
            )
        settings = replace(
            settings, worker_extension=settings.worker_extension or self._carriers.WORKER_EXTENSION
        )
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
        # Leaves the Ray cluster that `start` has joined; until then a function that does nothing.
        self._leave_cluster: Callable[[], object] = bool
        self._load_balancer: LoadBalancer | None = None
        self._balancing: tuple[Any, dict[str, Any]] | None = None  # arguments of `create_load_balancer`
        self._lock = threading.Lock()  # makes choosing an engine and counting its request one step
        self._unfinished: set[Future[Any]] = set()

    @classmethod
    def launch(cls, engine_args: Any, num_replicas: int = 1, **options: Any) -> Self:
        """Start a service with a load balancer, and return it. `options` are those of the
        constructor.
        """
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
        """Start a service for a model, and return it. The arguments are those of
        `make_async_vllm_engine`.
        """
        options |= {
            "num_devices": num_devices,
            "num_replicas": num_replicas,
            "verbose": verbose,
            "compile": compile,
        }
        return make_async_vllm_engine(
            model_name=model_name, enable_fp32_output=enable_fp32_output, **options
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a copy that generates in another process of the cluster; this service remains the
        engines' owner.
        """
        if self.backend == "local":
            raise TypeError(
                "engines in local processes cannot be used from other processes: set backend to ray"
            )
        self._require_launched("pickling")
        actors = [(replica.name, replica.actor) for replica in self.actors]  # type: ignore[attr-defined]
        state = self.settings, self.service_id, actors, self.weight_version, self._balancing
        importable: Any = next(
            kind for kind in type(self).__mro__ if not kind.__module__.startswith("torchrl.")
        )
        return importable._copy, state

    @classmethod
    def _copy(
        cls, settings: Any, service_id: str, actors: list[Any], weight_version: int, balancing: Any
    ) -> Self:
        service = cls(settings, len(actors), backend="ray")
        service._owner = False
        service.service_id = service_id
        service.weight_version = weight_version
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
        """Start all engines and wait until each has generated a token. Do nothing if they are
        running.

        Raises TimeoutError, which names the environment variable that allows more time.
        """
        if self.launched:
            log.warning("AsyncVLLM %s is launched already", self.service_id)
            return
        if not self._owner:
            raise RuntimeError(
                "this copy of a service has been shut down: get another copy from the owner"
            )
        timeout = arguments.start_timeout()
        self._thread = EngineThread(f"async-vllm-{self.service_id}")
        starts: list[Future[Any]] = []
        try:
            if self.backend == "ray":
                self._leave_cluster = join_once(
                    self.num_replicas * arguments.gpus_per_replica(self.settings)
                )
            gpus = gpu_count(self.backend)
            replicas = arguments.of_replicas(
                self.settings, self.num_replicas, gpus, self.backend == "local"
            )
            self._taken = set()
            if self.backend == "local":
                self._taken = {index for replica in replicas for index in replica.device_indices}
            if gpus and len(self._taken) == gpus:
                log.warning("%s: new weights can come by load_weights_from_storage only", NO_DEVICE_LEFT)
            for number, settings in enumerate(replicas):
                if self.backend == "local":
                    self.actors.append(LocalReplica(settings, self._thread))
                else:
                    name = f"async-vllm-replica-{self.service_id}-{number}"
                    kind = self._actor_class or ServiceEngine
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
        """Stop all engines, and cancel requests in flight after `drain_seconds`. Safe to call twice
        and in any state.

        The service can be started again. A copy does not stop the engines, but can no longer use
        them.
        """
        thread = self._thread
        self._thread = None
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
        leave = self._leave_cluster
        self._leave_cluster = bool
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
        """Answer prompts as vLLM's `LLM.generate` does, each on the engine that the load balancer
        chooses. Blocks.

        Args: prompts: a text, token ids, a prompt dictionary of vLLM's, or a list or tuple of
            these. sampling_params: parameters for all prompts, or a list with one for each.
            prompt_token_ids: the token ids of one prompt, or of several, instead of `prompts`.
            use_tqdm: True shows a progress bar. lora_request: the adapter to answer with.
            timeout_seconds: the time limit of each prompt, after which the engine drops it. None or
            0: no limit. actor_index: the engine to use, instead of the load balancer's choice.
            return_exceptions: return errors in the places of their prompts' outputs instead of
            raising.

        Returns: A `RequestOutput` for one prompt that was not in a list, else a list of them in the
            order of the prompts.

        Raises: ValueError: prompts or parameters have no known form; nothing was submitted.
            PromptErrors: some prompts of a list failed; has the outputs of the others. The error of
            a single prompt that was not in a list is raised as it is. PromptTimeouts: all failed
            prompts timed out; a TimeoutError with the same `exceptions` and `outputs`.
        """
        for name, value in removed.items():
            if name not in _REMOVED:
                raise TypeError(f"generate has no argument {name!r}")
            if value is not None:
                raise ValueError(f"{name}: {_REMOVED[name]}")
        from tqdm.auto import tqdm  # type: ignore[import-untyped]

        listed, single = arguments.prompt_dictionaries(prompts, prompt_token_ids)
        by_prompt = arguments.sampling_for_each(sampling_params, len(listed))
        futures: list[Future[RequestOutput]] = []
        with undone_by(lambda: [future.cancel() for future in futures]):
            for prompt, params in zip(listed, by_prompt, strict=True):
                futures.append(self._submit(prompt, params, actor_index, timeout_seconds, lora_request))
            for _ in tqdm(
                as_completed(futures), total=len(futures), desc="Processed prompts", disable=not use_tqdm
            ):
                pass  # each future ends by its deadline
        results = [arguments.answer_or_error(future, index) for index, future in enumerate(futures)]
        return arguments.answers(results, single, return_exceptions)

    def submit(
        self,
        prompt: Any,
        sampling_params: "SamplingParams | None" = None,
        timeout_seconds: float | None = None,
    ) -> "Future[RequestOutput]":
        """Start to answer one prompt in any form. Cancelling the future drops the request in the
        engine.
        """
        listed, single = arguments.prompt_dictionaries(prompt)
        if not single:
            raise ValueError("submit takes one prompt, not a list of them")
        return self._submit(
            listed[0], arguments.sampling_for_each(sampling_params, 1)[0], None, timeout_seconds
        )

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
            replica = self.actors[
                self._checked_index(self._route(prompt) if actor_index is None else actor_index)
            ]
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

    def create_load_balancer(
        self, strategy: str | Sequence[str] | None = None, **options: Any
    ) -> LoadBalancer:
        """Make the balancer for `generate`, and return it. `options` are those of
        `LoadBalancer`.
        """
        self._require_launched("creating load balancer")
        self._load_balancer = LoadBalancer(self, strategy, **({"seed": self.settings.seed} | options))
        self._balancing = strategy, options
        return self._load_balancer

    def get_num_unfinished_requests(self, actor_index: int | None = None) -> Any:
        """Return the number of unfinished requests of one engine, or a list for all. This process
        counts them itself, without a call of an engine.
        """
        return self._of_actors(
            "getting request counts", actor_index, ServiceReplica.get_num_unfinished_requests
        )

    def get_cache_usage(self, actor_index: int | None = None) -> Any:
        """Return the share of the KV cache in use (None: unknown) of one engine, or a list for all
        engines.
        """
        return self._of_actors(
            "getting cache usage", actor_index, lambda replica: replica.get_cache_usage()
        )

    def _of_actors(
        self, action: str, actor_index: int | None, read: Callable[[ServiceReplica], Any]
    ) -> Any:
        self._require_launched(action)
        if actor_index is not None:
            return read(self.actors[self._checked_index(actor_index)])
        return [read(replica) for replica in self.actors]

    def get_random_actor_index(self) -> int:
        """Return the index of a random engine, from a seeded generator."""
        return self._random.randrange(self.num_replicas)

    @property
    def engine_args(self) -> Any:
        """The `AsyncEngineArgs` that engines start with."""
        from vllm import AsyncEngineArgs

        return AsyncEngineArgs(**engine_arguments(self.settings))

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix of all engines; after weight updates that is done already.
        Blocks.
        """
        self._require_launched("resetting the prefix cache")
        calls = [replica.submit("reset_prefix_cache") for replica in self.actors]
        arguments.results_of(calls, UPDATE_SECONDS, "resetting the prefix cache")

    def get_tp_size(self) -> int:
        """Return the tensor parallel size of an engine."""
        return self.settings.tensor_parallel_size

    def get_tokenizer(self) -> Any:
        """Load and return the engines' tokenizer."""
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
        """Call a method of every worker of every engine, and wait. Return a list of the workers'
        results per engine.

        Raises TimeoutError where a worker did not answer in `timeout` seconds, by default the time
        that an engine has to start.
        """
        calls = self._calls("submit", method, timeout, args, kwargs)
        return arguments.results_of(
            calls, timeout or arguments.start_timeout(), f"the workers' {method}"
        )

    def collective_rpc_futures(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker as `collective_rpc` does, but do not wait. Return one
        future per engine; with Ray it is an ObjectRef.
        """
        return self._calls("refer", method, timeout or arguments.start_timeout(), args, kwargs)

    def _calls(self, way: str, method: str, timeout: float | None, args: Any, kwargs: Any) -> list[Any]:
        self._require_launched("calling workers")
        if "timeout" in (kwargs or {}):
            raise ValueError(
                "kwargs has timeout, which is an argument of the call itself: pass timeout=... beside it"
            )
        named = {"timeout": timeout, **(kwargs or {})}
        calls = [
            getattr(replica, way)("call_workers", method, *args, **named) for replica in self.actors
        ]

        def note(future: Future[Any]) -> None:
            """Set the service's version when a call has brought the last weight of an update."""
            outcome = {} if future.cancelled() or future.exception() else future.result()[0]
            self.weight_version = max(
                self.weight_version, 0 if outcome.get("error") else outcome.get("version", 0)
            )

        for future in calls if method in ("update_weight", "load_weights_from_storage") else []:
            (future if isinstance(future, Future) else future.future()).add_done_callback(note)
        return calls

    def _require_launched(self, action: str, owner: bool = False) -> None:
        if not self.launched:
            raise RuntimeError(f"AsyncVLLM service must be launched before {action}")
        if owner and not self._owner:
            raise RuntimeError(
                f"{action} is for the process that launched the service, of which this is a copy"
            )

    def _checked_index(self, index: int) -> int:
        if not 0 <= index < len(self.actors):
            raise IndexError(f"Actor index {index} out of range [0, {len(self.actors)})")
        return index


_REMOVED = {
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
    """Start an `AsyncVLLM` for a model, and return it.

    Args: model_name: a folder or a name of the Hugging Face hub. num_devices: the number of devices
        of each replica; the same as `tensor_parallel_size`. num_replicas: the number of engines.
        verbose: let vLLM log its progress, and its throughput every ten seconds. compile: use
        torch.compile and CUDA graphs; without them, engines start sooner and generate more slowly.
        enable_fp32_output: compute logits in float32, whatever the weights' dtype. backend: "local"
        or "ray", as for `AsyncVLLM`. carriers: the package that carries weights, by default
        `sharding`. engine_args: fields of vLLM's `AsyncEngineArgs`, by name.
    """
    arguments.require_vllm()
    if verbose:
        engine_args = {"disable_log_stats": False, "log_level": "INFO"} | engine_args
    settings = arguments.resolve(model_name, num_devices, compile, enable_fp32_output, **engine_args)
    return AsyncVLLM.launch(settings, num_replicas, backend=backend, carriers=carriers)
