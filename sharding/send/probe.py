"""A check of weights that cannot be read back: policy and engine score the same random tokens."""

import math
import random

from generation.engine.engine import Leader
from generation.engine.sampling import NotFiniteError
from generation.engine.settings import LEAST_MODEL_LEN
from sharding.report import AdapterFormat
from sharding.tenants import VersionedPolicy
from sharding.wire.channel import SyncError
from sharding.wire.manifest import SourceParameter

PROBE_TOKENS = LEAST_MODEL_LEN - 1
PROBE_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5}
"""Largest mean gap (nats) of the log-probability probe; a stale or misplaced weight is off by more than 1. A mixture in
bfloat16 sends some tokens to other experts than a trainer in float32: a tiny one was 0.23 off after 29 steps."""

Probe = tuple[list[int], list[float]]
"""Token ids, and the policy's log-probability (nats) of each except the first."""


def vocabulary_of(parameters: list[SourceParameter], adapter: AdapterFormat | None) -> int:
    """Return the number of tokens that the model knows, from its weights or from its adapter's format."""
    if adapter is not None:
        return adapter.vocabulary
    embedding = next((p for p in parameters if "embed" in p.name), parameters[0])
    return embedding.pieces[0].shape[0]


def draw_probe(policy: VersionedPolicy, vocabulary: int) -> Probe:
    """Draw random tokens and have the policy score them. Collective. Raises NotFiniteError, on all ranks alike."""
    token_ids = random.Random(policy.version).choices(range(vocabulary), k=PROBE_TOKENS)
    expected = policy.score_tokens(token_ids)
    if bad := [logprob for logprob in expected if not math.isfinite(logprob)]:
        raise NotFiniteError(f"the policy gives random tokens a log-probability of {bad[0]}")
    return token_ids, expected


def check_probe(leader: Leader, probe: Probe, timeout: float) -> None:
    """Score a probe with the engine, for at most `timeout` seconds, and compare with the policy's
    scores.

    Raises SyncError, and leaves the engine without a version, if their mean gap exceeds `PROBE_TOLERANCE`.
    """
    token_ids, expected = probe
    scored = leader.thread.run(leader.engine.prompt_logprobs_of_all(token_ids), timeout, "the log-probability probe")
    gap = max(sum(abs(a - b) for a, b in zip(expected, logprobs, strict=True)) / len(logprobs) for logprobs in scored)
    bound = PROBE_TOLERANCE[leader.engine.settings.dtype]
    if not gap <= bound:
        leader.engine.state.fail_sync()
        raise SyncError(
            f"after the update the engine's log-probabilities are {gap:.3g} nats off the trainer's on average, "
            f"more than {bound:g}: its weights are not the policy's"
        )
