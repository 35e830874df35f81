"""Files of user code and their neighbours, which they import as scripts do, and which disturb nobody else."""

import asyncio
import json
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from generation.importing import importable, load
from trainer.config.schema import RewardConfig, RewardFunction
from trainer.rewards import RewardPool


def write(folder: Path, **files: str) -> Path:
    """Write each `name=text` as name.py, `a__b` as a/b.py. Return the folder."""
    for name, text in files.items():
        path = folder.joinpath(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return folder


def test_a_file_imports_its_neighbours_in_every_form(tmp_path: Path) -> None:
    write(
        tmp_path,
        reward="""
            import helpers, parts.b as b
            import parts.c
            from helpers import x
            from parts import a
            from parts.b import *
            from . import helpers as again

            def f():
                from late import value
                return x, helpers.x, again is helpers, a.value, b.value, parts.c.value, value
        """,
        helpers="from later import x\n",
        later="x = 3\n",
        late="value = 4\n",
        parts__a="from parts.b import value\nfrom .c import value as other\nvalue = (value, other)\n",
        parts__b="value = 5\n",
        parts__c="value = 6\n",
    )
    assert load(f"{tmp_path}/reward.py:f")() == (3, 3, True, (5, 6), 5, 6, 4)


def test_neighbours_of_the_same_name_stay_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "import helpers\ndef f(): return helpers.here\nclass Kind: pass\n"
    for name in ("one", "two"):
        write(tmp_path / name, reward=text, helpers=f"here = {name!r}\n")
    write(tmp_path, helpers="here = 'current folder'\n", other="import helpers\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("one", "two"):
        assert load(f"{tmp_path}/{name}/reward.py:f")() == name
    kind = load(f"{tmp_path}/two/reward.py:Kind")
    assert pickle.loads(pickle.dumps(kind)) is kind is not load(f"{tmp_path}/one/reward.py:Kind")
    import helpers

    assert helpers.here == "current folder"
    del sys.modules["helpers"]


def test_neighbours_with_names_of_packages_disturb_nobody_else(tmp_path: Path) -> None:
    names = ("json", "trainer", "generation", "sharding", "hotbunk", "typing", "numpy")
    broken = dict.fromkeys(names, "raise RuntimeError('a neighbour was imported')\n")
    text = (
        "import json, typing, trainer.errors\ndef f(): return json.dumps(1), trainer.errors.UserError\n"
    )
    # A folder of data, which is not a package
    (write(tmp_path, reward=text, **broken) / "datasets").mkdir()
    write(tmp_path, loads="import datasets\ndef f(): return datasets.Dataset\n")
    import datasets

    from trainer.errors import UserError

    before = list(sys.path)
    assert load(f"{tmp_path}/reward.py:f")() == (json.dumps(1), UserError)
    assert load(f"{tmp_path}/loads.py:f")() is datasets.Dataset
    assert sys.path == before


def test_a_missing_module_is_named_with_file_line_and_remedy(tmp_path: Path) -> None:
    write(
        tmp_path,
        reward="import os\nimport helpers\n",
        helpers="\nfrom gone.deeply import x\n",
        part="import p.b\n",
    )
    (tmp_path / "p").mkdir()
    absent = f"which is neither installed nor in {tmp_path}: install the package that has it, or correct the name"
    for name, place in {
        "reward": "helpers.py, line 2, imports gone",
        "part": "part.py, line 1, imports p.b",
    }.items():
        with pytest.raises(ValueError) as caught:
            load(f"{tmp_path}/{name}.py:f")
        assert str(caught.value).endswith(f"cannot be loaded: {tmp_path}/{place}, {absent}")
        assert "beside_" not in str(caught.value)
    with pytest.raises(
        ValueError, match="there is no module gone_as_well: install the package that has it"
    ):
        load("gone_as_well.part:f")


def test_a_file_that_failed_is_read_again(tmp_path: Path) -> None:
    write(tmp_path, reward="import helpers\nf = helpers.x\n", helpers="y = 1\n")
    with pytest.raises(ValueError, match="AttributeError"):
        load(f"{tmp_path}/reward.py:f")
    write(tmp_path, reward="f = 2\n")
    assert load(f"{tmp_path}/reward.py:f") == 2


def test_reward_processes_import_neighbours(tmp_path: Path) -> None:
    write(
        tmp_path,
        reward="from helpers import judge\nreward = judge\n",
        helpers="judge = lambda completion: 0.75\n",
    )
    function = RewardFunction(name=f"{tmp_path}/reward.py:reward")
    with RewardPool(RewardConfig(functions=[function], workers=1, timeout_s=60)) as pool:
        result = asyncio.run(pool.score(prompt="1", completion="2", row={}, finish_reason="stop"))
    assert (result.reward, result.error) == (0.75, "")


def test_home_and_variables_in_import_strings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "mine", reward="f = 7\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MINE", str(tmp_path / "mine"))
    assert [load(f"{name}/reward.py:f") for name in ("~/mine", "$MINE", "${MINE}", "$HOME/mine")] == [
        7
    ] * 4
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert importable("$MINE/reward.py:f") == "reward:f"
    with pytest.raises(ValueError, match=r"'\$GONE/reward.py:f' cannot be loaded: \$GONE is not set"):
        load("$GONE/reward.py:f")


def test_pickled_objects_open_where_the_file_is_loaded(tmp_path: Path) -> None:
    write(
        tmp_path,
        kinds="import helpers\nclass Kind(helpers.Base):\n    pass\n",
        helpers="class Base:\n    x = 1\n",
    )
    kind = load(f"{tmp_path}/kinds.py:Kind")
    script = "import pickle, sys; from generation.importing import load; load(sys.argv[1])\n"
    script += "print(pickle.load(sys.stdin.buffer)().x)"
    command = [sys.executable, "-c", script, f"{tmp_path}/kinds.py:Kind"]
    assert (
        subprocess.run(command, input=pickle.dumps(kind), capture_output=True, check=True).stdout
        == b"1\n"
    )
