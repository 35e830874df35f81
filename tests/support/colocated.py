"""A trainer's model and a real engine on one rank of one machine, which the engine tests share."""

import copy
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from transformers import AutoModelForCausalLM

from generation.engine.engine import Engine, Leader
from generation.engine.sampling import SamplingSettings
from generation.engine.settings import EngineSettings
from generation.exact_ids import Generation
from generation.trajectory import Trajectory
from sharding import SHARING_WORKER, WORKER_EXTENSION
from sharding.manager import ShardingManager
from sharding.report import SyncSettings
from sharding.send.source import FsdpWeightSource, ShardedSource
from sharding.transports.base import Transport
from sharding.transports.zero_copy import ZeroCopy
from trainer.learning.batching import micro_batches
from trainer.learning.groups import to_sample
from trainer.policy.hf_format import checkpoint_views, parameter_names
from trainer.types import MicroBatch, RouteFormat


def start_engine(
    folder: Path | str, plain: bool = True, kind: type[Engine] = Engine, **settings: object
) -> Leader:
    """Start an engine for the model in `folder`, awake and without a version; on the CPU by default."""
    defaults: dict[str, object] = {"max_model_len": 256, "kv_cache_bytes": 64 << 20, "max_num_seqs": 32}
    fields: Any = (
        {"plain_cpu_weights": plain, "worker_extension": WORKER_EXTENSION} | defaults | settings
    )
    return Leader.start(kind(EngineSettings(model=str(folder), **fields)), 120)


def stop(leader: Leader) -> None:
    leader.close()


@torch.no_grad()
def gaps(
    score: Callable[[MicroBatch], torch.Tensor], answers: Sequence[Generation], format: RouteFormat
) -> dict[bool, torch.Tensor]:
    """Absolute differences between the log-probabilities of trainer and engine, sorted.

    The key says whether the trainer replayed the engine's routes.
    """
    samples = []
    for answer in answers:
        trajectory = Trajectory(0, 0, answer.prompt_ids, routes=answer.routes)
        trajectory.extend(answer.token_ids, answer.logprobs)
        samples.append(to_sample(trajectory, routes=format))
    gaps_by_replay = {}
    for replay in (False, True):
        [batch] = micro_batches(samples, 4000, 0, "cpu", count=1)
        batch.routes = batch.routes if replay else None
        gaps_by_replay[replay] = (
            batch.trained((score(batch) - batch.engine_logprobs).abs()).sort().values
        )
    return gaps_by_replay


def assert_replay_helps(gaps_by_replay: dict[bool, torch.Tensor]) -> None:
    """Replaying the engine's routes divides the largest gap by 4 or more, and the 95th percentile by 2 or more."""
    quantiles = {
        replay: (gap[int(0.95 * len(gap))].item(), gap[-1].item())
        for replay, gap in gaps_by_replay.items()
    }
    print(f"gap p95, max without and with the engine's routes: {quantiles}")
    assert (
        quantiles[True][1] <= quantiles[False][1] / 4 and quantiles[True][0] <= quantiles[False][0] / 2
    )


def assert_as_close_as_bfloat16(policy: "HfPolicy", prompt: list[int], sampled: Generation) -> None:
    """The engine is about as far from plain Transformers in float32 as plain Transformers in the policy's dtype is.

    Both distances are means over the answer's log-probabilities. Two ways of summing in bfloat16 differ by half, and
    the weights of another seed by ten times as much.
    """
    exact = HfPolicy.__new__(HfPolicy)
    exact.device, exact.model = policy.device, copy.deepcopy(policy.model).float()
    expected, rounded = (
        model.logprobs(prompt + sampled.token_ids)[len(prompt) - 1 :] for model in (exact, policy)
    )
    noise, gap = (
        sum(abs(a - b) for a, b in zip(logprobs, expected, strict=True)) / len(expected)
        for logprobs in (rounded, sampled.logprobs)
    )
    print(f"mean distance from float32: Transformers {noise:.3f}, engine {gap:.3f} nats")
    assert gap <= 3 * noise


class HfPolicy:
    """The smallest possible policy: a Transformers model in this process, and a version."""

    def __init__(
        self, folder: Path | str, device: str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        self.device = torch.device(device)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().to(self.device)
        self.version = 0

    @torch.no_grad()
    def randomise(self, seed: int) -> None:
        """Give every parameter new values, and the version a new number."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.model.parameters():
            values = torch.randn(parameter.shape, generator=generator) * (
                0.3 if parameter.dim() == 1 else 0.1
            )
            parameter.copy_(values)
            if parameter.dim() == 1:
                parameter.add_(1.0)
        self.version += 1

    @torch.no_grad()
    def logprobs(self, token_ids: list[int], temperature: float = 1.0) -> list[float]:
        """Log-probability of each of `token_ids[1:]` in plain Transformers."""
        table = torch.log_softmax(
            self.model(torch.tensor([token_ids], device=self.device)).logits[0].float() / temperature,
            dim=-1,
        )
        return [table[i, token].item() for i, token in enumerate(token_ids[1:])]

    def score_tokens(self, token_ids: list[int]) -> list[float]:
        return self.logprobs(token_ids)

    @torch.no_grad()
    def compute_in(self, memory: dict[str, torch.Tensor]) -> None:
        """Move parameters to other memory, which must hold the same values already."""
        for name, parameter in ((n, p) for n, p in parameter_names(self.model).items() if n in memory):
            assert torch.equal(memory[name].view(parameter.shape), parameter), name
            parameter.data = memory[name].view(parameter.shape)

    def release(self, weights: bool) -> int:
        return 0

    def restore(self) -> None:
        return None


class Colocated:
    """Policy, engine and sharding manager, as a context manager that leaves no process behind."""

    def __init__(
        self,
        folder: Path | str,
        plain: bool = True,
        verify: str = "full",
        bucket: int = 1 << 18,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        shared: bool = False,
        policy: Any = None,
        way: Transport | None = None,
        source: ShardedSource | None = None,
        **engine: object,
    ):
        """With `shared`, the policy, which must have `compute_in`, computes with the engine's weights."""
        name = str(dtype).removeprefix("torch.")
        if shared and device != "cpu":  # the memory of vLLM's sleeping allocator has no IPC handle
            engine["worker_class"] = SHARING_WORKER
        self.leader = start_engine(folder, plain, dtype=name, shared_weights=shared, **engine)
        self.policy = policy or HfPolicy(folder, device, dtype)
        self.source = source or FsdpWeightSource(
            list(
                parameter_names(self.policy.model).items()
                if policy is None
                else policy.named_parameters()
            ),
            dtype,
            lambda name, shape: checkpoint_views(self.policy.model, name, shape),
        )
        self._folder = tempfile.TemporaryDirectory(prefix="hotbunk-test-")
        settings = SyncSettings(verify, bucket, timeout=60)  # type: ignore[arg-type]
        device = self.policy.device
        if shared:
            way = ZeroCopy(device, self.source.parameters(), self.policy.compute_in, 60)
        folder = Path(self._folder.name)
        self.manager = ShardingManager(
            self.source, device, settings, folder, leader=self.leader, way=way
        )
        self.manager.connect()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        stop(self.leader)
        self.manager.close()
        self._folder.cleanup()

    def complete(self, prompt: list[int], sampling: SamplingSettings, seed: int = 0) -> Generation:
        """Sample an answer at the policy's version."""
        coroutine = self.leader.engine.complete(
            prompt, sampling, seed=seed, policy_version=self.policy.version
        )
        return self.leader.thread.run(coroutine, 60, "a test completion")

    def gap(self, prompt: list[int], completion: Generation, temperature: float) -> float:
        """Largest difference between the engine's log-probabilities and a second pass through plain Transformers."""
        expected = self.policy.logprobs(prompt + completion.token_ids, temperature)[len(prompt) - 1 :]
        return max(abs(a - b) for a, b in zip(expected, completion.logprobs, strict=True))
