"""Send a run's metrics to trackers other than Weights & Biases (`tracking.also`), through their own
libraries.

In all of them a resumed run continues, with each step once: TensorBoard gets the step from which
earlier events are void, and the others are asked for the last step that they have.
"""

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.run.records import Rows, write_whole

# MLflow's limits: characters of a value, and values in a request
_PARAM_LIMIT = 6000
_PARAMS_AT_A_TIME = 100


@dataclass(frozen=True)
class TrackedRun:
    """A run, as it is shown to a tracker.

    Attributes:
        folder: the run's.
        config: the resolved configuration, by section and key.
        earlier: the rows of a resumed run's earlier steps.
        name, project: the names of the run, and of the group of runs that it belongs to.
        continues: the tracker has the run already, from an earlier session.
    """

    folder: Path
    config: dict[str, Any]
    earlier: Rows
    name: str
    project: str
    continues: bool


class OtherTracker:
    """An open run in one tracker. `last` is the last step that the tracker has."""

    last = -1

    def log(self, row: dict[str, float | None]) -> None:
        """Send a step's metrics, including train/step, unless the tracker has the step. None is a
        non-finite value.
        """
        if (step := int(row["train/step"] or 0)) > self.last:
            self.send(step, {key: value for key, value in row.items() if value is not None})
            self.last = step

    def send(self, step: int, metrics: dict[str, float]) -> None:
        """Send a step's finite metrics, including train/step."""
        raise NotImplementedError

    def close(self) -> None:
        """Finish the tracker's run, with everything sent."""
        raise NotImplementedError


class TensorBoard(OtherTracker):
    """Writes event files to the run's folder `tensorboard`; `tensorboard --logdir runs` shows all
    runs.
    """

    def __init__(self, run: TrackedRun) -> None:
        """Open the event files. Those of an earlier session are continued."""
        from torch.utils.tensorboard import SummaryWriter

        log_folder = run.folder / "tensorboard"
        if run.earlier and any(log_folder.glob("events.*")):
            self.last = run.earlier[-1]["train/step"]
        self._writer: Any = SummaryWriter(str(log_folder), purge_step=self.last + 1)

    def send(self, step: int, metrics: dict[str, float]) -> None:
        """Write a step's metrics as scalars."""
        for key, value in metrics.items():
            if key != "train/step":
                self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event files."""
        self._writer.close()


class MLflow(OtherTracker):
    """Logs to a run at MLFLOW_TRACKING_URI, by default the database `mlflow.db` in the run's
    folder.
    """

    def __init__(self, run: TrackedRun) -> None:
        """Create the run, or continue the one whose id is in the file `mlflow_id`."""
        from mlflow import MlflowClient
        from mlflow.entities import Param

        # An absolute path, since a relative one would be valid in one folder only.
        database = f"sqlite:///{run.folder.resolve() / 'mlflow.db'}"
        self._client: Any = MlflowClient(tracking_uri=os.environ.get("MLFLOW_TRACKING_URI") or database)
        file = run.folder / "mlflow_id"
        if run.continues and file.is_file() and re.fullmatch("[0-9a-f]{32}", file.read_text("utf-8")):
            self._id = file.read_text("utf-8")
            self._client.update_run(self._id, status="RUNNING")
            history = self._client.get_metric_history(self._id, "train/step")
            self.last = max((metric.step for metric in history), default=-1)
        else:
            experiment = self._client.get_experiment_by_name(run.project)
            experiment_id = (
                experiment.experiment_id if experiment else self._client.create_experiment(run.project)
            )
            self._id = self._client.create_run(experiment_id, run_name=run.name).info.run_id
            params = []
            for section, values in run.config.items():
                for key, value in values.items():
                    params.append(Param(f"{section}.{key}", str(value)[:_PARAM_LIMIT]))
            for start in range(0, len(params), _PARAMS_AT_A_TIME):
                self._client.log_batch(self._id, params=params[start : start + _PARAMS_AT_A_TIME])
            write_whole(file, self._id)

    def send(self, step: int, metrics: dict[str, float]) -> None:
        """Log a step's metrics in one request."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        # MLflow takes no other characters
        names = {key: re.sub(r"[^\w\-. /:]", "_", key) for key in metrics}
        entries = [Metric(names[key], value, now, step) for key, value in metrics.items()]
        self._client.log_batch(self._id, metrics=entries)

    def close(self) -> None:
        """Mark the run as terminated."""
        self._client.set_terminated(self._id)


class Trackio(OtherTracker):
    """Logs to trackio's store on this machine, or to the one that TRACKIO_SERVER_URL or
    TRACKIO_SPACE_ID names.
    """

    def __init__(self, run: TrackedRun) -> None:
        """Open the run in trackio's store."""
        import trackio

        figures_alone = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        resume = "allow" if run.continues else "never"
        self._run: Any = trackio.init(
            run.project, name=run.name, config=run.config, resume=resume, **figures_alone
        )
        self.last = self._run._next_step - 1  # the last step that the store has (trackio/run.py, 0.43)

    def send(self, step: int, metrics: dict[str, float]) -> None:
        """Log a step's metrics."""
        self._run.log({key: value for key, value in metrics.items() if key != "train/step"}, step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


OTHER_TRACKERS: dict[str, Callable[[TrackedRun], OtherTracker]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "trackio": Trackio,
}
"""Trackers by name in tracking.also."""
