"""Lets a run outlast its process: the checkpoint it resumes from, those it writes, and an orderly early end.

Resuming. Beside each checkpoint stands the run's identity: the data, the model and the algorithm that it belongs to. It
is compared when a run resumes. Keys that change how a run is computed but not what (ranks, micro-batches, backend,
engine) are left out, and so are those that people change on purpose between two sessions (run.steps, policy.lr,
evaluation).

Writing. A thread writes while training continues, one checkpoint at a time. `save` copies the sharded tensors to host
memory, each rank's share of the checkpoint's size, and returns; what is written is the run at that moment. The thread's
exchanges between ranks have a process group of their own: two threads that use one group mix up each other's messages.

Leaving. SIGTERM on any rank, as clusters send it some time before they kill, is known to all ranks half a second later.
They agree on it at the end of the step, save and leave together. A step whose rollouts are still under way when half of
`checkpoint.grace_s` is over is given up, which leaves the policy as the step before did: every finished step is kept.
An update or an evaluation is finished; what takes longer than the grace period ends without saving again.
"""

import hashlib
import json
import math
import signal
import sys
import time
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
from sharding.ranks import Ranks, agreed, all_reduce_max, is_main, world_size
from trainer.config.checks import IDENTITY_KEYS, IDENTITY_SECTIONS
from trainer.config.recipe import masked, to_yaml
from trainer.config.schema import CheckpointConfig, TrainConfig
from trainer.distributed import say
from trainer.errors import UserError, shortened
from trainer.policy.hf_format import resolve_folder
from trainer.run import checkpoint, processes
from trainer.run.intervals import Intervals
from trainer.run.records import PRIVATE, patiently, write_whole
from trainer.run.tracking import NullTracker, make_tracker
from trainer.run.watchdog import Watchdog

_SAMPLE_BYTES = 1 << 16

# JSON values by key: data, model and tokenizer as digests, recipe keys by their dotted paths as they stand.
Identity = dict[str, Any]


@dataclass
class RunState:
    """The state of a run besides the policy, which checkpoints keep."""

    step: int = 0  # steps done
    prompts: int = 0  # taken from the training data so far; the next step continues from there
    seconds: float = 0.0  # spent in steps, all sessions of the run together
    largest_gap: float | None = None  # of all steps so far, nats; NaN where one was; None before any was measured
    syncs_verified: int = 0
    eval_before: float | None = None  # mean reward on held-out prompts, of the first evaluation
    eval_after: float | None = None  # and of the latest
    lengths: dict[int, int] = field(default_factory=dict)  # by prompt id, of its last answers; see `longest_answers`

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


def run_identity(config: TrainConfig, fingerprint: str, tokenizer: PreTrainedTokenizerBase) -> Identity:
    """The identity of a run; `fingerprint` is that of its training data (`PromptDataset`)."""
    return {
        "data": fingerprint,
        "model": model_digest(resolve_folder(config.model.path)),
        "tokenizer": _digest(json.dumps(sorted(tokenizer.get_vocab().items())).encode()),
        **_compared_keys(config.recorded()),
    }


def model_digest(folder: Path) -> str:
    """Of config.json and of some of the weights: size, beginning, middle and end of each file, so that it is quick."""
    config = json.loads((folder / "config.json").read_bytes())
    kept = config.keys() - {"_name_or_path", "transformers_version"}  # which saving the model again changes
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
    """Those of a recipe that a resumed run is compared by; `config` is its JSON."""
    recipe = {f"{section}.{name}": value for section, values in config.items() for name, value in values.items()}
    del recipe["algorithm.preset"]  # the keys that it sets are there
    compared = [key for key in recipe if key in IDENTITY_KEYS or key.partition(".")[0] in IDENTITY_SECTIONS]
    return {key: recipe[key] for key in compared}


def check_identity(path: Path, extra: dict[str, Any], identity: Identity, allowed: list[str]) -> None:
    """Raise UserError, one sentence, when the checkpoint at `path` belongs to another run than `identity` says.

    With other data, another model or another algorithm it would be another experiment. A key that the recipe did not
    have yet when the checkpoint was saved counts as its default. `extra` is the checkpoint's; `allowed` are keys, or
    sections of keys, that may differ (`checkpoint.resume_anyway`). Values of kwargs are not in the sentence.
    """
    if not isinstance(extra.get("identity"), dict):
        raise UserError(
            f"{path} does not say which data, model and algorithm it belongs to, as it is of an older version: "
            "start over with another run.name, or with checkpoint.resume=none"
        )
    for_sft = "sft.batch_size" in identity
    if for_sft != ("sft.batch_size" in extra["identity"]):
        made, asked = ("train", "sft") if for_sft else ("sft", "train")
        raise UserError(
            f"{path} was saved by hotbunk {made}, and hotbunk {asked} cannot resume from it: give this run another "
            "run.name, or start over with checkpoint.resume=none"
        )
    defaults = _compared_keys(TrainConfig.model_validate({"model": {"path": "m"}, "data": {"path": "d"}}).recorded())
    saved = {key: value for key, value in defaults.items() if key in identity} | extra["identity"]
    changed: dict[str, str] = {}
    for key in saved | identity:
        if saved.get(key, "?") == identity.get(key, "?") or key in allowed or key.partition(".")[0] in allowed:
            continue
        values = [json.dumps(masked(of[key], hidden="kwargs")) if key in of else "unknown" for of in (saved, identity)]
        was, now = ("***" if "${" in json.dumps(identity.get(key)) else shortened(value, 50) for value in values)
        changed[key] = f"{key} = {was} (now {now})"
    if changed:
        raise UserError(
            f"{path} was trained with {', '.join(changed.values())}: restore that, permit it by "
            f"checkpoint.resume_anyway=[{','.join(changed)}], or start over with another run.name"
        )


def find_checkpoint(config: TrainConfig, identity: Identity) -> tuple[Path | None, RunState]:
    """The checkpoint that the run resumes from, verified, and the state in it; None where the run begins. Collective.

    Of the run's own, damaged ones are named and passed over. Raises UserError when the checkpoint asked for is damaged,
    none is sound, or the newest sound one is another run's by its identity (checkpoint.resume_anyway permits it).
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
            say(f"{damage}; left out")
            continue
        check_identity(path, extra, identity, config.checkpoint.resume_anyway)
        try:
            state = msgspec.convert(extra["state"], RunState, str_keys=True)
        except (KeyError, msgspec.ValidationError) as error:
            raise UserError(f"{path} was saved by another version of Hotbunk: in extra.json, state: {error}") from error
        if extra["identity"].get("data") != identity["data"]:
            state.prompts, state.lengths = 0, {}  # positions and ids mean nothing in other data
        passed_over = ", the newest sound checkpoint" if path != candidates[0] else ""
        say(f"resuming from {path}{passed_over}, after step {state.step}")
        return path, state
    if candidates:
        raise UserError(
            f"no checkpoint in {folder} is sound (see above): restore one from a copy, or start over with "
            "checkpoint.resume=none"
        )
    return None, RunState()


def make_run_tracker(config: TrainConfig, state: RunState) -> NullTracker:
    """The run's record, with its recipe beside it, masked in other trackers; later metrics are dropped."""
    run, recipe, patience = config.run, masked(config.recorded()), config.checkpoint.patience_s
    tracker = make_tracker(run.folder, recipe, run.name, config.tracking, state.step or None, patience)
    if is_main():
        write_whole(run.folder / "config.yaml", to_yaml(config), PRIVATE)
    return tracker


class CheckpointWriter:
    """Saves into one folder, and deletes there what `checkpoint.keep` and `checkpoint.keep_best` do not name."""

    def __init__(self, folder: Path, config: CheckpointConfig, timeout: float) -> None:
        """Collective. `timeout` (seconds) is the deadline of writing one checkpoint."""
        self._folder = folder
        self._config = config
        self._timeout = timeout
        self._ranks = Ranks(dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout)))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint", initializer=this_device())
        self._writing: Future[None] | None = None

    def save(
        self, step: int, parts: checkpoint.Parts, extra: dict[str, Any], metrics: dict[str, float], carried: bytes = b""
    ) -> None:
        """Save the run as it is now; returns when it is copied, or with `checkpoint.background: false` written.

        Collective. Waits first for the previous checkpoint, and raises its failure on all ranks.
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
        """True if the checkpoint under way could not be written; `wait` then raises the reason."""
        return self._writing is not None and self._writing.done() and self._writing.exception() is not None

    def wait(self) -> None:
        """Wait until the checkpoint under way, if any, is complete on all ranks; its failure raises on all."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        if not wait([writing], self._timeout).done:
            raise TimeoutError(f"the checkpoint in {self._folder} is not written after {self._timeout:.0f} s")
        writing.result()

    def close(self) -> None:
        """Finish the checkpoint under way, however the run ends, so that finished steps are not lost."""
        try:
            self.wait()
        except Exception as error:  # the run is ending for another reason, which is the one to report
            print(f"[hotbunk] the last checkpoint was not written: {error}", file=sys.stderr)

    def _write(self, snapshot: checkpoint.Snapshot) -> None:
        patience = min(self._config.patience_s, self._timeout / 2)
        patiently(partial(checkpoint.write, self._folder, snapshot, self._ranks), f"step_{snapshot.step}", patience)
        with agreed("checkpoint (tidy)", among=self._ranks):
            checkpoint.drop_later(self._folder, snapshot.step)
            checkpoint.prune(self._folder, self._config.keep, self._config.keep_best, self._config.best_metric)


def check_best_metric(config: CheckpointConfig, step: int, metrics: dict[str, float]) -> None:
    """Raise UserError when checkpoints are to be kept by a figure that the run does not have.

    Figures of evaluations (eval/…) are missing in steps without one, and only in those.
    """
    name = config.best_metric.removeprefix("-")
    expected = not name.startswith("eval/") or any(key.startswith("eval/") for key in metrics)
    if config.keep_best and metrics and expected and name not in metrics:
        group = [key for key in metrics if key.partition("/")[0] == name.partition("/")[0]]
        there = ", ".join(sorted(group or metrics)[:12])
        raise UserError(f"checkpoint.best_metric: step {step} has no figure {name!r}; there are {there}")


class Keeper:
    """Saves a run, and ends it when it is asked to end."""

    def __init__(
        self,
        config: TrainConfig,
        watchdog: Watchdog,
        state: RunState,
        parts: checkpoint.Parts,
        identity: Identity,
        carried: Callable[[], bytes] = bytes,
    ) -> None:
        """Collective. What is saved of the run is its `state`, the `parts` that learn, and what this rank has
        `carried` over from step to step, as they then are.
        """
        self._carried = carried
        self._config = config.checkpoint
        self._watchdog = watchdog
        self._state = state
        self._parts = parts
        self._identity = identity
        folder, timeout = config.run.folder / "checkpoints", config.run.first_step_deadline_s
        self._writer = CheckpointWriter(folder, config.checkpoint, timeout)
        self._saved = state.step if config.checkpoint.resume == "auto" else 0
        self._intervals: Intervals | None = None  # on rank 0
        if self._config.every == "auto":
            with agreed("reading the run's sessions"):
                self._intervals = Intervals(config.run.folder, world_size()) if is_main() else None
        self._metrics: dict[str, float] = {}

    def hold_signals(self, *numbers: signal.Signals) -> None:
        """Let these signals leave time to save from now on."""
        if self._config.grace_s:
            processes.hold_signals(self._config.grace_s, self._watchdog.call_all, numbers)

    def step_done(self, metrics: dict[str, float]) -> None:
        """After a step's row is written: save if it is time to, leave if any rank was asked to. Collective.

        Raises on all ranks if the previous checkpoint could not be written.
        """
        self._metrics = metrics
        if self._is_due():
            self.save()
        asked = float(self._watchdog.called_at is not None)
        found = all_reduce_max({"asked": asked, "failed": float(self._writer.failed)})
        if found["failed"]:
            self._writer.wait()
        if found["asked"]:
            self.leave()

    def _is_due(self) -> bool:
        """True, on all ranks alike, if it is time to save. Collective."""
        every = self._config.every
        if every == "auto":
            over = self._intervals is not None and self._intervals.is_over()
            return bool(all_reduce_max({"due": float(over)})["due"])
        return bool(every) and self._state.step % every == 0

    def save(self) -> None:
        """Begin a checkpoint of the run as it is now, if there is none of this step. Collective."""
        if self._saved != self._state.step:
            began = time.monotonic()
            extra = {"state": asdict(self._state), "identity": self._identity}
            self._writer.save(self._state.step, self._parts, extra, self._metrics, self._carried())
            self._saved = self._state.step
            if self._intervals is not None:
                self._intervals.saved(time.monotonic() - began)

    def finish(self) -> None:
        """Save the run's end, and wait until it is written. Collective."""
        self.save()
        self._writer.wait()
        if self._intervals is not None:
            self._intervals.note("end")

    def leave(self) -> None:
        """Save, then end the run as SIGTERM would have. Collective."""
        self.finish()
        say(f"asked to end: saved at step {self._state.step}")
        processes.interrupt_now()

    def late_to_leave(self) -> bool:
        """True once half of the grace period is over."""
        return self._watchdog.called_for() > self._config.grace_s / 2

    def close(self) -> None:
        """Finish a checkpoint that is under way."""
        self._writer.close()
