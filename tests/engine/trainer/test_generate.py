"""`hotbunk generate` answers as plain Transformers does, a chat's ids only grow, and Ctrl-C leaves no process."""

import contextlib
import os
import signal
import subprocess
from pathlib import Path
from typing import IO

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.conftest import ROOT
from tests.support.forked import ENGINES, PYTHON
from tests.support.refusals import refusal
from trainer.commands.generate import ChatSession, training_sampling

TOKENS = 12
QUESTIONS = ["what is 2+2?", "and one more?"]


def greedy(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    """Return the greedy answer of plain Transformers."""
    ids = torch.tensor([prompt])
    answer = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS
    )
    return answer[0, len(prompt) :].tolist()


def test_a_chat_answers_like_transformers_and_ctrl_c_ends_it(tiny_qwen2: Path) -> None:
    tokenizer, model = (
        AutoTokenizer.from_pretrained(tiny_qwen2),
        AutoModelForCausalLM.from_pretrained(tiny_qwen2),
    )
    words = ["generate", str(tiny_qwen2), "--max-tokens", str(TOKENS), "--system", "be brief"]
    environment = os.environ | {ENGINES: "1"}
    process = subprocess.Popen(
        [*PYTHON, "-m", "trainer", *words], cwd=ROOT, env=environment, stdin=-1, stdout=-1, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    chat, expected = ChatSession(tokenizer, "be brief"), ""
    for question in QUESTIONS:
        answer = greedy(model, chat.ask(question))
        chat.ids = chat.ids + answer
        expected += (
            tokenizer.decode(answer, skip_special_tokens=True) + " […]" * (len(answer) == TOKENS) + "\n"
        )
        process.stdin.write(question + "\n")
        process.stdin.flush()
    printed = "".join(process.stdout.readline() for _ in range(expected.count("\n")))
    assert printed == expected
    family = writers(process.stdout)
    assert len(family) > 1  # the engine's are among them
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=120) == 128 + signal.SIGINT
    psutil.wait_procs(family, timeout=120)
    assert writers(process.stdout) == []


def writers(pipe: IO[str]) -> list[psutil.Process]:
    """Return the processes whose standard output is this pipe."""
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if os.stat(f"/proc/{process.pid}/fd/1").st_ino == os.fstat(pipe.fileno()).st_ino:
                processes.append(process)
    return processes


def test_each_prompt_of_a_chat_begins_with_all_ids_before_it(tiny_qwen2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_qwen2)
    chat = ChatSession(tokenizer, "be brief")
    first = chat.ask("2+2?")
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2+2?"}]
    assert tokenizer.decode(first) == tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    # Ids that no text encodes to: an end in the middle, and bytes that are not UTF-8.
    unspeakable = [tokenizer.eos_token_id, 200, 201, 14]
    for ending in ([], [tokenizer.eos_token_id]):
        # cut short, or ended: the template's end comes once either way
        chat.ids = first + unspeakable + ending
        second = chat.ask("<the answer> and 3+3?")
        assert second[: len(first) + 4] == first + unspeakable
        rest = tokenizer.decode(second[len(first) + 4 :])
        assert (
            rest
            == "<|im_end|>\n<|im_start|>user\n<the answer> and 3+3?<|im_end|>\n<|im_start|>assistant\n"
        )


def test_answers_are_sampled_with_the_lengths_and_ends_of_the_run(tmp_path: Path) -> None:
    run, folder = tmp_path / "run", tmp_path / "run" / "model"
    folder.mkdir(parents=True)
    assert training_sampling(folder) == {}
    for recipe, sampled in (
        ("sampling: {max_tokens: 8}", {"max_tokens": 8}),
        ("sampling:", {}),
        ("", {}),
    ):
        (run / "config.yaml").write_text(recipe)
        assert training_sampling(folder) == sampled
    (tmp_path / "config.yaml").write_text("sampling: {max_tokens: 8}")
    assert training_sampling(run) == {}  # not a run's model, though it is beside a config.yaml


@pytest.mark.parametrize(
    ("model", "words", "expected"),
    [
        ("absent/folder/of/mine", [], "there is no folder absent/folder/of/mine"),
        ("run", [], "has no model yet: its run is not finished"),
        ("weightless", [], "holds no *.safetensors"),
        ("plain", [], "has no chat template: give a --prompt to continue"),
        ("plain", ["--max-tokens", "0"], "--max-tokens must be at least 1"),
    ],
)
def test_a_mistake_in_a_call_of_generate_is_reported_in_one_sentence(
    model: str,
    words: list[str],
    expected: str,
    tiny_qwen2: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("run", "weightless", "plain"):
        (tmp_path / folder).mkdir()
    (tmp_path / "run" / "config.yaml").touch()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "plain" / name).write_bytes((tiny_qwen2 / name).read_bytes())
    (tmp_path / "weightless" / "config.json").write_bytes((tiny_qwen2 / "config.json").read_bytes())
    tokenizer = AutoTokenizer.from_pretrained(tiny_qwen2)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "plain")
    assert expected in refusal(capsys, "generate", model, *words)
