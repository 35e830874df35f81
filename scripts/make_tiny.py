#!/usr/bin/env python3
"""Make a tiny, randomly initialised model with tokenizer and chat template, without a network.

    python scripts/make_tiny.py FOLDER [--architecture qwen2|qwen3|llama|gemma3|qwen3_moe|deepseek_v2|lfm2] ...

`trainer/commands/tiny_model.py` defines the model.
"""

import argparse
import os
from pathlib import Path

from transformers.utils import logging as transformers_logging

from trainer.commands.tiny_model import ARCHITECTURES, make_tiny_model


def main() -> None:
    """Parse the command line, and write the model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--architecture", choices=ARCHITECTURES, default="qwen2")
    parser.add_argument(
        "--tied", action="store_true", default=True, help="share input and output embeddings (default)"
    )
    parser.add_argument("--untied", dest="tied", action="store_false")
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--intermediate-size", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--experts", type=int, default=4, help="experts of qwen3_moe and deepseek_v2")
    parser.add_argument("--vocab-size", type=int, default=288)
    parser.add_argument("--seed", type=int, default=0)
    options = vars(parser.parse_args())
    # Otherwise DeepSpeed, which is imported, warns that there is no GPU
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    transformers_logging.disable_progress_bar()
    make_tiny_model(options.pop("folder"), **options)


if __name__ == "__main__":
    main()
