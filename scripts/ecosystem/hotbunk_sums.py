"""A taskset of verifiers 0.4, as its own documentation has them: sums, with a reward, a metric and no tools."""

import verifiers.v1 as vf


class SumsData(vf.TaskData):
    answer: str


class SumsTask(vf.Task[SumsData]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        """The sum is in the last reply."""
        return float(self.data.answer in trace.last_reply)

    @vf.reward
    async def even(self, trace: vf.Trace) -> float:
        """The reply's length is even: something that a random model earns at times."""
        return float(len(trace.last_reply) % 2 == 0)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        """The reply's."""
        return float(len(trace.last_reply))


class SumsConfig(vf.TasksetConfig):
    size: int = 4


class SumsTaskset(vf.Taskset[SumsTask, SumsConfig]):
    def load(self) -> list[SumsTask]:
        """So many sums."""
        numbers = range(self.config.size)
        return [SumsTask(SumsData(prompt=f"What is {n}+3?", answer=str(n + 3)), self.config.task) for n in numbers]


__all__ = ["SumsTaskset"]
