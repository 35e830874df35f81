"""verl's thread on tool calls in rollouts, from its readers' side: its samplers, inline calls and server request.

These lines are changed:
- imports, and the names in quotes where a class of vLLM's is only an annotation;
- in `FnCallRolloutSampler` a comma, `tools=self.tools` for `tools: self.tools`, `self` in the property, a list of
  conversations for one, and code in place of the dots;
- `FunctionProcessor`, which vLLM no longer calls, has only its constructor: `rollout.tools` replaces it;
- the request's body is JSON: `[{"qualname": …}]` for `"qualname": …`;
- the model has learned the thread's two answers by heart.
"""
# ruff: noqa: F401, F811, RET504, UP006, UP035

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Dict, Protocol

import openai
import pytest
import torch
from transformers import PreTrainedTokenizer

from generation.engine.engine import Leader
from generation.engine.logits import engine_arguments
from generation.rollouts.sampler import make_sampler
from generation.rollouts.sampler_prompts import prompt_batch
from generation.server import OpenAIServer
from tests.engine.generation.test_rollout_levels import POC, model, run, tokenizer
from tests.engine.generation.test_samplers import assert_on_policy, chats, facade, sample
from tests.support.colocated import start_engine, stop
from tests.support.openai_clients import QUESTION, SAMPLING, carried, client, opened, serving, taken
from tests.support.recipes import make_config
from trainer.config.schema import TrainConfig
from trainer.rollouts.level import RolloutLevel

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput


class RolloutSampler(Protocol):
    def __call__(self, llm, prompts, sampling_params) -> "list[RequestOutput]": ...


# impl default RolloutSampler
class OneShotRolloutSampler:
    def __call__(self, llm, prompts, sampling_params) -> "list[RequestOutput]":
        return llm.generate(
            prompts=prompts,  # pass in prompts instead of token_ids to make it user-friendly
            sampling_params=sampling_params,
            use_tqdm=False,
        )


# impl RolloutSampler
class FnCallRolloutSampler:
    @property
    def tools(self) -> list[dict]:
        return [
            {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {}}}
        ]

    def __call__(self, llm, prompts, sampling_params) -> "list[RequestOutput]":
        messages = [
            [{"role": "user", "content": "blah blah blah please do tool calling"}] for _ in prompts
        ]
        r1 = llm.chat(
            messages=messages,
            sampling_params=sampling_params,
            use_tqdm=False,
            tools=self.tools,
        )
        # execute tool calls from r1 and return results
        r2 = llm.chat(self._went_on(messages, r1), sampling_params, use_tqdm=False, tools=self.tools)
        # get final RequestOutput response from vllm
        r3 = llm.chat(self._went_on(messages, r2), sampling_params, use_tqdm=False, tools=self.tools)
        return r3  # list[RequestOutput] from vllm

    def _went_on(self, messages, outputs):
        for conversation, output in zip(messages, outputs, strict=True):
            conversation.append({"role": "assistant", "content": output.outputs[0].text})
            conversation.append({"role": "tool", "content": "a result"})
        return messages


class FunctionProcessor:
    def __init__(
        self,
        tokenizer: PreTrainedTokenizer,
        function_map: Dict[str, Callable],
        start_tag: str = " <function>",
        end_tag: str = " </function>",
        result_start: str = "<results>",
        result_end: str = "</results>",
    ):
        self.tokenizer = tokenizer
        self.function_map = function_map
        # Pre-tokenize markers
        self.start_marker = tokenizer.encode(start_tag, add_special_tokens=False)
        self.end_marker = tokenizer.encode(end_tag, add_special_tokens=False)
        self.result_start = tokenizer.encode(result_start, add_special_tokens=False)
        self.result_end = tokenizer.encode(result_end, add_special_tokens=False)


class Environment:
    """TRL's interface as the thread describes it."""

    def generate(self, llm, prompts, sampling_params):
        outputs = llm.generate(prompts, sampling_params)
        completion_ids = [o.outputs[0].token_ids for o in outputs]
        return completion_ids


def add(x, y):
    return x + y


def multiply(x, y):
    return x * y


# Create function map
function_map = {"add": add, "multiply": multiply}


def favourite(token: int, weight: float) -> Any:
    """Return a factory of logits processors for requests that name them: one token becomes likelier than all others."""

    def factory(params: Any) -> Any:
        if "logits_processors" not in (params.extra_args or {}):
            return None

        def process(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            changed = logits.clone()
            changed[token] += weight
            return changed

        return process

    return factory


cite_prompt, shout = favourite(40, 1e4), favourite(50, 2e4)


@pytest.fixture(scope="module")
def leader(model: Path) -> Iterator[Leader]:
    """Yield an engine with two logits processors."""
    extra = engine_arguments([f"{__name__}:cite_prompt", f"{__name__}:shout"], v2=False)
    leader = start_engine(model, max_model_len=512, max_num_seqs=16, extra=extra)
    leader.engine.state.adopt_checkpoint(0)
    yield leader
    stop(leader)


def test_the_threads_samplers_run_as_they_are(leader: Leader, tokenizer: Any, model: Path) -> None:
    """One shot is the default, token by token; three chats are one trajectory; an environment may return ids."""
    samplers: dict[str, RolloutSampler] = {
        "one shot": OneShotRolloutSampler(),
        "chats": FnCallRolloutSampler(),
    }
    plain = [
        list(facade(leader, tokenizer).generate(p)[0].outputs[0].token_ids)
        for p in ([14, 50, 77], [20, 21, 22, 23, 24])
    ]
    batch = [prompt_batch([ids], [0], tokenizer, 1) for ids in ([14, 50, 77], [20, 21, 22, 23, 24])]
    assert plain
    for one in batch:
        (by_outputs,) = sample(leader, tokenizer, samplers["one shot"], one)
        (by_ids,) = sample(leader, tokenizer, make_sampler(Environment), one)
        assert by_outputs.response_ids == by_ids.response_ids
        assert_on_policy(model, [by_outputs])
    three = sample(leader, tokenizer, samplers["chats"], chats(tokenizer, ["hi", "and you?"]))
    assert [t.turns for t in three] == [3, 3]
    assert_on_policy(model, three)
    for t in three:
        assert "please do tool calling" in tokenizer.decode(t.prompt_ids)
        masked = [token for token, mask in zip(t.response_ids, t.loss_mask, strict=True) if not mask]
        assert tokenizer.decode(masked).count("a result") == 2


class vLLMRollout:
    """The lines of verl that the thread quotes, as methods of a class with the attributes that they use."""

    def __init__(self, inference_engine):
        self.inference_engine = inference_engine
        self.update_sampling_params = inference_engine.update_sampling_params

    @property
    def sampling_params(self):
        return self.inference_engine.sampling_params

    def generate_sequences(self, idx_list, **kwargs):
        with self.update_sampling_params(**kwargs):
            output = self.inference_engine.generate(
                prompts=None,  # because we have already convert it to prompt token id
                sampling_params=self.sampling_params,
                prompt_token_ids=idx_list,
                use_tqdm=False,
            )
        return output


def test_the_lines_with_which_verl_samples_run(leader: Leader, tokenizer: Any) -> None:
    outputs = vLLMRollout(facade(leader, tokenizer)).generate_sequences(
        [[14, 50, 77], [20, 21]], max_tokens=3, n=2
    )
    assert [len(output.outputs) for output in outputs] == [2, 2]
    assert all(len(completion.token_ids) <= 3 for output in outputs for completion in output.outputs)


def test_the_proof_of_concept_prints_what_the_thread_prints(leader: Leader, tokenizer: Any) -> None:
    """A processor in the request is refused with a remedy, and the remedy prints what the thread prints."""
    prompts = [
        "Hello world. please say <function> multiply(3, 302) </function> \nthis is a test",
        "Hello world. please say <function> add(3, 302) </function> ",
    ]

    def usage(llm, batch, sampling_params):
        from vllm import SamplingParams

        my_tool_processor = FunctionProcessor(tokenizer, function_map)
        r = llm.generate(  # llm is a vllm LLM instance
            prompts,
            SamplingParams(
                logits_processors=[my_tool_processor],
                max_tokens=200,
            ),
        )
        return r

    errors = {t.error for t in sample(leader, tokenizer, usage)}
    assert (
        len(errors) == 1
        and "name a class or factory in the recipe, engine.logits_processors" in errors.pop()
    )
    named = {"tools": [f"{__name__}:{name}" for name in function_map], "tool_parser": "inline"}
    config = make_config(rollout=named)
    function = RolloutLevel(config, tokenizer).function
    assert function is not None
    printed = [
        "<function> multiply(3, 302) </function><result>906.0</result>. Can I assist with anything else?",
        "<function> add(3, 302) </function><result>305.0</result>. Is there anything else I can help with?",
    ]
    done = run(leader, tokenizer, function, tokenizer(prompts)["input_ids"])
    assert [tokenizer.decode(t.response_ids, skip_special_tokens=True).strip() for t in done] == printed
    assert prompts == list(POC)


@pytest.fixture(scope="module")
def server(leader: Leader) -> Iterator[OpenAIServer]:
    yield from serving(leader, sampling=SAMPLING, eos_token_ids=(2,), header_keys=True)


def test_a_request_names_processors_of_the_recipe(leader: Leader, server: OpenAIServer) -> None:
    """Processors apply to that request only, in every interface, also in training; unknown ones are refused."""
    asked: dict[str, Any] = {"model": "policy", "messages": QUESTION, "max_tokens": 4}

    def answered(named: Any) -> list[int]:
        extra = {} if named is None else {"extra_body": {"logits_processors": named}}
        return carried(client(server).chat.completions.create(**asked, **extra).choices[0].message)[1]

    assert answered([{"qualname": f"{__name__}.cite_prompt"}]) == [40] * 4
    assert (
        answered(f"{__name__}:shout")
        == answered([f"{__name__}.cite_prompt", f"{__name__}.shout"])
        == [50] * 4
    )
    for unbiased in (answered([]), answered(None)):
        assert not {40, 50} & set(unbiased)
    key = opened(server, leader)
    client(server, key).responses.create(
        model="policy",
        input="what?",
        max_output_tokens=4,
        extra_body={"logits_processors": f"{__name__}:shout"},
    )
    (trajectory,) = taken(server, leader, key)
    assert trajectory.response_ids == [50] * 4
    for named, sentence in {
        "logits_processor_zoo.vllm.cite_prompt": "names 'logits_processor_zoo.vllm.cite_prompt', but",
        ("os.system",): f"of the recipe has: {__name__}:cite_prompt, {__name__}:shout",
    }.items():
        with pytest.raises(openai.BadRequestError, match=sentence):
            answered(named)
    with pytest.raises(
        openai.BadRequestError, match="must hold qualname alone: arguments come with requests"
    ):
        answered([{"qualname": f"{__name__}.shout", "kwargs": {}}])
    messages = {
        "model": "policy",
        "messages": QUESTION,
        "max_tokens": 4,
        "logits_processors": ["os.system"],
    }
    refused = client(server)._client.post(f"{server.base_url}/messages", json=messages)
    assert refused.status_code == 400 and "logits_processors names 'os.system'" in refused.text
