"""The files and keys by which a run finds a checkpoint, and by which it is compared with one,
without torch.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from trainer.config.schema import CheckpointConfig

COMPLETE_MARKER = "COMPLETE"
"""The file that makes a checkpoint folder a checkpoint."""

IDENTITY_DIGESTS = ("data", "model", "tokenizer")
IDENTITY_SECTIONS = ("algorithm",)
IDENTITY_KEYS = (
    "batch.prompts_per_step",
    "batch.updates_per_step",
    "lora.alpha",
    "lora.dropout",
    "lora.rank",
    "lora.start",
    "lora.target_modules",
    "lora.use_rslora",
    "policy.optimizer",
    "reward.functions",
    "rollout.ahead",
    "rollout.lag",
    "rollout.old_tokens",
    "rollout.slice_tokens",
    "run.seed",
    "sampling.stop_token_ids",
)
"""Digests, sections and keys of the recipe by which a resumed run is compared with its checkpoint
(`run.keeper`).
"""


def check_resume(checkpoint: CheckpointConfig) -> Iterator[str]:
    """Yield a sentence for a checkpoint that is none, and for each key that may differ but is not
    compared.
    """
    resume = checkpoint.resume
    if resume not in ("auto", "none") and not os.path.isfile(Path(resume) / COMPLETE_MARKER):
        yield (
            f"checkpoint.resume: {resume} is not a complete checkpoint (a step_N folder that holds "
            f"{COMPLETE_MARKER})"
        )
    sections = {key.partition(".")[0] for key in IDENTITY_KEYS}
    compared = [*IDENTITY_DIGESTS, *IDENTITY_SECTIONS, *IDENTITY_KEYS, *sorted(sections)]
    for name in checkpoint.resume_anyway:
        if name not in compared and name.partition(".")[0] not in IDENTITY_SECTIONS:
            yield (
                f"checkpoint.resume_anyway: a run is not compared by {name!r}, but by "
                f"{', '.join(compared)}"
            )
