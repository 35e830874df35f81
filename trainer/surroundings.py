"""Put a process's surroundings in order before anything heavy is imported: left-over variables,
proxies, a home.
"""

import os
import socket
import stat
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from generation.loopback import off_proxies
from trainer.errors import UserError

_OF_A_RANK = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "ROLE_NAME",
)


def put_in_order() -> str:
    """Forget variables that another launcher has left, keep loopback off proxies, and give a user
    without a home one.

    Returns a sentence about variables of several ranks that were forgotten, or "". Raises UserError
    where this Python was started in a way that torch, Transformers or vLLM do not bear.
    """
    if sys.flags.optimize > 1:
        raise UserError("PYTHONOPTIMIZE=2 (-OO) drops docstrings, which Transformers reads: unset it")
    if any(_makes_errors(*option.split(":")) for option in sys.warnoptions):
        raise UserError(
            "PYTHONWARNINGS=error (-W error) makes errors of torch's and vLLM's own warnings: unset it"
        )
    os.environ.update(off_proxies(os.environ))
    if os.path.expanduser("~") == "~":  # no HOME, and no entry in /etc/passwd
        os.environ["HOME"] = _private_home()
    # Where there is neither, getpass raises KeyError in torch
    os.environ.setdefault("USER", str(os.getuid()))
    return _forget_rank()


def _makes_errors(action: str, message: str = "", category: str = "", module: str = "", *_: str) -> bool:
    """Return True for an option of -W that raises warnings of every module; Python takes beginnings
    of an action.
    """
    return bool(action) and "error".startswith(action) and not module


def _private_home() -> str:
    """Make a folder for caches that only this user can enter, the same for all commands, and return
    its path.
    """
    home = os.path.join(tempfile.gettempdir(), f"hotbunk-home-{os.getuid()}")
    with suppress(FileExistsError):
        os.mkdir(home, mode=0o700)
    entry = os.lstat(home)
    if not stat.S_ISDIR(entry.st_mode) or entry.st_uid != os.getuid() or entry.st_mode & 0o077:
        raise UserError(
            f"HOME is not set, and {home} is not a private folder: set HOME to a folder of yours"
        )
    return home


def _forget_rank() -> str:
    """Forget the variables of a rank unless torchrun has set them; sizes without a rank may be the
    user's.
    """
    left = {name for name in _OF_A_RANK if name in os.environ}
    if "TORCHELASTIC_RUN_ID" in os.environ or left <= {"LOCAL_WORLD_SIZE"}:
        return ""
    rank = os.environ.get("RANK", "0")
    ranks = os.environ.pop("WORLD_SIZE", "1")
    for name in _OF_A_RANK:
        os.environ.pop(name, None)
    if ranks == "1":
        return ""
    remedy = f"a run on {ranks} nodes needs NNODES={ranks}, NODE_RANK={rank} and MASTER_ADDR"
    return f"RANK={rank} and WORLD_SIZE={ranks} are ignored, since torchrun has not set them: {remedy}"


def loopback_problem() -> str:
    """Return the error of a connection within this machine, on 127.0.0.1, or "" where there is
    none.
    """
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError as error:
        return str(error)
    return ""


def require_loopback() -> None:
    """Raise UserError unless processes of this machine reach each other on 127.0.0.1, as ranks and
    engines do.
    """
    if problem := loopback_problem():
        raise UserError(
            f"127.0.0.1 cannot be reached ({problem}): bring the loopback interface up (ip link set lo "
            "up)"
        )


def follow_umask(folder: Path) -> None:
    """Give a folder's files of weights the mode of any new file: safetensors makes them private.

    https://github.com/huggingface/safetensors/issues/782
    """
    usual = folder / "mode.part"
    usual.touch()
    for file in folder.glob("*.safetensors"):
        file.chmod(usual.stat().st_mode & 0o777)
    usual.unlink()
