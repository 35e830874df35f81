"""`hotbunk serve` answers the official client as plain Transformers would, and Ctrl-C leaves no process."""

import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from generation.images import ImageProcessor
from tests.conftest import ROOT
from tests.engine.trainer.test_generate import writers
from tests.support.forked import ENGINES, PYTHON
from tests.support.pictures import images
from tests.support.refusals import refusal


def test_a_served_model_answers_as_transformers_does(
    tiny_qwen2: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer, model = (
        AutoTokenizer.from_pretrained(tiny_qwen2),
        AutoModelForCausalLM.from_pretrained(tiny_qwen2),
    )
    messages = [{"role": "user", "content": "what is 2+2?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt = torch.tensor([tokenizer(text)["input_ids"]])
    mask = torch.ones_like(prompt)
    expected = model.generate(prompt, attention_mask=mask, do_sample=False, max_new_tokens=12)[
        0, prompt.shape[1] :
    ]
    words = [
        "serve",
        str(tiny_qwen2),
        "--port",
        "0",
        "--api-key",
        "secret",
        "--name",
        "mine",
        "--concurrent",
        "2",
    ]
    environment = os.environ | {ENGINES: "1"}
    process = subprocess.Popen(
        [*PYTHON, "-m", "trainer", *words], cwd=ROOT, env=environment, stdout=-1, text=True
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("mine answers at http://127.0.0.1:"), line
    api = openai.OpenAI(base_url=line.split()[-1], api_key="secret", max_retries=0)
    answer = api.chat.completions.create(model="mine", messages=messages, temperature=0, max_tokens=12)
    assert answer.choices[0].message.model_extra["generation_token_ids"] == expected.tolist()
    metrics = httpx.get(
        line.split()[-1].replace("/v1", "/metrics"), headers={"authorization": "Bearer secret"}
    ).text
    sampled = [
        row.split()[-1]
        for row in metrics.splitlines()
        if row.startswith("vllm:generation_tokens_total{")
    ]
    assert str(tiny_qwen2) not in metrics
    assert sampled == ["12.0"] and "\nhotbunk_weight_version 0.0\n" in metrics
    with pytest.raises(
        openai.BadRequestError, match="takes no trajectory keys in the header x-hotbunk-trajectory"
    ):
        api.chat.completions.create(
            model="mine", messages=messages, extra_headers={"x-hotbunk-trajectory": "a"}
        )
    page = (ROOT / "docs" / "server.md").read_text()
    (example,) = re.findall(r"```python\n(from openai .*?)```", page, re.DOTALL)
    exec(example.replace("http://127.0.0.1:8000/v1", line.split()[-1]).replace('"none"', '"secret"'), {})
    asked = [{"role": "user", "content": "12+30="}]
    text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert capsys.readouterr().out.endswith(f" {tokenizer(text)['input_ids']}\n")
    family = writers(process.stdout)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=120) == 128 + signal.SIGINT
    psutil.wait_procs(family, timeout=120)
    assert writers(process.stdout) == []


def test_a_served_multimodal_model_answers_as_transformers_does(tiny_vlm: Callable[..., Path]) -> None:
    folder, (image,) = tiny_vlm(), images((98, 70))
    processor = ImageProcessor(folder)
    ids, _ = processor.expand(
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}], [image]
    )
    model, prompt = AutoModelForImageTextToText.from_pretrained(folder), torch.tensor([ids])
    kinds = (prompt == model.config.image_token_id).long()
    features = processor.features([image]) | {
        "mm_token_type_ids": kinds,
        "attention_mask": torch.ones_like(prompt),
    }
    expected = model.generate(prompt, do_sample=False, max_new_tokens=8, **features)[0, len(ids) :]
    words = ["serve", str(folder), "--port", "0", "--concurrent", "2", "--images", "1"]
    environment = os.environ | {ENGINES: "1"}
    process = subprocess.Popen(
        [*PYTHON, "-m", "trainer", *words], cwd=ROOT, env=environment, stdout=-1, text=True
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith(f"{folder.name} answers at http://127.0.0.1:"), line
    api = openai.OpenAI(base_url=line.split()[-1], api_key="none", max_retries=0)

    def asked(*urls: str) -> Any:
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        messages: Any = [{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}]
        return api.chat.completions.create(
            model=folder.name, messages=messages, temperature=0, max_tokens=8
        )

    try:
        assert str(folder) not in httpx.get(f"{line.split()[-1]}/models").text
        extra = asked(image.data_url()).choices[0].message.model_extra
        assert (extra["prompt_token_ids"], extra["generation_token_ids"]) == (ids, expected.tolist())
        with pytest.raises(openai.BadRequestError, match="at a remote address"):
            asked("http://127.0.0.1:1/a.png")
        with pytest.raises(openai.BadRequestError, match="has 2 images, more than"):
            asked(*[image.data_url()] * 2)
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=120) == 128 + signal.SIGINT


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["absent/folder/of/mine"], "there is no folder absent/folder/of/mine"),
        (["MODEL", "--concurrent", "0"], "--concurrent must be at least 1"),
        (["MODEL", "--images", "0"], "--images must be at least 1"),
        (["MODEL", "--port", "70000"], "--port from 0 to 65535"),
        (["MODEL", "--port", "http"], "invalid int value"),
        (
            ["MODEL", "--host", "0.0.0.0"],
            "--host 0.0.0.0 lets other machines connect: give an --api-key",
        ),
        (["MODEL", "--host", "", "--api-key", ""], "lets other machines connect"),
    ],
)
def test_a_mistake_in_a_call_of_serve_is_reported_in_one_sentence(
    words: list[str], expected: str, tiny_qwen2: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(tiny_qwen2) if word == "MODEL" else word for word in words]
    assert expected in refusal(capsys, "serve", *words)
