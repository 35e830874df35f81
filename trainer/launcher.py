"""Start a run's ranks with torchrun, on a store that listens on one interface, and print a summary
if the run fails.

    python -m trainer.launcher --nproc-per-node 2 -m trainer train RECIPE …

`hotbunk train` becomes this process, once on each node. It takes torchrun's options. It differs
from plain torchrun in three ways:

- The rendezvous. torchrun's own listens on every interface
  (https://github.com/pytorch/pytorch/issues/173909) and, by default, unpickles whatever a
  connecting process has put there. Here launchers and ranks meet at a store bound to 127.0.0.1, or
  on several nodes to `--master-addr`, and nothing in it is unpickled.
- The end. Once no process of the run is left on this machine, a summary is printed instead of a
  traceback. The exit code is the failed rank's, or 128 + the number of the signal that ended the
  launcher.
- Temporary files. The launcher writes none.

docs/launching.md has the details.
"""

# ruff: noqa: E402 - a signal handler is installed before the imports
import ipaddress
import json
import logging
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any


def _leave(number: int, _: object) -> None:
    os.write(2, b"[hotbunk] the run was interrupted by SIGINT, exit code 130\n")
    os._exit(128 + number)


if __name__ == "__main__":
    # In effect until torchrun installs its own handler. A KeyboardInterrupt could be raised inside
    # one of the imports below, many of which catch every exception, and the run would continue.
    signal.signal(signal.SIGINT, _leave)
    os.environ["HOTBUNK_LAUNCHER"] = str(os.getpid())  # ranks end when this process does

from torch.distributed import DistNetworkError, PrefixStore
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousInfo,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.run import parse_args, parse_min_max_nnodes, run

from generation import guardian
from sharding.wire.group import listen
from trainer.distributed import PREFIX
from trainer.errors import UserError
from trainer.run import processes, supervisor
from trainer.run.records import read_rows
from trainer.run.screen import own_command
from trainer.run.watchdog import alarm

_BACKEND = "hotbunk"
_GONE_SECONDS = 30.0  # the time guardians have to end processes that the ranks have left behind
_LOOK_SECONDS = 1.0
_MOST_REASONS = 8  # the largest number of reasons in the summary
# Signals that torchrun handles
_INTERRUPTIONS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_SIGNALS = set(map(int, signal.Signals))
_SENTENCES = ("UserError", "RemoteError", "Interrupted", "Deadline")  # kinds whose text needs no prefix


class BoundRendezvous(StaticTCPRendezvous):
    """torchrun's static rendezvous, except that the first node's store listens on `master_addr`
    only.
    """

    def get_backend(self) -> str:
        """Return the name under which the rendezvous is registered."""
        return _BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other nodes' launchers at the store, which the ranks use too. Raises UserError
        if that fails.
        """
        address = f"{self.master_addr}:{self.master_port}"
        if self.rank == 0 and self._store is None:
            try:
                self._store = store = listen(
                    self.master_addr, self.master_port, self.timeout.total_seconds()
                )
            except OSError as error:
                raise UserError(
                    f"the launcher cannot listen on {address} ({error.strerror or error}): MASTER_ADDR "
                    "must be this node's own address, and MASTER_PORT free there"
                ) from error
            self.master_port = store.port
        try:
            info = super().next_rendezvous()
            while not self._first_of_its_node():
                time.sleep(_LOOK_SECONDS)
                info = super().next_rendezvous()
            return info
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise UserError(
                f"node {self.rank} did not meet the others at {address}: {reason}"
            ) from error

    def _first_of_its_node(self) -> bool:
        """Return True if this is the node's first launcher at this store; else an earlier one has
        died.

        In that case the store belongs to an attempt that is over. The other nodes may not have
        noticed, since a machine that loses power closes no connection; an alarm spares them a long
        wait. The next attempt has another store.
        """
        assert self._store is not None
        with suppress(DistNetworkError):
            # The store ends with its attempt, once the ranks have noticed the alarm
            if self._store.add(f"hotbunk/launcher/{self.rank}", 1) == 1:
                return True
            alarm(
                PrefixStore(PREFIX, self._store), f"node {self.rank} had died and has been started again"
            )
        self._store = None
        return False


def main(argv: Sequence[str] | None = None) -> int:
    """Run torchrun with `argv` (None: this process's arguments), and return the exit code."""
    args = parse_args(argv)
    for name in ("", ".agent.server.api"):
        # The summary reports signals; the second logger has its own level
        logging.getLogger(f"torch.distributed.elastic{name}").setLevel(logging.ERROR)
    messages_file = os.memfd_create("hotbunk-last-words")
    os.environ[processes.LAST_WORDS] = f"/proc/{os.getpid()}/fd/{messages_file}"
    failures: dict[int, ProcessFailure] = {}
    outcome = _beginning(args)
    _tell_supervisor(outcome)  # in case this launcher is killed
    try:
        _stay_private(args)
        guardian.adopt_orphans()  # all processes of the run stay below this one when their parents end
        run(args)
        return 0
    except ChildFailedError as failed:
        failures = failed.failures
        code = failed.get_first_failure()[1].exitcode
        code = code if code > 0 else 128 - code
    except (SignalException, KeyboardInterrupt) as interruption:
        code = 128 + getattr(interruption, "sigval", signal.SIGINT)
    except UserError as error:
        print(f"hotbunk: {error}", file=sys.stderr)
        return 2
    with suppress(SignalException, KeyboardInterrupt):  # after a second signal, do not wait
        deadline = time.monotonic() + _GONE_SECONDS
        while guardian.descendants() and time.monotonic() < deadline:
            # The guardians' last lines go before the summary
            time.sleep(0.1)
    for number in _INTERRUPTIONS:
        signal.signal(number, signal.SIG_IGN)  # the rest takes only a moment
    with os.fdopen(messages_file, "rb") as file:  # of `processes.leave_word`, in the order of writing
        messages = [json.loads(line) for line in file.read().splitlines()]
    ending = "failed"
    if code - 128 in _INTERRUPTIONS:
        ending = f"was interrupted by {signal.Signals(code - 128).name}"
    reasons = _reasons(messages, failures)
    if outcome.checkpoints:
        rows = read_rows(Path(outcome.checkpoints).with_name("metrics.jsonl"))
        outcome.step = rows[-1]["train/step"] + 1 if rows else 1
        outcome.saved = not set(supervisor.marks(Path(outcome.checkpoints))) <= set(outcome.before)
    outcome.kinds, outcome.reasons = (
        [message["kind"] for message in messages],
        [line.strip() for line in reasons],
    )
    _tell_supervisor(outcome)
    lines = [f"the run {ending}, exit code {code}", *reasons, *_remedy(args)]
    with suppress(OSError):  # the terminal is gone
        print("".join(f"[hotbunk] {line}\n" for line in lines), end="", file=sys.stderr, flush=True)
    return code


def _stay_private(args: Any) -> None:
    """Have torchrun use this launcher's store and write no files. Raises UserError if other nodes
    cannot reach it.
    """
    host = "127.0.0.1"
    port = 0
    node = args.node_rank
    nodes = parse_min_max_nnodes(args.nnodes)[1]
    if nodes > 1:
        host = args.master_addr
        port = args.master_port or 29500
        if node == 0 and not _is_loopback(host):
            try:
                address = socket.gethostbyname(host)
            except OSError as error:
                raise UserError(
                    f"MASTER_ADDR={host} is not known on this node: {error.strerror}"
                ) from error
            if _is_loopback(address):
                raise UserError(
                    f"MASTER_ADDR={host} is {address} on this node, where no other node can reach it: "
                    "set it to this node's address on the network"
                )

    def rendezvous(parameters: RendezvousParameters) -> BoundRendezvous:
        return BoundRendezvous(
            host, port, node, nodes, parameters.run_id, int(parameters.config["timeout"])
        )

    rendezvous_handler_registry.register(_BACKEND, rendezvous)
    args.standalone = False
    args.rdzv_backend = _BACKEND
    args.rdzv_endpoint = f"{host}:{port}"
    args.node_rank = 0  # otherwise torchrun warns that only its own static rendezvous uses it
    args.log_dir = args.log_dir or os.devnull


def _is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _reasons(messages: list[dict[str, Any]], failures: dict[int, ProcessFailure]) -> list[str]:
    """Return a line for each reason for which ranks ended.

    Ranks that left no message come first; the others follow in the order of their messages.
    """
    ranks: dict[str, list[int]] = {}
    for rank in failures.keys() - {message["rank"] for message in messages}:
        code = failures[rank].exitcode
        code = code if code > 0 else 128 - code
        by_signal = f"was ended by {signal.Signals(code - 128).name}" if code - 128 in _SIGNALS else ""
        ranks.setdefault(by_signal or f"ended with exit code {code}, without a message", []).append(rank)
    for message in messages:
        rank = message["rank"]
        kind = message["kind"]
        text = message["text"].removeprefix(f"rank {message['rank']} ")
        ranks.setdefault(text if kind in _SENTENCES else f"{kind}: {text}", []).append(rank)
    lines = []
    for text, numbers in ranks.items():
        noun = "rank" if len(numbers) == 1 else "ranks"
        lines.append(f"  {noun} {_list(sorted(numbers))}: {text}")
    more = len(lines) - _MOST_REASONS
    return lines if more <= 0 else [*lines[:_MOST_REASONS], f"  and {more} more reasons, above"]


def _list(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return str(ranks[0])
    return ", ".join(map(str, ranks[:-1])) + f" and {ranks[-1]}"


def _beginning(args: Any) -> supervisor.Outcome:
    """Return the outcome of an attempt before its start; empty without a supervisor, or if the
    recipe is wrong.
    """
    if supervisor.OUTCOME not in os.environ:
        return supervisor.Outcome()
    from trainer import cli

    try:
        folder = cli.training_config(cli.parse(args.training_script_args)).run.folder / "checkpoints"
    except UserError:  # the ranks will report it
        return supervisor.Outcome()
    return supervisor.Outcome(checkpoints=str(folder.absolute()), before=supervisor.marks(folder))


def _tell_supervisor(outcome: supervisor.Outcome) -> None:
    """Write the outcome of this attempt for the supervisor, if there is one."""
    if path := os.environ.get(supervisor.OUTCOME):
        with suppress(OSError):  # the supervisor is gone
            Path(path).write_text(json.dumps(asdict(outcome)), "utf-8")


def _remedy(args: Any) -> list[str]:
    """Return lines that say how to resume the run and where its files are."""
    from trainer import cli
    from trainer.run.checkpoint import latest_complete

    try:
        config = cli.training_config(cli.parse(args.training_script_args))
    except UserError:  # the recipe has changed meanwhile
        return []
    folder = config.run.folder
    newest = latest_complete(folder / "checkpoints")
    records = f"the ranks' output is above, the run's records are in {folder}"
    if newest is None:
        return ["no checkpoint is complete: the same command starts from the beginning", records]
    option = "" if config.checkpoint.resume == "auto" else " with --resume auto"
    resuming = f"to resume from {newest}, give the same command again{option}"
    trying = f"to try the model of {newest.name}: {own_command()} generate {shlex.quote(str(folder))}"
    return [resuming, trying, records]


if __name__ == "__main__":
    sys.exit(main())
