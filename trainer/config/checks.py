"""Checks of conditions between keys, and between keys and the machine, before torch loads anything.

Each check yields sentences; `check_config` gathers them, so that a recipe is corrected in one go.
No torch is imported.
"""

import difflib
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from generation.engine.devices import gpu_visible
from generation.engine.settings import (
    DRAFTING,
    LEAST_MODEL_LEN,
    LORA_RANKS,
    OWN_ARGUMENTS,
    UNSYNCED,
    engine_argument_names,
)
from trainer.config.algorithm import check_algorithm
from trainer.config.answer_age import check_slices
from trainer.config.lora_start import check_start
from trainer.config.machine import (
    check_device,
    device_gib,
    host_gib,
    rank_count,
    resolve_device,
    unwritable,
)
from trainer.config.model_file import (
    HUB_NAME,
    is_multimodal,
    model_config,
    steady_positions,
)
from trainer.config.model_file_checks import Command, check_model_file
from trainer.config.optimizer_keys import check_optimizer
from trainer.config.parallel import check_divides, check_parallel
from trainer.config.placement import check_placement, training_ranks
from trainer.config.prefix_sharing import check_prefixes
from trainer.config.resuming import check_resume
from trainer.config.schema import InlineTagsConfig, TrainConfig
from trainer.config.sync_ways import check_way
from trainer.config.weight_files import require_no_pointers, require_trainable, stored_tensors
from trainer.errors import UserError, quoted

_MOST_ANSWERS = 2**20  # in a step, since all of them are in memory
_OWN_TEMPLATE_KEYS = {
    "conversation",
    "max_length",
    "messages",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "tokenize",
    "tokenizer_kwargs",
    "tools",
    "truncation",
}


def check_config(config: TrainConfig, command: Command, environ: Mapping[str, str] = os.environ) -> None:
    """Raise UserError with one sentence for each problem, those of the files of weights and
    tokenizers included.

    Arguments are those of `find_problems`.
    """
    problems = find_problems(config, command, environ)
    if not any(problem.startswith("model.path") for problem in problems):
        problems += _check_files(config, command)
    if problems:
        raise UserError(*problems)


def find_problems(
    config: TrainConfig, command: Command, environ: Mapping[str, str] = os.environ
) -> list[str]:
    """List one sentence for each problem of a recipe that `command` would run into.

    sft neither samples nor has rewards, and eval does not train. `environ` has torchrun's variables
    (without them there is one rank on one machine) and those of the allocator.
    """
    try:
        ranks = rank_count(environ)
    except UserError as error:
        return list(error.args)  # most of the checks below depend on it
    neighbours = int(environ.get("LOCAL_WORLD_SIZE", ranks))
    training = training_ranks(config, ranks) if command == "train" else ranks
    problems = [*_check_paths(config, command), *check_device(config, environ)]
    if command != "eval" and training > 0:
        problems += _check_backend(config)
        problems += check_parallel(config, training, models_of(config, command))
        problems += check_prefixes(config, models_of(config, command))
        problems += _check_positions(config, command)
        problems += _check_lora(config, command)
    problems += _check_images(config)
    if command == "sft":
        problems += check_divides("sft.batch_size", config.sft.batch_size, "the number of ranks", ranks)
        problems += _check_run(config)
    else:
        problems += _check_evaluation(config)
        problems += _check_lengths(config)
        problems += _check_rollout(config)
        problems += _check_extra(config, command)
        problems += _check_memory(config)
    if command == "train":
        problems += check_placement(config, ranks, neighbours)
        if training > 0:
            problems += _check_batch(config, training)
        updates = config.batch.updates_per_step * config.algorithm.num_iterations
        problems += check_algorithm(config.algorithm, updates, config.critic.shared)
        problems += _check_sampling(config)
        problems += check_slices(config)
        problems += _check_run(config)
        problems += check_way(config, ranks, environ)
    return [*problems, *check_model_file(config, command, environ)]


def _check_files(config: TrainConfig, command: Command) -> Iterator[str]:
    """Check the files of models that are folders here; `fetch_model` checks those of a model from
    the hub.
    """
    paths = {"model.path": config.model.path}
    if command == "train" and config.algorithm.teacher is not None:
        paths["algorithm.teacher"] = config.algorithm.teacher
    if (
        command == "train"
        and config.critic.path is not None
        and config.algorithm.advantage_record.takes("values")
    ):
        paths["critic.path"] = config.critic.path
    for key, path in paths.items():
        needs_head = command != "eval" and key != "critic.path"  # engines untie a head by themselves
        check = require_trainable if needs_head else stored_tensors
        try:
            if key != "model.path":  # which `check_model_file` has read
                model_config(path)
            if os.path.isdir(path):
                check(Path(path))
        except UserError as error:
            yield from (f"{key}: {line.removeprefix('model.path: ')}" for line in error.args)
    tokenizer = config.model.tokenizer
    if tokenizer is not None and os.path.isdir(tokenizer):
        try:
            require_no_pointers(Path(tokenizer))
        except UserError as error:
            yield f"model.tokenizer: {error}"


def _check_images(config: TrainConfig) -> Iterator[str]:
    data = config.data
    if not data.max_images:
        if data.image_key is not None or any(
            dataset.image_key for dataset in config.eval.datasets.values()
        ):
            yield (
                "data.image_key is set, but data.max_images is 0: set it to the most images that a "
                "prompt has"
            )
        return
    if os.path.isdir(config.model.path) and not is_multimodal(config.model.path):
        yield (
            f"data.max_images is {data.max_images}, but {config.model.path} takes no images (it has no "
            "vision_config)"
        )
    if config.rollout.tools and config.rollout.tool_parser == "inline":
        yield (
            "data.max_images is set, but rollout.tool_parser is inline, which takes only text replies: "
            "use another"
        )
    if "mm_processor_kwargs" in config.engine.extra:
        yield "engine.extra has mm_processor_kwargs, which data.max_images decides: leave it out"


def _check_paths(config: TrainConfig, command: Command) -> Iterator[str]:
    named = [("data.path", config.data.path)]
    named += [
        (f"eval.datasets.{name}.path", dataset.path) for name, dataset in config.eval.datasets.items()
    ]
    for key, path in named:
        made = ("reasoning_gym:", *(["verifiers:"] if config.rollout.verifiers else []))
        if os.path.exists(path) or path.startswith(made):
            continue
        if Path(path).suffix in (".jsonl", ".json", ".parquet") or not HUB_NAME.fullmatch(path):
            # The path looks like a local one.
            yield f"{key}: there is no file or folder {path}"
    if command != "eval" and (reason := unwritable(config.run.folder)):
        yield (
            f"run.output_dir: {config.run.folder} cannot be made or written to, as {reason}: name "
            "another"
        )


def _check_backend(config: TrainConfig) -> Iterator[str]:
    policy = config.policy
    if policy.backend == "deepspeed" and find_spec("deepspeed") is None:
        yield (
            "policy.backend is deepspeed, but DeepSpeed is not installed: pip install "
            "'hotbunk[deepspeed]'"
        )
    if policy.backend == "deepspeed" and policy.zero_stage == 1 and policy.dtype == "bfloat16":
        # BF16_Optimizer's `fp32_groups_gradients_flat` (deepspeed/runtime/bf16_optimizer.py).
        yield (
            "policy.zero_stage: 1 in bfloat16 keeps float32 gradients of the whole model on every "
            "rank at all times: set it to 2, which computes the same in less memory, or policy.dtype "
            "to float32"
        )
    fsdp_only = {"policy.compile": policy.compile, "critic.shared": config.critic.shared}
    fsdp_only["policy.shard_size"] = policy.shard_size is not None
    fsdp_only["policy.expert_parallel"] = policy.expert_parallel > 1
    fsdp_only["policy.activation_checkpointing: products"] = (
        policy.activation_checkpointing == "products"
    )
    for key, chosen in fsdp_only.items():
        if chosen and policy.backend != "fsdp":
            yield f"{key} works with policy.backend: fsdp only"
    if policy.offload_activations and policy.activation_checkpointing == "none":
        yield (
            "policy.offload_activations is true, but only the inputs of recomputed layers are moved: "
            "set policy.activation_checkpointing to full"
        )
    if policy.update_on == "host" and policy.offload != "none":
        yield (
            "policy.offload is set, but policy.update_on: host keeps that state in host memory: leave "
            "one out"
        )
    yield from check_optimizer(policy)
    if (product := policy.lr * policy.weight_decay) >= 1:
        yield (
            f"policy.lr * policy.weight_decay = {product:g} would reduce weights to 0 in one step: "
            "lower one"
        )


def models_of(config: TrainConfig, command: Command) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the trainer's models: the keys that name them, and their config.json."""
    paths: dict[str, str | None] = {"model.path": config.model.path}
    if command == "train":
        paths |= {"critic.path": config.critic.path, "algorithm.teacher": config.algorithm.teacher}
    for name, path in paths.items():
        with suppress(UserError):  # other checks report it
            yield from [(name, model_config(path))] if path else []


def _check_positions(config: TrainConfig, command: Command) -> Iterator[str]:
    """Check that a sequence's log-probabilities cannot depend on the other sequences of its
    micro-batch.
    """
    if command == "sft":
        keys = "data.max_prompt_tokens + sft.max_tokens"
        longest = config.data.max_prompt_tokens + config.sft.max_tokens
    else:
        keys = "engine.max_model_len"
        longest = config.engine.max_model_len
    for name, model in models_of(config, command):
        if (steady := steady_positions(model)) is not None and longest > steady[1]:
            kind, tokens = steady
            why = (
                f"beyond {tokens} tokens the {kind} positions of {name} depend on the longest sequence "
                "of a batch"
            )
            yield f"{keys} = {longest}, but {why}: lower {'them' if ' ' in keys else 'it'}"


def _check_lora(config: TrainConfig, command: str) -> Iterator[str]:
    lora = config.lora
    yield from check_start(lora)
    if not lora.rank:
        return
    if config.policy.freeze:
        yield (
            "policy.freeze is set, but adapters freeze everything else: leave it out, or set lora.rank "
            "to 0"
        )
    if find_spec("peft") is None:
        yield "lora.rank is set, but PEFT is not installed: pip install 'hotbunk[lora]'"
    if not lora.target_modules:
        yield "lora.target_modules names no layer: name some, or set it to all-linear"
    if command == "sft" or not lora.engines_apply:
        return
    if lora.rank > LORA_RANKS[-1]:
        yield (
            f"lora.rank is {lora.rank}, but vLLM takes adapters up to {LORA_RANKS[-1]}: set lora.sync "
            "to merged"
        )
    if config.engine.load_format == "dummy":
        yield (
            "engine.load_format is dummy, but engines load the base of an adapter themselves: set it "
            "to auto"
        )
    dtype = config.engine.dtype or config.policy.dtype
    if dtype == "float32" and resolve_device(config) == "cuda":
        # vLLM asserts this in vllm/lora/ops/triton_ops.
        yield (
            "lora.sync is adapter, impossible on CUDA in float32: set it to merged, or engine.dtype to "
            "bfloat16"
        )


def _check_batch(config: TrainConfig, ranks: int) -> Iterator[str]:
    prompts = config.batch.prompts_per_step
    group = config.algorithm.group_size
    updates = config.batch.updates_per_step
    samples = prompts * group
    name = "batch.prompts_per_step * algorithm.group_size"
    yield from check_divides(name, samples, "the number of ranks", ranks)
    smallest = prompts // updates * group  # a step is cut between groups, never within one
    if not smallest:
        yield (
            f"batch.prompts_per_step is {prompts}, but each of batch.updates_per_step = {updates} "
            "updates needs a prompt of its own: raise one or lower the other"
        )
    elif smallest < ranks:
        yield (
            f"{name} = {samples} leaves some of {ranks} ranks without an answer in an update, since "
            f"the smallest of {updates} updates has {smallest}: raise batch.prompts_per_step or lower "
            "batch.updates_per_step"
        )
    if config.eval.every and not config.eval.datasets:
        yield "eval.every is set, but there is nothing to evaluate on: set eval.datasets"


def _check_sampling(config: TrainConfig) -> Iterator[str]:
    if config.sampling.temperature == 0:
        yield (
            "sampling.temperature is 0, but greedy answers to a prompt are all the same: set it above "
            "0 to train"
        )
    if config.sync.verify != "off" and (limit := config.engine.max_model_len) < LEAST_MODEL_LEN:
        yield (
            f"engine.max_model_len is {limit}, but sync.verify has the engines score "
            f"{LEAST_MODEL_LEN - 1} tokens: make it at least {LEAST_MODEL_LEN}, or set sync.verify to "
            "off"
        )


def _check_evaluation(config: TrainConfig) -> Iterator[str]:
    if not config.reward.functions and not config.rollout.code:
        yield "reward.functions is empty: name at least one, such as [{name: exact_match}]"
    if config.reward.error_reward and config.reward.failed == "leave_out":
        value = f"{config.reward.error_reward:g}, but reward.failed is leave_out"
        yield (
            f"reward.error_reward is {value}: set reward.failed to error_reward, or leave error_reward "
            "out"
        )
    for name, dataset in config.eval.datasets.items():
        samples = dataset.samples or config.eval.samples
        if above := [k for k in config.eval.k if k > samples]:
            key = f"eval.datasets.{name}.samples" if dataset.samples else "eval.samples"
            yield f"eval.k has k = {above[0]}, but {key} = {samples}: raise it, or lower k"


def _check_lengths(config: TrainConfig) -> Iterator[str]:
    limit = config.engine.max_model_len
    longest = [("sampling", config.sampling.max_tokens), ("eval", config.eval.max_tokens)]
    longest += [
        (f"eval.datasets.{name}", dataset.max_tokens) for name, dataset in config.eval.datasets.items()
    ]
    for key, tokens in longest:
        total = config.data.max_prompt_tokens + (tokens or 0)
        if total > limit:
            names = f"data.max_prompt_tokens + {key}.max_tokens"
            yield (
                f"{names} = {total} is more than engine.max_model_len = {limit}: raise that, or lower "
                "one of them"
            )


def _check_rollout(config: TrainConfig) -> Iterator[str]:
    rollout = config.rollout
    named = config.rollout.code
    if len(named) > 1:
        yield (
            f"rollout.{named[0]} and rollout.{named[1]} are both set, but only one can run an episode: "
            "leave one out"
        )
    custom = [key for key in named if key != "environment"]
    if rollout.tools and custom:
        yield (
            f"rollout.tools is set, but rollout.{custom[0]} calls its tools itself: leave one of the "
            "two out"
        )
    if rollout.mcp and custom:
        yield (
            f"rollout.mcp is set, but rollout.{custom[0]} calls its tools itself: leave one of the two "
            "out"
        )
    if rollout.mcp and None in (find_spec("mcp"), find_spec("cryptography")):  # mcp imports cryptography
        yield "rollout.mcp is set, but the MCP SDK is not installed: pip install 'hotbunk[mcp]'"
    for name, server in rollout.mcp.items():
        if bool(server.command) == (server.url is not None):
            yield (
                f"rollout.mcp.{name} needs a command to start, or the url of a server that runs: set "
                "one of the two"
            )
    if rollout.kwargs and not named:
        yield (
            "rollout.kwargs is set, but only environment, custom, sampler or client take them: set one "
            "of these"
        )
    if rollout.kwargs and rollout.verifiers is not None:
        yield (
            "rollout.kwargs is set, but an environment of verifiers takes rollout.verifiers.args: move "
            "them there"
        )
    if rollout.verifiers is not None and not config.data.path.startswith("verifiers:"):
        yield "data.path is set, but the tasks of rollout.verifiers are the prompts: leave data.path out"
    if rollout.tool_parser == "inline" and named:
        yield (
            f"rollout.tool_parser is inline, which works with rollout.tools only: rollout.{named[0]} "
            "takes messages"
        )
    if rollout.sampler and rollout.tool_parser not in ("hermes", "inline"):
        parser = (
            f"rollout.tool_parser is {rollout.tool_parser}, but rollout.sampler reads calls by itself"
        )
        yield f"{parser}: leave tool_parser out"
    if rollout.inline_tags != InlineTagsConfig() and rollout.tool_parser != "inline":
        yield (
            "rollout.inline_tags is set, but rollout.tool_parser is not inline: set that, or leave the "
            "tags out"
        )
    if rollout.inline_tags.start == rollout.inline_tags.end:
        yield (
            f"rollout.inline_tags: start and end are both {rollout.inline_tags.end!r}: set two "
            "different tags"
        )
    if "{error}" not in rollout.tool_error:
        yield (
            f"rollout.tool_error is {rollout.tool_error!r}, but must have {{error}} in the place of the "
            "error"
        )
    for key in config.data.chat_template_kwargs.keys() & _OWN_TEMPLATE_KEYS:
        yield f"data.chat_template_kwargs may not hold {key}, which Hotbunk sets itself: leave it out"


def _check_extra(config: TrainConfig, command: Command) -> Iterator[str]:
    """Check engine.extra, since vLLM complains only when it starts, or acts without the trainer's
    knowledge.
    """
    extra = config.engine.extra
    names = engine_argument_names() if extra else None
    for key, value in extra.items():
        if key in OWN_ARGUMENTS:
            by = OWN_ARGUMENTS[key]
            yield f"engine.extra.{key} is Hotbunk's to set" + (
                f": set {by} instead" if by else ": leave it out"
            )
        elif value and key in UNSYNCED and (command == "train" or key in DRAFTING):
            yield f"engine.extra.{key} {UNSYNCED[key]}: leave it out"
        elif names is not None and key not in names:
            close = difflib.get_close_matches(key, names, n=1)
            hint = f"did you mean {close[0]}?" if close else "leave it out"
            yield f"engine.extra.{key}: the vLLM installed here has no such argument: {hint}"
        elif key in ("additional_config", "hf_overrides") and not isinstance(value, dict):
            yield f"engine.extra.{key} is {quoted(value)}, but should be a mapping of keys"


def _check_memory(config: TrainConfig) -> Iterator[str]:
    """Check for single sizes that exceed the machine; `hotbunk plan` estimates whether all of them
    fit together.
    """
    engine = config.engine
    asked = config.engine.kv_cache_gib
    prompts = config.batch.prompts_per_step * (config.algorithm.oversampling + config.rollout.ahead)
    answers = prompts * config.algorithm.group_size
    if answers > _MOST_ANSWERS:
        names = "batch.prompts_per_step * algorithm.group_size * algorithm.oversampling"
        if config.rollout.ahead:
            names += ", with rollout.ahead,"
        yield (
            f"{names} = {answers:g} answers in a step, but at most {_MOST_ANSWERS} are possible: lower "
            "one of them"
        )
    table = 4 * engine.max_num_seqs * engine.max_model_len / 2**30
    host = host_gib()
    if table > host:
        names = "engine.max_num_seqs * engine.max_model_len"
        yield (
            f"{names}: vLLM's table of ids takes {table:g} GiB, and this machine has {host:.0f}: lower "
            "one of them"
        )
    cuda = resolve_device(config) == "cuda"
    there = device_gib() if cuda and asked is not None and gpu_visible() else host
    if (
        asked is not None
        and there is not None
        and asked * (1 if cuda else engine.tensor_parallel_size) > there
    ):
        yield (
            f"engine.kv_cache_gib = {asked:g} is more than the {there:.0f} GiB of this device: lower it"
        )


def _check_run(config: TrainConfig) -> Iterator[str]:
    yield from check_resume(config.checkpoint)
    metric = config.checkpoint.best_metric
    for tracker in config.tracking.also:
        if find_spec(tracker) is None:
            yield f"tracking.also names {tracker}, which is not installed: pip install {tracker}"
    if (
        config.checkpoint.keep_best
        and metric.removeprefix("-").startswith("eval/")
        and not config.eval.every
    ):
        yield (
            f"checkpoint.keep_best depends on {metric}, but eval.every is 0: set that, or "
            "checkpoint.best_metric"
        )
    first, last = config.run.profile or (1, 1)
    if not first <= last <= config.run.steps:
        yield (
            f"run.profile = [{first}, {last}], but should be a first and a last step within 1 to "
            f"{config.run.steps}"
        )
