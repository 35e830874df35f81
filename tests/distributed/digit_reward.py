"""The reward function of the runs in `real_run`, which reward processes load by its path."""


def many_digits(completion: str) -> float:
    """A reward that differs within almost every group of an untrained model."""
    return sum(ord(character) % 7 for character in completion) / 10
