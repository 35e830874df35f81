"""The command line of `hotbunk`, which imports torch only when a command needs it.

`hotbunk train` and `hotbunk sft`, or `torchrun … -m trainer train RECIPE`, start one process for
each rank; this module runs in each of them.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from contextlib import suppress
from errno import EACCES, ENAMETOOLONG, EPERM
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from generation.importing import without_collections
from trainer.commands.launch import RANKS
from trainer.config.checks import check_config
from trainer.config.machine import check_torch_libraries, resolve_device
from trainer.config.recipe import known_keys, load_config, to_yaml
from trainer.config.schema import RolloutConfig, TrainConfig
from trainer.config.section import OneOf, path_argument
from trainer.config.suggestions import closest, suggestion
from trainer.errors import UserError, exit_sentence, quoted
from trainer.rewards import RewardPool
from trainer.run import processes
from trainer.run.lock import RunLock
from trainer.run.screen import own_command
from trainer.surroundings import put_in_order


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv`, by default in this process's arguments. Return the exit code; 2
    means a mistake of the user's.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    return _reporting(lambda: _naming_paths(lambda: _dispatch(words)))


def _naming_paths(action: Callable[[], int]) -> int:
    """Run `action` and return its exit code. Raises UserError for a path that is too long or that
    may not be used.
    """
    try:
        return action()
    except OSError as error:
        if error.errno not in (ENAMETOOLONG, EACCES, EPERM) or error.filename is None:
            raise
        path = error.filename
        reason = str(error.strerror).lower()
        raise UserError(f"{path} cannot be used ({reason}): name another path") from error


def _dispatch(argv: list[str]) -> int:
    processes.put_current_folder_last()
    forgotten = put_in_order()
    if isinstance(sys.stdout, TextIOWrapper):
        with suppress(OSError):  # another process, such as a supervisor, has replaced the descriptor
            sys.stdout.reconfigure(errors="backslashreplace")  # for ASCII terminals and lone surrogates
    try:
        arguments = parse(argv or ["--help"])
    except SystemExit:  # argparse has printed the help
        return 0
    command = arguments.command
    if command not in ("train", "sft"):
        return _module(command).main(arguments) or 0
    if forgotten:
        print(f"[hotbunk] {forgotten}", file=sys.stderr)
    check_torch_libraries()
    config = training_config(arguments)
    check_config(config, command)
    if arguments.check:
        RewardPool(config.reward)
        if config.engine.logits_processors:
            from trainer.engines import processor_arguments

            processor_arguments(config, resolve_device(config) == "cuda")
        if config.rollout != RolloutConfig():
            from trainer.data import load_tokenizer
            from trainer.rollouts.level import RolloutLevel

            # Loads the functions that the section names
            RolloutLevel(config, load_tokenizer(config.model))
        return 0
    if arguments.dry_run:
        check_inputs(config, command)
        print(to_yaml(config, mask=True), end="")
        inputs = "answers and the model's sizes"
        if command == "train":
            inputs = "prompts, rewards and the model's sizes"
        start = shlex.join(word for word in argv if word != "--dry-run")
        print(f"# all checked: keys, tokenizer, {inputs}; to start: {own_command()} {start}")
        return 0
    lock = RunLock(config.run.folder)
    processes.start_guardian(lock.descriptor)  # before anything that starts processes or takes long

    def locked() -> int:
        if os.environ.get("RANK", "0") == "0":
            lock.take(config.checkpoint.grace_s + 60)  # the folder's last run may be ending
        return _module(command).main(config, lock) or 0

    return processes.run(lambda: _reporting(locked))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command and its arguments; `overrides` holds the overridden keys of a recipe. Raises
    UserError.
    """
    argv, overrides = split_overrides(argv)
    _check_command(argv)
    arguments = _parser(next(iter(argv), "")).parse_args(argv, argparse.Namespace(overrides=overrides))
    if overrides and not hasattr(arguments, "recipe"):
        raise UserError(
            f"hotbunk {arguments.command} takes no recipe, so --{overrides[0]} has nothing to override"
        )
    return arguments


def _check_command(argv: Sequence[str]) -> None:
    """Raise UserError if the first word is neither a command nor an option."""
    commands = ["train", "sft", *_commands()]
    if argv and not argv[0].startswith("-") and argv[0] not in commands:
        meant = closest(argv[0], commands)
        hint = f"did you mean {meant}?" if meant else f"the commands are {', '.join(commands)}"
        raise UserError(f"{quoted(argv[0])} is not a command of hotbunk; {hint}")


def training_config(arguments: argparse.Namespace) -> TrainConfig:
    """Load the recipe that the arguments of train or sft name, with their overrides. Raises
    UserError.
    """
    resume = [] if arguments.resume is None else [f"checkpoint.resume={json.dumps(arguments.resume)}"]
    return load_config(arguments.recipe, [*arguments.overrides, *resume])


def check_inputs(config: TrainConfig, command: str) -> None:
    """Load what a run loads before the model's weights (reward functions, tokenizer, prompts), and
    build the model without weights, to find mistakes. Raises UserError for the first.
    """
    from trainer.chat_template import end_tokens, unread_keys
    from trainer.data import check_token_ids, load_held_out, load_prompts, load_tokenizer
    from trainer.data.summary import prompt_lines
    from trainer.distributed import say
    from trainer.engines import processor_arguments
    from trainer.model_checks import check_model, check_teacher
    from trainer.rewards.trial import check_rewards
    from trainer.rollouts.level import RolloutLevel

    if command == "sft":
        from trainer.sft_rows import load_transcripts

        tokenizer = load_tokenizer(config.model)
        load_transcripts(config, tokenizer)
        ends = end_tokens(config.model.path, tokenizer, config.data, config.sampling.stop_token_ids)
        for line in (*unread_keys(tokenizer, config.data), *ends.remarks):
            say(line)
        check_model(config, "sft")
        return
    rewards = RewardPool(config.reward)
    processor_arguments(config, resolve_device(config) == "cuda")
    tokenizer = load_tokenizer(config.model)
    check_model(config)
    check_teacher(config, tokenizer)
    level = RolloutLevel(config, tokenizer)
    data = rewards.columns(level.data)
    images = level.image_rules
    prompts = load_prompts(data, tokenizer, images)
    ends = end_tokens(config.model.path, tokenizer, data, config.sampling.stop_token_ids)
    for line in (*unread_keys(tokenizer, data), *ends.remarks):
        say(line)
    evaluated = config.eval.datasets if config.eval.every else {}
    held_outs = {
        name: load_held_out(dataset, data, tokenizer, images) for name, dataset in evaluated.items()
    }
    for line in prompt_lines(prompts, held_outs, tokenizer):
        say(line)
    datasets = {data.path: prompts} | {f"eval.datasets.{name}": held_outs[name] for name in held_outs}
    check_token_ids(datasets, tokenizer, config.model)
    for line in check_rewards(rewards, datasets, tokenizer, config.run.seed, config.reward.timeout_s):
        say(line)


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split arguments into those that override no key of the recipe, and the overrides, each as
    `section.key=value`.

    Overrides are given as `--section.key value` or `--section.key=value`.
    """
    rest = []
    overrides = []
    words = iter(argv)
    for word in words:
        key, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or "." not in key:
            rest.append(word)
            continue
        if not equals:
            value = next(words, "--")
            if value.startswith("--"):
                raise UserError(f"{word} needs a value after it")
        overrides.append(f"{key}={value}")
    return rest, overrides


def describe_keys(width: int) -> str:
    """Describe all keys of a recipe with type, default, meaning and values, wrapped to `width`
    columns.
    """
    lines: list[str] = []

    def add(text: str, first: int, further: int) -> None:
        lines.extend(
            textwrap.TextWrapper(width, " " * first, " " * further, break_on_hyphens=False).wrap(text)
        )

    for key, field in known_keys():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            lines.append("")
            add(f"{key}: {field.annotation.__doc__}", 0, 0)
            continue
        start = "" if field.is_required() else json.dumps(field.default, ensure_ascii=False, default=str)
        add(f"--{key}  {_type(_annotation(field))}{f' = {start}' if start else ', required'}", 2, 8)
        add(field.description or "", 8, 8)
        for value, meaning in value_meanings(field).items():
            add(f"{value}: {meaning}", 10, 12)
    return "\n".join(lines)


def value_meanings(field: FieldInfo) -> dict[str, str]:
    """Return the meaning of each value of a key that takes a fixed set of values."""
    extra: Any = field.json_schema_extra or {}
    tables = [choice.table for choice in _choices(_annotation(field))]
    meanings = dict(extra.get("values", {}))
    for table in tables:
        meanings |= {name: entry.meaning for name, entry in table.items()}
    return meanings


def _annotation(field: FieldInfo) -> Any:
    """Return a field's type as the source has it. Pydantic's own record splits an annotated type
    into the type and its metadata.
    """
    return Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation


def _choices(annotation: Any) -> list[OneOf]:
    metadata = getattr(annotation, "__metadata__", ())
    choices = [item for item in metadata if isinstance(item, OneOf)]
    for part in get_args(annotation):
        if not isinstance(part, str | int):
            choices += _choices(part)
    return choices


def _type(annotation: Any) -> str:
    """Return a type as users write it: `int`, `auto|cpu|cuda`, `float|null`, `list`."""
    if get_origin(annotation) is Annotated:
        first, *metadata = get_args(annotation)
        table = next((item for item in metadata if isinstance(item, OneOf)), None)
        return "|".join([*table.table, *["file.py:fn"] * table.custom]) if table else _type(first)
    if get_origin(annotation) is Literal:
        return "|".join(map(str, get_args(annotation)))
    if get_origin(annotation) in (list, dict, tuple):
        return "mapping" if get_origin(annotation) is dict else "list"
    if get_args(annotation):  # a union; None is null in YAML
        return "|".join(map(_type, get_args(annotation)))
    return {type(None): "null", Path: "path", str: "text"}.get(
        annotation, getattr(annotation, "__name__", "")
    )


class _Parser(argparse.ArgumentParser):
    """An argparse parser that raises UserError, with one sentence, instead of exiting."""

    def error(self, message: str) -> Any:
        option = re.search(r"unrecognized arguments: --([\w-]+)", message)
        hint = (
            suggestion(option[1].replace("-", "_"), [key for key, _ in known_keys()]) if option else ""
        )
        raise UserError(message + (hint or f"; see {self.prog} --help"))


def _parser(chosen: str) -> argparse.ArgumentParser:
    """Build the parser of the command line. It knows the names of all commands, but only the
    arguments of the `chosen` one.
    """
    parser = _Parser(
        prog="hotbunk", description="Reinforcement learning of language models on shared GPUs."
    )
    parser.add_argument("--version", action="store_true", help="print the version and stop")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    summaries = {
        "train": "train a model by reinforcement",
        "sft": "warm-start a model on the answers in the data",
    }
    for name, summary in summaries.items():
        command = commands.add_parser(
            name,
            help=summary,
            description=f"{summary.capitalize()}.\n\n{RANKS}\n\n"
            "Keys of the recipe are overridden by --section.key value (in YAML):",
            epilog=describe_keys(max(60, shutil.get_terminal_size((120, 24)).columns)),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.add_argument("recipe", type=path_argument, help="YAML file")
        command.add_argument(
            "--dry-run", action="store_true", help="check, print the resolved recipe and stop"
        )
        command.add_argument(
            "--check", action="store_true", help="check what needs no tokenizer and no data, and stop"
        )
        command.add_argument("--resume", metavar="auto|none|PATH", help="short for --checkpoint.resume")
    for name, summary in _commands().items():
        command = commands.add_parser(name, help=summary, allow_abbrev=False)
        if name == chosen:
            _module(name).add_arguments(command)
    return parser


def _commands() -> dict[str, str]:
    """Return the commands besides train and sft, with their summaries: the modules in
    trainer/commands that define arguments.

    A summary is the first line of the module's docstring. Modules are read, not imported, so that
    `hotbunk --help` answers quickly.
    """
    files = sorted(Path(__file__).with_name("commands").glob("*.py"))
    texts = {path.stem: path.read_text("utf-8") for path in files}
    return {
        name: text.splitlines()[0].partition(": ")[2].rstrip('."')
        for name, text in texts.items()
        if "\ndef add_arguments(" in text
    }


def _module(command: str) -> ModuleType:
    check_torch_libraries()
    with without_collections():
        return import_module("trainer.rank" if command == "train" else f"trainer.commands.{command}")


def _reporting(action: Callable[[], int]) -> int:
    """Run `action` and return its exit code. A UserError is printed, once on each machine, and its
    exit code is 2.

    The UserError may also be the cause of the exception that a collective has raised on all ranks.
    An exit that the user's own code asks for (`sys.exit`) is reported in the same way.
    """
    try:
        return action()
    except (UserError, RuntimeError, SystemExit) as raised:
        error: BaseException | None = raised
        if isinstance(raised, SystemExit):
            error = UserError(exit_sentence(raised))
        elif not isinstance(raised, UserError):
            error = raised.__cause__
        if not isinstance(error, UserError):
            raise
        processes.leave_word("UserError", str(error))
        if not re.fullmatch("0*[1-9][0-9]{0,5}", os.environ.get("LOCAL_RANK", "0")):
            # This is the machine's first rank, or no rank at all.
            for line in str(error).splitlines():
                print(f"hotbunk: {line}", file=sys.stderr)
        return 2
