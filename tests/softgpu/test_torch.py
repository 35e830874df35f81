"""torch on the GPU in software against the CPU, in environment.sh's environment; check_cuda_lock.sh runs it.

Where the CPU's kernel computes both, all bits are equal.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs the environment of environment.sh"
)

Made = torch.Tensor | list[torch.Tensor]


def assert_same(computed: torch.Tensor, expected: torch.Tensor) -> None:
    assert computed.is_cuda and torch.equal(computed.detach().cpu(), expected.detach().cpu())


def matrix(device: str, *shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (8, 16)), generator=torch.Generator().manual_seed(1)).to(device)


def zeroed(device: str) -> Made:
    x = matrix(device)
    x[x > 0] = 0.0
    return x


def resized(device: str) -> Made:
    out = torch.empty(0, device=device)
    torch.add(matrix(device), 2, out=out).mul_(3)
    return out


def network(device: str) -> Made:
    torch.manual_seed(1)
    layers = (torch.nn.Linear(16, 32), torch.nn.LayerNorm(32), torch.nn.GELU(), torch.nn.Linear(32, 5))
    model = torch.nn.Sequential(*layers, torch.nn.Softmax(-1)).to(device)
    loss = model(matrix(device)).pow(2).sum()
    loss.backward()
    return [loss, *(parameter.grad for parameter in model.parameters())]


def embedding(device: str) -> Made:
    torch.manual_seed(1)
    model = torch.nn.Embedding(10, 8).to(device)
    ids = torch.tensor([1, 2, 3], device=device)
    loss = F.cross_entropy(model(ids), ids - 1)
    loss.backward()
    return [loss, model.weight.grad]


def attention(device: str, dtype: torch.dtype = torch.float32) -> Made:
    q, k, v = (matrix(device, 2, 4, 6, 8).to(dtype).mul(scale).requires_grad_() for scale in (1, 2, 3))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    out.sum().backward()
    return [out, q.grad, k.grad, v.grad]


def stepped(device: str, **options: bool) -> Made:
    parameter = torch.nn.Parameter(matrix(device))
    optimizer = torch.optim.AdamW([parameter], lr=0.1, **options)
    for _ in range(3):
        parameter.grad = parameter.detach().sin()
        optimizer.step()
    return parameter


def foreach_copies(device: str) -> Made:
    copies = [torch.empty(8, 16, device=device), torch.empty(4, device=device)]
    torch._foreach_copy_(copies, [matrix(device), matrix(device, 4).double()])
    return copies


def checkpointed(device: str) -> Made:
    weight = matrix(device, 16, 16).requires_grad_()
    checkpoint(lambda x: (x @ weight).relu(), matrix(device), use_reentrant=False).sum().backward()
    return weight.grad


def autocast(device: str) -> Made:
    with torch.autocast(device, torch.bfloat16):
        return (matrix(device) @ matrix(device).T).relu()


COMPUTED: dict[str, Callable[[str], Made]] = {
    "a product": lambda device: matrix(device) @ matrix(device).T,
    "a softmax": lambda device: matrix(device).softmax(-1),
    "an output that grows": resized,
    "indices": lambda device: matrix(device)[[1, 2]][:, :3],
    "a masked assignment": zeroed,
    "cat and where": lambda device: torch.where(torch.cat([matrix(device)] * 2) > 0, 1.0, -1.0),
    "sort and topk": lambda device: [*matrix(device).sort(), *matrix(device).topk(2)],
    "copies that cast and transpose": lambda device: torch.empty(16, 8, device=device).copy_(
        matrix(device).half().T
    ),
    "norms of many": lambda device: torch.nn.utils.get_total_norm([matrix(device)] * 2),
    "foreach copies": foreach_copies,
    "a network and its gradients": network,
    "an embedding and a cross entropy": embedding,
    "attention in float32": attention,
    "attention in bfloat16": lambda device: attention(device, torch.bfloat16),
    "autocast": autocast,
    "checkpointing": checkpointed,
    "fused AdamW": lambda device: stepped(device, fused=True),
    "foreach AdamW": lambda device: stepped(device, foreach=True),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_it_is_the_cpus_bit_for_bit(name: str) -> None:
    computed, expected = COMPUTED[name]("cuda"), COMPUTED[name]("cpu")
    pairs = (
        [(computed, expected)]
        if isinstance(computed, torch.Tensor)
        else list(zip(computed, expected, strict=True))
    )
    for one, other in pairs:
        assert_same(one, other)


@pytest.mark.parametrize(
    "mixed", [lambda x, y: x + y, lambda x, y: x @ y.T, lambda x, y: torch.cat([x, y])]
)
def test_tensors_of_two_devices_are_refused(
    mixed: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    with pytest.raises(RuntimeError, match="device"):
        mixed(matrix("cuda"), matrix("cpu"))


def test_random_numbers_follow_from_seed_and_state() -> None:
    torch.cuda.manual_seed(3)
    first, state, second = (
        torch.rand(4, device="cuda"),
        torch.cuda.get_rng_state(),
        torch.rand(4, device="cuda"),
    )
    assert not torch.equal(first, second)
    torch.cuda.set_rng_state(state)
    assert_same(torch.rand(4, device="cuda"), second)
    torch.cuda.manual_seed(3)
    assert_same(torch.rand(4, device="cuda"), first)
    generator = torch.Generator("cuda").manual_seed(5)
    numbers = torch.randn(4, device="cuda", generator=generator)
    assert_same(torch.randn(4, device="cuda", generator=generator.manual_seed(5)), numbers)


def test_streams_and_events_are_torchs() -> None:
    stream, start, end = torch.cuda.Stream(), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    with torch.cuda.stream(stream):
        x = torch.ones(1000, device="cuda") * 2
        assert torch.cuda.current_stream() == stream
    x.record_stream(torch.cuda.current_stream())
    end.record(stream)
    torch.cuda.current_stream().wait_event(end)
    end.synchronize()
    assert end.query() and start.elapsed_time(end) >= 0


def test_the_allocators_counts_and_the_devices_agree() -> None:
    torch.cuda.empty_cache()
    free, reserved = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()
    x = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_reserved() - reserved == free - torch.cuda.mem_get_info()[0] == 64 << 20
    del x
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] == free


def test_too_much_memory_is_torchs_out_of_memory() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="GiB"):
        torch.empty(1 << 40, dtype=torch.uint8, device="cuda")


def test_pinned_memory_and_pools() -> None:
    host = torch.arange(4.0).pin_memory()
    assert host.is_pinned() and not torch.empty(4).is_pinned()
    assert_same(host.to("cuda", non_blocking=True), host)
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        assert_same(torch.ones(4, device="cuda"), torch.ones(4))


def test_waits_for_the_device_are_found() -> None:
    x = matrix("cuda").sum()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            x.item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def share(received, answers) -> None:
    """In another process: read, write and give back what `reduce_tensor` has sent."""
    rebuild, arguments = received.get()
    x = rebuild(*arguments)
    answers.put(x.tolist())
    received.get()
    x.mul_(10)
    torch.cuda.synchronize()
    del x
    torch.cuda.ipc_collect()
    answers.put(None)


def test_another_process_reads_and_writes_the_same_memory() -> None:
    context = torch.multiprocessing.get_context("spawn")
    sent, answers = context.Queue(), context.Queue()
    child = context.Process(target=share, args=(sent, answers))
    child.start()
    x = torch.arange(6.0, device="cuda")
    sent.put(reduce_tensor(x))
    assert answers.get(timeout=120) == [0, 1, 2, 3, 4, 5]
    x.add_(1)
    torch.cuda.synchronize()
    sent.put(None)
    answers.get(timeout=120)
    assert x.tolist() == [10, 20, 30, 40, 50, 60]
    child.join(60)
    assert child.exitcode == 0


def read_late(answers, waits: bool) -> None:
    """In another process, whose copies run late: how often of 20 times another stream has read the old bytes."""
    side, old = torch.cuda.Stream(), 0
    for number in range(1, 21):
        x, target, seen = (
            torch.full((1000,), float(number), device="cuda"),
            *torch.zeros(2, 1000, device="cuda"),
        )
        torch.cuda.synchronize()
        target.copy_(x)
        if waits:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            seen.copy_(target)
        torch.cuda.synchronize()
        old += not torch.equal(seen, x)
    answers.put(old)


@pytest.mark.parametrize("waits", [True, False])
def test_a_wait_that_is_missing_between_streams_is_seen(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOFTGPU_LATE", "1")
    context = torch.multiprocessing.get_context("spawn")
    answers = context.Queue()
    child = context.Process(target=read_late, args=(answers, waits))
    child.start()
    old = answers.get(timeout=120)
    child.join(60)
    assert child.exitcode == 0 and (old == 0) == waits


def llama(device: str, attention: str, dtype: torch.dtype) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and parameters of five steps."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attn_implementation": attention}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=128, max_position_embeddings=64, **sizes, **heads)
    ).to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.randint(0, 128, (2, 20), generator=torch.Generator().manual_seed(1)).to(device)
    losses = []
    for _ in range(5):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, list(model.parameters())


@pytest.mark.parametrize(
    ("attention", "dtype"), [("sdpa", torch.float32), ("eager", torch.float32), ("sdpa", torch.bfloat16)]
)
def test_five_steps_of_a_llama_are_the_cpus_bit_for_bit(attention: str, dtype: torch.dtype) -> None:
    (losses, parameters), (expected_losses, expected) = (
        llama(device, attention, dtype) for device in ("cuda", "cpu")
    )
    print(losses)
    assert losses == expected_losses
    for one, other in zip(parameters, expected, strict=True):
        assert_same(one, other)
