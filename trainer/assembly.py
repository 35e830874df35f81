"""Puts the parts of a run together: policies, sharding manager, and the checkpoint that a run goes on from."""

import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import PreTrainedTokenizerBase

from sharding.low_rank import MergingWeightSource
from sharding.manager import Leader, ShardingManager, SyncSettings
from sharding.source import FsdpWeightSource, ShardedSource, one_piece
from trainer import checkpoint, lifetime
from trainer.config import ModelConfig, TrainConfig, to_yaml
from trainer.config_checks import resolve_device
from trainer.data import load_tokenizer
from trainer.distributed import agreed, is_main
from trainer.errors import UserError
from trainer.identity import Identity, differences
from trainer.learning.learner import updates_asked
from trainer.policy import FrozenPolicy, InPlacePolicy, Policy, Scorer, make_policy
from trainer.policy.attention import require_packing
from trainer.policy.checkpoint_names import checkpoint_views
from trainer.policy.critic import Critic, make_critic
from trainer.policy.loading import build_meta_model
from trainer.policy.lora import BaseOfPolicy, adapter_format, add_adapters, factors, is_adapter, low_rank, peft_name
from trainer.records import write_whole
from trainer.tracking import NullTracker, make_tracker


def rank_device(config: TrainConfig) -> torch.device:
    """The device this rank trains on."""
    if resolve_device(config) == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def check_teacher(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise UserError unless the teacher, if there is one, means the same by every token id."""
    teacher = config.algorithm.teacher
    if teacher is not None:
        own = load_tokenizer(ModelConfig(path=teacher, trust_remote_code=config.model.trust_remote_code))
        if own.get_vocab() != tokenizer.get_vocab():
            raise UserError(f"algorithm.teacher: {teacher} has another tokenizer than {config.model.path}")


def check_model(config: TrainConfig) -> None:
    """Raise UserError unless Transformers can build the model, and PEFT its adapters; tried without their weights."""
    path, dtype = config.model.path, getattr(torch, config.policy.dtype)
    settings = (config.model.attn_implementation, config.model.trust_remote_code, torch.device("cpu"))
    try:
        with torch.random.fork_rng(devices=[]):
            model = build_meta_model(Path(path), dtype, *settings)
            if config.lora.rank:
                add_adapters(model, config.lora, dtype, "meta")
    except UserError:
        raise
    except Exception as error:  # whatever the model's own code makes of its config.json
        keys = "model.path" + (" and lora.target_modules" if config.lora.rank else "")
        raise UserError(f"{keys}: {path} cannot be built: {type(error).__name__}: {error}") from error


def build_models(config: TrainConfig, device: torch.device) -> tuple[Policy, Scorer | None, Critic | None]:
    """The policy; a frozen reference, where KL or a teacher is asked for; a critic with a trunk of its own.

    The latter two are always on FSDP2. The reference is what the policy starts from, its base where it has adapters, or
    the teacher.
    """
    algorithm = config.algorithm
    updates = config.run.steps * updates_asked(config)
    values = algorithm.advantage == "gae"
    head = values and config.critic.shared
    policy = make_policy(config.model, config.policy, device, updates, config.lora, head, config.sync.zero_copy)
    if config.batch.packing:
        require_packing(policy.model)
    reference: Scorer | None = None
    if config.lora.rank and algorithm.kl_coef and not algorithm.teacher:
        reference = BaseOfPolicy(policy)
    elif algorithm.kl_coef or algorithm.teacher:
        model = config.model.model_copy(update={"path": algorithm.teacher} if algorithm.teacher else {})
        reference = FrozenPolicy(model, config.policy, device)
    critic = make_critic(config, device, updates) if values and not config.critic.shared else None
    return policy, reference, critic


def build_sharding(config: TrainConfig, policy: Policy, leader: Leader | None) -> ShardingManager:
    """The weight path from the policy to the engine, in the engine's dtype and under the checkpoint's names."""
    dtype = getattr(torch, config.engine.dtype or config.policy.dtype)
    alone = config.lora.engines_apply
    source = adapter_source(policy, dtype) if alone else weight_source(policy, dtype)
    adapter = adapter_format(policy.model, config.lora) if alone else None
    settings = SyncSettings(config.sync.verify, config.sync.bucket_mib << 20, config.sync.timeout_s, config.sync.replay)
    folder = lifetime.private_folder()
    size = config.engine.tensor_parallel_size
    compute_in = policy.compute_in if isinstance(policy, InPlacePolicy) else None
    return ShardingManager(source, policy.device, settings, folder, size, leader, adapter, compute_in)


def weight_source(policy: Policy, dtype: torch.dtype) -> ShardedSource:
    """All weights under the checkpoint's names, adapters merged."""
    weights = [(name, parameter) for name, parameter in policy.named_parameters() if not is_adapter(name)]
    return MergingWeightSource(
        weights, low_rank(policy.model), dtype, lambda name, shape: checkpoint_views(policy.model, name, shape)
    )


def adapter_source(policy: Policy, dtype: torch.dtype) -> ShardedSource:
    """The factors of the adapters under PEFT's names, by which vLLM knows them."""
    return FsdpWeightSource(
        list(factors(policy.model).items()), dtype, lambda name, shape: one_piece(peft_name(name), shape)
    )


@dataclass
class RunState:
    """What a run carries from step to step besides the policy, and so what a checkpoint keeps of it.

    Attributes:
        step: steps done.
        prompts: taken from the training data so far; the next step goes on from there.
        seconds: spent in steps, all sessions of the run together.
        largest_gap: of all steps so far, nats; NaN where one was; None before any was measured.
        eval_before, eval_after: mean reward on held-out prompts, of the first and of the latest evaluation.
    """

    step: int = 0
    prompts: int = 0
    seconds: float = 0.0
    largest_gap: float | None = None
    syncs_verified: int = 0
    eval_before: float | None = None
    eval_after: float | None = None

    def count_step(self, metrics: dict[str, float]) -> None:
        """A step is done."""
        self.step += 1
        self.seconds += metrics["time/step"]
        gaps = [gap for gap in (self.largest_gap, metrics.get("gap/max")) if gap is not None]
        self.largest_gap = math.nan if any(map(math.isnan, gaps)) else max(gaps, default=None)

    def count_evaluation(self, reward: float) -> None:
        """An evaluation is done."""
        self.eval_after = reward
        if self.eval_before is None:
            self.eval_before = reward


def find_checkpoint(config: TrainConfig, identity: Identity) -> tuple[Path | None, RunState]:
    """The checkpoint that the run goes on from, verified, and the state in it; None, where the run begins. Collective.

    Of the run's own, damaged ones are named and passed over.

    Raises:
        UserError: the checkpoint asked for is damaged, none is sound, or the newest sound one is another run's by its
            identity (checkpoint.resume_anyway permits it).
    """
    folder, wanted = config.run.folder / "checkpoints", config.checkpoint.resume
    with agreed("removing unfinished checkpoints"):
        checkpoint.remove_unfinished(folder)
    if wanted == "none":
        return None, RunState()
    candidates = checkpoint.all_complete(folder) if wanted == "auto" else [Path(wanted)]
    for path in candidates:
        try:
            extra = checkpoint.verify(path)
        except checkpoint.Damaged as damage:
            if wanted != "auto":
                raise
            _say(f"{damage}; left out")
            continue
        check_identity(path, extra, identity, config.checkpoint.resume_anyway)
        if path != candidates[0]:
            _say(f"going on from {path}, the newest sound checkpoint")
        return path, _saved_state(path, extra, identity)
    if candidates:
        raise UserError(
            f"no checkpoint in {folder} is sound (see above): restore one from a copy, or start over with "
            "checkpoint.resume=none"
        )
    return None, RunState()


def _saved_state(path: Path, extra: dict[str, Any], identity: Identity) -> RunState:
    try:
        state = msgspec.convert(extra["state"], RunState)
    except (KeyError, msgspec.ValidationError) as error:
        raise UserError(f"{path} was saved by another version of Hotbunk: in extra.json, state: {error}") from error
    if extra["identity"].get("data") != identity["data"]:
        state.prompts = 0  # a position means nothing in other data
    return state


def _say(line: str) -> None:
    if is_main():
        print(f"[hotbunk] {line}", file=sys.stderr)


def check_identity(path: Path, extra: dict[str, Any], identity: Identity, allowed: list[str]) -> None:
    """Raise UserError, one sentence, when a checkpoint belongs to another run than `identity` says, but for `allowed`.

    What goes on with other data, another model or another algorithm is another experiment.
    """
    if not isinstance(extra.get("identity"), dict):
        raise UserError(
            f"{path} does not say which data, model and algorithm it belongs to, as it is of an older version: "
            "start over with another run.name, or with checkpoint.resume=none"
        )
    if found := differences(extra["identity"], identity, allowed):
        keys, phrases = zip(*found, strict=True)
        raise UserError(
            f"{path} was trained with {', '.join(phrases)}: restore that, permit it by "
            f"checkpoint.resume_anyway=[{','.join(keys)}], or start over with another run.name"
        )


def make_run_tracker(config: TrainConfig, state: RunState) -> NullTracker:
    """The run's record, with its resolved recipe beside it; metrics of steps after `state.step` are dropped."""
    tracker = make_tracker(
        config.run.folder,
        config.model_dump(mode="json"),
        name=config.run.name,
        project=config.tracking.project,
        wandb=config.tracking.wandb,
        completions_per_step=config.tracking.completions_per_step,
        resumed_from=state.step or None,
    )
    if is_main():
        write_whole(config.run.folder / "config.yaml", to_yaml(config))
    return tracker
