"""The command `hotbunk sft`, which warm-starts a model on the answers in the data
(`trainer.sft`).
"""

from contextlib import ExitStack

from trainer.build import joined
from trainer.config.schema import TrainConfig
from trainer.run.lock import RunLock
from trainer.sft import SftRun


def main(config: TrainConfig, lock: RunLock | None = None) -> None:
    """Train `model.path` for `sft.steps` steps and write it to the run's folder, whose lock rank 0
    has taken.
    """
    config = config.model_copy(update={"run": config.run.model_copy(update={"steps": config.sft.steps})})
    with joined(config, lock) as watchdog, ExitStack() as resources:
        with watchdog.phase("start-up", config.run.first_step_deadline_s):
            training = SftRun(config, watchdog, resources)
        training.train()
