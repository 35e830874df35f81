"""A taskset of verifiers 0.4, written as in its documentation: sums, with two rewards, a metric and no tools."""

import verifiers.v1 as vf


class SumsData(vf.TaskData):
    """The data of a task: its prompt and the sum."""

    answer: str


class SumsTask(vf.Task[SumsData]):
    """A sum, with its rewards and its metric."""

    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        """Return 1 if the sum is in the last reply."""
        return float(self.data.answer in trace.last_reply)

    @vf.reward
    async def even(self, trace: vf.Trace) -> float:
        """Return 1 if the length of the reply is even, which a random model gets at times."""
        return float(len(trace.last_reply) % 2 == 0)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        """Return the length of the reply in characters."""
        return float(len(trace.last_reply))


class SumsConfig(vf.TasksetConfig):
    """The configuration of the taskset: its number of sums."""

    size: int = 4


class SumsTaskset(vf.Taskset[SumsTask, SumsConfig]):
    """The taskset that verifiers loads by the name of this file."""

    def load(self) -> list[SumsTask]:
        """Return `size` sums."""
        numbers = range(self.config.size)
        return [
            SumsTask(SumsData(prompt=f"What is {n}+3?", answer=str(n + 3)), self.config.task)
            for n in numbers
        ]


__all__ = ["SumsTaskset"]
