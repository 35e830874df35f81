"""The meeting of launchers, and the last messages on the screen; whole runs are in tests/distributed."""

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import DistNetworkError, PrefixStore, TCPStore
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from tests.support.real_run import ROOT, listening
from trainer import launcher
from trainer.distributed import PREFIX
from trainer.errors import UserError
from trainer.launcher import BoundRendezvous
from trainer.run import supervisor
from trainer.run.watchdog import Watchdog


def free_port(address: str) -> int:
    with socket.create_server((address, 0)) as server:
        return int(server.getsockname()[1])


def test_two_nodes_meet_at_the_interface_that_is_named_and_listen_nowhere_else() -> None:
    before = listening({os.getpid()}).get(os.getpid(), set())
    nodes = [BoundRendezvous("127.0.0.2", free_port("127.0.0.2"), node, 2, "run", 30) for node in (1, 0)]
    nodes[0].master_port = nodes[1].master_port
    with ThreadPoolExecutor() as threads:
        second, first = threads.map(BoundRendezvous.next_rendezvous, nodes)
    assert (first.rank, second.rank, first.world_size) == (0, 1, 2)
    first.store.set("key", "value")
    assert second.store.get("key") == b"value"
    assert listening({os.getpid()})[os.getpid()] - before == {"127.0.0.2"}


def test_a_node_that_restarts_ends_its_attempt_and_joins_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a power failure unnoticed by the other nodes, their store still has the old entry of this node."""
    monkeypatch.setattr(launcher, "_LOOK_SECONDS", 0.01)
    port, codes, ended = free_port("127.0.0.2"), list[int](), threading.Event()
    first, second = (BoundRendezvous("127.0.0.2", port, node, 2, "run", 30) for node in (0, 1))
    with ThreadPoolExecutor() as threads:
        old = [met.store for met in threads.map(BoundRendezvous.next_rendezvous, (first, second))]
        rank = TCPStore("127.0.0.2", port, is_master=False)
        leave = lambda code: (codes.append(code), ended.set())  # noqa: E731
        with Watchdog(PrefixStore(PREFIX, rank), 0, 1, leave):
            again = threads.submit(BoundRendezvous("127.0.0.2", port, 1, 2, "run", 30).next_rendezvous)
            assert ended.wait(120)
        assert codes == [124]
        assert rank.get(f"{PREFIX}/watchdog/why") == b"node 1 had died and has been started again"
        assert not again.done()
        del old, rank
        first._store = second._store = None  # what the ends of their processes do
        gc.collect()
        met = BoundRendezvous("127.0.0.2", port, 0, 2, "run", 30).next_rendezvous()
        met.store.set("key", "new")
        assert again.result(30).store.get("key") == b"new"


def test_a_store_that_ends_as_a_node_joins_it_is_not_joined() -> None:
    class Ended:
        def add(self, key: str, amount: int) -> int:
            raise DistNetworkError("Failed to recv, got 0 bytes")

    node = BoundRendezvous("127.0.0.2", 1, 1, 2, "run", 30)
    node._store = Ended()  # type: ignore[assignment]
    assert not node._first_of_its_node() and node._store is None


def test_an_address_that_is_not_this_nodes_is_refused_in_a_sentence() -> None:
    with pytest.raises(
        UserError, match=r"cannot listen on 203\.0\.113\.7:29500 .*MASTER_ADDR must be this node's own"
    ):
        BoundRendezvous("203.0.113.7", 29500, 0, 2, "run", 30).next_rendezvous()


def test_a_name_that_means_loopback_on_the_first_node_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # As Debian's /etc/hosts has it
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    monkeypatch.setenv(launcher.processes.LAST_WORDS, "")
    several = [
        "--nnodes",
        "2",
        "--node-rank",
        "0",
        "--master-addr",
        "first",
        "-m",
        "trainer",
        "train",
        "r.yaml",
    ]
    assert launcher.main(several) == 2
    assert "MASTER_ADDR=first is 127.0.1.1 on this node" in capsys.readouterr().err


def test_reasons_are_told_once_those_of_silent_ranks_first(tmp_path: Path) -> None:
    words = [
        {"rank": 5, "kind": "RuntimeError", "text": "out of luck"},
        *(
            {"rank": rank, "kind": "RemoteError", "text": f"rank {rank} lost contact"}
            for rank in (3, 0, 1)
        ),
        {"rank": 4, "kind": "UserError", "text": "rank 4 is a word of the sentence"},
    ]
    exits = {2: -9, 6: 139, 7: 7, 5: 1}
    failures = {rank: ProcessFailure(0, 1, code, str(tmp_path / "none")) for rank, code in exits.items()}
    assert launcher._reasons(words, failures) == [
        "  rank 2: was ended by SIGKILL",
        "  rank 6: was ended by SIGSEGV",
        "  rank 7: ended with exit code 7, without a message",
        "  rank 5: RuntimeError: out of luck",
        "  ranks 0, 1 and 3: lost contact",
        "  rank 4: is a word of the sentence",
    ]


def test_a_ctrl_c_that_an_import_would_swallow_ends_the_launcher(tmp_path: Path) -> None:
    """A stand-in for torch catches everything while it is imported, as some real modules do for a moment."""
    (tmp_path / "torch.py").write_text(
        "import os, signal, sys, time\n"
        "try:\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(1)\nexcept BaseException:\n    pass\n"
        "sys.exit(7)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "trainer.launcher"]
    ended = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stderr) == (
        130,
        "[hotbunk] the run was interrupted by SIGINT, exit code 130\n",
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_launcher_says_its_own_lines_only_when_a_run_is_interrupted(
    tmp_path: Path, number: signal.Signals
) -> None:
    """Torchrun's own messages about the interruption are not printed."""
    script = "import signal, time\nsignal.signal(2, signal.SIG_DFL)\nprint('ready', flush=True)\ntime.sleep(600)\n"
    (tmp_path / "rank.py").write_text(script)
    command = [sys.executable, "-m", "trainer.launcher", "--nproc-per-node=1", str(tmp_path / "rank.py")]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True, **pipes) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            process.send_signal(number)
            _, output = process.communicate(timeout=60)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 128 + number
    lines = output.splitlines()
    assert lines and [line for line in lines if not line.startswith("[hotbunk] ")] == []


def test_a_supervisor_is_told_what_was_saved_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "x.yaml"
    recipe.write_text(f"run: {{output_dir: {tmp_path}}}\nmodel: {{path: m}}\ndata: {{path: d}}\n")
    (tmp_path / "x" / "checkpoints" / "step_4").mkdir(parents=True)
    (tmp_path / "x" / "checkpoints" / "step_6").mkdir()
    (tmp_path / "x" / "checkpoints" / "step_4" / "COMPLETE").touch()
    words: Any = SimpleNamespace(training_script_args=["train", str(recipe), "--resume", "none"])
    assert launcher._beginning(words) == supervisor.Outcome()  # without one
    monkeypatch.setenv(supervisor.OUTCOME, str(tmp_path / "outcome"))
    outcome = launcher._beginning(words)
    assert outcome.checkpoints == str(tmp_path / "x" / "checkpoints")
    assert [mark.split()[0] for mark in outcome.before] == ["step_4"]
    launcher._tell_supervisor(outcome)
    written = supervisor.Outcome(**json.loads((tmp_path / "outcome").read_text()))
    assert set(supervisor.marks(Path(written.checkpoints))) == set(written.before)
    (tmp_path / "x" / "checkpoints" / "step_6" / "COMPLETE").touch()
    assert len(set(supervisor.marks(Path(written.checkpoints))) - set(written.before)) == 1
    words.training_script_args = ["train", str(tmp_path / "absent.yaml")]
    assert launcher._beginning(words) == supervisor.Outcome()  # whose mistake the ranks tell
