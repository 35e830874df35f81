"""The command `hotbunk`, also `python -m hotbunk`."""

import os
import sys

import hotbunk

# Commands whose imports take seconds
_SLOW = ("train", "sft", "eval", "generate", "serve", "doctor", "plan")


def main() -> int:
    """Run the command that this process's arguments name, and return the exit code. `train` and
    `sft` start ranks.
    """
    words = sys.argv[1:]
    if words == ["--version"]:
        print(f"hotbunk {hotbunk.__version__}")
        return 0
    is_rank = "TORCHELASTIC_RUN_ID" in os.environ  # torchrun or accelerate has started this process
    if words and words[0] in _SLOW and not is_rank and sys.stderr.isatty():
        print(f"· hotbunk {hotbunk.__version__}: loading", file=sys.stderr, flush=True)  # before imports
    from trainer.commands.launch import launch
    from trainer.errors import UserError

    if words[:1] in (["train"], ["sft"]) and not is_rank:
        try:
            launch(words)
        except UserError as error:
            print(f"hotbunk: {error}", file=sys.stderr)
            return 2
    from trainer import cli  # takes half a second, which the launcher would pay again

    return cli.main(words)


if __name__ == "__main__":
    sys.exit(main())
