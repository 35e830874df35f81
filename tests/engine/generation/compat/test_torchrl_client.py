"""TorchRL's own client classes, unmodified, with our service as their engine.

Skipped if TorchRL is not installed; `scripts/test.sh` and `bash scripts/try_ecosystem.sh torchrl` install it.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from tests.support.colocated import HfPolicy

pytestmark = pytest.mark.skipif(find_spec("torchrl") is None, reason="torchrl is not installed")

SMALL = {"max_model_len": 128, "max_num_seqs": 8, "kv_cache_memory_bytes": 32 << 20, "dtype": "float32"}
PROMPTS = [[5, 6, 7, 8], [4, 8, 9, 10]]


@pytest.fixture(scope="module")
def service(model: Path) -> Iterator[Any]:
    """Yield a service that is made after TorchRL has been imported."""
    from torchrl.collectors.llm import vLLMUpdaterV2  # noqa: F401
    from torchrl.modules.llm import vLLMWrapper  # noqa: F401

    from generation import AsyncVLLM

    with AsyncVLLM.from_pretrained(
        str(model), num_replicas=2, verbose=False, compile=False, **SMALL
    ) as service:
        yield service


def wrapper(service: Any, **options: Any) -> Any:
    from torchrl.modules.llm import vLLMWrapper

    options = {
        "generate": True,
        "return_log_probs": True,
        "generate_kwargs": {"max_tokens": 6},
    } | options
    return vLLMWrapper(service, **options)


def scored(service: Any) -> torch.Tensor:
    """Return log-probabilities of the prompts' tokens after the first, which TorchRL's wrapper gets from the engine."""
    from tensordict import TensorDict
    from torchrl.modules.llm.policies import Tokens

    score = wrapper(service, input_mode="tokens", generate=False, pad_output=True, generate_kwargs=None)
    full = Tokens(full=torch.tensor(PROMPTS), batch_size=[2])
    return score(TensorDict(tokens=full, batch_size=[2]))["log_probs"].full[:, 1:]


def expected(policy: HfPolicy) -> torch.Tensor:
    """Return the policy's log-probabilities of the same tokens."""
    return torch.tensor([policy.logprobs(ids) for ids in PROMPTS])


def test_text_prompts_get_texts_and_log_probabilities(service: Any) -> None:
    from tensordict import TensorDict
    from torchrl.modules.llm.policies import Text

    texts = TensorDict(text=Text(prompt=["one two", "three"], batch_size=[2]), batch_size=[2])
    out = wrapper(service, input_mode="text")(texts)
    assert len(out["text"].response) == 2 and all(isinstance(text, str) for text in out["text"].response)
    for logprobs, ids in zip(
        out["log_probs"].get("response", as_list=True),
        out["tokens"].get("response", as_list=True),
        strict=True,
    ):
        assert logprobs.shape == ids.shape and 1 <= len(ids) <= 6 and (logprobs <= 0).all()


def test_a_chat_history_gets_an_answer(service: Any, model: Path) -> None:
    from tensordict import TensorDict
    from torchrl.data.llm import History
    from torchrl.modules.llm.policies import ChatHistory

    history = History.from_chats([[{"role": "user", "content": "hi"}]])
    out = wrapper(service, input_mode="history")(
        TensorDict(history=ChatHistory(prompt=history, batch_size=[1]), batch_size=[1])
    )
    asked = out["tokens"].get("prompt", as_list=True)[0].tolist()
    chat = [{"role": "user", "content": "hi"}]
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert (
        asked
        == tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True)["input_ids"]
    )
    assert 1 <= len(out["tokens"].get("response", as_list=True)[0]) <= 6


def test_tokens_are_scored_as_transformers_scores_them(service: Any, model: Path) -> None:
    from tensordict import TensorDict
    from torchrl.modules.llm.policies import Tokens

    prompts = Tokens(prompt=torch.tensor(PROMPTS), batch_size=[2])
    out = wrapper(service, input_mode="tokens", pad_output=True)(
        TensorDict(tokens=prompts, batch_size=[2])
    )
    assert out["tokens"].response.shape[0] == out["log_probs"].response.shape[0] == 2
    assert (scored(service) - expected(HfPolicy(model))).abs().max() < 1e-4


def test_the_updater_pushes_a_tied_model_which_then_answers(service: Any, model: Path) -> None:
    from torchrl.collectors.llm import vLLMUpdaterV2
    from torchrl.modules.llm import TransformersWrapper

    updater = vLLMUpdaterV2(service)
    assert updater.master_port == service.get_master_port() and updater.get_tp_size() == 1
    updater.init()
    policy = HfPolicy(model)
    assert "lm_head.weight" in policy.model.state_dict()
    for version in (1, 2):
        policy.randomise(version)
        updater.push_weights_from_transformers(
            TransformersWrapper(policy.model, tokenizer=service.get_tokenizer())
        )
        assert service.weight_version == version
        for _ in range(2):  # both engines in turn
            assert (scored(service) - expected(policy)).abs().max() < 1e-4
    updater.push_weights(iter(()))  # only a warning, and the engines keep their weights
    assert (scored(service) - expected(policy)).abs().max() < 1e-4
