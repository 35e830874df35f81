"""Reward functions run in processes of their own, where they may raise, hang or die.

Each call has a deadline after which its process is killed and replaced, so a loop inside C code or a lost socket costs
one answer's reward and nothing else. Threads could not give that: nothing can stop them. A process may also be ended
from outside, as by the kernel when memory is short: its call is made once more, so that rewards do not depend on that.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass
from pickle import PicklingError
from typing import Any

from generation.trajectory import Trajectory, checked_reward
from trainer.config import RewardConfig
from trainer.rewards.loading import bind_rewards
from trainer.rewards.worker import Reply, StartError, Worker


class RewardError(RuntimeError):
    """Too many calls of a reward function failed."""


@dataclass
class RewardResult:
    """One answer's reward.

    Attributes:
        reward: the weighted sum; `reward.error_reward` where a function has failed.
        parts: each function's own value.
        error: what went wrong, if anything did.
        unusable: what a function returned, or the sum, cannot be a reward: nothing can be learned from the answer.
    """

    reward: float
    parts: dict[str, float]
    error: str = ""
    unusable: bool = False


class RewardPool:
    """Scores answers with the recipe's reward functions. A context manager; leaving it leaves no process.

    The functions are loaded and checked here first, so that a wrong name is an error before a model loads. All answers
    are scored on one event loop. Enter the pool on a thread that outlives it: workers die with the thread that started
    them.
    """

    def __init__(self, config: RewardConfig) -> None:
        """Load and check the functions. Raises UserError naming the one that does not fit."""
        self._config = config
        self._specs = [(function.name, function.kwargs) for function in config.functions]
        bound = bind_rewards(self._specs)
        self.labels = [reward.label for reward in bound]
        self._text_votes = not bound or bound[0].extract is str.strip
        self._asked_for = frozenset[str]().union(*(reward.keywords for reward in bound))
        weights = [function.weight for function in config.functions]
        self.weights = dict(zip(self.labels, weights, strict=True))
        self._counts: Counter[str] = Counter()
        self._first_errors: dict[str, str] = {}
        self._workers: list[Worker] = []
        self._idle: asyncio.Queue[Worker] = asyncio.Queue()

    def __enter__(self) -> "RewardPool":
        """Start the workers, which import the functions while the caller goes on."""
        for _ in range(self._config.workers):
            self._add_worker()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the workers, whatever they are doing."""
        while self._workers:
            self._workers.pop().kill()

    async def score(
        self,
        *,
        prompt: str,
        completion: str,
        row: dict[str, Any],
        finish_reason: str,
        trajectory: Trajectory | None = None,
    ) -> RewardResult:
        """Score one answer. Never raises because of a reward function: its failure is in the result and is counted.

        `row` is the dataset's row; `row["answer"]` is what functions see as `answer`. The trajectory, turns and tool
        replies included, travels to the processes only if a function asks for it.
        """
        offered = {"prompt": prompt, "row": row, "answer": row.get("answer"), "finish_reason": finish_reason}
        offered["trajectory"] = trajectory if "trajectory" in self._asked_for else None
        replies = await asyncio.gather(*(self._call(index, completion, offered) for index in range(len(self.labels))))
        outcomes = dict(zip(self.labels, replies, strict=True))
        errors = {label: reply.error for label, reply in outcomes.items() if reply.error}
        self._count(errors)
        parts = {label: reply.value for label, reply in outcomes.items() if not reply.error}
        if errors:
            message = "; ".join(f"{label} {error}" for label, error in errors.items())
            unusable = any(outcomes[label].returned for label in errors)
            return RewardResult(self._config.error_reward, parts, message, unusable)
        try:
            weighted = [
                checked_reward(w * parts[label], f"{label} times its weight is") for label, w in self.weights.items()
            ]
            return RewardResult(checked_reward(sum(weighted), "the sum of all is"), parts)
        except ValueError as error:
            return RewardResult(self._config.error_reward, parts, str(error), unusable=True)

    async def extract(self, completion: str) -> str | None:
        """What the first function takes for the answer in a completion, to be voted on; None: nothing, or it failed.

        Where that is the text, white space around it left out, no process is asked.
        """
        if self._text_votes:
            return completion.strip()
        reply = await self._call(0, completion, None)
        if reply.error:
            self._count({self.labels[0]: f"{reply.error} while extracting the answer"})
        return None if reply.error else reply.value

    def take_counts(self) -> dict[str, float]:
        """Calls and errors since the last time, under the same keys on every rank: they can be summed over ranks."""
        keys = ["reward/calls", *(f"reward/errors/{label}" for label in self.labels)]
        counts = {key: float(self._counts[key]) for key in keys}
        self._counts.clear()
        return counts

    def check_error_rate(self, counts: dict[str, float]) -> None:
        """Raise RewardError when a function failed in more than `max_error_rate` of the calls that `counts` tells of.

        Args:
            counts: what `take_counts` gave, summed over ranks.
        """
        for label in self.labels:
            calls, errors = counts["reward/calls"], counts[f"reward/errors/{label}"]
            if errors > self._config.max_error_rate * calls:
                raise RewardError(
                    f"reward {label!r} failed in {errors:.0f} of {calls:.0f} calls ({errors / calls:.0%}), more than "
                    f"reward.max_error_rate={self._config.max_error_rate:g} allows; first error: it "
                    f"{self._first_errors.get(label, 'failed on another rank')}"
                )

    def _count(self, errors: dict[str, str]) -> None:
        self._counts["reward/calls"] += 1
        for label, error in errors.items():
            self._counts[f"reward/errors/{label}"] += 1
            self._first_errors.setdefault(label, error)

    async def _call(self, index: int, completion: str, offered: dict[str, Any] | None) -> Reply:
        """Call one function, or extract; once more, in a fresh process, where the first ended before it answered."""
        asked = 0
        while True:
            asked += 1
            worker = await self._next_worker()
            answered = False
            try:
                reply = await worker.ask(index, completion, offered, self._config.timeout_s)
                answered = True
                return reply
            except TimeoutError:
                return Reply(0.0, f"took longer than reward.timeout_s={self._config.timeout_s:g}")
            except StartError as error:
                return Reply(0.0, str(error))
            except (EOFError, OSError):
                code = worker.kill()
                if asked == 2:
                    return Reply(0.0, f"ended its process with exit code {code}, as when it was asked before")
            except (PicklingError, TypeError, AttributeError, ValueError) as error:
                return Reply(0.0, f"cannot be given this row: {type(error).__name__}: {error}")
            finally:
                if answered:
                    self._idle.put_nowait(worker)
                else:
                    self._replace(worker)

    async def _next_worker(self) -> Worker:
        """The next that is free and alive."""
        while self._workers:
            worker = await self._idle.get()
            if not worker.dead():
                return worker
            self._replace(worker)
        raise RuntimeError("this reward pool is not open: use it in a with statement")

    def _replace(self, worker: Worker) -> None:
        worker.kill()
        if worker in self._workers:  # else the pool has been closed meanwhile
            self._workers.remove(worker)
            self._add_worker()

    def _add_worker(self) -> None:
        worker = Worker(self._specs)
        self._workers.append(worker)
        self._idle.put_nowait(worker)
