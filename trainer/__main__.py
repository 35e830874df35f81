"""`python -m trainer`, so that `torchrun … -m trainer train RECIPE` works."""

import sys

from trainer.cli import main

if __name__ == "__main__":  # reward workers and engines import this module again
    sys.exit(main())
