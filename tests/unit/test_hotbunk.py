"""The package `hotbunk`, in folders that hold a trainer.py of the user's."""

import subprocess
import sys
from pathlib import Path

import generation
import sharding
import trainer
from tests.support.real_run import ROOT


def run(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    (folder / "trainer.py").write_text("MINE = True\n")
    code = f"import sys; sys.path += [{str(ROOT)!r}]; {code}"
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=120
    )


def test_hotbunk_exports_the_public_names_of_all_packages() -> None:
    import hotbunk

    assert sorted([*generation.__all__, *sharding.__all__, *trainer.__all__]) == hotbunk.__all__
    assert (
        hotbunk.TrainConfig is trainer.TrainConfig
        and hotbunk.ShardingManager is sharding.ShardingManager
    )


def test_our_packages_are_imported_before_the_users_modules(tmp_path: Path) -> None:
    code = """
from hotbunk import TrainConfig
first = next(path for path in sys.path if not path.endswith("shims"))
print(TrainConfig.__module__, repr(first), "torch" in sys.modules)
"""
    done = run(tmp_path, code)
    assert done.stdout.split() == ["trainer.config.schema", "''", "False"], done.stderr


def test_a_module_of_the_users_that_is_imported_already_is_named(tmp_path: Path) -> None:
    done = run(tmp_path, "import trainer; import hotbunk")
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: {tmp_path}/trainer.py has been imported as trainer, as Hotbunk's package is called: give it "
        "another name"
    )
