"""Engines in tests are forked from this process (2 s instead of 12), and compile nothing."""

import os

os.environ.setdefault("HOTBUNK_FORK_ENGINE", "1")
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
