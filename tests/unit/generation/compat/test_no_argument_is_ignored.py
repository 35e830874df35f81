"""Every argument documented for ChatLearn's module and samplers is used, refused, or listed in docs/interfaces.md."""

import inspect
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams

from generation.compat.chatlearn import vllm_module as chatlearn
from generation.compat.chatlearn.hyper_parameters import KNOWN, read_settings
from generation.compat.chatlearn.vllm_module import PromptPipeline, VLLMModule, get_model, print_rank_0
from generation.rollouts.agent import InlineTags, inline_rollout
from generation.rollouts.sampler import FnCallRolloutSampler, OneShotRolloutSampler, make_sampler
from generation.rollouts.sampler_llm import SamplerLLM
from generation.rollouts.sampler_prompts import PromptText
from generation.rollouts.tools import ToolLimits
from tests.conftest import ROOT
from tests.support.recipes import make_config
from tests.support.small_tokenizer import small_tokenizer
from tests.unit.generation.compat.test_chatlearn import SIZES, FakeLLM

PAGE = (ROOT / "docs" / "interfaces.md").read_text()
VERL, CHATLEARN = (
    part for part in re.split(r"^## ", PAGE, flags=re.MULTILINE) if part.startswith(("verl", "ChatL"))
)
OTHER: dict[str, Any] = {  # for every hyper-parameter a value that is not its default, nor the recipe's
    **{
        f"{mode}{name}": value
        for mode in ("", "eval_")
        for name, value in {
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 7,
            "min_p": 0.1,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.5,
            "repetition_penalty": 1.5,
        }.items()
    },
    "model": "some/where",
    "tokenizer": "some/where",
    "dtype": "bfloat16",
    "seed": 7,
    "trust_remote_code": True,
    "tensor_parallel_size": 2,
    "tensor_model_parallel_size": 2,
    "gpu_memory_utilization": 0.7,
    "kv_cache_memory_bytes": 1 << 26,
    "enforce_eager": False,
    "max_num_batched_tokens": 4096,
    "block_size": 64,
    "kv_offloading_size": 1.0,
    "cpu_offload_gb": 1.0,
    "disable_sliding_window": True,
    "disable_custom_all_reduce": True,
    "max_concurrent_requests": 3,
    "max_num_seqs": 3,
    "generation_batch_size": 3,
    "micro_batch_size": 3,
    "seq_length": 96,
    "max_new_tokens": 8,
    "new_token_limit": False,
    "vllm_input_ids_key": "ids",
    "vllm_prompt_key": "text",
    "n": 3,
    "ignore_eos": True,
    "use_beam_search": True,
    "stop_token_list": "</s>;ab",
    "prompt_logprobs": 1,
    "includes": ["more.yaml"],
    "max_paddings": 512,
    "swap_space": 4,
    "sliding_window": 128,
}
SAMPLER = {"sampler": "a:b"}


def recipe(**sections: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe that agrees with `SIZES`."""
    defaults = {"engine": {"max_model_len": 64}, "sampling": {"max_tokens": 16}}
    return make_config(defaults, **sections | {"rollout": SAMPLER}).model_dump()


def refusal(work: Callable[[], Any], name: str) -> bool:
    """Return whether `work` raises a ValueError that names `name`."""
    try:
        work()
    except ValueError as error:
        return re.search(rf"\b{name}\b", str(error)) is not None
    return False


def test_every_hyper_parameter_has_another_value_here() -> None:
    assert set(OTHER) == KNOWN


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_a_hyper_parameter_changes_the_settings_or_is_refused(name: str) -> None:
    args = SIZES | {name: OTHER[name]}
    if not refusal(lambda: read_settings(args), name):
        assert read_settings(args) != read_settings(SIZES)


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_a_hyper_parameter_applies_in_training_or_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hyper-parameter that applies changes the requests or the names of their parts; its row in the page says
    which.
    """
    assert (
        re.search(rf"`{name}\b", CHATLEARN)
        or (name.startswith("disable_") and "`disable_…`" in CHATLEARN)
        or ("penalty" in name and "the penalties" in CHATLEARN)
        or (
            name
            in (
                "max_num_seqs",
                "max_concurrent_requests",
                "generation_batch_size",
                "micro_batch_size",
                "tensor_parallel_size",
                "tensor_model_parallel_size",
            )
            and "the sizes of batches and of tensor parallelism" in CHATLEARN
        )
    )
    other = small_tokenizer()
    other.add_tokens(["more"])
    monkeypatch.setattr(
        chatlearn,
        "load_tokenizer",
        lambda engine: other if engine.get("tokenizer") else small_tokenizer(),
    )
    args = SIZES | {name: OTHER[name]}
    if not refusal(lambda: VLLMModule(args).check_recipe(recipe()), name):
        assert asked_in_training(args) != asked_in_training(SIZES)
    VLLMModule(SIZES).check_recipe(recipe())


class Noting(VLLMModule):
    """A module that keeps the rows of a batch."""

    def _add_request(self, data: Any, is_eval: bool = False) -> Any:
        self.keys = sorted(data)
        return super()._add_request(data, is_eval)


def in_training(
    made: VLLMModule, llm: FakeLLM, evaluation: bool = False, step: int = 3
) -> list[PromptText]:
    """Have a module sample as the trainer does, and return the prompts."""
    llm.settings = SimpleNamespace(step=step, evaluation=evaluation)  # type: ignore[attr-defined]
    prompts = [PromptText("ab", [5, 6], 0, sample) for sample in range(2)]
    plain = llm.generate
    llm.generate = lambda requests, params, use_tqdm: plain(  # type: ignore[method-assign]
        [{"prompt_token_ids": getattr(p, "token_ids", p)} for p in requests], params, use_tqdm
    )
    try:
        made(
            llm,
            prompts,
            SamplingParams(temperature=1.0, max_tokens=16, stop=["own"], stop_token_ids=[2]),
        )
    finally:
        del llm.generate  # type: ignore[method-assign]
    return prompts


def asked_in_training(args: dict[str, Any]) -> tuple[Any, ...]:
    llm = FakeLLM()
    made = Noting(args)
    in_training(made, llm)
    [(prompts, params)] = llm.calls
    assert len(prompts) == 2
    return made.keys, [
        (p.ignore_eos, p.prompt_logprobs, p.stop, p.stop_token_ids, p.temperature) for p in params
    ]


@pytest.mark.parametrize(
    ("sections", "args"),
    [
        ({"algorithm": {"group_size": 4}}, {"n": 4}),
        (
            {"sampling": {"temperature": 0.7}, "eval": {"top_p": 0.9}},
            {"temperature": 0.7, "eval_top_p": 0.9},
        ),
        ({}, {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "eval_top_k": -1, "repetition_penalty": 1.0}),
        (
            {"engine": {"kv_cache_gib": 0.0625, "enforce_eager": False}},
            {"kv_cache_memory_bytes": 1 << 26, "enforce_eager": False},
        ),
        (
            {"engine": {"max_num_seqs": 3, "extra": {"block_size": 64}}},
            {"micro_batch_size": 3, "block_size": 64},
        ),
        (
            {"run": {"seed": 7}, "model": {"path": "m"}},
            {"seed": 7, "model": "m", "new_token_limit": True},
        ),
    ],
)
def test_hyper_parameters_that_agree_with_the_recipe_are_taken(
    sections: dict[str, Any], args: dict[str, Any]
) -> None:
    VLLMModule(SIZES | args).check_recipe(recipe(**sections))
    with pytest.raises(ValueError, match="let them agree, or leave"):
        VLLMModule(SIZES | {"seq_length": 65} | args).check_recipe(recipe(**sections))


def test_a_dataset_with_a_temperature_of_its_own_is_compared_as_well() -> None:
    evaluation = {
        "temperature": 0.5,
        "datasets": {"one": {"path": "p"}, "two": {"path": "p", "temperature": 0.25}},
    }
    with pytest.raises(
        ValueError, match=r"eval_temperature is 0.5, but in training eval.datasets.two.temperature"
    ):
        VLLMModule(SIZES | {"eval_temperature": 0.5}).check_recipe(recipe(eval=evaluation))


class Prepares(VLLMModule):
    def build_dataset(self, train_prompts: Any, is_eval: bool = False) -> Any:
        return train_prompts


def test_a_dataset_of_the_modules_own_is_refused_in_training() -> None:
    with pytest.raises(
        ValueError, match="Prepares.build_dataset is not called in training, whose prompts"
    ):
        make_sampler(Prepares, {"model_args": SIZES}, recipe())
    assert make_sampler(Prepares, {"model_args": SIZES})  # by hand


class RecordingModule(VLLMModule):
    """A module that records its calls and decodes every batch to `decoded`."""

    decoded: Any = None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.steps: list[tuple[str, int]] = []

    def setup(self) -> None:
        self.steps.append(("setup", 0))

    def forward_step(self, data: Any, iteration: int = 0) -> Any:
        self.steps.append(("train", iteration))
        return super().forward_step(data, iteration)

    def eval_forward(self, data: Any, iteration: int = 0) -> Any:
        self.steps.append(("eval", iteration))
        return super().eval_forward(data, iteration)

    def decode_internal(self, batched_outputs: Any) -> Any:
        return self.decoded


def test_texts_that_a_module_decodes_are_those_of_the_answers() -> None:
    made, llm = RecordingModule(SIZES | {"n": 3}), FakeLLM()
    made.decoded = {"str_outputs": ["one", "two"]}
    assert [prompt.decoded for prompt in in_training(made, llm)] == ["one", "two"]
    in_training(made, llm, evaluation=True, step=-5)
    in_training(made, llm, step=4)
    assert made.steps == [("setup", 0), ("train", 3), ("eval", 4), ("train", 4)]
    # The trainer has made a group of them
    assert [len(prompts) for prompts, _ in llm.calls] == [2, 2, 2]
    for outputs in (None, {}, ["one", "two"], {"str_outputs": ["one"]}, {"str_outputs": ["one", None]}):
        made.decoded = outputs
        with pytest.raises(
            ValueError, match="not a mapping whose str_outputs has 2 texts: in training they are shown"
        ):
            in_training(made, llm)
    with pytest.raises(
        ValueError, match="the weights of a given llm cannot be changed: .*in training, set model.path"
    ):
        made.load_checkpoint("some/where")


USED: dict[str, str] = {
    # The argument, and the test that sees its effect; or the words of its row.
    "VLLMModule.model_args": "test_chatlearn",
    "VLLMModule.llm": "test_chatlearn",
    "load_checkpoint.path": "test_seed_003",
    "check_recipe.recipe": "here",
    "build_dataset.train_prompts": "test_chatlearn",
    "build_dataset.is_eval": "`build_dataset(…, is_eval)`",
    "_add_request.data": "test_chatlearn",
    "_add_request.is_eval": "test_chatlearn",
    "forward_step.data": "test_chatlearn",
    "forward_step.iteration": "`iteration`",
    "eval_forward.data": "test_chatlearn",
    "eval_forward.iteration": "`iteration`",
    "decode_internal.batched_outputs": "test_chatlearn",
    "_forward_step.data": "test_chatlearn",
    "_forward_step.iteration": "`iteration`",
    "_forward_step.eval_mode": "test_chatlearn",
    "_add_request_internal.prompt": "test_chatlearn",
    "_add_request_internal.input_ids": "test_chatlearn",
    "_add_request_internal.is_eval": "test_chatlearn",
    "generate.data": "test_chatlearn",
    "generate.iteration": "test_samplers",
    "generate.is_eval": "test_chatlearn",
    "execute_step.data": "test_samplers",
    "execute_step.scheduled": "test_chatlearn",
    "PromptPipeline.prompts": "test_chatlearn",
    "PromptPipeline.max_prompt_length": "test_chatlearn",
    "PromptPipeline.tokenizer": "test_chatlearn",
    "PromptPipeline.cut": "test_chatlearn",
    "get_model.provider": "test_chatlearn",
    "get_model._": "`get_model(provider, *rest)`",
    "print_rank_0.message": "`print_rank_0(message)`",
    "FnCallRolloutSampler.functions": "test_samplers",
    "FnCallRolloutSampler.max_turns": "test_samplers",
    "FnCallRolloutSampler.limits": "here",
    "OneShotRolloutSampler.llm": "here",
    "OneShotRolloutSampler.prompts": "here",
    "OneShotRolloutSampler.sampling_params": "here",
    "InlineTags.start": "test_environments",
    "InlineTags.end": "test_environments",
    "InlineTags.result_start": "test_environments",
    "InlineTags.result_end": "test_environments",
    "generate.prompts": "test_samplers",
    "generate.sampling_params": "test_samplers",
    "generate.options": "here",
    "chat.messages": "test_samplers",
    "chat.sampling_params": "test_samplers",
    "chat.options": "here",
    "update_sampling_params.changes": "test_samplers",
}


def documented() -> set[str]:
    """Return the arguments that both sections of the page name."""
    module = [
        name
        for name in re.findall(r"`(\w+)`", CHATLEARN)
        if inspect.isfunction(vars(VLLMModule).get(name))
    ]
    of_module = {*module, "check_recipe"} - {"setup", "model_provider"}
    places: list[tuple[str, Any]] = [(name, getattr(VLLMModule, name)) for name in of_module]
    places += [("VLLMModule", VLLMModule.__init__), ("PromptPipeline", PromptPipeline.__init__)]
    places += [
        ("get_model", get_model),
        ("print_rank_0", print_rank_0),
        ("InlineTags", InlineTags.__init__),
    ]
    places += [("FnCallRolloutSampler", FnCallRolloutSampler.__init__)]
    places += [("OneShotRolloutSampler", OneShotRolloutSampler.__call__)]
    places += [
        (name, getattr(SamplerLLM, name)) for name in ("generate", "chat", "update_sampling_params")
    ]
    return {
        f"{place}.{name}"
        for place, call in places
        for name in inspect.signature(call).parameters
        if name != "self"
    }


def test_every_documented_argument_has_its_test_or_its_row() -> None:
    assert set(USED) == documented()
    tests = {path.stem: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    for argument, where in USED.items():
        assert where in PAGE if where.startswith("`") else where == "here" or where in tests, argument


def test_arguments_of_samplers_reach_what_they_are_for() -> None:
    arguments: dict[str, Any] = {}
    llm = SimpleNamespace(generate=lambda **options: arguments.update(options) or [])
    assert OneShotRolloutSampler()(llm, "prompts", "params") == []
    assert arguments == {"prompts": "prompts", "sampling_params": "params", "use_tqdm": False}
    limits = ToolLimits()
    assert FnCallRolloutSampler(limits=limits)._limits is limits
    assert inline_rollout.__defaults__ == (InlineTags(),)


@pytest.mark.parametrize(
    ("method", "option"),
    [
        *[("generate", name) for name in ("lora_request", "priority", "logits_processors")],
        *[
            ("chat", name)
            for name in ("chat_template", "chat_template_content_format", "logits_processors")
        ],
    ],
)
def test_options_of_vllms_that_mean_nothing_here_are_refused(method: str, option: str) -> None:
    llm: Any = SamplerLLM.__new__(SamplerLLM)
    with pytest.raises(ValueError, match=option):
        getattr(llm, method)(["ab"], None, **{option: "openai"})


def test_options_that_change_nothing_have_their_row() -> None:
    assert "`use_tqdm`" in VERL
