"""A report tells a run's notes what is new since the one before."""

from sharding.report import SyncReport

PATCHES = "50 % of the bytes cannot be patched, since engines re-process b"


def test_a_fact_is_noted_once_and_again_when_it_changes() -> None:
    first = SyncReport(1, left_out=["vision.last"], unpatched=PATCHES)
    left_out = "vLLM leaves out 1 weight of this model: vision.last"
    assert [*first.notes(previous=SyncReport(-1))] == [PATCHES, left_out]
    assert [*SyncReport(2, left_out=["vision.last"], unpatched=PATCHES).notes(previous=first)] == []
    assert [*SyncReport(2, left_out=["vision.last"]).notes(previous=first)] == [], "nothing was patched"
    changed = SyncReport(2, left_out=["a", "b"], unpatched="30 % " + PATCHES[5:])
    assert [*changed.notes(previous=first)] == [
        changed.unpatched,
        "vLLM leaves out 2 weights of this model: a, b",
    ]


def test_each_update_that_sent_everything_anew_is_noted() -> None:
    report = SyncReport(3, nbytes=900, spared=800, resent="the update before broke off")
    assert [*report.notes(previous=report)] == [
        "all weights were sent, since the update before broke off"
    ]
    assert report.sent_bytes == 100
