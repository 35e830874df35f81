"""A whole run of a model that sees, in slices and with pass@k: killed in the middle, beside one that was not.

tests/distributed/killed_run.py --images does more of it.
"""

import signal
from pathlib import Path

import pytest

from tests.distributed.killed_run import Disturbance, disturbed, unequal
from tests.distributed.real_run import Run, seeing_sections, write_recipe


@pytest.mark.timeout(1500)
@pytest.mark.covers("P19")
def test_a_run_with_images_that_is_killed_ends_as_one_that_was_not(tmp_path: Path) -> None:
    """Bit for bit: rows of 0, 1 and 2 images, answers that are carried from step to step, evaluation with k of two."""
    model, sections = seeing_sections(tmp_path)
    recipe = write_recipe(
        tmp_path,
        model,
        **sections,
        run={"steps": 4},
        checkpoint={"every": 1},
        eval={"every": 2, "samples": 2, "temperature": 1.0, "k": [1, 2]},
        sampling={"max_tokens": 9},
        rollout={"slice_tokens": 3, "ahead": 1.0},
    )
    noted = tmp_path / "imports"
    straight = Run(recipe, ranks=1, name="straight", imports=noted)
    assert straight.wait() == 0, straight.output()
    straight.assert_gone()
    assert {"torchvision", "trainer.policy.vision"} <= set(noted.read_text().split())
    rows = straight.rows()
    assert max(row["gap/max"] for row in rows[1:]) <= 1e-4
    assert any(row.get("carry/answers") for row in rows) and all("eval/pass@2" in rows[step] for step in (0, 2, 4))
    broken = disturbed(recipe, [Disturbance("rollout", "rank", signal.SIGKILL, 2, 0.05)], ranks=1, seed=0)
    assert broken.failures == [] and unequal(straight, broken.run) == []
