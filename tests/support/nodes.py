"""Simulates machines on one machine: each has processes, a network, a hostname, a /tmp and a /dev/shm of its own.

They are Linux namespaces joined by a bridge in another namespace, and change nothing outside. They end with this
process, however it ends.
"""

import shutil
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

_PREFIX = "10.77.0."
_ALONE = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]


def missing() -> str:
    """Why this machine cannot simulate several; empty if it can."""
    tools = [
        tool
        for tool in ("unshare", "nsenter", "setpriv", "ip", "bridge", "tc")
        if shutil.which(tool) is None
    ]
    if tools:
        return f"{', '.join(tools)} not installed (Debian: util-linux, iproute2)"
    tried = subprocess.run(
        [*_ALONE, "ip", "link", "add", "tried", "type", "bridge"], capture_output=True, text=True
    )
    return (
        f"no network namespaces: {tried.stderr.strip() or 'not permitted'}" if tried.returncode else ""
    )


class Nodes:
    """Starts `count` machines; a context manager. All of them see the folders in `shared`, as if mounted.

    A node's address is `address(i)`, its hostname `node{i}`.
    """

    def __init__(self, count: int, folder: Path, *shared: Path) -> None:
        self.count, self._folder, self._shared = count, folder, shared
        self._inits: dict[int, subprocess.Popen[str]] = {}
        self._switch: subprocess.Popen[str] | None = None
        self._resources = ExitStack()

    def __enter__(self) -> "Nodes":
        self._resources.callback(self._end)
        with self._resources:
            self._switch = self._hold(
                ["unshare", "--net"], "ip link add switch type bridge && ip link set switch up"
            )
            for node in range(self.count):
                self.boot(node)
            self._resources = self._resources.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    @staticmethod
    def address(node: int) -> str:
        """Return the node's address in the network of all nodes."""
        return f"{_PREFIX}{node + 1}"

    def boot(self, node: int) -> None:
        """Start a machine, which has nothing in memory and an empty /tmp."""
        home = self._folder / f"node{node}"
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        bind = ""
        for shared in filter(lambda path: path.is_relative_to("/tmp"), self._shared):
            # hidden by the node's own /tmp
            inside = home / shared.relative_to("/tmp")
            inside.mkdir(parents=True, exist_ok=True)
            bind += f"mount --bind {shared} {inside} && "
        begin = (
            f"hostname node{node} && ip link set lo up && {bind}mount --rbind {home} /tmp && "
            "mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs tmpfs /run"
        )
        init = self._inits[node] = self._hold(_ALONE, begin)
        inner = Path(f"/proc/{init.pid}/task/{init.pid}/children").read_text().split()[0]
        self._in_switch(f"ip link add port{node} type veth peer name eth0 netns {inner}")
        self._in_switch(f"ip link set port{node} master switch up")
        self._inside(node, f"ip addr add {self.address(node)}/24 dev eth0 && ip link set eth0 up")

    def start(
        self, node: int, command: list[str], log: Path, environment: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        """Start a command on a node, whose output is appended to `log`."""
        with log.open("ab") as file:
            return subprocess.Popen(
                [*self._enter(node), *command],
                env=environment | {"TMPDIR": "/tmp", "HOME": "/tmp"},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def kill(self, node: int) -> None:
        """Simulates a power failure: every process of the node ends at once, and so does its address."""
        init = self._inits.pop(node)
        init.kill()
        init.wait()
        self._in_switch(f"! ip link show port{node} >/dev/null 2>&1 || ip link del port{node}")

    def cut(self, node: int) -> None:
        """Have the switch drop everything from and for the node; no process is told."""
        self._in_switch(f"bridge link set dev port{node} state 0")

    def mend(self, node: int) -> None:
        """Undo `cut`."""
        self._in_switch(f"bridge link set dev port{node} state 3")

    def slow(self, node: int, mbit: int) -> None:
        """Limits what is sent to the node to `mbit` Mbit/s."""
        self._in_switch(
            f"tc qdisc add dev port{node} root tbf rate {mbit}mbit burst 64kbit latency 400ms"
        )

    def processes(self, node: int) -> list[str]:
        """Return the command lines of what runs on a node, except for its first process."""
        command = [*self._enter(node), "ps", "-eo", "pid=,args="]
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        rows = [line.split(None, 1) for line in listed.splitlines()]
        return [args for pid, args in rows if pid != "1" and not args.startswith("ps -eo")]

    def _hold(self, namespaces: list[str], begin: str) -> subprocess.Popen[str]:
        """Start a process that keeps namespaces alive, after `begin` has prepared them; it ends with this one."""
        script = f"{begin} && echo ready && exec sleep infinity"
        command = ["setpriv", "--pdeathsig", "KILL", *namespaces, "sh", "-c", script]
        held = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert held.stdout is not None
        if held.stdout.readline() != "ready\n":
            held.kill()
            raise RuntimeError(f"a simulated machine could not be started: {begin}")
        return held

    def _enter(self, node: int) -> list[str]:
        inner = (
            Path(f"/proc/{self._inits[node].pid}/task/{self._inits[node].pid}/children")
            .read_text()
            .split()[0]
        )
        return ["nsenter", "--target", inner, "--net", "--uts", "--mount", "--pid", "--"]

    def _inside(self, node: int, script: str) -> None:
        subprocess.run([*self._enter(node), "sh", "-ec", script], check=True, timeout=20)

    def _in_switch(self, script: str) -> None:
        assert self._switch is not None
        enter = ["nsenter", "--target", str(self._switch.pid), "--net", "--"]
        subprocess.run([*enter, "sh", "-ec", script], check=True, timeout=20)

    def _end(self) -> None:
        for held in [*self._inits.values(), *filter(None, [self._switch])]:
            held.kill()
            held.wait()
        self._inits.clear()
        for _ in range(50):  # the folders are free once the last process of a namespace has gone
            shutil.rmtree(self._folder, ignore_errors=True)
            if not self._folder.exists():
                return
            time.sleep(0.1)
