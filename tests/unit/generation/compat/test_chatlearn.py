"""ChatLearn's hyper-parameters and module without an engine: each row of the page, and what its example class does."""

import json
import random
import warnings
from pathlib import Path
from typing import Any

import pytest

import generation
from generation.compat.chatlearn.hyper_parameters import KNOWN, read_settings
from generation.compat.chatlearn.vllm_module import (
    PromptPipeline,
    VLLMModule,
    check_tokenizer,
    get_model,
    print_rank_0,
)
from tests.support.small_tokenizer import small_tokenizer

SIZES = {"seq_length": 64, "max_new_tokens": 16}
PAGE = [  # every hyper-parameter of ChatLearn's tables
    "n",
    "ignore_eos",
    "top_p",
    "top_k",
    "temperature",
    "use_beam_search",
    "eval_temperature",
    "eval_top_k",
    "eval_top_p",
    "stop_token_list",
    "new_token_limit",
    "prompt_logprobs",
    "max_num_batched_tokens",
    "max_paddings",
    "block_size",
    "gpu_memory_utilization",
    "swap_space",
    "sliding_window",
    "tokenizer",
    "includes",
]


class FakeLLM:
    """An LLM that records its calls and answers with the prompt's length."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[Any], list[Any]]] = []

    def get_tokenizer(self) -> Any:
        return small_tokenizer()

    def generate(self, prompts: list[Any], sampling_params: list[Any], use_tqdm: bool) -> list[Any]:
        from vllm.outputs import CompletionOutput, RequestOutput

        self.calls.append((prompts, sampling_params))
        outputs = []
        for number, prompt in enumerate(prompts):
            ids = prompt["prompt_token_ids"]
            answer = [len(ids), 2]
            logprobs = [{token: type("Logprob", (), {"logprob": -1.0})()} for token in answer]
            done = CompletionOutput(0, f"answer {number}", answer, None, logprobs, finish_reason="stop")
            outputs.append(RequestOutput(str(number), None, ids, None, [done], True))
        return outputs


def module(llm: FakeLLM | None = None, **args: Any) -> VLLMModule:
    return VLLMModule(SIZES | args, llm or FakeLLM())


def test_every_hyper_parameter_of_the_page_is_known() -> None:
    assert set(PAGE) <= KNOWN


@pytest.mark.parametrize(
    ("args", "where", "expected"),
    [
        ({"n": 4}, "n", 4),
        ({"ignore_eos": True}, "sampling.ignore_eos", True),
        ({"top_p": 0.9}, "sampling.top_p", 0.9),
        ({"top_k": -1}, "sampling.top_k", -1),
        ({"top_k": 0}, "sampling.top_k", 0),
        ({"temperature": 0}, "sampling.temperature", 0),
        ({"use_beam_search": False}, "n", 1),
        ({"eval_temperature": 0.5, "temperature": 1.0}, "eval_sampling.temperature", 0.5),
        ({"eval_temperature": 0.5, "temperature": 1.0}, "sampling.temperature", 1.0),
        ({"top_k": 5}, "eval_sampling.top_k", 5),
        ({"eval_min_p": 0.1}, "eval_sampling.min_p", 0.1),
        ({"stop_token_list": "<EOS>;</s>"}, "stop", ["<EOS>", "</s>"]),
        ({"new_token_limit": True}, "max_prompt_length", 48),
        ({"new_token_limit": False}, "max_prompt_length", 63),
        ({"prompt_logprobs": 1}, "sampling.prompt_logprobs", 1),
        ({"prompt_logprobs": None}, "sampling", {"ignore_eos": False}),
        ({"max_num_batched_tokens": 4096}, "engine.max_num_batched_tokens", 4096),
        ({"max_paddings": None}, "n", 1),
        ({"block_size": 16}, "engine.block_size", 16),
        ({"gpu_memory_utilization": 0.5}, "engine.gpu_memory_utilization", 0.5),
        ({"kv_cache_memory_bytes": 1 << 26}, "engine.kv_cache_memory_bytes", 1 << 26),
        ({"kv_offloading_size": 4}, "engine.kv_offloading_size", 4),
        ({"sliding_window": None}, "n", 1),
        ({"tokenizer": "some/where"}, "engine.tokenizer", "some/where"),
        ({"vllm_input_ids_key": "ids", "vllm_prompt_key": "text"}, "input_ids_key", "ids"),
        ({"micro_batch_size": 8}, "engine.max_num_seqs", 8),
        ({"max_concurrent_requests": 9}, "engine.max_num_seqs", 9),
        ({"enforce_eager": False, "disable_custom_all_reduce": True}, "engine.enforce_eager", False),
    ],
)
def test_hyper_parameters_mean_what_they_mean_today(
    args: dict[str, Any], where: str, expected: Any
) -> None:
    setting: Any = read_settings(SIZES | args)
    for part in where.split("."):
        setting = setting[part] if isinstance(setting, dict) else getattr(setting, part)
    assert setting == expected


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ({"n": 0}, "n is 0, but should be a whole number of at least 1"),
        ({"top_p": 0}, r"top_p is 0, but should be in \(0, 1\]"),
        ({"top_k": -2}, "top_k is -2, but should be at least 1, or -1 or 0"),
        ({"temperature": -1}, "temperature is -1, but should be at least 0"),
        ({"use_beam_search": True}, r"set it to false, .*LLM\.beam_search"),
        ({"eval_top_p": 2}, "eval_top_p is 2"),
        ({"ignore_eos": 1}, "ignore_eos is 1, but should be true or false"),
        ({"max_paddings": 512}, "max_paddings is gone: .*max_num_batched_tokens"),
        ({"block_size": 0}, "block_size is 0"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization is 1.5"),
        ({"swap_space": 4}, "swap_space is gone: .*kv_offloading_size"),
        ({"sliding_window": 128}, r"sliding_window is gone: .*config\.json.*disable_sliding_window"),
        ({"temperatur": 1}, "temperatur is not a hyper-parameter; did you mean temperature"),
        ({"seq_length": None}, "seq_length is missing"),
        ({"includes": ["a.yaml"]}, "includes is read from YAML files"),
        (
            {"micro_batch_size": 8, "max_num_seqs": 4},
            "micro_batch_size is 8, but max_num_seqs, .* same, is 4",
        ),
        (
            {"tensor_parallel_size": 1, "tensor_model_parallel_size": 2},
            "tensor_model_parallel_size is 2, but tensor_p",
        ),
        (
            {"max_new_tokens": 64},
            "must be an integer greater than 0: seq_length - max_new_tokens = 64 - 64",
        ),
    ],
)
def test_meaningless_hyper_parameters_are_refused_with_a_remedy(
    args: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        read_settings(SIZES | args)


def test_suspicious_values_are_warned_of() -> None:
    with pytest.warns(UserWarning, match="empty entry"):
        assert read_settings(SIZES | {"stop_token_list": "a;;b"}).stop == ["a", "b"]
    with pytest.warns(UserWarning, match="fewer than 32 answers"):
        read_settings(SIZES | {"max_num_batched_tokens": 16, "max_num_seqs": 32})


def test_hyper_parameters_come_from_files_that_include_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.yaml").write_text("seq_length: ${HOTBUNK_TEST_LENGTH:32}\ntemperature: 0.5\n")
    (tmp_path / "engine.yaml").write_text(
        "includes: [model.yaml]\nmax_new_tokens: 8\ntemperature: 0.9\n"
    )
    monkeypatch.setenv("HOTBUNK_TEST_LENGTH", "48")
    made = VLLMModule(tmp_path / "engine.yaml", FakeLLM())
    assert made.model_args == {"seq_length": 48, "temperature": 0.9, "max_new_tokens": 8}


def test_chatlearns_own_file_is_read_with_its_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its defaults have characters that OmegaConf's grammar has not, and write None where YAML has null."""
    path = tmp_path / "vllm.yaml"
    path.write_text(
        "seq_length: 64\nmax_new_tokens: 8\nstop_token_list: ${stop_token_list:<EOS>;</s>}\n"
        "prompt_logprobs: ${prompt_logprobs:None}\nsliding_window: None\n"
    )
    made = VLLMModule(path, FakeLLM())
    assert made.settings.stop == ["<EOS>", "</s>"]
    assert made.model_args["prompt_logprobs"] is None and made.model_args["sliding_window"] is None
    monkeypatch.setenv("stop_token_list", "<END>")
    assert VLLMModule(path, FakeLLM()).settings.stop == ["<END>"]


@pytest.mark.parametrize(
    "name", ["num_gpu", "trainable", "pipeline_model_parallel_size", "num_scheduler_steps"]
)
def test_keys_of_chatlearns_devices_and_scheduler_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is not a hyper-parameter"):
        module(**{name: 1})


def test_a_models_name_is_not_taken_for_a_file() -> None:
    with pytest.raises(
        ValueError, match="policy is not a file: give the hyper-parameters or a YAML file of them"
    ):
        VLLMModule("policy", FakeLLM())


def test_the_pages_rlhf_yaml_names_the_models_file(tmp_path: Path) -> None:
    """The model's file is found relative to rlhf.yaml, whose own keys win. A recipe may name the file as well."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "sizes.yaml").write_text("seq_length: 48\n")
    (tmp_path / "models" / "vllm.yaml").write_text(
        "includes: [sizes.yaml]\nmax_new_tokens: 8\ntemperature: 0.9\n"
    )
    section = {"model_config_file": "models/vllm.yaml", "temperature": 0.5}
    expected = {"seq_length": 48, "max_new_tokens": 8, "temperature": 0.5}
    for number, text in enumerate([{"policy": section}, {"models": {"policy": section}}, section]):
        (tmp_path / f"{number}.yaml").write_text(json.dumps(text))
        assert VLLMModule(tmp_path / f"{number}.yaml", FakeLLM()).model_args == expected
    absolute = {"model_config_file": str(tmp_path / "models" / "vllm.yaml"), "temperature": 0.5}
    assert VLLMModule(absolute, FakeLLM()).model_args == expected
    (tmp_path / "two.yaml").write_text(json.dumps({"policy": section, "reward": section}))
    with pytest.raises(ValueError, match="holds policy, reward, not one model's section: give the mod"):
        VLLMModule(tmp_path / "two.yaml", FakeLLM())


def test_an_empty_batch_gives_what_empty_outputs_give() -> None:
    llm = FakeLLM()
    made = module(llm)
    for empty in ([], {}, PromptPipeline([], 3, small_tokenizer())):
        assert made.generate(empty) == made.decode_internal([])
    assert llm.calls == []


def test_an_output_has_the_numbered_answers_to_its_prompt() -> None:
    made = module(n=3)
    rows = made.build_dataset(["first", "second!"])
    outputs = made.execute_step(
        {"prompt": ["first", "second!"], "input_ids": [row["input_ids"] for row in rows]}
    )
    assert [output.prompt for output in outputs] == ["first", "second!"]
    assert [[answer.index for answer in output.outputs] for output in outputs] == [[0, 1, 2]] * 2
    assert [answer.text for output in outputs for answer in output.outputs] == [
        f"answer {n}" for n in range(6)
    ]


def test_the_names_of_the_page_come_from_one_package() -> None:
    names = ("VLLMModule", "PromptPipeline", "get_model", "print_rank_0")
    assert [getattr(generation, name) for name in names] == [
        VLLMModule,
        PromptPipeline,
        get_model,
        print_rank_0,
    ]
    assert {*names} <= {*generation.__all__}


def test_a_dataset_has_ids_and_text_and_no_empty_prompt() -> None:
    rows = module().build_dataset(["ab", "c"])
    tokenizer = small_tokenizer()
    assert [rows[i] for i in range(len(rows))] == [
        {"input_ids": tokenizer.encode(text), "prompt": text} for text in ("ab", "c")
    ]
    with pytest.raises(ValueError, match="Got empty prompt: number 1"):
        PromptPipeline(["a", ""], 3, tokenizer)
    for length in (0, -1, 2.5):
        with pytest.raises(ValueError, match="must be an integer greater than 0"):
            PromptPipeline(["a"], length, tokenizer)  # type: ignore[arg-type]


class WordTokenizer:
    """A tokenizer with one token for every five characters, about a word."""

    def encode(self, text: str) -> list[str]:
        return [text[i : i + 5] for i in range(0, len(text), 5)]

    def decode(self, tokens: list[str]) -> str:
        return "".join(tokens)


def test_prompts_are_measured_in_tokens_and_never_cut_at_their_end() -> None:
    """Limits on prompts count tokens. ChatLearn's page cut characters: a prompt of 100 characters and 20 tokens lost 70
    of them at a limit of 30 tokens.
    """
    tokenizer: Any = WordTokenizer()
    kept = PromptPipeline(["x" * 100], 30, tokenizer)
    assert len(kept[0]["input_ids"]) == 20
    prompts = ["x" * 100 + "Answer:", "short"]
    with pytest.warns(UserWarning, match="1 of 2 prompts have more than 10 tokens, and are left out"):
        dropped = PromptPipeline(prompts, 10, tokenizer)
    assert dropped.prompts == [("short", ["short"])]
    assert (len(dropped), dropped.dropped, dropped[0]["prompt"]) == (1, 1, "short")
    cut = PromptPipeline(prompts, 10, tokenizer, cut=True)
    assert (len(cut), cut.dropped, len(cut[0]["input_ids"])) == (2, 0, 10)
    assert cut[0]["prompt"].endswith("Answer:")
    assert tokenizer.decode(cut[0]["input_ids"]) == cut[0]["prompt"]


def test_answers_are_limited_or_fill_the_context() -> None:
    generator = random.Random(1)
    for limited in (True, False):
        made = module(new_token_limit=limited)
        for _ in range(20):
            ids = [5] * generator.randint(1, made.settings.max_prompt_length)
            expected = 16 if limited else 64 - len(ids)
            assert made._sampling_params(ids, is_eval=False).max_tokens == expected
        with pytest.raises(ValueError, match="drop it in build_dataset"):
            made._sampling_params([5] * 64, is_eval=False)


def test_a_batch_is_asked_in_either_mode_prompt_after_prompt() -> None:
    llm = FakeLLM()
    made = module(llm, n=2, temperature=1.0, eval_temperature=0.25, stop_token_list="</s>;ab")
    rows = made.build_dataset(["first", "second!"])
    trained = made.generate([rows[0], rows[1]])
    assert [len(p["prompt_token_ids"]) for p in llm.calls[0][0]] == [5, 5, 7, 7]
    assert trained["no_padded_query_ids"] == [rows[0]["input_ids"]] * 2 + [rows[1]["input_ids"]] * 2
    assert trained["str_prompts"] == ["first", "first", "second!", "second!"]
    assert trained["all_tokens"][2] == [*rows[1]["input_ids"], 7, 2]  # nothing padded
    assert trained["loss_mask"][2] == [0] * 7 + [1, 1]
    assert trained["logprobs"][2] == [-1.0, -1.0]
    made.generate([rows[0]], is_eval=True)
    made.generate([rows[0]])
    assert [params.temperature for _, asked in llm.calls for params in asked[:1]] == [1.0, 0.25, 1.0]
    first = llm.calls[0][1][0]
    assert (first.stop_token_ids, first.stop) == ([2], ["ab"])  # an id where one token says it


class Old(VLLMModule):
    """A module whose methods have the bodies that ChatLearn's page prints."""

    def _add_request(self, data: Any) -> Any:  # type: ignore[override]  # the page's skeleton has no is_eval
        return self._add_request_internal(data["prompt"], data["input_ids"])

    def forward_step(self, data: Any, iteration: int = 0) -> Any:
        return self.execute_step(
            data["seq_group_metadata_list"],
            data["blocks_to_swap_in"],
            data["blocks_to_swap_out"],
            data["blocks_to_copy"],
        )


def test_scheduler_arguments_of_old_vllm_are_refused_with_a_remedy() -> None:
    remedy = r"return self\.execute_step\(data\) from forward_step"
    made = Old(SIZES, FakeLLM())
    row = made.build_dataset(["hello"])[0]
    with pytest.raises(ValueError, match=remedy) as caught:
        made.generate([row])
    assert "seq_group_metadata_list" in str(caught.value)
    with pytest.raises(ValueError, match=remedy):
        made.execute_step([], {}, {}, {})
    for name in ("scheduler", "build_scheduler", "cache_engine"):
        with pytest.raises(AttributeError, match=remedy):
            getattr(made, name)
    with pytest.raises(AttributeError, match="Old has no attribute 'else_where'"):
        _ = made.else_where


def test_iterations_and_modes_are_checked() -> None:
    made = module()
    for iteration, mode in ((-1, False), (0.5, False), (True, False), (0, 1)):
        with pytest.raises(ValueError, match="iteration is|eval_mode is"):
            made._forward_step({}, iteration, mode)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"call its setup\(\), or give it an llm"):
        VLLMModule(SIZES).generate([])


def test_another_tokenizer_than_the_policys_is_refused() -> None:
    check_tokenizer(small_tokenizer(), small_tokenizer(None))
    other = small_tokenizer()
    other.add_tokens(["more"])
    with pytest.raises(ValueError, match="has other tokens than"):
        check_tokenizer(other, small_tokenizer())


def test_models_and_warnings_of_the_page_still_have_their_names() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = module()
        assert get_model(made.model_provider) is made.llm
        made.setup()
        assert made.tokenizer.tokenizer.encode("a") == made.tokenizer.encode("a")
