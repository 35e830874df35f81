"""Logits processor factories behave alike under both of vLLM's interfaces: compared with a table computed by hand."""

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate

from generation.engine.engine import Engine
from generation.engine.logits import (
    FACTORIES,
    REQUESTED,
    engine_arguments,
    processor_of,
    requested,
    with_exact_names,
)
from generation.engine.logits.adapter_v1 import FactoryProcessorV1 as First
from generation.engine.logits.adapter_v2 import FactoryProcessorV2 as Second

WIDTH = 8


def counting(params: SamplingParams) -> Any:
    """Add 1 at each id generated so far, and 100 times the number of its own calls at id 0; only where asked for."""
    if not (params.extra_args or {}).get("count"):
        return None
    calls = 0

    def process(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        changed = logits.clone()
        changed[output_ids] += 1
        changed[0] += 100 * calls
        return changed

    return process


def doubling(params: SamplingParams) -> Any:
    """Doubles the logits of every request, in place."""
    return lambda output_ids, logits: logits.mul_(2)


CONFIG: Any = SimpleNamespace(
    additional_config={FACTORIES: [f"{__name__}:counting", f"{__name__}:doubling"]}
)
ASKING = SamplingParams(extra_args={"count": True})
PLAIN = SamplingParams()


def expected(output_ids: list[int], asked: bool, calls: int = 1) -> torch.Tensor:
    row = torch.ones(WIDTH)
    if asked:
        row[output_ids] += 1
        row[0] += 100 * calls
    return row * 2


def test_the_first_interface_keeps_a_state_for_each_request() -> None:
    processor = First(CONFIG, torch.device("cpu"), False)
    outputs: list[list[int]] = [[1, 2], [3], [4]]
    added = [
        (i, params, [9], ids)
        for i, (params, ids) in enumerate(zip([ASKING, PLAIN, ASKING], outputs, strict=True))
    ]
    processor.update_state(BatchUpdate(batch_size=3, removed=[], added=added, moved=[]))
    logits = processor.apply(torch.ones(3, WIDTH))
    wanted = [expected([1, 2], True), expected([3], False), expected([4], True)]
    assert torch.equal(logits, torch.stack(wanted))
    outputs[0].append(5)
    processor.update_state(None)
    assert torch.equal(processor.apply(torch.ones(3, WIDTH))[0], expected([1, 2, 5], True, calls=2))
    assert not processor.is_argmax_invariant()


def test_the_second_interface_keeps_a_state_for_each_slot() -> None:
    tokens = torch.zeros(4, 16, dtype=torch.int64)
    tokens[3, :4] = torch.tensor([9, 9, 1, 2])  # a prompt of two, then what was generated
    tokens[1, :3] = torch.tensor([9, 9, 3])
    states: Any = SimpleNamespace(
        prompt_len=SimpleNamespace(np=np.array([0, 2, 0, 2])), all_token_ids=SimpleNamespace(gpu=tokens)
    )
    processor = Second(CONFIG, states)
    assert processor.add_request(3, ASKING)
    assert processor.add_request(1, PLAIN)
    context: Any = SimpleNamespace(
        idx_mapping_np=np.array([1, 3]),
        expanded_idx_mapping=torch.tensor([1, 3]),
        pos=torch.tensor([2, 3]),
    )
    logits = processor.apply(torch.ones(2, WIDTH), context)
    assert torch.equal(logits, torch.stack([expected([3], False), expected([1, 2], True)]))
    processor.add_request(3, ASKING)  # another request takes the slot: it counts from the beginning
    assert torch.equal(processor.apply(torch.ones(2, WIDTH), context)[1], expected([1, 2], True))


def test_requests_without_processors_cost_nothing_on_the_device() -> None:
    config: Any = SimpleNamespace(additional_config={FACTORIES: [f"{__name__}:counting"]})
    processor = Second(config, SimpleNamespace())  # type: ignore[arg-type]
    assert not processor.add_request(0, PLAIN)
    logits = torch.ones(1, WIDTH)
    assert processor.apply(logits, SimpleNamespace(idx_mapping_np=np.array([0]))) is logits  # type: ignore[arg-type]


def test_a_request_may_choose_among_the_factories_of_its_recipe() -> None:
    """A request names factories in any form that recipes have, and both interfaces leave out those it does not name."""
    arguments = engine_arguments([f"{__name__}:doubling", f"{__name__}:counting"], v2=False)
    dotted = f"{__name__}.doubling"
    for named in (dotted, f"{__name__}:doubling", {"qualname": dotted}, [{"qualname": dotted}]):
        assert requested(named, arguments) == [f"{__name__}:doubling"]
    assert requested([], arguments) == []
    for named in (f"{__name__}:tripling", ["os.system"], [3], {"FactoryProcessor": 1}, None):
        with pytest.raises(ValueError, match="logits_processors names|must hold qualname alone"):
            requested(named, arguments)
    with pytest.raises(ValueError, match="but engine.logits_processors of the recipe has: none"):
        requested(dotted, {})
    only = SamplingParams(extra_args={"count": True, REQUESTED: requested(dotted, arguments)})
    none = SamplingParams(extra_args={"count": True, REQUESTED: []})
    first = First(CONFIG, torch.device("cpu"), False)
    first.update_state(BatchUpdate(2, [], [(0, only, [9], [1]), (1, none, [9], [1])], []))
    assert torch.equal(
        first.apply(torch.ones(2, WIDTH)), torch.stack([expected([1], False), torch.ones(WIDTH)])
    )
    second = Second(CONFIG, SimpleNamespace())  # type: ignore[arg-type]
    assert [second.add_request(slot, params) for slot, params in enumerate([only, none])] == [
        True,
        False,
    ]


def test_a_processor_that_exits_raises_an_error_instead() -> None:
    """SystemExit would end vLLM's worker without a message."""

    def exits(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        raise SystemExit(0)

    process = processor_of({"mine.py:exits": lambda params: exits}, PLAIN)
    assert process is not None
    with pytest.raises(RuntimeError, match="a logits processor raised SystemExit: 0"):
        process([], torch.ones(WIDTH))


@pytest.mark.parametrize(
    "named", ["doubling", f"{__name__}:doublin", 7, [f"{__name__}:doubling", 7], {"a": 1}]
)
def test_a_librarys_request_with_a_wrong_name_is_refused_before_it_reaches_a_worker(named: Any) -> None:
    arguments = engine_arguments([f"{__name__}:doubling"], v2=False)
    with pytest.raises(ValueError, match="logits_processors names|must hold qualname alone"):
        with_exact_names(SamplingParams(extra_args={REQUESTED: named}), arguments)


def test_a_librarys_request_names_one_processor_and_keeps_its_other_arguments() -> None:
    """A text would otherwise match each processor whose name is a part of it."""
    arguments = engine_arguments([f"{__name__}:doubling", f"{__name__}:counting"], v2=False)
    params = SamplingParams(extra_args={"count": True, REQUESTED: f"{__name__}.doubling"})
    exact = with_exact_names(params, arguments)
    assert exact.extra_args == {"count": True, REQUESTED: [f"{__name__}:doubling"]}
    assert with_exact_names(ASKING, arguments) is ASKING


def test_an_engine_gives_every_request_exact_names() -> None:
    engine = object.__new__(Engine)
    engine.settings = SimpleNamespace(extra=engine_arguments([f"{__name__}:doubling"], v2=False))  # type: ignore[assignment]
    params = SamplingParams(extra_args={REQUESTED: "doublin"})
    with pytest.raises(
        ValueError, match="logits_processors names 'doublin', but engine.logits_processors"
    ):
        asyncio.run(anext(engine.submit({}, params, "request")))  # type: ignore[arg-type]
