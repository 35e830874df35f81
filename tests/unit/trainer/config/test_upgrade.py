"""Keys under other names: refused in a sentence, rewritten in recipes and checkpoints, and understood on resuming."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from tests.unit.trainer.run.test_old_checkpoint import SAVED
from trainer.cli import main
from trainer.config.recipe import RENAMED, Renamed, known_keys, load_config, refusal
from trainer.errors import UserError
from trainer.run import checkpoint
from trainer.run.lock import RunLock

OLD = """\
# how the smallest model learns
includes: [base.yaml]
model: {path: m}
data: {path: d}   # nothing else
algorithm:
  preset: ppo
  trace: 0.9       # lambda
  "discount":   0.99
sync: {verify: off, "shared": true, replay: yes}
"""


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key whose values have other words as well, in place of one that there is."""
    monkeypatch.setitem(RENAMED, "sync.shared", Renamed("sync.verify_as", {True: "full", False: "off"}))


def test_old_names_are_of_no_key_and_new_ones_are_in_the_same_section() -> None:
    keys = {name for name, _ in known_keys()}
    for old, new in RENAMED.items():
        assert old not in keys and new.key in keys and old.partition(".")[0] == new.key.partition(".")[0]


def test_a_recipe_keeps_all_but_its_old_keys(tmp_path: Path, shared: None, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recipe.yaml").write_text(OLD)
    (tmp_path / "base.yaml").write_text("algorithm:\n  includes:\n    - parts/a.yaml\n    - parts/b.yaml\n")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "a.yaml").write_text("group_size: 4\n")
    (tmp_path / "parts" / "b.yaml").write_text("trace: 0.5\n")
    assert main(["upgrade", str(tmp_path / "recipe.yaml")]) == 0
    expected = (
        OLD.replace("trace", "gae_lambda").replace('"discount":', "gamma:").replace('"shared": true', "verify_as: full")
    )
    assert (tmp_path / "recipe.yaml").read_text() == expected
    assert (tmp_path / "parts" / "b.yaml").read_text() == "gae_lambda: 0.5\n"
    said = capsys.readouterr().out
    assert "sync.shared is now sync.verify_as: full" in said and "algorithm.trace is now algorithm.gae_lambda" in said
    assert "a.yaml" not in said
    assert main(["upgrade", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}: nothing to change\n"
    (tmp_path / "recipe.yaml").write_text(expected.replace("verify_as: full, ", ""))
    config = load_config(tmp_path / "recipe.yaml", [])
    assert (config.algorithm.gae_lambda, config.algorithm.gamma, config.algorithm.group_size) == (0.9, 0.99, 4)


@pytest.mark.parametrize("override", [[], ["algorithm.trace=0.9"]])
def test_an_old_key_is_refused_with_its_new_name(tmp_path: Path, override: list[str]) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: {path: m}\ndata: {path: d}\n" + "algorithm: {trace: 0.9}\n" * (not override))
    with pytest.raises(UserError) as caught:
        load_config(recipe, override)
    said = (
        "algorithm.trace is now algorithm.gae_lambda: write algorithm.gae_lambda: 0.9, or `hotbunk upgrade` the recipe"
    )
    assert str(caught.value).startswith(said) and "\n" not in str(caught.value)


def test_nothing_is_written_if_one_recipe_has_to_be_mended_by_hand(
    tmp_path: Path, shared: None, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.yaml").write_text("algorithm: {trace: 1}\n")
    for text, sentence in (
        ("algorithm: {trace: 1, gae_lambda: 1}\n", "sets algorithm.trace and algorithm.gae_lambda, which is the same"),
        ("sync: {shared: '${oc.env:SHARED}'}\n", "sync.shared is ${oc.env:SHARED}: write it as sync.verify_as by hand"),
        ("algorithm: {trace: 1\n", "b.yaml cannot be read"),
    ):
        (tmp_path / "b.yaml").write_text(text)
        assert main(["upgrade", str(tmp_path)]) == 2
        (said,) = capsys.readouterr().err.splitlines()
        assert sentence in said
        assert (tmp_path / "a.yaml").read_text() == "algorithm: {trace: 1}\n"


def test_an_empty_folder_has_nothing_to_upgrade(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["upgrade", str(tmp_path)]) == 2
    assert "is neither a recipe nor a folder that holds recipes" in capsys.readouterr().err


def a_run(folder: Path, digests: bool) -> Path:
    """With the checkpoint of 8cc548e, whose marker is empty, or with one as they are written today."""
    step = folder / "checkpoints" / "step_3"
    shutil.copytree(SAVED, step)
    (folder / "config.yaml").write_text(yaml.safe_dump({"algorithm": {"trace": 0.95}}))
    if digests:
        (step / "extra.json").write_text(
            json.dumps(json.loads((step / "extra.json").read_text()) | {"digests": "SHA-256"})
        )
        names = sorted(path.name for path in step.iterdir() if path.name != "COMPLETE")
        (step / "COMPLETE").write_text("".join(checkpoint._digest_line(step, name) for name in names))
    return step


@pytest.mark.parametrize("digests", [False, True])
def test_a_runs_checkpoints_are_rewritten_and_stay_sound(tmp_path: Path, digests: bool) -> None:
    step = a_run(tmp_path, digests)
    before = {path.name: path.read_bytes() for path in step.iterdir()}
    assert main(["upgrade", str(tmp_path)]) == 0
    after = {path.name: path.read_bytes() for path in step.iterdir()}
    assert {name for name in after if after[name] != before.get(name)} == {"extra.json", *["COMPLETE"] * digests}
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == {"algorithm": {"gae_lambda": 0.95}}
    identity, old = checkpoint.verify(step)["identity"], json.loads(before["extra.json"])["identity"]
    assert identity.pop("algorithm.gae_lambda") == old.pop("algorithm.trace")
    assert identity.pop("algorithm.gamma") == old.pop("algorithm.discount")
    assert identity == old


def test_an_upgrade_that_was_killed_between_two_files_is_completed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = a_run(tmp_path, digests=True)
    real = checkpoint.write_whole

    def killed(path: Path, content: str | bytes) -> None:
        if path.name == "extra.json":
            raise KeyboardInterrupt
        real(path, content)

    monkeypatch.setattr(checkpoint, "write_whole", killed)
    with pytest.raises(KeyboardInterrupt):
        main(["upgrade", str(tmp_path)])
    monkeypatch.undo()
    with pytest.raises(checkpoint.Damaged):
        checkpoint.verify(step)
    assert main(["upgrade", str(tmp_path)]) == 0
    assert "algorithm.gae_lambda" in checkpoint.verify(step)["identity"]


def test_a_damaged_checkpoint_or_a_run_under_way_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = a_run(tmp_path, digests=True)
    extra = json.loads((step / "extra.json").read_text())
    (step / "extra.json").write_text(json.dumps(extra | {"step": 4}))
    damaged = (step / "extra.json").read_bytes()
    assert main(["upgrade", str(tmp_path)]) == 2
    assert "is damaged: extra.json is not what was written" in capsys.readouterr().err
    assert (step / "extra.json").read_bytes() == damaged

    other = a_run(tmp_path / "other", digests=True)
    lock, before = RunLock(tmp_path / "other"), (other / "extra.json").read_bytes()
    lock.take(0)
    assert main(["upgrade", str(tmp_path / "other")]) == 2
    assert "is in use by process" in capsys.readouterr().err and (other / "extra.json").read_bytes() == before


def test_a_value_is_translated_only_where_it_has_another_word() -> None:
    renamed = RENAMED["sync.zero_copy"]
    assert [renamed.value(old) for old in (True, False, 1, "x", None)] == ["zero_copy", "staged", 1, "x", None]
    assert refusal("sync.zero_copy", True).startswith('sync.zero_copy is now sync.way: write sync.way: "zero_copy", or')
