"""A random reward, which differs among the answers of a group, so that each step has something to learn."""

import random


def anything(completion: str) -> float:
    """Return a random number from 0 to 1."""
    return random.random()
