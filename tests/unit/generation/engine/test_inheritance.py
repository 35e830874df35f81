"""What a forked engine inherits, it never collects. In a process of its own, whose forks have no neighbours' memory."""

import subprocess
import sys

import pytest

from tests.conftest import ROOT

PARENT = """
import gc, os, sys
from contextlib import nullcontext
from generation.engine.vllm_compat import inheritance_untouched

class Told:
    def __init__(self, name):
        self.name, self.itself = name, self  # a cycle: only the collector can end it

    def __del__(self):
        who = "parent" if os.getpid() == parent else "child"
        os.write(1, f"{who} ends what was {self.name}\\n".encode())

parent = os.getpid()
gc.disable()  # nothing is collected but where it is asked for
Told("garbage")
used = Told("in use")
with inheritance_untouched() if sys.argv[1] == "untouched" else nullcontext():
    if os.fork() == 0:
        del used
        gc.collect()
        Told("the child's own")
        gc.collect()
        os._exit(0)
    os.wait()
del used
gc.collect()
os.write(1, f"{gc.get_freeze_count()} frozen\\n".encode())
os._exit(0)
"""


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("untouched", ["parent garbage", "child the child's own", "parent in use"]),
        ("touched", ["child garbage", "child in use", "child the child's own", "parent garbage", "parent in use"]),
    ],
)
def test_a_forked_child_collects_only_what_is_its_own(how: str, told: list[str]) -> None:
    """And the parent goes on as before. Without the guard the child ends what it does not own."""
    done = subprocess.run([sys.executable, "-c", PARENT, how], cwd=ROOT, capture_output=True, text=True, check=True)
    *ends, frozen = done.stdout.splitlines()
    assert sorted(line.replace(" ends what was", "") for line in ends) == sorted(told)
    assert frozen == "0 frozen"
