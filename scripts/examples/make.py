"""Make the tiny model and the data of an example task, in runs/TASK_start.

python -m scripts.examples.make arithmetic|calculator|chain_sums|shapes
"""

import argparse
import os
from importlib import import_module
from pathlib import Path

TASKS = ("arithmetic", "calculator", "chain_sums", "shapes")


def main() -> None:
    """Parse the command line, and make the files of the task."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=TASKS)
    task = parser.parse_args().task
    # Otherwise DeepSpeed, which is imported, warns that there is no GPU
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    module = import_module(f"scripts.examples.tasks.{task}")
    from transformers.utils import logging  # after `shapes`, which makes torchvision importable

    logging.disable_progress_bar()
    module.make(Path("runs") / f"{task}_start")


if __name__ == "__main__":
    main()
