"""On PYTHONPATH, it changes modules of a run once they are loaded, as variables of the environment ask:

HOTBUNK_TEST_PHASES=FOLDER        each rank writes the phase it is in to FOLDER/RANK, where a test sees it
HOTBUNK_TEST_IMPORTS=FILE         each process notes in FILE the modules it imports to see images
HOTBUNK_TEST_STALE=VERSION:TOKEN  with weights of that version, engines keep the token's embedding of the one before
"""

import os
import re
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


def announce_phases(module: ModuleType) -> None:
    enter = module.Watchdog._arm

    def announce(watchdog):
        enter(watchdog)
        file = os.path.join(os.environ["HOTBUNK_TEST_PHASES"], os.environ["RANK"])
        with open(f"{file}.new", "w") as new:
            new.write(watchdog.current_phase())
        os.replace(f"{file}.new", file)

    module.Watchdog._arm = announce


def keep_a_row(module: ModuleType) -> None:
    """After everything has been verified."""
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
    """The change of a module, if there is to be one in this process."""
    asked, change = CHANGES.get(name, ("", None))
    return None if asked not in os.environ or (change is announce_phases and "RANK" not in os.environ) else change


def change_what_is_loaded() -> None:
    """In a rank that was forked."""
    for name in CHANGES:
        if change := asked_for(name):
            change(import_module(name))


OF_IMAGES = re.compile(
    r"torchvision|trainer\.policy\.vision|transformers\.models\.(?!auto)\w+\.(image_)?processing_\w+"
)


class _Changer:
    """Finds those modules where they are, and has them changed once they are loaded."""

    def find_spec(self, name: str, path: list[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
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
