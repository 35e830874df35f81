"""The entry point of `python -m trainer`, so that `torchrun … -m trainer train RECIPE` works."""

import sys

from trainer.run import processes

if __name__ == "__main__":  # reward workers and engines import this module again
    processes.put_current_folder_last()
    from trainer.cli import main

    sys.exit(main())
