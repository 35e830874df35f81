"""Samplers without an engine: trajectories made of their results, and errors about invalid results."""

import random
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.outputs import CompletionOutput, RequestOutput

from generation.engine.logits import check_request, engine_arguments, uses_v2, with_remedy
from generation.engine.sampling import SamplingSettings, vllm_sampling_params
from generation.exact_ids import Generation, History, echoes, generations_of, joined
from generation.importing import importable, load
from generation.rollouts.episode import RolloutSettings
from generation.rollouts.sampler import make_sampler, trajectories
from generation.rollouts.sampler_llm import off_policy
from generation.rollouts.sampler_prompts import PromptReader, PromptText, prompt_batch
from generation.trajectory import Trajectory
from tests.support.small_tokenizer import small_tokenizer


def output(
    prompt: list[int], answer: list[int], name: str = "r", flat: bool = False, alternatives: int = 0
) -> RequestOutput:
    """Return a vLLM output in which token t has log-probability -t / 100, with `alternatives` beside each token."""
    logprobs: Any = FlatLogprobs() if flat else []
    for token in answer:
        beside = {9000 + i: Logprob(-99.0) for i in range(alternatives)}
        logprobs.append({token: Logprob(-token / 100)} | beside)
    done = CompletionOutput(
        0, "", answer, cumulative_logprob=None, logprobs=logprobs, finish_reason="stop"
    )
    return RequestOutput(name, None, prompt, None, [done], finished=True)


def turned(outputs: list[RequestOutput]) -> Trajectory:
    """Return the trajectory of the turns that gave these outputs."""
    return joined(
        [generation for request_output in outputs for generation in generations_of(request_output)]
    )


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("alternatives", [0, 2])
def test_a_trajectory_is_made_of_plain_outputs(flat: bool, alternatives: int) -> None:
    """A trajectory has the sampled tokens, their log-probabilities, and 0 for all tokens between them, as counted by
    hand.
    """
    turns = [([1, 2], [3, 4]), ([1, 2, 3, 4, 50, 51], [5]), ([1, 2, 3, 4, 50, 51, 5, 60], [6, 7])]
    tokens = turned(
        [output(prompt, answer, flat=flat, alternatives=alternatives) for prompt, answer in turns]
    )
    assert tokens.prompt_ids == [1, 2]
    assert tokens.response_ids == [3, 4, 50, 51, 5, 60, 6, 7]
    assert tokens.loss_mask == [1, 1, 0, 0, 1, 0, 1, 1]
    assert tokens.logprobs == [-0.03, -0.04, 0, 0, -0.05, 0, -0.06, -0.07]
    assert tokens.answer_start == 6


def test_outputs_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(ValueError, match="does not begin with the 4 ids before it"):
        turned([output([1, 2], [3, 4]), output([1, 2, 3, 5, 6], [7])])
    bare = output([1], [2])
    bare.outputs[0].logprobs = None
    with pytest.raises(ValueError, match="no log-probabilities for 1 tokens"):
        turned([bare])


def test_masks_of_random_conversations_count_what_was_sampled() -> None:
    generator = random.Random(0)
    for _ in range(100):
        ids, sampled, turns = [1], 0, []
        for _ in range(generator.randint(1, 6)):
            answer = [generator.randrange(9) for _ in range(generator.randint(0, 5))]
            turns.append(output(list(ids), answer))
            sampled += len(answer)
            ids += answer + [generator.randrange(9) for _ in range(generator.randint(0, 5))]
        tokens = turned(turns)
        assert sum(tokens.loss_mask) == sampled
        assert ids[: 1 + len(tokens.response_ids)] == [1, *tokens.response_ids]


def batch_of(count: int, samples: int = 1) -> list[PromptText]:
    prompts = [[100 + i, 200 + i] for i in range(count)]
    return prompt_batch(prompts, range(count), small_tokenizer(), samples)


def history_of(batch: list[PromptText], turns: int = 1) -> tuple[History, list[RequestOutput]]:
    """Return the history of `turns` answers in a row to each prompt, with different ids, and the last outputs."""
    history, last = History(), []
    for position, prompt in enumerate(batch):
        ids, parent = list(prompt.token_ids), None
        for turn in range(turns):
            done = output(list(ids), [10 * position + turn, 7], f"{position}/{turn}")
            answer = generations_of(done)[0]
            answer.position, answer.place, answer.parent = position, prompt.place, parent
            history.add(answer)
            ids, parent = [*answer.ids, 99], answer
        last.append(done)
    return history, last


def test_outputs_of_a_sampler_are_checked_index_by_index() -> None:
    batch = batch_of(3)
    history, outputs = history_of(batch)
    assert [t.prompt_index for t in trajectories(outputs, batch, history)] == [0, 1, 2]
    alien = output([1], [2], "alien")
    changed = output(batch[1].token_ids, [10, 8], "1/0")
    two = output(batch[1].token_ids, [10, 7], "1/0")
    two.outputs *= 2
    for returned, sentence in [
        (None, "returned None instead of a list with 3 results"),
        ("text", "instead of a list"),
        (outputs[:2], "returned 2 results for 3 prompts: nothing for prompt 2"),
        ([*outputs, alien], "returned 4 results for 3 prompts: result 3 has no prompt"),
        ([outputs[0], None, outputs[2]], "returned None for prompt 1"),
        ([outputs[0], alien, outputs[2]], "result 1 is an output that this engine has not returned"),
        (
            [outputs[0], outputs[1], 4],
            "result 2 is 4, but should be a RequestOutput or a list of token ids",
        ),
        ([outputs[0], [4, 4], outputs[2]], "result 1 holds 2 ids that the policy has not sampled"),
        (
            [outputs[1], outputs[0], outputs[2]],
            "result 0 answers prompt 1, not prompt 0: keep the order",
        ),
        ([outputs[0], changed, outputs[2]], "result 1 has other token_ids than were sampled"),
        ([outputs[0], two, outputs[2]], "result 1 has 2 answers: return one"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            trajectories(returned, batch, history)


def test_an_answer_drawn_from_another_distribution_is_not_trained_on() -> None:
    batch = batch_of(2)
    history, outputs = history_of(batch)
    history.generations[1].off_policy = "temperature is 0.2 instead of 1.0"
    with pytest.raises(
        ValueError, match=r"result 1 was not sampled as training asks: temperature is 0\.2"
    ):
        trajectories(outputs, batch, history)


def test_lists_of_ids_stand_for_answers_and_whole_conversations() -> None:
    batch = batch_of(2, samples=2)
    history, outputs = history_of(batch, turns=3)
    conversations = trajectories(outputs, batch, history)
    assert [t.loss_mask for t in conversations] == [[1, 1, 0, 1, 1, 0, 1, 1]] * 4
    places = [(t.prompt_index, t.sample_index, t.turns) for t in conversations]
    assert places == [(0, 0, 3), (0, 1, 3), (1, 0, 3), (1, 1, 3)]
    last_answers = [list(o.outputs[0].token_ids) for o in outputs]
    assert trajectories(last_answers, batch, history) == conversations
    assert trajectories([t.response_ids for t in conversations], batch, history) == conversations
    cut = trajectories([t.response_ids[:4] for t in conversations], batch, history)
    assert [(t.response_ids, t.loss_mask) for t in cut] == [
        (t.response_ids[:4], [1, 1, 0, 1]) for t in conversations
    ]


def test_an_answer_may_be_cut_but_not_changed() -> None:
    batch = batch_of(1)
    history, outputs = history_of(batch, turns=2)
    outputs[0].outputs[0].token_ids = outputs[0].outputs[0].token_ids[:1]
    [cut] = trajectories(outputs, batch, history)
    assert cut.loss_mask == [1, 1, 0, 1]


def test_a_conversation_ends_before_the_turn_that_had_no_room() -> None:
    batch = batch_of(1)
    history, _ = history_of(batch)
    parent = history.generations[0]
    none = RequestOutput(
        "none",
        "",
        [*parent.ids, *[5] * 500],
        None,
        [CompletionOutput(0, "", [], 0.0, [], finish_reason="length")],
        True,
    )
    answer = generations_of(none)[0]
    answer.parent = parent
    history.add(answer)
    [ended] = trajectories([none], batch, history)
    assert (ended.response_ids, ended.finish_reason, ended.error, ended.turns) == (
        parent.token_ids,
        "length",
        "",
        1,
    )


@pytest.mark.parametrize(
    ("message", "same"),
    [
        ({"content": "<think>well</think>four"}, True),
        ({"content": " four\n"}, True),  # templates and parsers strip, and drop what was thought
        ({"content": "five"}, False),
        ({"content": ""}, False),
        (
            {
                "content": None,
                "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1, "b": "x y"}'}}],
            },
            False,
        ),
    ],
)
def test_an_assistants_message_is_known_for_what_was_sampled(
    message: dict[str, Any], same: bool
) -> None:
    assert echoes(message, "<think>well</think>four") is same


def test_tool_calls_are_told_apart_by_their_arguments() -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": "x y"}}</tool_call>'
    call = {"function": {"name": "add", "arguments": {"a": 1, "b": "x y"}}}
    assert echoes({"content": "", "tool_calls": [call]}, text)
    call["function"]["arguments"] = '{"a": 2, "b": "x y"}'
    assert not echoes({"content": "", "tool_calls": [call]}, text)


def prompts_after(
    answer_text: str, answer_ids: list[int]
) -> tuple[PromptReader, PromptText, Generation]:
    """Return the forms of prompts that can follow one answer, whose ids differ from any encoding of its text."""
    tokenizer = small_tokenizer()
    settings = RolloutSettings(1, SamplingSettings(8, stop_token_ids=[tokenizer.eos_token_id]), 0, 0, 0)
    messages = [{"role": "user", "content": "hi"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    start = PromptText(rendered, tokenizer(rendered)["input_ids"], messages=messages)
    history = History()
    answer = Generation(
        answer_ids,
        [0.0] * len(answer_ids),
        prompt_ids=start.token_ids,
        text=answer_text,
        prompt_text=str(start),
    )
    history.add(answer, messages)
    return PromptReader(tokenizer, settings, [start], history), start, answer


def test_texts_ids_and_messages_go_on_from_what_was_sampled() -> None:
    """Continued prompts keep the sampled tokens 7 and 8, whose text would be encoded to others."""
    prompts, start, answer = prompts_after("ab", [7, 8, 2])
    reply = {"role": "assistant", "content": "ab"}
    [text] = prompts.requests(str(start) + "ab" + "<tool>3")
    [ids] = prompts.requests([[*answer.ids, 40, 41]])
    [chat] = prompts.chat_requests(
        [*start.messages, reply, {"role": "user", "content": "more"}], None, {}
    )
    for request in (text, ids, chat):
        assert request.parent is answer
        assert request.input.ids[: len(answer.ids)] == answer.ids
    tokenizer = small_tokenizer()
    assert tokenizer.decode(text.input.ids[len(answer.ids) :]) == "<tool>3"
    assert tokenizer.decode(chat.input.ids[len(answer.ids) :]) == "<user>more<assistant>"


def test_an_answer_without_text_is_continued_and_no_question_asked_again() -> None:
    """An answer of EOS alone has no text, but its token was sampled and is kept."""
    prompts, start, answer = prompts_after("", [2])
    asked_again, followed = prompts.requests([f"{start}", f"{start}<results>"])
    assert asked_again.parent is None
    assert asked_again.input.ids == start.token_ids
    assert followed.parent is answer
    assert followed.input.ids[: len(answer.ids)] == answer.ids


def test_prompts_come_in_all_forms() -> None:
    prompts, start, _ = prompts_after("x", [7])
    ids = start.token_ids
    assert [r.input.ids for r in prompts.requests(start)] == [ids]
    assert [
        r.input.ids for r in prompts.requests([start, ids, {"prompt_token_ids": ids}, {"prompt": "q"}])
    ][:3] == [ids] * 3
    assert [
        len(prompts.requests(form)) for form in ("text", ids, {"prompt": "q"}, ["a", "b"], [ids, ids])
    ] == [
        1,
        1,
        1,
        2,
        2,
    ]
    [templated] = prompts.chat_requests(start.messages, None, {})
    assert templated.input.ids == ids
    with pytest.raises(ValueError, match="needs messages"):
        prompts.chat_requests([], None, {})


@pytest.mark.parametrize("form", ["text", "ids", "chat"])
def test_equal_samples_are_told_apart_where_positions_change(form: str) -> None:
    """Sample with equal answers keep their identity: two prompts, two samples each, of which the first prompt is
    finished and left out.
    """
    tokenizer = small_tokenizer()
    settings = RolloutSettings(2, SamplingSettings(8), 0, 0, 0)
    history, messages = History(), [[{"role": "user", "content": name}] for name in "ab"]
    batch = prompt_batch([[10, 11], [12, 13]], [0, 1], tokenizer, 2, messages)
    for position, prompt in enumerate(batch):
        answer = Generation([7], [0.0], prompt_ids=prompt.token_ids, text="x", prompt_text=str(prompt))
        answer.position, answer.place = position, prompt.place
        history.add(answer, prompt.messages)
    prompts = PromptReader(tokenizer, settings, batch, history)
    if form == "chat":
        turns = [{"role": "assistant", "content": "x"}, {"role": "user", "content": "on"}]
        requests = prompts.chat_requests([[*messages[1], *turns]] * 2, None, {})
    elif form == "ids":
        requests = prompts.requests([[12, 13, 7, 9]] * 2)
    else:
        requests = prompts.requests([str(batch[2]) + "xy"] * 2)
    assert [request.parent for request in requests] == history.generations[2:]
    assert [request.place for request in requests] == [(1, 0), (1, 1)]


def test_off_policy_names_what_differs_and_nothing_else() -> None:
    training = vllm_sampling_params(SamplingSettings(8), None)
    same = training.clone()
    same.max_tokens, same.stop, same.seed, same.top_k, same.logprobs = 3, ["x"], 5, 0, 4
    assert off_policy(same, training) == ""
    assert off_policy(SamplingParams(temperature=0.5, min_tokens=2), training) == (
        "temperature is 0.5 instead of 1.0, min_tokens is 2 instead of 0"
    )


class Called:
    def __init__(self, answer: int = 0) -> None:
        self.answer = answer

    def __call__(self, llm: Any, prompts: Any, sampling_params: Any) -> Any:
        return [self.answer]


class Environment:
    def generate(self, llm: Any, prompts: Any, sampling_params: Any) -> Any:
        return [1]


def test_a_class_or_function_named_in_a_recipe_becomes_a_sampler() -> None:
    assert make_sampler(load(f"{__file__}:Called"), {"answer": 4})(None, [], None) == [4]
    assert make_sampler(Called(3))(None, [], None) == [3]
    assert make_sampler(Environment)(None, [], None) == [1]
    for candidate, kwargs in ((7, {}), (object(), {}), (Called(), {"answer": 1})):
        with pytest.raises(ValueError, match="is not a sampler|takes no kwargs"):
            make_sampler(candidate, kwargs)
    for spec, sentence in (
        (f"{__file__}:Gone", "has no 'Gone'"),
        ("no.such:Thing", "'no.such:Thing' cannot be loaded"),
    ):
        with pytest.raises(ValueError, match=sentence):
            load(spec)


def no_sevens(params: SamplingParams) -> Any:
    return lambda output_ids, logits: logits


def test_processors_reach_the_engine_in_the_form_it_takes() -> None:
    here = f"{__file__}:no_sevens"
    assert engine_arguments([], v2=False) == {}
    for v2 in (False, True):
        arguments = engine_arguments([here], v2)
        assert arguments["logits_processors"] == [
            f"generation.engine.logits.adapter_v{1 + v2}:FactoryProcessorV{1 + v2}"
        ]
        assert arguments["additional_config"] == {"hotbunk_logits_factories": ["test_sampler:no_sevens"]}
    assert importable(here) == "test_sampler:no_sevens"
    old = "vllm.v1.sample.logits_processor.builtin.MinPLogitsProcessor"
    assert engine_arguments([{"qualname": old}], v2=False) == {
        "logits_processors": [f"{old.rpartition('.')[0]}:MinPLogitsProcessor"]
    }
    with pytest.raises(
        ValueError, match="model runner V1, but this engine runs V2: derive it from .* or name a factory"
    ):
        engine_arguments([{"qualname": old}], v2=True)


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ("no_colon", "write pkg.mod:Name or path/file.py:Name"),
        ("gone/file.py:Name", "there is no file gone/file.py"),
        ("no.such.module:Name", "there is no module no: install the package"),
        ("math:gone", "math has no 'gone'"),
        ("math:pi", "neither a class of processors nor a function"),
        ({"qualname": "math.sin", "args": [1]}, "arguments come with requests, in extra_args"),
    ],
)
def test_invalid_logits_processors_are_refused(entry: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        engine_arguments([entry], v2=False)


def test_processors_given_with_a_request_are_answered_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"engine\.logits_processors: \[pkg\.mod:Name\]"):
        check_request({"temperature": 1.0, "logits_processors": [print]})
    with pytest.raises(TypeError) as caught:
        SamplingParams(logits_processors=[print])
    assert "engine.logits_processors" in str(with_remedy(caught.value))
    other = TypeError("something else")
    assert with_remedy(other) is other


def test_the_interface_follows_the_device() -> None:
    assert not uses_v2(on_cpu=True, environ={})
    assert uses_v2(on_cpu=False, environ={})
    assert not uses_v2(on_cpu=False, environ={"VLLM_USE_V2_MODEL_RUNNER": "0"})
