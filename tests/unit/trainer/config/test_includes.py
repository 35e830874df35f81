"""Recipes made of several files, and values that the environment overrides."""

from pathlib import Path

import pytest

from generation.yaml_files import fill_defaults, read_yaml
from trainer.config.recipe import load_config
from trainer.errors import UserError


def write(folder: Path, **files: str) -> Path:
    """Write each `name=text` as name.yaml; return the path of the first."""
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder / f"{next(iter(files))}.yaml"


def test_the_nearer_file_takes_precedence(tmp_path: Path) -> None:
    recipe = write(
        tmp_path,
        recipe="includes: [base.yaml, more.yaml]\nrun: {steps: 3}\nsampling: {stop: [c]}\n",
        base="model: {path: m}\ndata: {path: d}\nrun: {steps: 1, seed: 1}\nsampling: {stop: [a, b]}\n"
        "policy: {lr: 1e-5}\n",
        more="run: {steps: 2, seed: 2}\n",
    )
    config = load_config(recipe, ["run.seed=4"])
    assert (config.model.path, config.run.steps, config.run.seed) == ("m", 3, 4)
    assert config.sampling.stop == ["c"]  # a list is one value: it is replaced, not lengthened
    assert config.policy.lr == 1e-5
    assert config.run.name == "recipe"
    assert load_config(recipe, []).run.seed == 2


def test_a_section_includes_a_file_relative_to_its_own(tmp_path: Path) -> None:
    write(
        tmp_path / "sizes",
        engine="includes: smaller.yaml\nmax_num_seqs: 7\n",
        smaller="max_model_len: 99\n",
    )
    recipe = write(
        tmp_path,
        recipe="model: {path: m}\ndata: {path: d}\nengine: {includes: [sizes/engine.yaml], sleep: false}\n",
    )
    engine = load_config(recipe, []).engine
    assert (engine.max_num_seqs, engine.max_model_len, engine.sleep) == (7, 99, False)


def test_a_cycle_is_named_from_end_to_end(tmp_path: Path) -> None:
    recipe = write(
        tmp_path, a="includes: [b.yaml]\n", b="includes: [c.yaml]\n", c="includes: [./a.yaml]\n"
    )
    with pytest.raises(UserError, match=r"a\.yaml includes b\.yaml includes c\.yaml includes a\.yaml"):
        load_config(recipe, [])


def test_the_same_file_twice_is_no_cycle(tmp_path: Path) -> None:
    recipe = write(
        tmp_path,
        recipe="includes: [left.yaml, right.yaml]\n",
        left="includes: [base.yaml]\n",
        right="includes: [base.yaml]\n",
        base="model: {path: m}\ndata: {path: d}\n",
    )
    assert load_config(recipe, []).model.path == "m"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("includes: [gone.yaml]", r"gone\.yaml: no such recipe file, which .*recipe\.yaml includes"),
        ("includes: [list.yaml]", r"list\.yaml, which .*recipe\.yaml includes must be a mapping"),
        ("includes: {a: b}", r"recipe\.yaml: includes is \{'a': 'b'\}, but should be a list of files"),
        ("includes: [base.yaml]\nruns: {}", "runs is not a known key; did you mean run?"),
        ("includes: [base.yaml]\nrun: {steps: '${HOTBUNK_TEST_X:[1}'}", "cannot be read|no valid YAML"),
    ],
)
def test_each_problem_is_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    recipe = write(tmp_path, recipe=text, base="model: {path: m}\ndata: {path: d}\n", list="- a\n")
    with pytest.raises(UserError, match=sentence) as caught:
        load_config(recipe, [])
    assert "\n" not in str(caught.value)


def test_a_default_may_have_characters_that_interpolations_have_not(tmp_path: Path) -> None:
    text = "model: {path: '${HOTBUNK_TEST_X:<m>;</s>}'}\ndata: {path: '${run.name}.jsonl'}\nrun: {name: d}\n"
    config = load_config(write(tmp_path, recipe=text), [])
    assert (config.model.path, config.data.path) == ("<m>;</s>", "d.jsonl")


def test_defaults_stand_until_the_environment_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = write(
        tmp_path,
        recipe="includes: ['${HOTBUNK_TEST_BASE:base}.yaml']\nrun: {steps: '${HOTBUNK_TEST_STEPS:5}', seed: 0}\n"
        "policy: {lr: '${HOTBUNK_TEST_LR:1e-5}'}\nsampling: {stop: '${HOTBUNK_TEST_STOP:[a, b]}'}\n"
        "engine: {kv_cache_gib: '${HOTBUNK_TEST_KV:}', sleep: '${HOTBUNK_TEST_SLEEP:false}'}\n",
        base="model: {path: '/models/${HOTBUNK_TEST_MODEL:tiny}/${run.seed}'}\ndata: {path: d}\n",
    )
    config = load_config(recipe, [])
    assert (config.run.steps, config.policy.lr, config.sampling.stop) == (5, 1e-5, ["a", "b"])
    assert (config.engine.kv_cache_gib, config.engine.sleep) == (None, False)
    assert config.model.path == "/models/tiny/0"
    monkeypatch.setenv("HOTBUNK_TEST_STEPS", "7")
    monkeypatch.setenv("HOTBUNK_TEST_MODEL", "large")
    changed = load_config(recipe, ["run.seed=3", "run.output_dir=${HOTBUNK_TEST_OUT:elsewhere}"])
    assert changed.run.steps == 7
    assert changed.model.path == "/models/large/3"
    assert changed.run.output_dir == "elsewhere"


def test_values_from_the_environment_are_typed_as_in_a_file() -> None:
    values = {
        "a": "${N:1}",
        "b": "x${N:1}y",
        "c": ["${LIST:[1, 2]}"],
        "d": "${oc.env:HOME,else}",
        "e": "${a.b}",
        "f": 3,
    }
    assert fill_defaults(values, {"N": "2.5"}) == values | {"a": 2.5, "b": "x2.5y", "c": [[1, 2]]}


def test_read_yaml_alone_raises_value_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such recipe file"):
        read_yaml(tmp_path / "none.yaml")
