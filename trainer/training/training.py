"""The calls of which a loop of one's own is made: train, score, sample, save.

Every call is collective: under torchrun all ranks make the same calls with the same data, of which
each computes its share. Nothing here computes a loss or an update in a way of its own: those are
the policy's (`FsdpPolicy.accumulate`, `step`), as in `hotbunk train`.
"""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy
import torch
import torch.distributed as dist
from torch import Tensor

from generation.engine.sampling import SamplingSettings
from generation.exact_ids import Generation
from generation.trajectory import Trajectory
from sharding.ranks import agreed, all_reduce_max, is_main, send_to_all, world_size
from sharding.send.source import local_part
from trainer.config.machine import resolve_device
from trainer.config.schema import TrainConfig
from trainer.data import Prompt, load_tokenizer
from trainer.distributed import destroy_process_group, init_process_group
from trainer.engines import fetch_model, rank_device
from trainer.errors import UserError
from trainer.learning.batching import Batcher
from trainer.policy import FsdpPolicy
from trainer.policy.lora import save_adapter
from trainer.policy.optimizer import MetricSums, TrainingDiverged
from trainer.run import checkpoint
from trainer.training.calls import Calls, noted
from trainer.training.data import (
    AnyDatum,
    CheckedDatum,
    Datum,
    as_data,
    checked,
    every_position,
    micro_batches,
)
from trainer.training.losses import LossFunction, NamedLoss, slopes_of
from trainer.training.sampling import AnyPrompt, Engines, WeightSnapshot
from trainer.training.settings import settings_of

_CALLS = "sampling_calls"  # the key of their number in a checkpoint
_FAILED = "forward_backward has failed since the last optim_step"


class Training:
    """A model in training, whose owner writes the loop.

        with hotbunk.Training("models/tiny", lora_rank=8) as training:
            training.forward_backward(data, "cross_entropy")
            training.optim_step(learning_rate=1e-4)
            [answers] = training.sample([prompt], n=4, max_tokens=64)
            training.save("runs/mine")

    It runs in one process, or on every rank of torchrun, which all make the same calls with all of
    the data; each computes its share. Ranks whose calls differ get a sentence that says so.
    """

    def __init__(
        self,
        model: str | Path,
        /,
        lora_rank: int | None = None,
        recipe: str | Path | None = None,
        **sections: Any,
    ) -> None:
        """Join the ranks and load the model.

        `lora_rank` is that of adapters; None: the recipe's, or all weights are trained. `recipe` is
        a file for all other settings, and `sections` override its keys: `policy={"lr": 1e-4}`.
        Raises UserError for wrong settings, and for modes that work in `hotbunk train` alone.
        """
        file = None if recipe is None else str(recipe)
        self.config: TrainConfig = settings_of(str(model), lora_rank, file, sections)
        seconds = self.config.run.step_deadline_s
        self._calls = Calls(seconds)
        with ExitStack() as resources:
            if not dist.is_initialized():
                init_process_group(seconds, resolve_device(self.config))
                resources.push(_leave)
            with agreed("fetching the model"):
                fetch_model(self.config)
            self.tokenizer = load_tokenizer(self.config.model)
            self.policy = FsdpPolicy(
                self.config.model, self.config.policy, rank_device(self.config), lora=self.config.lora
            )
            self._engines = Engines(self.config, self.policy, self.tokenizer, resources)
            self._resources = resources.pop_all()
        self._engines.resources = self._resources
        self._batcher = Batcher.of(self.config, self.policy, self.tokenizer.pad_token_id or 0)
        text = self.policy.model.config.get_text_config()
        self._vocabulary: int = text.vocab_size
        self._longest: int = getattr(text, "max_position_embeddings", None) or 1 << 30
        self._defaults = [dict(group, params=None) for group in self.policy.optimizer.param_groups]
        self._waiting: MetricSums | None = None  # the sums of calls since the last step
        self._failed = False  # one of these calls has failed
        self._numbers = count(1)  # of weights, each of which has its own
        self._number = 0  # of the weights in training
        self._held: WeightSnapshot | None = None  # the snapshot in the place of the weights in training
        self._aside: dict[str, Tensor] = {}  # the weights in training meanwhile

    @property
    def shifts(self) -> list[dict[str, float]]:
        """The cost of each shift of the engines: seconds by phase, and bytes put away."""
        return self._engines.shifts

    @property
    def version(self) -> int:
        """The number of optimizer steps that were applied."""
        return self.policy.version

    def forward_backward(
        self,
        data: Sequence[AnyDatum],
        loss: str | LossFunction = "cross_entropy",
        *,
        advantages: Sequence[float] | None = None,
        temperature: float | None = None,
        **options: Any,
    ) -> dict[str, float]:
        """Add the gradients of a loss, summed over all tokens, to those that wait for `optim_step`.

        `loss` is a name, with keys of the recipe's section `algorithm` as `options`, or a function
        of the data and of each datum's log-probabilities, which returns a scalar, or a scalar and
        figures. A function costs one more forward pass. Data may be trajectories of `episodes`,
        with one of the `advantages` each. `temperature` divides logits; None:
        `sampling.temperature`.

        Returns `loss`, the number of `tokens`, and of a named loss the mean `entropy` in nats, the
        share that was `clipped`, and, of data with log-probabilities, their distance to the
        policy's, `gap_mean` and `gap_max` in nats. Raises UserError for data that cannot be
        computed, and leaves waiting gradients as they were.
        """
        if callable(loss):
            named = NamedLoss("cross_entropy", {})
            given = {"function": loss, "options": options}
            rows = self._begin("forward_backward", data, temperature, advantages, **given)
            self._compute_with(None)
            logprobs = self._scores(rows, temperature)
            slopes, value, figures = self._slopes(loss, as_data(data, advantages), logprobs)
            rows = [replace(row, weights=-slope) for row, slope in zip(rows, slopes, strict=True)]
            totals = self._accumulate(rows, named, temperature)
            return {"loss": value, "tokens": float(sum(map(len, logprobs)))} | figures
        given = {"loss": loss, "options": options}
        rows = self._begin("forward_backward", data, temperature, advantages, **given)
        self._compute_with(None)
        named = NamedLoss(loss, options)
        totals = self._accumulate(rows, named, temperature)
        tokens = max(1.0, totals["tokens"])
        figures = {"loss": totals["loss"], "tokens": totals["tokens"]}
        figures |= {key: totals[key] / tokens for key in ("entropy", "clipped")}
        if all(row.logprobs is not None for row in rows):
            figures["gap_mean"] = totals["gap"] / tokens
            figures |= all_reduce_max({"gap_max": named.largest_gap()})
        return figures

    def optim_step(
        self,
        learning_rate: float | None = None,
        *,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        max_grad_norm: float | None = None,
    ) -> dict[str, float]:
        """Apply the waiting gradients, clipped to a norm of `max_grad_norm` (infinity: not at all).

        Arguments of None are the recipe's, whose learning rate is constant here. A `weight_decay`
        that is given holds for all tensors, the recipe's for matrices alone. Returns
        `learning_rate`, the `grad_norm` before clipping, and the `version` of the weights.

        Raises UserError, with the gradients dropped and the weights as they were, if there are no
        gradients, one of the calls that made them has failed, or they are not finite.
        """
        rate = self.config.policy.lr if learning_rate is None else learning_rate
        norm = self.config.policy.max_grad_norm if max_grad_norm is None else max_grad_norm
        changes = {"betas": betas, "eps": eps, "weight_decay": weight_decay}
        given = {key: value for key, value in changes.items() if value is not None}
        numbers = [rate, norm, *(betas or ()), eps or 0.0, weight_decay or 0.0]
        unknown = [key for key in given if key not in self._defaults[0]]
        problems = [f"policy.optimizer has no {key}: leave it out" for key in unknown]
        if not all(isinstance(number, int | float) and number >= 0 for number in numbers):
            problems.append("optim_step takes numbers of at least 0: correct its arguments")
        self._calls.begin("optim_step", [repr((rate, norm, given)).encode()], problems)
        self._compute_with(None)
        waiting = self._waiting
        self._waiting = None
        if self._failed or waiting is None:
            reason = _FAILED if self._failed else "there are no gradients"
            self._drop()
            raise UserError(f"optim_step applied nothing, since {reason}: call forward_backward again")
        for group, defaults in zip(self.policy.optimizer.param_groups, self._defaults, strict=True):
            group |= {key: defaults[key] for key in changes if key in defaults} | given
        try:
            stats = self.policy.step(waiting, rate, norm)
            finite = not stats.skipped
        except TrainingDiverged:
            finite = False
        if not finite:
            raise UserError(
                "optim_step applied nothing, since the loss or the gradient is not finite: look at the "
                "data of the last forward_backward, or lower the learning rate"
            )
        self._number = next(self._numbers)
        return {
            "learning_rate": rate,
            "grad_norm": stats.grad_norm,
            "version": float(self.policy.version),
        }

    def logprobs(
        self,
        data: Sequence[AnyDatum],
        *,
        temperature: float | None = None,
        weights: WeightSnapshot | None = None,
    ) -> list[Tensor]:
        """Return the log-probability of every target, also of those with weight 0: [N] float32,
        nats, of each datum.

        `weights` is a snapshot to compute with; None: the present weights. Waiting gradients stay
        as they are.
        """
        rows = self._begin("logprobs", data, temperature, weights=_number(weights))
        self._compute_with(weights)
        return self._scores(rows, temperature)

    def snapshot(self) -> WeightSnapshot:
        """Return a copy of the trained weights, with which `sample` and `logprobs` can be called
        however many steps later.

        It is in host memory. With adapters it has theirs alone, so many can be kept.
        """
        self._calls.begin("snapshot")
        self._compute_with(None)
        return WeightSnapshot(self.version, self._number, self._copies())

    def sample(
        self,
        prompts: Sequence[AnyPrompt],
        n: int = 1,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        weights: WeightSnapshot | None = None,
    ) -> list[list[Generation]]:
        """Return `n` answers to each prompt, on every rank, by engines with the present weights or
        those of a snapshot.

        A prompt is a list of ids, a text, or a list of messages for the chat template. Arguments of
        None are the recipe's (section `sampling`). Answers have `token_ids`, `logprobs` (nats, at
        the temperature), `text`, `prompt_ids` and `finish_reason`. The first call starts the
        engines. Seeds depend on `run.seed` and the number of the call.
        """
        changes = {"max_tokens": max_tokens, "temperature": temperature}
        ids, answers = self._submit("sample", prompts, n, changes, weights)
        mine: dict[int, Generation] = {}
        with agreed("sampling"):
            mine = answers.result()
        return self._engines.gathered(mine, ids, n, self._version(weights))

    async def sample_async(
        self,
        prompts: Sequence[AnyPrompt],
        n: int = 1,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        weights: WeightSnapshot | None = None,
    ) -> list[list[Generation]]:
        """Do what `sample` does while other coroutines run, on one rank.

        A call that trains, or samples with other weights, waits until the answers are there. Raises
        UserError on several ranks, where calls of coroutines have no common order.
        """
        if world_size() > 1:
            raise UserError("sample_async works on one rank: call sample, with all prompts at once")
        changes = {"max_tokens": max_tokens, "temperature": temperature}
        ids, answers = self._submit("sample_async", prompts, n, changes, weights)
        version = self._version(weights)
        return self._engines.gathered(await asyncio.wrap_future(answers), ids, n, version)

    def episodes(
        self,
        rows: Sequence[Mapping[str, Any]],
        n: int = 1,
        *,
        tools: Sequence[Callable[..., Any] | str] | None = None,
        environment: Callable[..., Any] | str | None = None,
        custom: Callable[..., Any] | str | None = None,
        max_tokens: int | None = None,
        temperature: float | None = None,
        weights: WeightSnapshot | None = None,
    ) -> list[list[Trajectory]]:
        """Run `n` episodes of each row, on every rank, and return the trajectories of each row.

        A row is a dictionary with the columns of a recipe's data, such as `prompt`. `tools`,
        `environment` and `custom` are those of the recipe's section `rollout`, as objects or by
        name; without one, an episode is one answer. Trajectories have exact ids, rewards of
        environments and functions, and an `error` where the episode failed. `forward_backward`
        takes them as they are. Other arguments are those of `sample`.
        """
        chosen = {"tools": tools or [], "environment": environment, "custom": custom}
        changes = {"max_tokens": max_tokens, "temperature": temperature}
        problems: list[str] = []
        prompts: list[Prompt] = []
        with noted(problems):
            level, prompts = self._engines.level(rows, chosen)
        ids = [list(prompt.token_ids) for prompt in prompts]
        settings = self._shift("episodes", ids, n, changes, weights, problems)
        mine: list[Trajectory] = []
        with agreed("the episodes"):
            mine = self._engines.episodes(level, prompts, n, settings)
        return self._engines.gathered_episodes(mine, len(prompts), self._version(weights))

    def save(self, folder: str | Path) -> Path:
        """Write weights and optimizer to `folder`/step_N, complete or invisible; return that path.

        Gradients are not saved: raises UserError while some wait for `optim_step`.
        """
        waits = self._waiting is not None or self._failed
        problems = ["save would lose the waiting gradients: call optim_step first"] * waits
        self._calls.begin("save", [str(folder).encode()], problems)
        self._compute_with(None)
        extra = {_CALLS: self._engines.calls}
        return checkpoint.save(Path(folder), self.version, {"policy": self.policy}, extra)

    def load(self, path: str | Path) -> Path:
        """Continue from a step_N folder, or from the newest complete one in a folder; return it.

        Waiting gradients are dropped. The number of ranks may differ from that of `save`.
        """
        self._calls.begin("load", [str(path).encode()])
        folder = Path(path)
        found = [folder] if checkpoint.is_complete(folder) else checkpoint.all_complete(folder)
        if not found:
            raise UserError(f"{folder} has no complete checkpoint: give a folder that save has written")
        self._compute_with(None)
        checkpoint.verify(found[0])
        extra = checkpoint.load(found[0], {"policy": self.policy})
        self._engines.calls = int(extra.get(_CALLS, 0))
        self._number = next(self._numbers)
        self._drop()
        return found[0]

    def export(self, folder: str | Path) -> None:
        """Write the model with its tokenizer in Hugging Face format, adapters merged; the adapter
        itself goes to `folder`/adapter.
        """
        self._calls.begin("export", [str(folder).encode()])
        self._compute_with(None)
        self.policy.save_pretrained(Path(folder))
        if self.config.lora.rank:
            model = self.config.model.path
            save_adapter(self.policy.model, self.config.lora, model, Path(folder) / "adapter")
        with agreed("writing the tokenizer"):
            if is_main():
                self.tokenizer.save_pretrained(folder)

    def close(self) -> None:
        """Leave the ranks together, and give back what was started. Safe to call twice."""
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._resources.__exit__(kind, error, traceback)

    def _begin(
        self,
        name: str,
        data: Sequence[AnyDatum],
        temperature: float | None,
        advantages: Sequence[float] | None = None,
        **arguments: Any,
    ) -> list[CheckedDatum]:
        """Check the data of a call, agree on it with the other ranks, and return its rows."""
        problems: list[str] = []
        rows: list[CheckedDatum] = []
        with noted(problems):
            if temperature is not None and not 0 < temperature < math.inf:
                raise UserError(f"temperature is {temperature}: give a finite number above 0")
            needs: Sequence[str] = ()
            if "loss" in arguments:
                needs = NamedLoss(arguments["loss"], arguments["options"]).needs
            elif arguments.get("options"):
                raise UserError("a function as the loss takes no options: leave them out")
            rows = checked(as_data(data, advantages), self._vocabulary, self._longest, needs)
        names = ("loss", "options", "weights")
        words = repr((temperature, *(arguments.get(name) for name in names)))
        content = (row.content() for row in rows)
        self._calls.begin(name, [words.encode(), *content], problems)
        return rows

    def _submit(
        self,
        name: str,
        prompts: Sequence[AnyPrompt],
        n: int,
        changes: dict[str, Any],
        weights: WeightSnapshot | None,
    ) -> tuple[list[list[int]], "Future[dict[int, Generation]]"]:
        """Start this rank's share of the answers, after a shift where one is needed. Collective.

        Returns the ids of the prompts, and the answers under way.
        """
        problems: list[str] = []
        ids: list[list[int]] = []
        with noted(problems):
            ids = self._engines.prompt_ids(prompts)
        settings = self._shift(name, ids, n, changes, weights, problems)
        return ids, self._engines.submit(ids, n, settings)

    def _shift(
        self,
        name: str,
        ids: list[list[int]],
        n: int,
        changes: dict[str, Any],
        weights: WeightSnapshot | None,
        problems: list[str],
    ) -> SamplingSettings:
        """Check the numbers of a call that samples, agree on it with the other ranks, and wake the
        engines where they sleep or have other weights. Collective.
        """
        with noted(problems):
            settings = self._engines.settings(changes)
            counts = [n, settings.max_tokens]
            if not all(type(number) is int and number > 0 for number in counts):
                raise UserError(f"n and max_tokens are {counts}: give whole numbers above 0")
            if not 0 <= settings.temperature < math.inf:
                raise UserError(f"temperature is {settings.temperature}: give a finite number from 0 on")
        words = repr((ids, n, changes, _number(weights)))
        self._calls.begin(name, [words.encode()], problems)
        number = self._number if weights is None else weights.number
        if not self._engines.has(number):
            self._compute_with(weights)
            self._engines.wake(number)
        return settings

    def _version(self, weights: WeightSnapshot | None) -> int:
        return self.version if weights is None else weights.version

    def _compute_with(self, weights: WeightSnapshot | None) -> None:
        """Put the engines to sleep, and the weights of a snapshot, or those in training, in the
        policy. Collective.
        """
        self._engines.sleep()
        if weights is not None and weights.number == self._number:
            weights = None
        if weights is self._held:
            return
        if self._held is None:
            self._aside = self._copies()
        source = self._aside if weights is None else weights.tensors
        with torch.no_grad():
            for name, parameter in self.policy.trained().items():
                local_part(parameter).copy_(source[name])
        self._held = weights

    def _copies(self) -> dict[str, Tensor]:
        """Return this rank's shards of the trained weights, copied to host memory."""
        trained = self.policy.trained()
        return {name: local_part(p).detach().to("cpu", copy=True) for name, p in trained.items()}

    def _temperature(self, temperature: float | None) -> float:
        return self.config.sampling.temperature if temperature is None else temperature

    def _scores(self, rows: Sequence[CheckedDatum], temperature: float | None) -> list[Tensor]:
        """Return the log-probabilities [N] of all targets, on every rank. Collective."""
        batches = micro_batches(every_position(rows), self._batcher)
        mine: dict[int, bytes] = {}
        outputs = self.policy.score(batches, self._temperature(temperature))
        for batch, output in zip(batches, outputs, strict=True):
            for index, line in zip(batch.rows, output.logprobs.cpu(), strict=False):
                mine[index] = line[: len(rows[index].inputs)].numpy().tobytes()
        every: dict[int, bytes] = {}
        for part in send_to_all(msgspec.msgpack.encode(mine)):
            every |= msgspec.msgpack.decode(part, type=dict[int, bytes])
        vectors = (numpy.frombuffer(every[index], "float32") for index in range(len(rows)))
        return [torch.from_numpy(vector.copy()) for vector in vectors]

    def _slopes(
        self, loss: LossFunction, data: Sequence[Datum], logprobs: list[Tensor]
    ) -> tuple[list[Tensor], float, dict[str, float]]:
        """Return `slopes_of`, the same on all ranks, or raise UserError on all. Collective."""
        problems: list[str] = []
        result: tuple[list[Tensor], float, dict[str, float]] = ([], 0.0, {})
        with noted(problems):
            result = slopes_of(loss, data, logprobs)
        content = (slope.numpy().tobytes() for slope in result[0])
        self._calls.agree("the derivatives of the loss", content, problems)
        return result

    def _accumulate(
        self, rows: Sequence[CheckedDatum], loss: NamedLoss, temperature: float | None
    ) -> dict[str, float]:
        """Accumulate gradients, and return the sums over ranks. A failure drops all that wait."""
        batches = micro_batches(rows, self._batcher)
        self._failed = True  # unless the end is reached, whatever happens: a signal, too
        sums = self.policy.accumulate(batches, loss, self._temperature(temperature))
        totals = sums.over_ranks()
        if not math.isfinite(totals["loss"]):
            raise UserError(
                f"the loss is {totals['loss']}: look at the data's values; optim_step will drop the "
                "gradients"
            )
        self._failed = False
        if self._waiting is None:
            self._waiting = sums
        else:
            self._waiting.join(sums)
        return totals

    def _drop(self) -> None:
        """Drop all gradients."""
        self._waiting = None
        self._failed = False
        self.policy.drop_gradients()


def _number(weights: WeightSnapshot | None) -> int | None:
    return None if weights is None else weights.number


def _leave(kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
    """Leave the ranks; after an error at once, since the others may wait for this rank."""
    destroy_process_group(together=kind is None)
