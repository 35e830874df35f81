"""Resumes a run from its checkpoint, saves it while it trains, and ends it in order when it is
asked to end.

Resuming. Each checkpoint contains the run's identity: its data, model and algorithm. It is compared
when a run resumes. It excludes keys that change how a run is computed but not its results (ranks,
micro-batches, backend, engine), and keys that people change on purpose between two sessions
(run.steps, policy.lr, evaluation).

Writing. A thread writes while training continues, one checkpoint at a time. `save` copies the
sharded tensors to host memory, each rank its share of the checkpoint, and returns; the thread
writes this copy. The thread's exchanges between ranks have a process group of their own, since two
threads that use one group would mix up each other's messages.

Leaving. A SIGTERM on any rank, which clusters send some time before they kill, reaches all ranks
within half a second. They agree on it at the end of the step, save and leave together. A step whose
rollouts are still running when half of `checkpoint.grace_s` is over is abandoned, which leaves the
policy as it was after the previous step. An update or an evaluation is finished. A run that takes
longer than the grace period ends without saving again.
"""

import hashlib
import json
import math
import signal
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from generation.engine.devices import this_device
from sharding.ranks import Ranks, agreed, all_reduce_max, is_main
from trainer.config.recipe import masked, to_yaml
from trainer.config.resuming import IDENTITY_KEYS, IDENTITY_SECTIONS
from trainer.config.schema import CheckpointConfig, TrainConfig
from trainer.distributed import say
from trainer.errors import UserError, shortened
from trainer.policy.hf_format import resolve_folder
from trainer.run import checkpoint, processes
from trainer.run.records import PRIVATE, patiently, write_whole
from trainer.run.tracking import NullTracker, make_tracker
from trainer.run.watchdog import Watchdog

_SAMPLE_BYTES = 1 << 16

# JSON values by key: the digests of data, model and tokenizer, and the recipe's values by dotted
# key.
Identity = dict[str, Any]


@dataclass
class RunState:
    """The state of a run that checkpoints keep besides the policy."""

    step: int = 0  # number of steps done
    prompts: int = 0  # number of training prompts taken so far; the next step continues there
    seconds: float = 0.0  # total time of all steps, over all sessions of the run
    # Over all steps, nats; NaN if one was NaN; None before any was measured
    largest_gap: float | None = None
    syncs_verified: int = 0
    eval_before: float | None = None  # mean reward on held-out prompts in the first evaluation
    eval_after: float | None = None  # mean reward on held-out prompts in the latest evaluation
    # Which of those tried stay (`trainer.learning.proof`)
    shortcuts: dict[str, bool] = field(default_factory=dict)
    # Tokens besides EOS at which the run's answers end
    stop_token_ids: list[int] = field(default_factory=list)
    # What policy.activation_checkpointing is, or was chosen to be
    recomputation: str = ""
    # Bytes of a worker's KV cache, with what decided them, if engine.kv_cache_gib is null
    kv_cache: dict[str, float] = field(default_factory=dict)

    def count_step(self, metrics: dict[str, float]) -> None:
        """Count a finished step with these metrics."""
        self.step += 1
        self.seconds += metrics["time/step"]
        gaps = [gap for gap in (self.largest_gap, metrics.get("gap/max")) if gap is not None]
        self.largest_gap = math.nan if any(map(math.isnan, gaps)) else max(gaps, default=None)

    def count_evaluation(self, reward: float) -> None:
        """Count a finished evaluation with this mean reward."""
        self.eval_after = reward
        if self.eval_before is None:
            self.eval_before = reward


def run_identity(config: TrainConfig, fingerprint: str, tokenizer: PreTrainedTokenizerBase) -> Identity:
    """Return the identity of a run; `fingerprint` is the fingerprint of its training data
    (`PromptDataset`).
    """
    return {
        "data": fingerprint,
        "model": model_digest(resolve_folder(config.model.path)),
        "tokenizer": _digest(json.dumps(sorted(tokenizer.get_vocab().items())).encode()),
        **_compared_keys(config.recorded()),
    }


def model_digest(folder: Path) -> str:
    """Return a digest of config.json and of a sample of the weights: each file's size, start,
    middle and end.
    """
    config = json.loads((folder / "config.json").read_bytes())
    # These change when the model is saved again
    kept = config.keys() - {"_name_or_path", "transformers_version"}
    pieces = [json.dumps({key: config[key] for key in sorted(kept)}).encode()]
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        pieces.append(str(size).encode())
        with file.open("rb") as stream:
            for start in (0, size // 2, max(0, size - _SAMPLE_BYTES)):
                stream.seek(start)
                pieces.append(stream.read(_SAMPLE_BYTES))
    return _digest(b"".join(pieces))


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def _compared_keys(config: dict[str, Any]) -> Identity:
    """Return the values of a recipe that have to be equal for a run to resume; `config` is the
    recipe's JSON.
    """
    recipe = {}
    for section, values in config.items():
        for name, value in values.items():
            recipe[f"{section}.{name}"] = value
    del recipe["algorithm.preset"]  # the keys that it sets are compared instead
    compared = [
        key for key in recipe if key in IDENTITY_KEYS or key.partition(".")[0] in IDENTITY_SECTIONS
    ]
    return {key: recipe[key] for key in compared}


def check_identity(path: Path, extra: dict[str, Any], identity: Identity, allowed: list[str]) -> None:
    """Raise UserError if the checkpoint at `path` belongs to a run with another identity.

    With other data, another model or another algorithm it would be another experiment. A key that
    did not exist when the checkpoint was saved counts as its default. `extra` is the checkpoint's;
    `allowed` are keys, or sections of keys, that may differ (`checkpoint.resume_anyway`). The
    message does not quote values of kwargs.
    """
    if not isinstance(extra.get("identity"), dict):
        raise UserError(
            f"{path} does not say which data, model and algorithm it belongs to, since an older "
            "version has saved it: start over with another run.name, or with checkpoint.resume=none"
        )
    for_sft = "sft.batch_size" in identity
    if for_sft != ("sft.batch_size" in extra["identity"]):
        made, asked = ("train", "sft") if for_sft else ("sft", "train")
        raise UserError(
            f"{path} was saved by hotbunk {made}, and hotbunk {asked} cannot resume from it: give this "
            "run another run.name, or start over with checkpoint.resume=none"
        )
    shortest = TrainConfig.model_validate({"model": {"path": "m"}, "data": {"path": "d"}})
    defaults = _compared_keys(shortest.recorded())
    saved = {key: value for key, value in defaults.items() if key in identity} | extra["identity"]
    changed: dict[str, str] = {}
    for key in saved | identity:
        equal = saved.get(key, "?") == identity.get(key, "?")
        if equal or key in allowed or key.partition(".")[0] in allowed:
            continue
        secret = "${" in json.dumps(identity.get(key))
        texts = []
        for of in (saved, identity):
            value = json.dumps(masked(of[key], hidden="kwargs")) if key in of else "unknown"
            texts.append("***" if secret else shortened(value, 50))
        was, now = texts
        changed[key] = f"{key} = {was} (now {now})"
    if changed:
        raise UserError(
            f"{path} was trained with {', '.join(changed.values())}: restore that, permit it by "
            f"checkpoint.resume_anyway=[{','.join(changed)}], or start over with another run.name"
        )


def find_checkpoint(config: TrainConfig, identity: Identity) -> tuple[Path | None, RunState]:
    """Find and verify the checkpoint that the run resumes from. Collective.

    Returns its path and the state in it, or None and a new state if the run starts from the
    beginning. Damaged checkpoints of the run are reported and skipped. Raises UserError if the
    checkpoint asked for is damaged, if all are damaged, or if the newest sound one has another
    identity (unless checkpoint.resume_anyway permits it).
    """
    folder = config.run.folder / "checkpoints"
    wanted = config.checkpoint.resume
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
            say(f"{damage}; skipped")
            continue
        check_identity(path, extra, identity, config.checkpoint.resume_anyway)
        try:
            state = msgspec.convert(extra["state"], RunState, str_keys=True)
        except (KeyError, msgspec.ValidationError) as error:
            raise UserError(
                f"{path} was saved by another version of Hotbunk: in extra.json, state: {error}"
            ) from error
        if extra["identity"].get("data") != identity["data"]:
            state.prompts = 0  # a position means nothing in other data
        passed_over = ", the newest sound checkpoint" if path != candidates[0] else ""
        say(f"resuming from {path}{passed_over}, after step {state.step}")
        return path, state
    if candidates:
        raise UserError(
            f"no checkpoint in {folder} is sound (see above): restore one from a copy, or start over "
            "with checkpoint.resume=none"
        )
    return None, RunState()


def make_run_tracker(config: TrainConfig, state: RunState) -> NullTracker:
    """Open the run's records and trackers, and write its recipe beside them.

    Trackers get the recipe with secrets masked. Metrics of steps after the state's step are
    dropped.
    """
    run = config.run
    recipe = masked(config.recorded())
    patience = config.checkpoint.patience_s
    tracker = make_tracker(run.folder, recipe, run.name, config.tracking, state.step or None, patience)
    if is_main():
        write_whole(run.folder / "config.yaml", to_yaml(config), PRIVATE)
    return tracker


class CheckpointWriter:
    """Writes checkpoints into one folder, and deletes those that `checkpoint.keep` and `keep_best`
    do not keep.
    """

    def __init__(self, folder: Path, config: CheckpointConfig, timeout: float) -> None:
        """Create the writing thread and its process group. Collective. A checkpoint may take
        `timeout` seconds.
        """
        self._folder = folder
        self._config = config
        self._timeout = timeout
        self._ranks = Ranks(dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout)))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint", initializer=this_device())
        self._writing: Future[None] | None = None

    def save(
        self,
        step: int,
        parts: checkpoint.Parts,
        extra: dict[str, Any],
        metrics: dict[str, float],
        carried: bytes = b"",
    ) -> None:
        """Save the run as it is now; return when it is copied or, with `checkpoint.background:
        false`, written.

        Collective. Waits for the previous checkpoint first, and raises that one's failure on all
        ranks.
        """
        self.wait()
        check_best_metric(self._config, step, metrics)
        with agreed("checkpoint (copy)"):
            snapshot = checkpoint.Snapshot.take(step, parts, extra | {"metrics": metrics}, carried)
            if self._config.background:
                snapshot = snapshot.on_host()
        self._writing = self._thread.submit(self._write, snapshot)
        if not self._config.background:
            self.wait()

    @property
    def failed(self) -> bool:
        """True if the latest checkpoint could not be written; `wait` then raises the error."""
        return (
            self._writing is not None and self._writing.done() and self._writing.exception() is not None
        )

    def wait(self) -> None:
        """Wait until the checkpoint under way, if any, is complete on all ranks; raise its failure
        on all ranks.
        """
        writing = self._writing
        self._writing = None
        if writing is None:
            return
        if not wait([writing], self._timeout).done:
            raise TimeoutError(
                f"the checkpoint in {self._folder} is not written after {self._timeout:.0f} s"
            )
        writing.result()

    def close(self) -> None:
        """Finish the checkpoint under way, however the run ends, so that finished steps are not
        lost.
        """
        try:
            self.wait()
        except Exception as error:
            # The run may be ending with another error, which must not be replaced
            print(f"[hotbunk] the last checkpoint was not written: {error}", file=sys.stderr)

    def _write(self, snapshot: checkpoint.Snapshot) -> None:
        patience = min(self._config.patience_s, self._timeout / 2)
        patiently(
            partial(checkpoint.write, self._folder, snapshot, self._ranks),
            f"step_{snapshot.step}",
            patience,
        )
        with agreed("checkpoint (tidy)", among=self._ranks):
            checkpoint.drop_later(self._folder, snapshot.step)
            checkpoint.prune(
                self._folder, self._config.keep, self._config.keep_best, self._config.best_metric
            )


def check_best_metric(config: CheckpointConfig, step: int, metrics: dict[str, float]) -> None:
    """Raise UserError if checkpoint.best_metric names a metric that the run does not have.

    Metrics of evaluations (eval/…) may be missing in steps without an evaluation.
    """
    name = config.best_metric.removeprefix("-")
    expected = not name.startswith("eval/") or any(key.startswith("eval/") for key in metrics)
    if config.keep_best and metrics and expected and name not in metrics:
        group = [key for key in metrics if key.partition("/")[0] == name.partition("/")[0]]
        there = ", ".join(sorted(group or metrics)[:12])
        raise UserError(f"checkpoint.best_metric: step {step} has no metric {name!r}; there are {there}")


def late_to_leave(config: CheckpointConfig, watchdog: Watchdog) -> bool:
    """Return True once half of the grace period is over in which a run that was asked to end can
    save.
    """
    return watchdog.called_for() > config.grace_s / 2


class Keeper:
    """Saves a run when a checkpoint is due, and ends it in order when it is asked to end."""

    def __init__(
        self,
        config: TrainConfig,
        watchdog: Watchdog,
        state: RunState,
        parts: checkpoint.Parts,
        identity: Identity,
        carried: Callable[[], bytes] = bytes,
    ) -> None:
        """Prepare to save the run's `state`, its trained `parts`, and this rank's answers.
        Collective.

        `carried()` is called at each save; it packs this rank's answers that have not been trained
        on.
        """
        self._carried = carried
        self._config = config.checkpoint
        self._watchdog = watchdog
        self._state = state
        self._parts = parts
        self._identity = identity
        folder = config.run.folder / "checkpoints"
        timeout = config.run.first_step_deadline_s
        self._writer = CheckpointWriter(folder, config.checkpoint, timeout)
        self._saved = state.step if config.checkpoint.resume == "auto" else 0
        self._metrics: dict[str, float] = {}

    def hold_signals(self, *numbers: signal.Signals) -> None:
        """Delay the effect of these signals from now on, so that there is time to save."""
        if self._config.grace_s:
            processes.hold_signals(self._config.grace_s, self._watchdog.call_all, numbers)

    def step_done(self, metrics: dict[str, float]) -> None:
        """Save if a checkpoint is due, and leave if any rank was asked to end. Collective.

        Call it after a step's row is written. Raises on all ranks if the previous checkpoint could
        not be written.
        """
        self._metrics = metrics
        if self._config.every and self._state.step % self._config.every == 0:
            self.save()
        asked = float(self._watchdog.called_at is not None)
        flags = all_reduce_max({"asked": asked, "failed": float(self._writer.failed)})
        if flags["failed"]:
            self._writer.wait()
        if flags["asked"]:
            self.leave()

    def save(self) -> None:
        """Begin a checkpoint of the run as it is now, unless this step has one. Collective."""
        if self._saved != self._state.step:
            extra = {"state": asdict(self._state), "identity": self._identity}
            self._writer.save(self._state.step, self._parts, extra, self._metrics, self._carried())
            self._saved = self._state.step

    def finish(self) -> None:
        """Save the run, and wait until the checkpoint is written. Collective."""
        self.save()
        self._writer.wait()

    def leave(self) -> None:
        """Save, and then end the run as SIGTERM does. Collective."""
        self.finish()
        say(f"asked to end: saved at step {self._state.step}")
        processes.interrupt_now()

    def close(self) -> None:
        """Finish the checkpoint under way, if any."""
        self._writer.close()
