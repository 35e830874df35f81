"""The trials of `hotbunk doctor`: a tiny model goes through the phases of a run, with the code of a
run.

    python -m trainer.commands.doctor_trials TRIAL cpu|cuda FINDINGS.jsonl

runs on every rank. Rank 0 writes one finding per line.
"""

import asyncio
import copy
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from generation.engine.sampling import SamplingSettings, sample_seed
from generation.exact_ids import Generation
from sharding.manager import ShardingManager
from sharding.ranks import agreed, exchange, is_main, world_size
from sharding.wire.staging import resident_bytes
from trainer.build import build_models, build_sharding
from trainer.commands.doctor import Finding
from trainer.config.schema import TrainConfig
from trainer.config.sync_ways import WAYS
from trainer.distributed import destroy_process_group, init_process_group
from trainer.engines import put_to_sleep, rank_device, start_engine, stop_engine
from trainer.learning.batching import micro_batches
from trainer.policy import Outputs
from trainer.run import processes
from trainer.types import MicroBatch, Sample

MIB = 2**20
KV_CACHE_GIB = 0.25
# Prompts of each shift, and tokens of an answer.
PROMPTS = 8
TOKENS = 32
TEMPERATURES = (1.0, 0.7)  # of the answers after the first sync, and after the second
SHIFTS = 10
DRIFT_MIB = 64  # growth of memory over the shifts that is not a leak
# Name, quantile and bound in nats: float32 differs in the last digits, bfloat16 by rounding of
# single logits.
GAPS = {"float32": ("largest gap", 1.0, 1e-3), "bfloat16": ("95th percentile of the gap", 0.95, 0.15)}

ReportFn = Callable[[str, str, str, bool, str], None]
"""(what was tried, the measured fact, the wanted one, True if ok, the remedy if not) -> None:
records a finding.
"""


def make_model(folder: Path) -> Path:
    """Make a random Qwen2 of 4 million parameters, whose tokenizer has one token per number; return
    `folder`.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    size = 512
    words = WordLevel({str(number): number for number in range(size)}, unk_token="0")
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), eos_token="1", pad_token="0"
    ).save_pretrained(folder)
    shape = {
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "max_position_embeddings": 512,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = Qwen2Config(vocab_size=size, initializer_range=0.05, eos_token_id=1, **shape, **heads)
        Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def recipe(folder: Path, device: str, way: str, ranks: int, dtype: str = "") -> TrainConfig:
    """Return the configuration of a run with the model in `folder`; its data and rewards are never
    loaded.

    By default it is in bfloat16 on CUDA, and in float32 on a CPU.
    """
    dtype = dtype or ("bfloat16" if device == "cuda" else "float32")
    in_place = WAYS[way].shares_memory or WAYS[way].reads_shards  # weights stay where they are
    engine = {
        "max_model_len": 256,
        "max_num_seqs": 32,
        "kv_cache_gib": KV_CACHE_GIB,
        "plain_cpu_weights": True,
    }
    return TrainConfig.model_validate(
        {
            "run": {"name": "doctor", "device": device},
            "model": {"path": str(folder)},
            "data": {"path": "none"},
            "engine": engine | {"tensor_parallel_size": ranks},
            "sync": {"verify": "full", "bucket_mib": 16, "way": way, "timeout_s": 120},
            "policy": {"dtype": dtype, "lr": 1e-3, "offload": "none" if in_place else "all"},
        }
    )


class Trial:
    """The policy, engine and sharding manager of one configuration, on every rank."""

    def __init__(self, config: TrainConfig, resources: ExitStack) -> None:
        self.config = config
        self.device = rank_device(config)
        began = time.perf_counter()
        with agreed("starting the engine"):
            self.leader = start_engine(config, self.device.type == "cuda")
        resources.callback(stop_engine, self.leader)
        self.start_seconds = time.perf_counter() - began
        awake = self.engine_bytes()
        with agreed("putting the engine to sleep"):
            put_to_sleep(self.leader, config.engine.start_timeout_s)
        # When the engine fell asleep, before models were built
        self.released_bytes = awake - self.engine_bytes()
        self.policy, _, _ = build_models(config, self.device)
        manager = build_sharding(config, self.policy, self.leader)
        assert isinstance(manager, ShardingManager)  # engines are on the ranks' devices
        self.manager = resources.enter_context(closing(manager))
        self.manager.connect()

    def engine_bytes(self) -> int:
        """Return the memory of the engine's workers: resident bytes on CPU, bytes in use on the
        devices on CUDA.
        """
        nbytes = 0
        if self.leader is not None:
            nbytes = self.leader.thread.run(
                self.leader.engine.memory_bytes(), 60, "asking for the engine's memory"
            )
        return sum(exchange(nbytes))

    def bytes(self) -> int:
        """Return the memory of trainer and engine together, over all ranks."""
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            return sum(exchange(total - free))
        return self.engine_bytes() + sum(exchange(resident_bytes()))

    def sample(self, temperature: float) -> MicroBatch:
        """Sample answers to random prompts from the awake engine; return one micro-batch, the same
        on all ranks.
        """
        numbers = random.Random(0)
        prompts = []
        for _ in range(PROMPTS):
            prompts.append([numbers.randrange(2, 512) for _ in range(8)])
        answers: list[dict[str, Any]] = []
        if self.leader is not None:
            engine = self.leader.engine
            settings = SamplingSettings(TOKENS, temperature)

            async def answers_to_all() -> list[Generation]:
                requests = [
                    engine.complete(
                        ids, settings, seed=sample_seed(0, 0, n, 0), policy_version=self.policy.version
                    )
                    for n, ids in enumerate(prompts)
                ]
                return await asyncio.gather(*requests)

            answers = [
                asdict(answer) for answer in self.leader.thread.run(answers_to_all(), 120, "sampling")
            ]
        samples = []
        for prompt, answer in zip(prompts, exchange(answers)[0], strict=True):
            ids = answer["token_ids"]
            start = len(prompt)
            mask = [0] * start + [1] * len(ids)
            samples.append(Sample(prompt + ids, mask, [0.0] * start + answer["logprobs"]))
        return micro_batches(samples, 8192, 0, self.device, count=1)[0]

    def gap(self, batch: MicroBatch, temperature: float) -> tuple[str, float, float]:
        """Return the name, value and bound, in nats, of the gap between the engine's and the
        policy's log-probabilities.
        """
        [outputs] = self.policy.score([batch], temperature)
        differences = batch.trained(outputs.logprobs - batch.engine_logprobs).abs()
        name, quantile, bound = GAPS[self.config.policy.dtype]
        return name, torch.quantile(differences, quantile).item(), bound

    def learn(self, *batches: MicroBatch) -> None:
        """Run one optimizer step that makes the answers likelier, so that the next sync has changes
        to send.
        """

        def loss(batch: MicroBatch, outputs: Outputs) -> tuple[Tensor, dict[str, Tensor]]:
            return -(outputs.logprobs * batch.loss_mask).sum() / batch.loss_mask.sum() / world_size(), {}

        self.policy.update(list(batches), loss, 1.0)


def one_engine(trial: Trial, report: ReportFn) -> None:
    """Try start, sleep, wake, a sync, an optimizer step, another sync, and shifts in which memory
    stays flat.
    """
    report("engine", f"started in {trial.start_seconds:.0f} s", "a start", True, "")
    report_sleep(trial, report)
    report_shifts(trial, report_syncs(trial, report), report)
    if trial.device.type == "cuda":
        report_collectives(trial.device, report)


def report_collectives(device: torch.device, report: ReportFn) -> None:
    """Report the collectives of FSDP2, by NCCL on CUDA, and its gradients.

    On one rank FSDP2 itself calls only the one between replicas, so the others are called here.
    """
    layer, inputs = nn.Linear(64, 64, device=device), torch.randn(8, 64, device=device)
    whole = copy.deepcopy(layer)
    fully_shard(
        layer,
        mesh=init_device_mesh(device.type, (world_size(), 1), mesh_dim_names=("replicas", "shards")),
    )
    for module in (layer, whole):
        module(inputs).square().sum().backward()
    assert isinstance(layer.weight.grad, DTensor) and whole.weight.grad is not None
    gathered, scattered = torch.zeros_like(inputs), torch.zeros_like(inputs)
    dist.all_gather_into_tensor(gathered, inputs)
    dist.reduce_scatter_tensor(scattered, inputs)
    pairs = [(gathered, inputs), (scattered, inputs), (layer.weight.grad.to_local(), whole.weight.grad)]
    relative_errors = []
    for value, expected in pairs:
        difference = (value - expected).abs().max()
        relative_errors.append((difference / expected.abs().max()).item())
    largest = max(relative_errors)
    remedy = "NCCL_DEBUG=INFO says what NCCL does on this device: report this with doctor.json"
    report(
        "collectives of FSDP2", f"relative error {largest:.1e}", "at most 1e-5", largest <= 1e-5, remedy
    )


def report_shifts(trial: Trial, batch: MicroBatch, report: ReportFn) -> None:
    """Report whether memory stays flat over shifts."""
    used = []
    for _ in range(SHIFTS):
        trial.learn(batch)
        with trial.manager.generation_shift(trial.policy):
            trial.sample(1.0)
        used.append(trial.bytes())
    drift = (used[-1] - used[2]) / MIB
    remedy = "memory grows from shift to shift: report this with doctor.json"
    change = f"{drift:+.1f} MiB from the third to the last"
    ok = drift <= DRIFT_MIB
    report(f"memory over {SHIFTS} shifts", change, f"within {DRIFT_MIB} MiB", ok, remedy)


def report_sleep(trial: Trial, report: ReportFn) -> None:
    """Report the memory that a sleeping engine releases: the weights and, if allocated in advance,
    the KV cache.
    """
    released = trial.released_bytes / MIB
    elements = sum(parameter.numel() for _, parameter in trial.policy.named_parameters())
    itemsize = 2 if trial.device.type == "cuda" else 4
    held = elements * itemsize / MIB
    wanted = 0.8 * (held + (KV_CACHE_GIB * 1024 if trial.device.type == "cuda" else 0))
    remedy = (
        "vLLM's sleep mode does not free memory here: set engine.sleep to false, if trainer and engine "
        "both fit"
    )
    report(
        "sleep", f"{released:.0f} MiB released", f"at least {wanted:.0f} MiB", released >= wanted, remedy
    )


def report_syncs(trial: Trial, report: ReportFn) -> MicroBatch:
    """Report two syncs with an optimizer step between them, and the gap after each; return the last
    answers.
    """
    remedy = "the engine does not have the policy's weights: report this with doctor.json"
    for sync, temperature in zip(
        ("first sync", "sync after an optimizer step"), TEMPERATURES, strict=True
    ):
        with trial.manager.generation_shift(trial.policy):
            verified = trial.manager.report.verified
            seconds = trial.manager.report.seconds["sync"]
            batch = trial.sample(temperature)
        fact = f"verified: {verified or 'no'}, {seconds * 1e3:.0f} ms"
        report(sync, fact, "verified: full", verified == "full", remedy)
        name, gap, bound = trial.gap(batch, temperature)
        report(
            f"gap at temperature {temperature:g}",
            f"{name} {gap:.1e} nats",
            f"{bound:g} nats",
            gap <= bound,
            remedy,
        )
        trial.learn(batch)
    return batch


def float32(trial: Trial, report: ReportFn) -> None:
    """Try float32, in which trainer and engine agree closely if neither rounds its products to
    TF32.
    """
    report_syncs(trial, report)


def zero_copy(trial: Trial, report: ReportFn) -> None:
    """Try policy and engine in one memory, where later syncs move nothing."""
    report_syncs(trial, report)
    with trial.manager.generation_shift(trial.policy):
        moved = trial.manager.report.nbytes
    remedy = "leave sync.way at staged on this machine, and report this with doctor.json"
    report("sync", f"{moved} bytes moved", "0 bytes", moved == 0, remedy)


def pull(trial: Trial, report: ReportFn) -> None:
    """Try an engine that reads the policy's shards, where later syncs stage nothing and map nothing
    again.
    """
    report_shifts(trial, report_syncs(trial, report), report)
    with trial.manager.generation_shift(trial.policy):
        staged = trial.manager.report.staging_bytes
        seconds = trial.manager.report.seconds["sync"]
    remedy = "leave sync.way at staged on this machine, and report this with doctor.json"
    report("sync", f"{staged} bytes staged, {seconds * 1e3:.0f} ms", "0 bytes", staged == 0, remedy)


def tensor_parallel(trial: Trial, report: ReportFn) -> None:
    """Try one engine of two ranks, whose collectives use NCCL on CUDA."""
    report("engine of two ranks", f"started in {trial.start_seconds:.0f} s", "a start", True, "")
    report_sleep(trial, report)
    report_syncs(trial, report)


TRIALS = {
    "one engine": one_engine,
    "float32": float32,
    "pull": pull,
    "zero copy": zero_copy,
    "tensor parallel": tensor_parallel,
}
TRIED_WAYS = {"pull": "pull", "zero copy": "zero_copy"}


def main(name: str, device: str, findings: Path) -> int:
    """Run one rank of one trial."""
    processes.install_signal_handlers(lambda: name)
    init_process_group(300, device)
    with ExitStack() as resources:
        folder = Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="model-")))
        folder = Path(exchange(str(folder))[0])
        if is_main():
            make_model(folder)
        exchange(None)  # all ranks wait until the model is complete
        dtype = "float32" if name == "float32" else ""
        config = recipe(folder, device, TRIED_WAYS.get(name, "staged"), world_size(), dtype=dtype)
        prefix = "" if name == "one engine" else f"{name}: "
        file = resources.enter_context(findings.open("a", encoding="utf-8"))

        def report(what: str, fact: str, wanted: str, ok: bool, remedy: str) -> None:
            if is_main():
                finding = Finding(
                    prefix + what, fact, wanted, "ok" if ok else "failed", "" if ok else remedy
                )
                file.write(json.dumps(asdict(finding)) + "\n")
                file.flush()

        TRIALS[name](Trial(config, resources), report)
    destroy_process_group()
    return 0


if __name__ == "__main__":
    processes.start_guardian()
    processes.run(lambda: main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
