"""Patches modules of a run as they are loaded, when this folder is on PYTHONPATH. Environment variables choose what:

HOTBUNK_TEST_PHASES=FOLDER        each rank writes its current phase to FOLDER/RANK, where a test reads it
HOTBUNK_TEST_IMPORTS=FILE         each process appends to FILE the modules for images that it imports
HOTBUNK_TEST_STALE=VERSION:TOKEN  with weights of that version, engines keep the token's embedding of the previous one
"""

import os
import re
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


def announce_phases(module: ModuleType) -> None:
    """Have each rank write its phase whenever it changes."""
    enter = module.Watchdog._arm

    def announce(watchdog):
        enter(watchdog)
        file = os.path.join(os.environ["HOTBUNK_TEST_PHASES"], os.environ["RANK"])
        with open(f"{file}.new", "w") as new:
            new.write(watchdog.current_phase())
        os.replace(f"{file}.new", file)

    module.Watchdog._arm = announce


def keep_a_row(module: ModuleType) -> None:
    """Have workers restore the previous version's embedding of one token, after everything has been verified."""
    receive, before = module.VllmInternalWorkerExtension._hotbunk_receive, []
    version, row = map(int, os.environ["HOTBUNK_TEST_STALE"].split(":"))

    def receive_all_but_a_row(worker, carrier):
        outcome, weight = receive(worker, carrier), worker.get_model().model.embed_tokens.weight.data
        if outcome["version"] == version:
            weight[row] = before[0]
        before[:] = [weight[row].clone()]
        return outcome

    module.VllmInternalWorkerExtension._hotbunk_receive = receive_all_but_a_row


CHANGES = {
    "trainer.run.watchdog": ("HOTBUNK_TEST_PHASES", announce_phases),
    "sharding.worker.extension": ("HOTBUNK_TEST_STALE", keep_a_row),
}


def asked_for(name: str) -> Callable[[ModuleType], None] | None:
    """Return the patch for a module, or None if this process is not to apply one."""
    asked, change = CHANGES.get(name, ("", None))
    return (
        None
        if asked not in os.environ or (change is announce_phases and "RANK" not in os.environ)
        else change
    )


def change_what_is_loaded() -> None:
    """Patches the modules that a forked rank has inherited already loaded."""
    for name in CHANGES:
        if change := asked_for(name):
            change(import_module(name))


OF_IMAGES = re.compile(
    r"trainer\.policy\.vision|transformers\.models\.(?!auto)\w+\.(image_)?processing_\w+"
)


class _Changer:
    """Finds the modules of CHANGES in their usual place, and patches each once it is loaded."""

    def find_spec(
        self, name: str, path: list[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if OF_IMAGES.fullmatch(name) and (noted := os.environ.get("HOTBUNK_TEST_IMPORTS")):
            with open(noted, "a") as file:
                file.write(f"{name}\n")
        change = asked_for(name)
        if change is None:
            return None
        spec = PathFinder.find_spec(name, path, target)
        assert spec is not None and spec.loader is not None
        load = spec.loader.exec_module

        def load_and_change(module: ModuleType) -> None:
            load(module)
            change(module)

        spec.loader.exec_module = load_and_change  # type: ignore[method-assign]
        return spec


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, _Changer())  # type: ignore[arg-type]
