"""Patches turn a bucket's former content into the new one, in as many bytes as a loop counts, and survive damage."""

import pytest
import torch

from sharding.wire.patches import apply_patch, patch_between


@pytest.mark.parametrize(("words", "changed"), [(7, 1), (65536, 1), (65537, 3), (200_000, 2000)])
def test_a_patch_has_the_changed_words_alone(words: int, changed: int) -> None:
    random = torch.Generator().manual_seed(words)
    before = torch.randint(0, 256, (2 * words,), dtype=torch.uint8, generator=random)
    after = before.clone()
    places = torch.randperm(words, generator=random)[:changed]
    after.view(torch.int16)[places] += 1
    after.view(torch.int16)[-1] += 1  # twice if it was drawn
    patch = patch_between(before, after)
    different = sum(
        a != b for a, b in zip(before.view(torch.int16).tolist(), after.view(torch.int16).tolist(), strict=True)
    )
    blocks = (words + 65535) // 65536
    if 4 * blocks + 4 * different + 8 > 2 * words:
        assert patch is None
        return
    assert patch is not None and patch.nbytes == -(-(4 * blocks + 4 * different) // 8) * 8
    apply_patch(patch, before)
    assert torch.equal(before, after)


def test_a_bucket_that_has_changed_too_much_has_no_patch() -> None:
    before = torch.zeros(1024, dtype=torch.uint8)
    after = before.clone()
    after[:512] = 1
    assert patch_between(before, after) is None
    after[400:512] = 0
    assert patch_between(before, after) is not None
    assert patch_between(before, before) is not None


def test_a_damaged_patch_stays_in_its_bucket() -> None:
    before, after = torch.zeros(300_000, dtype=torch.uint8), torch.zeros(300_000, dtype=torch.uint8)
    after[::1000] = 1
    patch = patch_between(before, after)
    assert patch is not None
    random = torch.Generator().manual_seed(0)
    for _ in range(50):
        damaged, bucket = patch.clone(), before.clone()
        damaged[int(torch.randint(len(patch), (1,), generator=random))] ^= 255
        apply_patch(damaged, bucket)
        apply_patch(torch.randint(0, 256, (len(patch),), dtype=torch.uint8, generator=random), bucket)
