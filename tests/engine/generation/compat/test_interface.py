"""`VllmGeneration` on real engines: NeMo RL's example, the contract of its batches, and its engines' states.

Expected log-probabilities and greedy tokens come from plain Transformers.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoTokenizer

from generation.compat.nemo.batch import BatchedDataDict, rows_of, verify_right_padding
from generation.compat.nemo.config import VllmConfig, VllmSpecificArgs
from generation.compat.nemo.generation import VllmGeneration
from generation.engine.engine import WorkerError
from generation.engine.lifecycle import EngineStateError
from sharding import WORKER_EXTENSION
from sharding.manager import ShardingManager
from sharding.ranks import RemoteError
from sharding.remote.broadcast import CollectiveSender
from sharding.report import SyncReport, SyncSettings
from sharding.send.source import FsdpWeightSource
from tests.support.colocated import HfPolicy
from trainer.policy.hf_format import checkpoint_views, parameter_names

PROMPTS = [[14, 50, 77], [20, 21, 22, 0, 24], [99, 98], [14, 15, 16, 17]]
KEYS = {
    "output_ids",
    "generation_lengths",
    "unpadded_sequence_lengths",
    "logprobs",
    "truncated",
    "errors",
}


def config(model: Path, **changes: Any) -> VllmConfig:
    engine = VllmSpecificArgs(
        max_model_len=64,
        num_replicas=2,
        kv_cache_memory_bytes=32 << 20,
        max_num_seqs=16,
        expose_http_server=True,
    )
    return VllmConfig(
        backend="vllm",
        max_new_tokens=12,
        temperature=0.7,
        top_p=0.9,
        top_k=50,
        model_name=str(model),
        stop_token_ids=[2],
        colocated={"enabled": True},
        vllm_cfg=engine,
        vllm_kwargs={"worker_extension_cls": WORKER_EXTENSION},
        **changes,
    )


def padded(prompts: list[list[int]], **more: Any) -> BatchedDataDict:
    """Return a batch of right-padded prompts."""
    width = max((len(prompt) for prompt in prompts), default=0)
    ids = torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in prompts], dtype=torch.long)
    lengths = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.long)
    return BatchedDataDict(
        {"input_ids": ids.view(len(prompts), width), "input_lengths": lengths, **more}
    )


def responses(output: BatchedDataDict) -> list[list[int]]:
    """Each row's response, cut out by its lengths."""
    ends, counts = output["unpadded_sequence_lengths"].tolist(), output["generation_lengths"].tolist()
    return [
        ids[e - n : e] for ids, e, n in zip(output["output_ids"].tolist(), ends, counts, strict=True)
    ]


def greedy_by_transformers(model: torch.nn.Module, prompt: list[int], count: int) -> list[int]:
    """Return the greedy continuation by plain Transformers, up to token 2 or `count` tokens."""
    ids = list(prompt)
    while len(ids) < len(prompt) + count and ids[len(prompt) :][-1:] != [2]:
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.fixture(scope="module")
def generation(model: Path) -> Iterator[VllmGeneration]:
    with VllmGeneration(config(model), timeout=120) as generation:
        yield generation


def test_outputs_have_the_promised_shapes_types_and_logprobs(
    generation: VllmGeneration, model: Path
) -> None:
    """Log-probabilities are those of the sampled distribution, after temperature, top-k and top-p."""
    data = padded(PROMPTS * 4)
    data["input_ids"] = data["input_ids"].int()
    output = generation.generate(data)
    assert set(output) == KEYS
    ids, logprobs, counts = output["output_ids"], output["logprobs"], output["generation_lengths"]
    assert ids.shape == logprobs.shape == (16, 5 + int(counts.max()))
    assert (ids.dtype, logprobs.dtype) == (torch.int32, torch.float32)
    assert (counts.dtype, output["truncated"].dtype) == (torch.int64, torch.bool)
    assert torch.equal(output["unpadded_sequence_lengths"], data["input_lengths"] + counts)
    assert verify_right_padding(output) == (True, None)
    network = HfPolicy(model).model
    for row, (prompt, response) in enumerate(zip(PROMPTS * 4, responses(output), strict=True)):
        assert ids[row, : len(prompt)].tolist() == prompt
        end = len(prompt) + len(response)
        assert not logprobs[row, : len(prompt)].any()
        assert not logprobs[row, end:].any()
        expected = truncated_logprobs(network, prompt + response)[len(prompt) - 1 :]
        torch.testing.assert_close(logprobs[row, len(prompt) : end], expected, atol=1e-4, rtol=0)
    assert len({tuple(r) for r in responses(output)}) > 4  # every sample has a seed of its own


def truncated_logprobs(network: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    """Log-probability of each token after the first, at temperature 0.7, top-k 50 and top-p 0.9."""
    with torch.no_grad():
        scores = network(torch.tensor([ids])).logits[0].double() / 0.7
    kept = []
    for row, token in zip(scores, ids[1:], strict=False):
        order = row.argsort(descending=True)[:50]
        shares = torch.softmax(row[order], 0)
        inside = shares.cumsum(0) - shares < 0.9
        kept.append(torch.log(shares[order == token].sum() / shares[inside].sum()))
    return torch.stack(kept).float()


def test_greedy_answers_are_those_of_transformers(generation: VllmGeneration, model: Path) -> None:
    output = generation.generate(padded(PROMPTS), greedy=True)
    policy = HfPolicy(model)
    for row, (prompt, response) in enumerate(zip(PROMPTS, responses(output), strict=True)):
        assert response == greedy_by_transformers(policy.model, prompt, 12)
        expected = policy.logprobs(prompt + response)[len(prompt) - 1 :]
        end = len(prompt) + len(response)
        assert output["logprobs"][row, len(prompt) : end].tolist() == pytest.approx(expected, abs=1e-4)
    assert responses(generation.generate(padded(PROMPTS), greedy=True)) == responses(output)


def test_an_empty_batch_gives_an_empty_batch(generation: VllmGeneration) -> None:
    output = generation.generate(padded([]))
    assert set(output) == KEYS
    assert output["output_ids"].shape == output["logprobs"].shape == (0, 0)
    assert output["output_ids"].dtype == torch.long
    assert [len(output[key]) for key in sorted(KEYS)] == [0] * 6
    assert asyncio.run(collect(generation.generate_async(padded([])))) == []


async def collect(results: Any) -> list[tuple[int, BatchedDataDict]]:
    return [result async for result in results]


def test_stop_strings_hold_for_their_own_sample(generation: VllmGeneration, model: Path) -> None:
    """Merged over the batch, the string of one sample would end the other's answer as well."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    plain = responses(generation.generate(padded([PROMPTS[0]] * 3), greedy=True))[0]
    text = [tokenizer.decode([token]) for token in plain]
    early, late = next(i for i, t in enumerate(text) if i > 0 and t not in text[:i]), len(text) - 1
    assert early < late
    data = padded([PROMPTS[0]] * 3, stop_strings=[[text[early]], None, ["never said"]])
    output = generation.generate(data, greedy=True)
    # The stop string is part of the answer
    assert responses(output) == [plain[: early + 1], plain, plain]
    assert output["truncated"].tolist() == [False, *([plain[-1] != 2] * 2)]


def test_a_sample_that_fails_does_not_affect_the_others(generation: VllmGeneration) -> None:
    prompts = [PROMPTS[0], [5] * 70, [10**6, 1], [], [7] * 64, PROMPTS[2]]
    output = generation.generate(padded(prompts), greedy=True)
    assert [bool(error) for error in output["errors"]] == [False, True, True, True, True, False]
    assert "70 tokens leaves no room in 64" in output["errors"][1]
    assert output["generation_lengths"].tolist()[1:5] == [0] * 4
    assert output["output_ids"][1, :70].tolist() == [5] * 70
    assert not output["truncated"][1:5].any()
    assert not output["logprobs"][1:5].any()
    alone = responses(generation.generate(padded([PROMPTS[0], PROMPTS[2]]), greedy=True))
    assert [responses(output)[0], responses(output)[5]] == alone


def test_truncated_marks_answers_that_no_stop_token_ended(generation: VllmGeneration) -> None:
    output = generation.generate(padded([*PROMPTS, [7] * 60]))
    for response, cut in zip(responses(output), output["truncated"].tolist(), strict=True):
        assert cut == (response[-1] != 2)
    assert len(responses(output)[4]) <= 4  # the end of the context


def test_async_results_come_as_they_finish_with_their_place(generation: VllmGeneration) -> None:
    prompts = [PROMPTS[0], PROMPTS[1], [7] * 63]  # the last one has room for a single token
    worker = generation.workers[0]
    results = worker.thread.run(
        collect(worker.engine.generate_async(padded(prompts), greedy=True)), 60, "a test"
    )
    assert results[0][0] == 2
    results = asyncio.run(collect(generation.generate_async(padded(prompts), greedy=True)))
    assert sorted(place for place, _ in results) == [0, 1, 2]
    batched = generation.generate(padded(prompts), greedy=True)
    for place, output in results:
        assert output["output_ids"].shape == (1, output["unpadded_sequence_lengths"].item())
        assert responses(output)[0] == responses(batched)[place]
        assert set(output) == KEYS | {"gen_leader_worker_idx"}
    assert {output["gen_leader_worker_idx"][0] for _, output in results} == {0, 1}


def test_closing_the_async_results_aborts_their_requests(generation: VllmGeneration) -> None:
    """While the requests run, weights are not updated."""
    worker = generation.workers[0]

    async def listen_once() -> int:
        results = worker.engine.generate_async(padded([[7] * 63, *PROMPTS * 8]))
        assert (await anext(results))[0] == 0
        with pytest.raises(EngineStateError, match="requests would continue with other weights"):
            await worker.engine.update_weights_from_collective_async()
        await results.aclose()
        return int(worker.engine.llm.get_num_unfinished_requests())

    assert worker.thread.run(listen_once(), 60, "a test") == 0
    assert generation.invalidate_kv_cache() is True  # no block is in use


def test_text_prompts_give_text_answers(generation: VllmGeneration, model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = ["1+1=", "what", "x" * 500]
    data = BatchedDataDict({"prompts": texts, "stop_strings": [None, ["zz"], None]})
    output = generation.generate_text(data, greedy=True)
    by_ids = responses(
        generation.generate(padded([tokenizer(t)["input_ids"] for t in texts[:2]]), greedy=True)
    )
    assert output["texts"][:2] == [tokenizer.decode(ids, skip_special_tokens=True) for ids in by_ids]
    assert [bool(error) for error in output["errors"]] == [False, False, True]
    results = asyncio.run(collect(generation.generate_text_async(data, greedy=True)))
    assert {place: answer["texts"][0] for place, answer in results} == dict(enumerate(output["texts"]))
    with pytest.raises(ValueError, match="a list of strings"):
        generation.generate_text(padded(PROMPTS))


def test_the_workers_own_methods_can_be_called(generation: VllmGeneration) -> None:
    """The blocking and the asynchronous worker answer as `VllmGeneration` does."""
    worker = generation.workers[0]
    data, texts = padded(PROMPTS), BatchedDataDict({"prompts": ["1+1="]})
    expected = generation.generate(data, greedy=True)
    assert worker.generate(data, greedy=True)["output_ids"].equal(expected["output_ids"])
    assert worker.generate_text(texts, greedy=True) == generation.generate_text(texts, greedy=True)
    results = worker.thread.run(collect(worker.engine.generate_async(data, greedy=True)), 60, "a test")
    assert {place: responses(one)[0] for place, one in results} == dict(enumerate(responses(expected)))
    (place, text) = worker.thread.run(
        collect(worker.engine.generate_text_async(texts, greedy=True)), 60, "a test"
    )[0]
    assert (place, text) == (0, worker.generate_text(texts, greedy=True))
    assert worker.report_device_id() == worker.engine.device_ids == ["cpu:0"]
    assert generation.device_uuids == [["cpu:0"], ["cpu:0"]]
    assert worker.get_num_unfinished_requests() == 0


def test_answers_do_not_depend_on_the_engine_that_gives_them(generation: VllmGeneration) -> None:
    """Seeds are made from the call and the place; both engines are used."""
    first, second = generation.workers
    numbers = next(generation._calls), next(generation._calls)
    assert numbers[1] == numbers[0] + 1
    served: list[int] = []
    for number, worker in enumerate((first, second)):
        worker.engine._request_numbers = _recording(worker.engine._request_numbers, served, number)
    data = padded([PROMPTS[0]] * 8)
    spread = responses(generation.generate(data))
    assert sorted(served) == [0] * 4 + [1] * 4
    alone = [
        second.begin("answer", row, False, numbers[1] + 1).result(60).token_ids
        for row in rows_of(data, 0)
    ]
    assert spread == alone


def _recording(numbers: Iterator[int], served: list[int], engine: int) -> Iterator[int]:
    """Yield the numbers, and append `engine` to `served` at each."""
    for number in numbers:
        served.append(engine)
        yield number


def test_calls_that_an_engines_state_forbids_raise(generation: VllmGeneration) -> None:
    """Level 1 keeps the weights. Level 2 drops them until an update, and is tested at the end of this file."""
    before = responses(generation.generate(padded(PROMPTS), greedy=True))
    assert generation.prepare_for_generation() is True  # already awake
    assert generation.finish_generation(level=1) is True
    assert generation.finish_generation(level=1) is True  # already asleep
    for call in (generation.generate, generation.workers[0].generate):
        with pytest.raises(EngineStateError, match="cannot generate: the engine is asleep"):
            call(padded(PROMPTS))
    with pytest.raises(EngineStateError, match="cannot wake the KV cache"):
        generation.prepare_for_generation(["kv_cache"])
    assert generation.prepare_for_generation(["weights"]) is True
    with pytest.raises(EngineStateError, match="holding weights but no KV cache"):
        generation.generate(padded(PROMPTS))
    assert generation.prepare_for_generation() is True
    assert responses(generation.generate(padded(PROMPTS), greedy=True)) == before
    with pytest.raises(ValueError, match="no memory called everything"):
        generation.prepare_for_generation(["everything"])
    with pytest.raises(ValueError, match="level 1"):
        generation.finish_generation(level=3)


def test_each_engine_has_an_openai_server_of_its_own(generation: VllmGeneration) -> None:
    urls = generation.dp_openai_server_base_urls
    assert len(set(urls)) == 2
    for worker, url in zip(generation.workers, urls, strict=True):
        assert url == worker.thread.run(worker.engine.report_dp_openai_server_base_url(), 10, "a test")
        assert url is not None
        assert url.startswith("http://127.0.0.1:")
        assert httpx.get(f"{url}/models", timeout=60).json()["data"][0]["max_model_len"] == 64


def test_weights_arrive_by_broadcast_between_sleep_and_generation(
    generation: VllmGeneration, model: Path
) -> None:
    """A trainer updates two engines: they sleep, map their weights, receive, and map the KV cache."""
    policy = HfPolicy(model)
    policy.randomise(seed=5)
    generation.finish_generation()
    generation.prepare_for_generation(["weights"])
    with CollectiveSender(
        source_of(policy), policy.device, SyncSettings("sample", 1 << 18, 60), workers=2
    ) as sender:
        joining = generation.init_collective(
            sender.ip, sender.port, sender.world_size, train_world_size=sender.train_world_size
        )
        sender.connect(joining)
        generation.prepare_refit_info(
            {name: (shape, dtype) for name, (shape, dtype) in sender.refit_info().items()}
        )
        updates = generation.update_weights_from_collective()
        sender.send(policy.version, updates)
        assert [update.result(60) for update in updates] == [True, True]
        generation.prepare_for_generation(["kv_cache"])
        assert [worker.engine.state.version for worker in generation.workers] == [1, 1]
        assert_weights_are(policy, generation)
    generation.prepare_refit_info({})


def test_a_rank_updates_the_engine_on_the_same_device(
    generation: VllmGeneration, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken update raises, and the engine generates nothing until a complete one."""
    policy, worker, settings = HfPolicy(model), generation.workers[0], SyncSettings("full", 1 << 18, 60)
    source = source_of(policy)
    policy.randomise(seed=6)
    sender = ShardingManager(source, policy.device, settings, tmp_path)
    with pytest.raises(
        ValueError, match="1 groups of ranks cannot send to 2 engines: start as many ranks as"
    ):
        generation.connect_ipc(sender.endpoints())
    never = worker.submit("update_weights_via_ipc_zmq_async")
    with pytest.raises(WorkerError, match="no rank to receive from"):
        never.result(60)
    sender.connect([worker.submit("connect_ipc_async", *sender.endpoints())])

    def send() -> SyncReport:
        return sender.send(7, [worker.submit("update_weights_via_ipc_zmq_async", timeout_s=60)])

    try:
        worker.sleep()
        for _ in range(2):
            with pytest.raises(
                RemoteError, match="EngineStateError: cannot update weights: the engine is asleep"
            ):
                send()
        worker.wake_up(["weights"])
        with monkeypatch.context() as patch:
            patch.setattr(source, "gather_into", lambda *_: 1 / 0)
            broken = worker.submit("update_weights_via_ipc_zmq_async")
            with pytest.raises(ZeroDivisionError):
                sender.send(7, [broken])
        with pytest.raises(RuntimeError, match=r"worker 0 on cpu:0.*broke the update off"):
            broken.result(60)
        worker.wake_up()
        with pytest.raises(EngineStateError, match="weights of no version"):
            generation.generate(padded(PROMPTS))
        assert send().version == 7
    finally:
        sender.close()
    assert worker.engine.state.version == 7
    assert responses(worker.generate(padded(PROMPTS), greedy=True)) == [
        greedy_by_transformers(policy.model, prompt, 12) for prompt in PROMPTS
    ]


def source_of(policy: HfPolicy) -> FsdpWeightSource:
    parameters = list(parameter_names(policy.model).items())
    return FsdpWeightSource(
        parameters, torch.float32, lambda name, shape: checkpoint_views(policy.model, name, shape)
    )


def assert_weights_are(policy: HfPolicy, generation: VllmGeneration) -> None:
    """Greedy answers of all engines are those of the policy."""
    expected = [greedy_by_transformers(policy.model, prompt, 12) for prompt in PROMPTS]
    for worker in generation.workers:
        assert responses(worker.generate(padded(PROMPTS), greedy=True)) == expected
