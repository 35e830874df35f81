"""Reward functions of the runs in `real_run`; reward processes load this file by its path."""

import os
import subprocess


def many_digits(completion: str) -> float:
    """Return a reward that differs within almost every group of an untrained model."""
    return sum(ord(character) % 7 for character in completion) / 10


class LeavesProcesses:
    """Rewards as `many_digits` does, and once in each process starts another that only its name links to the run."""

    def __init__(self) -> None:
        self._left = False

    def __call__(self, completion: str) -> float:
        if not self._left:
            self._left = True
            # Sleep takes it for part of a second
            name = "0." + str(int(os.environ["HOTBUNK_TEST_RUN"], 16))
            subprocess.Popen(["sleep", "10000", name], env={}, start_new_session=True)
        return many_digits(completion)
