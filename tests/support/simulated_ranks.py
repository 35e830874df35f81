"""Update large models on tensors without data, as the first of any number of simulated ranks.

PYTHONPATH=. python tests/support/simulated_ranks.py          # the whole grid, in two minutes: planned against tracked
PYTHONPATH=. python tests/support/simulated_ranks.py 7b,8,4   # one: model, ranks, and a number of layers
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AttentionInterface, Qwen2Config

from tests.support import policy_checks as checks
from tests.support.counted_collectives import check_traffic
from tests.support.recipes import make_config
from tests.support.released_models import CONFIGS, write_config
from trainer.config.schema import TrainConfig
from trainer.estimates.memory import trainer_parts
from trainer.estimates.model_sizes import model_sizes
from trainer.policy import FsdpPolicy, attention, logprobs, routing, sequence

GIB = 2**30
DEVICE_GIB = 80.0
LENGTH, PROMPT = 1024, 512  # tokens of a sequence, and of its prompt, which is not trained
MODELS: dict[str, dict[str, Any]] = {  # as in the config.json of Qwen2.5
    "1.5b": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "7b": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
    "32b": {
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
}


class WithoutData(FsdpPolicy):
    """A policy whose weights are fake tensors as soon as they are loaded."""

    def _load(self, start: Any) -> None:
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.fake.__enter__()
        parameters: dict[int, nn.Parameter] = {}
        for parameter in self.model.parameters():
            local = torch.empty(parameter.to_local().shape, dtype=parameter.dtype)
            mesh, shape, stride = parameter.device_mesh, parameter.shape, parameter.stride()
            sharded = DTensor.from_local(
                local, mesh, parameter.placements, run_check=False, shape=shape, stride=stride
            )
            parameters[id(parameter)] = nn.Parameter(sharded)
        names = self.model.named_parameters(remove_duplicate=False)
        self.model.load_state_dict(
            {name: parameters[id(parameter)] for name, parameter in names}, assign=True
        )


def model_folder(root: Path, name: str, layers: int | None = None) -> Path:
    """Make a folder with the config.json of one of MODELS or of `released_models`, and no weights."""
    folder, changes = root / f"{name}-{layers}", {} if layers is None else {"num_hidden_layers": layers}
    if name in CONFIGS:
        return write_config(name, folder, **changes)
    Qwen2Config(architectures=["Qwen2ForCausalLM"], **MODELS[name] | changes).save_pretrained(folder)
    return folder


def recipe(model: Path, tokens: int = 16384, **policy: Any) -> TrainConfig:
    """Return a recipe with micro-batches of `tokens` tokens, planned for a CUDA device."""
    return make_config(
        run={"device": "cuda"},
        model={"path": str(model)},
        data={"path": "d", "max_prompt_tokens": PROMPT},
        sampling={"max_tokens": LENGTH - PROMPT},
        batch={"prompts_per_step": 4096, "tokens_per_micro_batch": tokens},
        algorithm={"group_size": 8},
        policy={"dtype": "bfloat16", "activation_checkpointing": "full"} | policy,
    )


@contextmanager
def ranks_without_others(count: int) -> Iterator[None]:
    """Make this process the first of `count` ranks, whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()


def same_message(message: Any, peer: int, group: Any) -> Any:
    """Replace `sharding.ranks._swap`: the other rank sends the same message."""
    return message


def as_on_cuda(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Attention that keeps for backward what PyTorch's variable-length kernel keeps; tensors are [1, T, heads, D].

    Sequences have LENGTH tokens.
    """
    rows = query.shape[2] // LENGTH
    q, k, v = (x[0].unflatten(1, (rows, LENGTH)).transpose(0, 1) for x in (query, key, value))
    return attention._causal(q, k, v, 0.0, scaling, None).transpose(1, 2).flatten(0, 1).unsqueeze(0)


def tracked_peak(config: TrainConfig, ranks: int) -> int:
    """Return the peak bytes of an update of two micro-batches on the first rank, without their inputs.

    The optimizer's step is left out: the fused one works in place, but its stand-in for fake tensors copies.
    """
    ways = config.policy.sequence_parallel
    parts = [config.batch.tokens_per_micro_batch // ways] * ways
    elements = logprobs.cuda_block_elements(int(DEVICE_GIB * GIB))

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, scaling: float, **_: Any
    ) -> Any:
        if ways == 1:
            return as_on_cuda(query, key, value, scaling), None
        shared = sequence.heads_for_tokens(parts, query, key, value)
        return sequence.tokens_for_heads(parts, as_on_cuda(*shared, scaling)), None

    with (
        ranks_without_others(ranks),
        mock.patch.object(logprobs, "CPU_ELEMENTS", elements),
        mock.patch.object(routing.Routing, "_count"),  # fake tensors have no loads
        # In place, as on CUDA
        mock.patch.object(logprobs, "_add_product", lambda total, left, right: total.add_(0)),
    ):
        AttentionInterface.register(attention.NAME, attend)
        policy = WithoutData(config.model, config.policy, torch.device("cpu"))
        try:
            return _update(policy, parts[0])
        finally:
            policy.fake.__exit__(None, None, None)
            AttentionInterface.register(attention.NAME, attention.attention)


def _update(policy: WithoutData, tokens: int) -> int:
    ids = torch.zeros(1, tokens, dtype=torch.int64)
    places = torch.arange(tokens).view(-1, LENGTH)[:, PROMPT:].flatten()
    targets = torch.zeros(len(places), dtype=torch.int64)
    model, module = policy.model, policy.module

    def forward() -> Tensor:
        hidden = model.base_model(input_ids=ids, position_ids=ids, use_cache=False).last_hidden_state[0]
        targets_logprobs: Tensor = model.get_output_embeddings()(
            hidden.index_select(0, places), targets, 1.0
        )[0]
        return targets_logprobs

    module.forward = forward
    module.train()
    tracker = FSDPMemTracker(module, policy.optimizer)
    with tracker:
        for _ in range(2):
            tracker.reset_mod_stats()
            module().sum().backward()
        policy._reshard()
    return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


def planned_peak(config: TrainConfig, ranks: int) -> int:
    """Return the plan's bytes for the same update: everything that training needs for the policy."""
    parts = trainer_parts(config, model_sizes(config, config.model.path), ranks, DEVICE_GIB)
    return int(sum(part.training for part in parts if part.name != "CUDA and NCCL"))


def compare(specs: list[str]) -> list[dict[str, Any]]:
    """Planned and tracked bytes of each of `specs`, MODEL,RANKS[,LAYERS[,CHECKPOINTING[,TOKENS[,SHARING]]]]."""
    rows = []
    with tempfile.TemporaryDirectory() as root:
        for spec in specs:
            name, ranks, layers, checkpointing, tokens, ways = [*spec.split(","), *[""] * 4][:6]
            folder = model_folder(Path(root), name, int(layers) if layers else None)
            policy = {
                "activation_checkpointing": checkpointing or "full",
                "sequence_parallel": int(ways or 1),
            }
            config = recipe(folder, int(tokens or 16384), **policy)
            row = {
                "planned": planned_peak(config, int(ranks)),
                "tracked": tracked_peak(config, int(ranks)),
            }
            rows.append({"spec": spec, **row})
            print(
                f"{spec:>20} {row['planned'] / GIB:9.2f} {row['tracked'] / GIB:9.2f} GiB"
                f" {row['planned'] / row['tracked'] - 1:+7.1%}",
                file=sys.stderr,
                flush=True,
            )
    return rows


def check_all_traffic(ranks: int) -> None:
    """The plan for this number of ranks counts the collectives that are really called."""
    alike = mock.patch("sharding.ranks._swap", same_message)
    with tempfile.TemporaryDirectory() as folder, ranks_without_others(ranks), alike:
        for tied in (True, False):
            checks.make_model("qwen2", checks.model_folder(Path(folder), "qwen2", tied), tied)
            for settings in ({}, {"shard_size": 8}, {"reshard_after_forward": False}):
                check_traffic(Path(folder), tied, activation_checkpointing="full", **settings)


if __name__ == "__main__":
    if sys.argv[1:2] == ["traffic"]:
        check_all_traffic(int(sys.argv[2]))
        sys.argv[1:3] = []
    grid = [f"{name},{ranks}" for name in MODELS for ranks in (1, 8, 64, 512)]
    print(json.dumps(compare(sys.argv[1:] or grid)))
