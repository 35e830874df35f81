"""Commands print and work whatever surrounds them: another launcher's variables, proxies, no home, no loopback."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from generation.loopback import off_proxies
from tests.conftest import ROOT

SHOW = """
import getpass, json, os
from trainer.surroundings import put_in_order
line = put_in_order()
print(json.dumps({"line": line, "user": getpass.getuser(), "home": os.path.expanduser("~")} | dict(os.environ)))
"""


def put_in_order(*options: str, as_stranger: bool = False, **environ: str) -> dict[str, Any]:
    """Return what `put_in_order` makes of these variables, and no others, in a process of its own."""
    command = [sys.executable, *options, "-c", SHOW]
    if as_stranger:  # a uid without an entry in /etc/passwd
        command = ["setpriv", "--reuid", "54321", "--clear-groups", *command]
    done = subprocess.run(
        command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_variables_of_a_rank_count_only_where_torchrun_has_set_them() -> None:
    rank = {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
    }
    left = put_in_order(**rank)
    assert not rank.keys() & left.keys()
    assert left["line"] == (
        "RANK=3 and WORLD_SIZE=4 are ignored, since torchrun has not set them: "
        "a run on 4 nodes needs NNODES=4, NODE_RANK=3 and MASTER_ADDR"
    )
    started = put_in_order(**rank, TORCHELASTIC_RUN_ID="none")
    assert rank.items() <= started.items() and started["line"] == ""
    sizes = {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}  # which `hotbunk plan` documents
    assert sizes.items() <= put_in_order(**sizes).items()
    assert not sizes.keys() & put_in_order(**sizes, LOCAL_RANK="0").keys()


def test_loopback_is_never_asked_of_a_proxy() -> None:
    variables = put_in_order(HTTP_PROXY="http://127.0.0.2:1", no_proxy="example.org")
    assert variables["no_proxy"] == "example.org,127.0.0.1,localhost,::1"
    assert variables["NO_PROXY"] == "127.0.0.1,localhost,::1"
    assert off_proxies(variables) == {name: variables[name] for name in ("NO_PROXY", "no_proxy")}


def test_a_client_reaches_a_server_of_this_machine_beside_a_proxy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import httpx

    proxies = {"HTTP_PROXY": "http://127.0.0.2:1", "ALL_PROXY": "http://127.0.0.2:1"}
    for name, value in (proxies | off_proxies({})).items():
        monkeypatch.setenv(name, value)
    client = httpx.Client()
    for host in ("127.0.0.1", "localhost", "[::1]"):
        assert client._transport_for_url(httpx.URL(f"http://{host}:80")) is client._transport
    assert client._transport_for_url(httpx.URL("http://example.org")) is not client._transport


@pytest.mark.skipif(
    os.getuid() != 0 or not shutil.which("setpriv"), reason="only root can be another user"
)
def test_a_user_without_a_home_and_an_entry_has_a_private_one(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    for folder in tmp_path.parents:
        if not folder.stat().st_mode & 0o001:
            folder.chmod(folder.stat().st_mode | 0o011)
    variables = put_in_order(as_stranger=True, TMPDIR=str(tmp_path), PYTHONPATH=str(ROOT))
    assert variables["home"] == str(tmp_path / "hotbunk-home-54321") and variables["user"] == "54321"
    entry = (tmp_path / "hotbunk-home-54321").stat()
    assert (entry.st_mode & 0o777, entry.st_uid) == (0o700, 54321)


def run(*words: str, within: tuple[str, ...] = (), **environ: str) -> tuple[int, str]:
    command = [*within, sys.executable, *words]
    environment = os.environ | environ
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("options", "environ", "sentence"),
    [
        (
            (),
            {"PYTHONOPTIMIZE": "2"},
            "PYTHONOPTIMIZE=2 (-OO) drops docstrings, which Transformers reads: unset it",
        ),
        (
            (),
            {"PYTHONWARNINGS": "error"},
            "PYTHONWARNINGS=error (-W error) makes errors of torch's and vLLM's own",
        ),
        (
            ("-W", "error::FutureWarning"),
            {},
            "PYTHONWARNINGS=error (-W error) makes errors of torch's and vLLM's own",
        ),
    ],
)
def test_a_python_that_the_libraries_do_not_bear_is_named(
    options: tuple[str, ...], environ: dict[str, str], sentence: str
) -> None:
    code, error = run(*options, "-m", "hotbunk", "train", "recipe.yaml", **environ)
    assert code == 2 and error.startswith(f"hotbunk: {sentence}") and error.count("\n") == 1


def test_warnings_may_be_errors_in_modules_of_the_users_own() -> None:
    assert put_in_order("-W", "error:::mine", "-W", "ignore")["line"] == ""


def test_a_machine_without_loopback_is_named() -> None:
    if subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode:
        pytest.skip("no network namespace can be made here")
    code, error = run("-m", "hotbunk", "train", "recipe.yaml", within=("unshare", "-n"))
    assert (
        code == 2
        and error.startswith("hotbunk: 127.0.0.1 cannot be reached (")
        and "ip link set lo up" in error
    )


def test_a_package_of_another_project_that_hides_ours_is_named(tmp_path: Path) -> None:
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "__init__.py").write_text("raise RuntimeError('another project')\n")
    script = (
        f"import runpy, sys; sys.path.insert(0, {str(ROOT)!r}); sys.argv = ['hotbunk', 'train', 'x.yaml']; "
        "runpy.run_module('hotbunk', run_name='__main__')"
    )
    code, error = run("-P", "-c", script, PYTHONPATH=str(tmp_path))
    assert code == 2
    assert error.startswith(
        f"hotbunk: {tmp_path / 'trainer'} hides Hotbunk's package trainer by PYTHONPATH: take "
    )
