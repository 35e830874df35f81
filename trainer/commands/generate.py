"""`hotbunk generate`: answer a prompt, or chat, with a model."""

import argparse
import multiprocessing
import os
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from transformers import PreTrainedTokenizerBase

from generation.engine.devices import first_devices
from generation.engine.engine import Leader
from generation.engine.sampling import SamplingSettings
from generation.engine.settings import EngineSettings, cpu_binding, kv_elements
from generation.messages import chat_form, plain_ids
from generation.rollouts.episode import encode_following, without_second_end
from trainer.chat_template import end_tokens
from trainer.commands.exporting import export
from trainer.config.model_file import model_config
from trainer.config.resuming import COMPLETE_MARKER
from trainer.config.schema import ModelConfig
from trainer.config.section import expanded_argument
from trainer.config.weight_files import stored_tensors
from trainer.data import load_tokenizer
from trainer.engines import on_checkpoint
from trainer.errors import UserError
from trainer.run import processes
from trainer.run.checkpoint import is_complete, latest_complete

LONGEST = 4096  # most tokens of a conversation, if the model allows as many
LONGEST_ANSWER = 512  # most tokens of an answer
_SPARE = 512  # tokens of KV cache: vLLM rounds up to blocks, and keeps one block for itself


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    add_model_arguments(parser)
    parser.add_argument(
        "--prompt", help="prompt to answer; without it, the command chats on the terminal"
    )
    parser.add_argument("--system", help="system message")
    longest = (
        f"most tokens of an answer (default: {LONGEST_ANSWER}, or fewer if the run was trained with "
        "fewer)"
    )
    parser.add_argument("--max-tokens", type=int, help=longest)
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="sampling temperature (default: 0, greedy)"
    )


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that choose a model for `model_folder`."""
    parser.add_argument(
        "model", type=expanded_argument, help="folder of a run, a checkpoint or a model, or a hub name"
    )
    step = "use the checkpoint of this step (default: the run's result, or its newest checkpoint)"
    parser.add_argument("--step", type=int, help=step)


def main(arguments: argparse.Namespace) -> int:
    """Run the command. Raises UserError before anything is started; after that it ends the process
    itself.
    """
    if (arguments.max_tokens is not None and arguments.max_tokens < 1) or arguments.temperature < 0:
        raise UserError("--max-tokens must be at least 1, and --temperature at least 0")
    settings = engine_settings(arguments.model, arguments.step)
    chat = ChatSession(load_tokenizer(ModelConfig(path=settings.model)), arguments.system)
    if chat.tokenizer.chat_template is None and (
        arguments.prompt is None or arguments.system is not None
    ):
        raise UserError(
            f"{settings.model} has no chat template: give a --prompt to continue, and no --system"
        )
    if arguments.prompt is not None:
        chat.ask(arguments.prompt)
    sampled = training_sampling(Path(settings.model))
    ends = end_tokens(settings.model, chat.tokenizer, stop_token_ids=sampled.get("stop_token_ids"))
    for line in ends.remarks:
        print(line, file=sys.stderr)
    longest = arguments.max_tokens or min(LONGEST_ANSWER, sampled.get("max_tokens", LONGEST_ANSWER))
    sampling = SamplingSettings(longest, arguments.temperature, stop_token_ids=ends.ids)
    processes.start_guardian()
    processes.run(lambda: converse(settings, chat, sampling))


def run_folder(name: str) -> Path:
    """Return the run's folder if `name` is a checkpoint; any other folder as it is."""
    folder = Path(name)
    return folder.absolute().parents[1] if is_complete(folder) else folder


def model_folder(name: str, step: int | None = None) -> Path:
    """Return the folder or hub name of the model that `name` stands for: a model, a checkpoint, or
    a run.

    A run's model is its result or, if there is none yet or the run has continued since, the policy
    of its newest checkpoint; with `step`, it is the policy of that step's checkpoint. A line on
    stderr says which checkpoint is used. Raises UserError if there is no such model.
    """
    folder = Path(name)
    run = run_folder(name)
    chosen = folder if run != folder else None
    if not (run / "config.yaml").is_file():
        if chosen or step is not None:
            raise UserError(
                f"{name} is not in a run's folder with a config.yaml, which describes the model"
            )
        return folder
    if step is not None:
        chosen = run / "checkpoints" / f"step_{step}"
        if not is_complete(chosen):
            raise UserError(
                f"--step: {chosen} is not a complete checkpoint: choose another one in its folder"
            )
    elif chosen is None:
        result = run / "model" / "config.json"
        chosen = latest_complete(run / "checkpoints")
        newest = 0.0 if chosen is None else (chosen / COMPLETE_MARKER).stat().st_mtime
        if result.is_file() and result.stat().st_mtime >= newest:
            return result.parent
    if chosen is None:
        raise UserError(
            f"{name} has no model yet: its run is not finished, and no checkpoint is complete"
        )
    print(f"the policy of {chosen}, after step {chosen.name.removeprefix('step_')}", file=sys.stderr)
    try:
        # In a separate process, since the threads of torch's operations would not survive the
        # guardian's fork
        with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as process:
            return process.submit(export, chosen, run).result()
    except BrokenProcessPool as error:
        raise UserError(
            f"exporting the policy of {chosen} was killed, usually for lack of memory"
        ) from error


def training_sampling(folder: Path) -> dict[str, Any]:
    """Read the keys of `sampling` with which a run's model was trained; empty for a model that is
    not a run's.

    Such a model may not end answers that are longer than in its training.
    """
    file = folder.parent / "config.yaml"
    of_run = re.fullmatch(r"model(_step_\d+)?", folder.name) and file.is_file()
    recipe = yaml.safe_load(file.read_bytes()) if of_run else None
    return (recipe or {}).get("sampling") or {}


def engine_settings(name: str, step: int | None = None) -> EngineSettings:
    """Return the settings of an engine for one conversation with a model (`model_folder`), in the
    model's dtype.
    """
    folder = model_folder(name, step)
    try:
        config = model_config(str(folder))
        if folder.is_dir():
            stored_tensors(folder)
    except UserError as error:
        raise UserError(str(error).removeprefix("model.path: ")) from error
    dtype = "float32" if (config.get("dtype") or config.get("torch_dtype")) == "float32" else "bfloat16"
    length = min(config.get("max_position_embeddings") or LONGEST, LONGEST)
    itemsize = 4 if dtype == "float32" else 2
    return EngineSettings(
        model=str(folder),
        dtype=dtype,
        max_model_len=length,
        max_num_seqs=1,
        kv_cache_bytes=(length + _SPARE) * kv_elements(config) * itemsize,
        sleep=False,
        device_indices=first_devices(1),
        **cpu_binding([0], 1),
    )


class ChatSession:
    """A conversation as token ids. Earlier messages are never encoded again: a prompt begins with
    all ids before it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, system: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.ids = list[int]()
        self._system = [] if system is None else [{"role": "system", "content": system}]

    def ask(self, text: str) -> list[int]:
        """Add a message of the user and return the prompt's ids; without a chat template, those of
        the text alone.
        """
        if self.tokenizer.chat_template is None:
            [self.ids] = plain_ids(self.tokenizer, [text])
            return self.ids
        message = {"role": "user", "content": text}
        if self.ids:
            added = encode_following(self.tokenizer, [message], {})
            self.ids = self.ids + without_second_end(self.ids[-1], added, {added[0]})
        else:
            messages = [*self._system, message]
            rendered = chat_form(self.tokenizer).render(messages)
            self.ids = self.tokenizer(rendered, add_special_tokens=False)["input_ids"]
        return self.ids


class Typing:
    """A printer of an answer that grows."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._printed = ""

    def grow(self, ids: list[int]) -> None:
        """Print the new text of the answer's ids, without a last character whose bytes are
        incomplete.

        It prints nothing if the text of earlier ids has changed.
        """
        text = self._tokenizer.decode(ids, skip_special_tokens=True).rstrip("\ufffd")
        if text.startswith(self._printed):
            print(text[len(self._printed) :], end="", flush=True)
            self._printed = text

    def finish(self, text: str) -> None:
        """Print the rest of the complete answer, or all of it on a new line if different text has
        been printed.
        """
        print(text[len(self._printed) :] if text.startswith(self._printed) else f"\n{text}", flush=True)
        self._printed = ""


def converse(settings: EngineSettings, chat: ChatSession, sampling: SamplingSettings) -> int:
    """Answer the prompt in `chat` or, without one, what the user types, until Ctrl-D.

    On a terminal answers are printed while they grow.
    """
    typing = Typing(chat.tokenizer)
    on_ids = typing.grow if sys.stdout.isatty() else None

    def job(leader: Leader) -> int:
        for prompt in [chat.ids] if chat.ids else _typed(chat):
            seed = int.from_bytes(os.urandom(7))
            request = leader.engine.complete(
                prompt, sampling, seed=seed, policy_version=0, on_ids=on_ids
            )
            answer = leader.thread.run(request, 3600, "the answer")
            chat.ids = prompt + answer.token_ids
            text = chat.tokenizer.decode(answer.token_ids, skip_special_tokens=True)
            typing.finish(f"{text} […]" if answer.finish_reason == "length" else text)
        return 0

    return on_checkpoint("generate", settings, job)


_CHAT_HELP = "/new begins a new conversation, /quit or Ctrl-D ends, Ctrl-C stops an answer and ends"


def _typed(chat: ChatSession) -> Iterator[list[int]]:
    """Yield the prompt after each line that is typed; on a terminal, lines such as /help are not
    for the model.
    """
    interactive = sys.stdin.isatty()
    with suppress(EOFError):
        while True:
            line = input("> " if interactive else "")
            command = line.strip() if interactive and line.startswith("/") else ""
            if command == "/quit":
                return
            if command == "/new":
                chat.ids = []
            elif command:
                print(_CHAT_HELP)
            else:
                yield chat.ask(line)
