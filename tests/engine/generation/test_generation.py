"""One engine by itself: it samples as requested, and a bad request does not affect the others."""

import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer
from vllm.model_executor.models import registry

from generation.engine import vllm_compat
from generation.engine.engine import Leader
from generation.engine.sampling import SamplingSettings, sample_seed
from generation.engine.settings import (
    OWN_ARGUMENTS,
    QUANTIZING,
    UNSYNCED,
    EngineSettings,
    engine_argument_names,
)
from generation.engine.vllm_compat import engine_arguments
from generation.rollouts.episodes import RolloutSettings, rollout
from generation.trajectory import Trajectory
from sharding import WORKER_EXTENSION
from tests.conftest import TinyModel
from tests.support.colocated import HfPolicy, start_engine, stop
from trainer import engines
from trainer.commands import generate
from trainer.config.schema import TrainConfig
from trainer.errors import UserError
from trainer.learning.groups import to_sample

PAD = 0
PROMPTS = [[14, 50, 77], [20, 21, 22, 23, 24], [99, 98]]


@pytest.fixture(scope="module")
def model(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model whose generation_config.json asks for settings that training does not use."""
    folder = tmp_path_factory.mktemp("hostile") / "model"
    shutil.copytree(tiny_model(), folder)
    hostile = {
        "temperature": 0.1,
        "top_k": 1,
        "top_p": 0.2,
        "repetition_penalty": 5.0,
        "do_sample": True,
        "max_length": 9,
    }
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | hostile))
    return folder


@pytest.fixture(scope="module")
def leader(model: Path) -> Iterator[Leader]:
    """Yield an engine of that model, at version 0."""
    leader = start_engine(model, max_model_len=128, max_num_seqs=64)
    leader.engine.state.adopt_checkpoint(0)
    yield leader
    stop(leader)


def run(
    leader: Leader, group: int, prompts: list[list[int]] = PROMPTS, order: list[int] | None = None
) -> list[Trajectory]:
    """Run one rollout of `group` samples a prompt; the trajectories are sorted by prompt and sample."""
    settings = RolloutSettings(group, SamplingSettings(max_tokens=60), policy_version=0, seed=1, step=3)
    claim = partial(next, iter(order or range(len(prompts))), None)
    seen: list[Trajectory] = []

    async def note(trajectory: Trajectory) -> None:
        seen.append(trajectory)

    finished = leader.thread.run(rollout(leader.engine, prompts, settings, claim, note), 60, "a rollout")
    assert sorted(map(id, finished)) == sorted(map(id, seen))
    return sorted(finished, key=lambda t: (t.prompt_index, t.sample_index))


def test_on_a_terminal_an_answer_is_printed_as_it_is_generated(
    leader: Leader, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pieces add up to the answer that a pipe gets at once; a character is printed when all its bytes are there."""
    prompt, sampling = PROMPTS[0], SamplingSettings(max_tokens=40, temperature=0.0)
    tokenizer = AutoTokenizer.from_pretrained(model)
    monkeypatch.setattr(generate, "on_checkpoint", lambda command, settings, job: job(leader))
    pieces: dict[bool, list[str]] = {True: [], False: []}
    for terminal, printed in pieces.items():
        chat = generate.ChatSession(tokenizer)
        chat.ids = prompt
        monkeypatch.setattr(
            sys, "stdout", SimpleNamespace(isatty=lambda t=terminal: t, write=printed.append, flush=int)
        )
        generate.converse(leader.engine.settings, chat, sampling)
        assert len(chat.ids) == len(prompt) + 40
    # The text, and the line's end
    assert "".join(pieces[True]) == "".join(pieces[False]) and len(pieces[False]) == 2
    # The last character may be cut off
    assert not any(piece.endswith("\ufffd") for piece in pieces[True][:-2])
    assert len(list(filter(None, pieces[True]))) > 10


def test_logprobs_are_the_trainers_despite_the_models_own_settings(leader: Leader, model: Path) -> None:
    """Sampling is at temperature 1 without truncation; samples include PAD and ids that the tokenizer does not have."""
    policy = HfPolicy(model)
    trajectories = run(leader, group=24)
    assert len(trajectories) == 72
    for t in trajectories:
        expected = policy.logprobs(t.prompt_ids + t.response_ids)[len(t.prompt_ids) - 1 :]
        assert max(abs(a - b) for a, b in zip(expected, t.logprobs, strict=True)) < 1e-4
        assert t.loss_mask == [1] * len(t.response_ids)
    padded = [t for t in trajectories if PAD in t.response_ids]
    assert padded
    sample = to_sample(padded[0])
    assert sample.loss_mask[len(padded[0].prompt_ids) + padded[0].response_ids.index(PAD)] == 1
    distinct = {tuple(t.response_ids) for t in trajectories}
    assert len(distinct) == len(trajectories)  # with top_k 1 or temperature 0.1, samples would repeat


def test_an_answer_depends_on_its_seed_and_not_on_other_requests_or_their_order(leader: Leader) -> None:
    forwards = run(leader, group=4)
    backwards = run(leader, group=4, order=[2, 1, 0])
    alone = run(leader, group=1, order=[1])
    assert [t.response_ids for t in forwards] == [t.response_ids for t in backwards]
    assert (
        alone[0].response_ids
        == next(t for t in forwards if (t.prompt_index, t.sample_index) == (1, 0)).response_ids
    )
    assert (
        len(
            {
                sample_seed(*place)
                for place in [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)]
            }
        )
        == 5
    )


def test_one_failing_request_does_not_lose_the_batch(leader: Leader) -> None:
    # Too long, and an id that the model does not have
    prompts = [PROMPTS[0], [5] * 300, [10**6], PROMPTS[2]]
    trajectories = run(leader, group=2, prompts=prompts)
    failed = [t.prompt_index for t in trajectories if t.error]
    assert failed == [1, 1, 2, 2]
    assert "300 tokens" in trajectories[2].error
    assert all(t.response_ids for t in trajectories if not t.error)


def test_an_answer_is_cut_where_the_context_ends(leader: Leader) -> None:
    sampling = SamplingSettings(max_tokens=500)
    completion = leader.thread.run(
        leader.engine.complete([7] * 120, sampling, seed=5, policy_version=0), 60, "test"
    )
    assert len(completion.token_ids) <= 8
    assert completion.finish_reason in ("length", "stop")


def test_an_error_while_scoring_ends_the_rollout(leader: Leader) -> None:
    async def explode(trajectory: Trajectory) -> None:
        raise ZeroDivisionError("scoring")

    settings = RolloutSettings(2, SamplingSettings(max_tokens=4), policy_version=0, seed=0, step=0)
    claim = partial(next, iter([1, 0]), None)
    with pytest.raises(ExceptionGroup) as caught:
        leader.thread.run(rollout(leader.engine, PROMPTS, settings, claim, explode), 60, "a rollout")
    assert caught.group_contains(ZeroDivisionError)
    assert run(leader, group=1)  # the engine still answers


def test_an_unknown_engine_argument_is_named(model: Path) -> None:
    with pytest.raises(ValueError, match=r"engine\.extra: vLLM .* has no engine argument no_such_thing"):
        start_engine(model, extra={"no_such_thing": 1})


def test_settings_that_vllm_refuses_end_in_an_error_message(model: Path) -> None:
    sections = {
        "model": {"path": str(model)},
        "data": {"path": "d"},
        "engine": {"extra": {"block_size": "many"}},
    }
    with pytest.raises(
        UserError,
        match="the engine does not start with these settings of engine and model: .*block_size",
    ):
        engines.start_engine(TrainConfig.model_validate(sections), on_cuda=False)


def test_vllms_argument_names_are_read_without_importing_it() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    assert engine_argument_names() == {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    free = {
        "disable_log_stats",
        "enable_chunked_prefill",
        "enable_prefix_caching",
        "max_num_batched_tokens",
    }
    ours = engine_arguments(EngineSettings("m", 64, lora_rank=8)).keys() - free - {"use_tqdm_on_load"}
    assert ours <= OWN_ARGUMENTS.keys()
    younger = {"sleep_mode_offload_cudagraph"}  # vLLM 0.31 lacks it
    assert {*OWN_ARGUMENTS, *UNSYNCED, *QUANTIZING} - younger <= engine_argument_names()


@pytest.mark.parametrize("folder", ["repository", "a repository"])
def test_a_path_with_a_space_is_not_preloaded(
    folder: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LD_PRELOAD splits at spaces, and every program that engines start would complain of both halves."""
    library = tmp_path / folder / "torch" / "lib" / "libgomp.so.1"
    library.parent.mkdir(parents=True)
    library.touch()
    monkeypatch.setattr(torch, "__file__", str(library.parents[1] / "__init__.py"))
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    settings = EngineSettings(str(model), 64, kv_cache_bytes=1 << 24, worker_extension=WORKER_EXTENSION)
    with vllm_compat.started_with(settings):
        vllm_compat._checked_config(settings)
        assert os.environ["LD_PRELOAD"] == ("" if " " in folder else str(library))


def test_a_class_is_inspected_without_another_python_and_as_vllm_does(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = EngineSettings(str(model), 64, kv_cache_bytes=1 << 24, worker_extension=WORKER_EXTENSION)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    in_subprocess = registry._run_in_subprocess
    registry._try_inspect_model_cls.cache_clear()
    with monkeypatch.context() as patched, vllm_compat.started_with(settings):
        patched.setattr(registry, "subprocess", None)
        [name] = vllm_compat._checked_config(settings).model_config.architectures
    assert registry._run_in_subprocess is in_subprocess
    [file] = (tmp_path / "modelinfos").iterdir()
    found = json.loads(file.read_text())["modelinfo"]
    with vllm_compat.started_with(settings):
        file.unlink()
        model_class = registry.ModelRegistry.models[name]
        information = dataclasses.asdict(model_class.inspect_model_cls())
    assert found == json.loads(json.dumps(information))


def test_starting_an_engine_does_not_change_the_callers_environment(leader: Leader) -> None:
    """Engines start with variables of their own; this process keeps its own."""
    assert os.environ["TORCH_COMPILE_DISABLE"] == "1"  # set by the test session
    assert "HOTBUNK_PLAIN_CPU_WEIGHTS" not in os.environ
    assert "VLLM_CPU_OMP_THREADS_BIND" not in os.environ


def test_the_size_of_the_kv_cache_is_that_of_its_blocks(leader: Leader) -> None:
    """The engine was given bytes, of which it uses whole blocks."""
    sizes = leader.engine.call_workers("hotbunk_kv_cache_bytes")
    [size] = leader.thread.run(sizes, 60.0, "asking the engine")
    blocks = leader.engine.llm.vllm_config.cache_config.num_gpu_blocks
    given = leader.engine.settings.kv_cache_bytes
    assert blocks and given and size % blocks == 0
    assert given - size // blocks < size <= given


def test_more_prompt_tokens_than_a_step_holds_do_not_kill_the_engine(leader: Leader) -> None:
    """vLLM would split the prompt, and then set an offset of its generator, which a CPU generator does not have."""
    prompts = [[14 + i % 200] * 60 for i in range(64)]
    assert not any(t.error for t in run(leader, group=2, prompts=prompts))
