"""The command `hotbunk`, also `python -m hotbunk`."""

import os
import sys

from trainer.commands.launch import launch
from trainer.errors import UserError


def main() -> int:
    """Runs the command that this process's arguments name, and returns the exit code. `train` and `sft` start ranks."""
    words = sys.argv[1:]
    # A process that torchrun or accelerate has started is a rank already.
    if words[:1] in (["train"], ["sft"]) and "TORCHELASTIC_RUN_ID" not in os.environ:
        try:
            launch(words)
        except UserError as error:
            print(f"hotbunk: {error}", file=sys.stderr)
            return 2
    from trainer import cli  # takes half a second, which the launcher would pay again

    return cli.main(words)


if __name__ == "__main__":
    sys.exit(main())
