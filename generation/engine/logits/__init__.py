"""Custom logits processors, which the recipe names (`engine.logits_processors`), in the form that
vLLM takes.

vLLM no longer takes processors with a request. Their classes are named when the engine starts, for
all requests (https://github.com/vllm-project/vllm/issues/17799). It has two interfaces, one for
each of its model runners (https://github.com/vllm-project/vllm/pull/56497): the LogitsProcessor of
`vllm.v1.sample.logits_processor` and that of `vllm.v1.worker.gpu.sample.logits_processor`. A recipe
names either a class written for the interface of the model runner that this engine uses, or a
*factory*, a function that works with both:

    def no_digits(params: SamplingParams) -> Callable[[list[int], Tensor], Tensor] | None

The factory is called once for each request, so that the processor it returns can have state. It may
return None, which leaves the request alone, for example unless the request asks for it in
`extra_args`. The processor is called with the ids generated so far and the logits (vocabulary,) of
the next token, and returns the changed logits.

A request may also name the factories that apply to it, in `extra_args={"logits_processors":
[...]}`, or to the server by `extra_body={"logits_processors": [...]}`; by default all of them
apply. Classes apply to every request.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from generation.importing import importable, load

FACTORIES = "hotbunk_logits_factories"
"""The entry of vLLM's `additional_config` that brings the factories' names to the workers."""

REQUESTED = "logits_processors"
"""The entry of a request's `extra_args` that names the factories for it."""

_V1 = "generation.engine.logits.adapter_v1:FactoryProcessorV1"
_V2 = "generation.engine.logits.adapter_v2:FactoryProcessorV2"
_V2_INTERFACE = "vllm.v1.worker.gpu.sample.logits_processor"
_REQUEST_PROBLEM = (
    "logits_processors cannot be given with a request: vLLM builds them into the engine; name a class "
    "or factory in the recipe, engine.logits_processors: [pkg.mod:Name], and let requests choose by "
    "SamplingParams(extra_args={...})"
)


def check_request(parameters: Mapping[str, Any]) -> None:
    """Raise ValueError, naming the remedy, where sampling parameters hold logits processors of
    their own.
    """
    if parameters.get("logits_processors") is not None:
        raise ValueError(_REQUEST_PROBLEM)


def with_remedy(error: Exception) -> Exception:
    """Return vLLM's error about processors in a request as one that names the remedy; any other
    error as it is.
    """
    if isinstance(error, TypeError | AttributeError) and "logits_processors" in str(error):
        return ValueError(_REQUEST_PROBLEM)
    return error


def uses_v2(on_cpu: bool, environ: Mapping[str, str]) -> bool:
    """Return True if an engine started here uses vLLM's second model runner; the build for CPUs has
    the first only.
    """
    return not on_cpu and environ.get("VLLM_USE_V2_MODEL_RUNNER") != "0"


def engine_arguments(named: Sequence[str | Mapping[str, Any]], v2: bool) -> dict[str, Any]:
    """Return vLLM's engine arguments for these processors; empty where none are named. `v2` is the
    result of `uses_v2`.

    An entry is `pkg.mod:Name` or `path/file.py:Name`, or vLLM's former mapping with a `qualname`.
    Raises ValueError where it cannot be imported, is not a processor, or is for the other
    interface.
    """
    specs = [importable(_spec_of(entry)) for entry in named]
    factories = [spec for spec in specs if not _is_class_for(spec, v2)]
    classes: list[str] = [spec for spec in specs if spec not in factories]
    if not factories:
        return {"logits_processors": classes} if classes else {}
    return {
        "logits_processors": [*classes, _V2 if v2 else _V1],
        "additional_config": {FACTORIES: factories},
    }


def load_factories(additional_config: Any) -> dict[str, Any]:
    """Return, in a worker, the factories that the engine was started with, by name."""
    return {spec: load(spec) for spec in (additional_config or {}).get(FACTORIES, [])}


def processor_of(factories: Mapping[str, Any], params: Any) -> Callable[[list[int], Any], Any] | None:
    """Return, in a worker, one processor for a request with these parameters; None if no factory
    makes one.

    It applies, in order, the processors of all factories, or of those that the request names.
    """
    named = (params.extra_args or {}).get(REQUESTED, factories)
    made = [factory(params) for spec, factory in factories.items() if spec in named]
    chain = [processor for processor in made if processor is not None]

    def apply(output_ids: list[int], logits: Any) -> Any:
        try:
            for processor in chain:
                logits = processor(output_ids, logits)
        except SystemExit as error:  # it would end vLLM's worker without a message
            raise RuntimeError(f"a logits processor raised SystemExit: {error}") from error
        return logits

    return apply if chain else None


def requested(named: Any, arguments: Mapping[str, Any]) -> list[str]:
    """Return the names that an engine with these arguments has for the processors that a request
    names.

    `named` is one processor, or a list of them, in any form that a recipe may use. Raises
    ValueError for a processor that the engine's recipe does not name.
    """
    specs = [
        *arguments.get("logits_processors", []),
        *arguments.get("additional_config", {}).get(FACTORIES, []),
    ]
    by_name = {spec.replace(":", "."): spec for spec in specs if spec not in (_V1, _V2)}
    chosen = []
    for entry in named if isinstance(named, list) else [named]:
        if (
            not isinstance(entry, str | Mapping)
            or (spec := by_name.get(_spec_of(entry).replace(":", "."))) is None
        ):
            names = ", ".join(by_name.values()) or "none"
            raise ValueError(
                f"logits_processors names {entry!r:.60}, but engine.logits_processors of the recipe "
                f"has: {names}"
            )
        chosen.append(spec)
    return chosen


def with_exact_names(params: Any, arguments: Mapping[str, Any]) -> Any:
    """Return vLLM's sampling parameters with the processors that they name as the workers know
    them.

    Parameters that name none are returned as they are. Raises ValueError as `requested` does.
    """
    named = (params.extra_args or {}).get(REQUESTED)
    if named is None:
        return params
    exact = params.clone()
    exact.extra_args = params.extra_args | {REQUESTED: requested(named, arguments)}
    return exact


def _spec_of(entry: str | Mapping[str, Any]) -> str:
    if isinstance(entry, str):
        return entry
    if set(entry) != {"qualname"}:
        raise ValueError(
            f"{dict(entry)} must hold qualname alone: arguments come with requests, in extra_args"
        )
    module, _, name = str(entry["qualname"]).replace(":", ".").rpartition(".")
    return f"{module}:{name}"


def _is_class_for(spec: str, v2: bool) -> bool:
    """Return True for a class derived from vLLM's, False for a factory. Raises ValueError where
    `spec` is neither.
    """
    value = load(spec)
    # By `v2`
    bases = {True: _interface(_V2_INTERFACE), False: _interface("vllm.v1.sample.logits_processor")}
    for for_v2, base in bases.items():
        if base is not None and isinstance(value, type) and issubclass(value, base):
            if for_v2 is v2:
                return True
            remedy = (
                f"derive it from {bases[v2].__module__}.LogitsProcessor, or name a factory, which works "
                "with both"
            )
            other = f"is written for vLLM's model runner V{1 + for_v2}, but this engine runs V{1 + v2}"
            raise ValueError(f"{spec!r} {other}: {remedy}")
    if not callable(value):
        raise ValueError(f"{spec!r} is neither a class of processors nor a function that makes one")
    return False


def _interface(module: str) -> Any:
    """Return the base class of one interface; None if the installed vLLM does not have the
    interface.
    """
    try:
        return importlib.import_module(module).LogitsProcessor
    except (ImportError, AttributeError):
        return None
