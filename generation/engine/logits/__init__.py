"""Custom logits processors, named in the recipe (`engine.logits_processors`), for the vLLM at hand.

vLLM takes no processor objects with a request any more: classes are named when the engine starts, for all requests
(https://github.com/vllm-project/vllm/issues/17799). There are two interfaces, one for each of its model runners
(https://github.com/vllm-project/vllm/pull/56497): the LogitsProcessor of `vllm.v1.sample.logits_processor`
and that of `vllm.v1.worker.gpu.sample.logits_processor`. What a recipe names is a class written for the one that this
engine runs, or a *factory*, which suits both:

    def no_digits(params: SamplingParams) -> Callable[[list[int], Tensor], Tensor] | None

It is called once for each request, so what it returns has state of its own; None leaves the request alone, so that a
request can ask for it in `extra_args`. What it returns is called with the ids generated so far and the logits
(vocabulary,) of the next token, and gives them back changed.
"""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from generation.importing import importable, load

FACTORIES = "hotbunk_logits_factories"
"""Where the factories' names travel to the workers: this entry of vLLM's `additional_config`."""

_V1 = "generation.engine.logits.adapter_v1:FactoryProcessor"
_V2 = "generation.engine.logits.adapter_v2:FactoryProcessor"
_V2_INTERFACE = "vllm.v1.worker.gpu.sample.logits_processor"
_NEW_WAY = (
    "logits_processors cannot be given with a request: vLLM builds them into the engine; name a class or factory in "
    "the recipe, engine.logits_processors: [pkg.mod:Name], and let requests choose by SamplingParams(extra_args={...})"
)


def check_request(parameters: Mapping[str, Any]) -> None:
    """Raise ValueError, naming the new way, where sampling parameters hold processors of their own."""
    if parameters.get("logits_processors") is not None:
        raise ValueError(_NEW_WAY)


def new_way(error: Exception) -> Exception:
    """vLLM's complaint about per-request processors as one that names the remedy; any other error as it is."""
    if isinstance(error, TypeError | AttributeError) and "logits_processors" in str(error):
        return ValueError(_NEW_WAY)
    return error


def uses_v2(on_cpu: bool, environ: Mapping[str, str]) -> bool:
    """True if an engine started here uses the second model runner's interface; the CPU build only has the first."""
    return not on_cpu and environ.get("VLLM_USE_V2_MODEL_RUNNER") != "0"


def engine_arguments(named: Sequence[str | Mapping[str, Any]], v2: bool) -> dict[str, Any]:
    """vLLM's engine arguments for these processors; empty where none are named. `v2` is what `uses_v2` says.

    An entry is `pkg.mod:Name` or `path/file.py:Name`, or vLLM's former mapping with a `qualname`. Raises ValueError
    where it cannot be imported, is not a processor, or is for the other interface.
    """
    specs = [importable(_spelled(entry)) for entry in named]
    factories = [spec for spec in specs if not _is_class_for(spec, v2)]
    classes: list[str] = [spec for spec in specs if spec not in factories]
    if not factories:
        return {"logits_processors": classes} if classes else {}
    return {"logits_processors": [*classes, _V2 if v2 else _V1], "additional_config": {FACTORIES: factories}}


def load_factories(additional_config: Any) -> list[Any]:
    """In a worker: the factories that the engine was started with."""
    return [load(spec) for spec in (additional_config or {}).get(FACTORIES, [])]


def _spelled(entry: str | Mapping[str, Any]) -> str:
    if isinstance(entry, str):
        return entry
    if set(entry) != {"qualname"}:
        raise ValueError(f"{dict(entry)} must hold qualname alone: arguments come with requests, in extra_args")
    home, _, name = str(entry["qualname"]).replace(":", ".").rpartition(".")
    return f"{home}:{name}"


def _is_class_for(spec: str, v2: bool) -> bool:
    """True for a class derived from vLLM's, False for a factory. Raises ValueError where it is neither."""
    found = load(spec)
    kinds = {True: _interface(_V2_INTERFACE), False: _interface("vllm.v1.sample.logits_processor")}
    for kind, base in kinds.items():
        if base is not None and isinstance(found, type) and issubclass(found, base):
            if kind is v2:
                return True
            raise ValueError(
                f"{spec!r} is written for vLLM's model runner V{1 + kind}, but this engine runs "
                f"V{1 + v2}: derive it from {kinds[v2].__module__}.LogitsProcessor, or name a factory, which suits both"
            )
    if not callable(found):
        raise ValueError(f"{spec!r} is neither a class of processors nor a function that makes one")
    return False


def _interface(module: str) -> Any:
    """The base class of one interface, or None where this vLLM has no such interface."""
    try:
        return importlib.import_module(module).LogitsProcessor
    except (ImportError, AttributeError):
        return None
