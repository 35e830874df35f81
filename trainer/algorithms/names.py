"""The names by which a recipe chooses among the functions here; no torch, so that reading a recipe stays quick."""

from typing import Literal

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "fixed_length"]
Level = Literal["token", "geometric", "sequence"]
Estimator = Literal["k1", "k2", "k3", "unbiased_k3"]
AtBound = Literal["fewer", "fill"]
