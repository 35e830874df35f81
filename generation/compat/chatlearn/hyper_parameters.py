"""The hyper-parameters of ChatLearn's vLLM backend, with their current meaning or their
replacement.
"""

import difflib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from generation.engine.settings import OWN_ARGUMENTS
from generation.yaml_files import read_yaml

_GONE = {
    "max_paddings": "vLLM pads no batches any more: leave it out; max_num_batched_tokens "
    "bounds the tokens of a step",
    "swap_space": "vLLM swaps no KV blocks to the CPU any more, it computes them again: leave it "
    "out, or set kv_offloading_size (GiB of host memory for the KV cache)",
    "sliding_window": "the window is read from the model's config.json: leave it out; "
    "disable_sliding_window: true switches it off",
}
SAMPLING: dict[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (lambda v: v >= 0, "at least 0, which is greedy"),
    "top_p": (lambda v: 0 < v <= 1, "in (0, 1]"),
    "top_k": (lambda v: v >= -1, "at least 1, or -1 or 0 for all tokens"),
    "min_p": (lambda v: 0 <= v <= 1, "in [0, 1]"),
    "presence_penalty": (lambda v: -2 <= v <= 2, "in [-2, 2]"),
    "frequency_penalty": (lambda v: -2 <= v <= 2, "in [-2, 2]"),
    "repetition_penalty": (lambda v: v > 0, "above 0"),
}
_ENGINE = (  # vLLM's own names
    "model",
    "tokenizer",
    "dtype",
    "seed",
    "trust_remote_code",
    "tensor_parallel_size",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "enforce_eager",
    "max_num_batched_tokens",
    "block_size",
    "kv_offloading_size",
    "cpu_offload_gb",
    "disable_sliding_window",
    "disable_custom_all_reduce",
)
_ALIASES = {  # ChatLearn's names for an argument of vLLM
    "max_num_seqs": (
        "max_concurrent_requests",
        "max_num_seqs",
        "generation_batch_size",
        "micro_batch_size",
    ),
    "tensor_parallel_size": ("tensor_parallel_size", "tensor_model_parallel_size"),
}
_PROMPTS = ("seq_length", "max_new_tokens", "new_token_limit", "vllm_input_ids_key", "vllm_prompt_key")
_OWN = ("n", "ignore_eos", "use_beam_search", "stop_token_list", "prompt_logprobs", "includes")
KNOWN = frozenset(
    [
        *SAMPLING,
        *(f"eval_{name}" for name in SAMPLING),
        *_ENGINE,
        *(alias for same in _ALIASES.values() for alias in same),
        *_PROMPTS,
        *_OWN,
        *_GONE,
    ]
)
_RECIPE = {  # the recipe's key that decides in training, for each hyper-parameter
    "seq_length": "engine.max_model_len",
    "max_new_tokens": "sampling.max_tokens",
    "n": "algorithm.group_size",
    "temperature": "sampling.temperature",
    **{f"eval_{name}": f"eval.{name}" for name in ("temperature", "top_p")},
    **{
        name: OWN_ARGUMENTS.get(name) or f"engine.extra.{name}"
        for name in _ENGINE
        if name != "tokenizer"
    },
    **{alias: f"engine.{name}" for name, aliases in _ALIASES.items() for alias in aliases},
}
_FIXED = {
    "top_p": 1,
    "top_k": -1,
    "min_p": 0,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "new_token_limit": True,
}
"""The values in training of hyper-parameters without a key in recipes."""


@dataclass(frozen=True)
class ChatLearnSettings:
    """The settings that hyper-parameters describe."""

    seq_length: int  # tokens of prompt and answer together
    max_new_tokens: int
    new_token_limit: bool  # False: answers may fill what the prompt leaves of `seq_length`
    n: int  # answers to each prompt, each a separate request
    sampling: dict[str, Any]  # fields of vLLM's `SamplingParams`
    eval_sampling: dict[str, Any]
    stop: list[str]  # strings that end an answer
    engine: dict[str, Any]  # engine arguments by vLLM's names
    input_ids_key: str  # key of the ids in a dataset's rows
    prompt_key: str  # key of the text in a dataset's rows

    @property
    def max_prompt_length(self) -> int:
        """The most tokens that a prompt may have."""
        return self.seq_length - (self.max_new_tokens if self.new_token_limit else 1)

    def max_tokens(self, prompt_tokens: int) -> int:
        """Return the most tokens that the answer to a prompt of `prompt_tokens` tokens may have."""
        return self.max_new_tokens if self.new_token_limit else self.seq_length - prompt_tokens


def read_model_args(args: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    """Return the hyper-parameters in a mapping or a YAML file, which override those of their
    `model_config_file`.

    ChatLearn's files write None, which is a text in YAML: it is read as null. They may be in a
    section, like `policy` in `rlhf.yaml`. Raises ValueError where there are several sections, or no
    such file.
    """
    folder = Path()
    values = args
    if isinstance(args, str | Path):
        if not Path(args).exists():
            names = "a name of a model, which ChatLearn's own VLLMModule takes, has no meaning here"
            raise ValueError(
                f"{args} is not a file: give the hyper-parameters or a YAML file of them; {names}"
            )
        folder, values = Path(args).parent, OmegaConf.to_container(read_yaml(Path(args)), resolve=True)  # type: ignore[assignment]
    assert isinstance(values, Mapping)
    while sections := [name for name, value in values.items() if isinstance(value, Mapping)]:
        if len(values) > 1:
            remedy = "give the module the file that its own model_config_file names"
            raise ValueError(
                f"{args!s:.80} holds {', '.join(map(str, values))}, not one model's section: {remedy}"
            )
        values = values[sections[0]]
    model_args = dict(values)
    if (name := model_args.pop("model_config_file", None)) is not None:
        model_args = {**OmegaConf.to_container(read_yaml(folder / name), resolve=True), **model_args}  # type: ignore[dict-item]
    return {name: None if value == "None" else value for name, value in model_args.items()}


def check_recipe(args: Mapping[str, Any], recipe: Mapping[str, Any]) -> None:
    """Raise ValueError for the first hyper-parameter that contradicts the recipe, a mapping of
    sections.

    The recipe decides in training, except for hyper-parameters that only concern requests
    (`stop_token_list`, `ignore_eos`, `prompt_logprobs`), for which it has no keys.
    """
    for name, value in args.items():
        field = name.removeprefix("eval_")
        decided = dict[str, Any]()
        if key := _RECIPE.get(name):
            setting: Any = recipe
            for part in key.split("."):
                setting = setting.get(part)
            decided[key] = setting
            if name != field:
                datasets = recipe["eval"]["datasets"].items()
                decided |= {
                    f"eval.datasets.{of}.{field}": settings[field]
                    for of, settings in datasets
                    if settings[field] is not None
                }
        elif field in _FIXED:
            decided["the trainer"] = _FIXED[field]
        if name == "kv_cache_memory_bytes" and value is not None:
            value /= 2**30
        for by, other in decided.items():
            if value is not None and value != other and (field, value, other) != ("top_k", 0, -1):
                it_has = "has none" if other is None else f"has {other!r}"
                remedy = f"let them agree, or leave {name} out"
                raise ValueError(
                    f"{name} is {args[name]!r}, but in training {by} decides, which {it_has}: {remedy}"
                )


def read_settings(args: Mapping[str, Any]) -> ChatLearnSettings:
    """Return the settings that hyper-parameters describe. Raises ValueError for one that is
    unknown, out of its range, or without a meaning any more; the error names the replacement.
    """
    arguments = {key: value for key, value in args.items() if value is not None}
    for key in arguments:
        if key in _GONE:
            raise ValueError(f"{key} is gone: {_GONE[key]}")
        if key not in KNOWN:
            close = difflib.get_close_matches(key, KNOWN, n=1)
            raise ValueError(
                f"{key} is not a hyper-parameter" + (f"; did you mean {close[0]}?" if close else "")
            )
    if "includes" in arguments:
        raise ValueError("includes is read from YAML files: give the module the path of one that has it")
    if arguments.get("use_beam_search"):
        remedy = "set it to false, and for evaluation use LLM.beam_search of a plain vllm.LLM"
        raise ValueError(
            "use_beam_search: beams are not samples of the policy, and vLLM no longer has them: "
            f"{remedy}"
        )
    sampling = _sampling(arguments, "")
    listed = arguments.get("stop_token_list", "")
    for key in ("seq_length", "max_new_tokens"):
        if key not in arguments:
            raise ValueError(f"{key} is missing: set it to a number of tokens")
    total = _whole(arguments, "seq_length", 1)
    new = _whole(arguments, "max_new_tokens", 1)
    limited = _flag(arguments, "new_token_limit", True)
    if limited and new >= total:
        needed = "Prompt length for RLHF/OnlineDPO/GRPO trainer must be an integer greater than 0"
        raise ValueError(f"{needed}: seq_length - max_new_tokens = {total} - {new}")
    parts = listed.split(";") if listed else []  # `<EOS>;</s>`
    if not all(parts):
        warnings.warn(f"stop_token_list {listed!r} has an empty entry, which is left out", stacklevel=2)
    return ChatLearnSettings(
        seq_length=total,
        max_new_tokens=new,
        new_token_limit=limited,
        n=_whole(arguments, "n", 1, 1),
        sampling=sampling,
        eval_sampling=sampling | _sampling(arguments, "eval_"),
        stop=[part for part in parts if part],
        engine=_engine(arguments),
        input_ids_key=str(arguments.get("vllm_input_ids_key", "input_ids")),
        prompt_key=str(arguments.get("vllm_prompt_key", "prompt")),
    )


def _sampling(args: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return checked fields of `SamplingParams`; with a prefix, only those that are set under
    it.
    """
    fields: dict[str, Any] = {}
    for name, (fits, meaning) in SAMPLING.items():
        value = args.get(prefix + name)
        if value is None:
            continue
        fields[name] = checked(prefix + name, value, int | float, fits, meaning)
    if prefix:
        return fields
    if "prompt_logprobs" in args:
        fields["prompt_logprobs"] = _whole(args, "prompt_logprobs", 0)
    return fields | {"ignore_eos": _flag(args, "ignore_eos", False)}


def _engine(args: Mapping[str, Any]) -> dict[str, Any]:
    arguments = {key: args[key] for key in _ENGINE if key in args}
    share = arguments.get("gpu_memory_utilization", 1)
    checked("gpu_memory_utilization", share, int | float, lambda v: 0 < v <= 1, "in (0, 1]")
    for key in ("block_size", "max_num_batched_tokens"):
        # Both in tokens; "16 MB" in ChatLearn's docs is a mistake
        if key in args:
            _whole(args, key, 1)
    for name, aliases in _ALIASES.items():
        for key in [alias for alias in aliases if alias in args]:
            if arguments.setdefault(name, _whole(args, key, 1)) != args[key]:
                raise ValueError(
                    f"{key} is {args[key]}, but {name}, which means the same, is {arguments[name]}: "
                    "drop one"
                )
    at_once = arguments.get("max_num_seqs", 1)
    if (tokens := arguments.get("max_num_batched_tokens", at_once)) < at_once:
        text = f"max_num_batched_tokens = {tokens} lets fewer than {at_once} answers grow at once"
        warnings.warn(text, stacklevel=2)
    return arguments


def _whole(args: Mapping[str, Any], key: str, lowest: int, default: int | None = None) -> int:
    meaning = f"a whole number of at least {lowest}"
    return int(checked(key, args.get(key, default), int, lambda v: v >= lowest, meaning))


def _flag(args: Mapping[str, Any], key: str, default: bool) -> bool:
    return bool(checked(key, args.get(key, default), bool, lambda _: True, "true or false"))


def checked(name: str, value: Any, kind: Any, fits: Callable[[Any], bool], meaning: str) -> Any:
    """Return the value. Raises ValueError unless it has the type `kind`, a bool not being a number,
    and `fits`.
    """
    if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool) or not fits(value):
        raise ValueError(f"{name} is {value!r}, but should be {meaning}")
    return value
