"""A reward that tells the answers of a group apart, whatever they are, so that each step has something to learn."""

import random


def anything(completion: str) -> float:
    """From 0 to 1."""
    return random.random()
