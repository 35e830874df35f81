"""Patches turn a bucket's former content into the new one, in as many bytes as a loop counts, and survive damage."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sharding.transports import delta
from sharding.transports.delta import LastSent
from sharding.wire import patches
from sharding.wire.manifest import Piece, SourceParameter
from sharding.wire.patches import apply_patch, patch_between


class Temporaries(TorchDispatchMode):
    """Keeps the memory of all tensors that operators return, by its address, so that none is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: dict[int, Any] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        result = function(*arguments, **(keywords or {}))
        if isinstance(result, Tensor):
            self.memory[result.untyped_storage().data_ptr()] = result.untyped_storage()
        return result

    def largest_besides(self, *tensors: Tensor) -> int:
        """Return the bytes of the largest that none of these tensors lies in."""
        addresses = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        return max(
            (m.nbytes() for address, m in self.memory.items() if address not in addresses), default=0
        )


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
        a != b
        for a, b in zip(before.view(torch.int16).tolist(), after.view(torch.int16).tolist(), strict=True)
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


@pytest.mark.parametrize("share", [3, 300])
def test_temporaries_are_a_slices_and_the_patch_is_that_of_one_piece(
    share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, words = torch.zeros(2 * 700_000, dtype=torch.uint8), torch.arange(700_000)
    after = (words * (words % share == 0)).to(torch.int16).view(torch.uint8)
    changed = after.view(torch.int16).nonzero().flatten()
    counts = [
        int(((changed >= first) & (changed < first + 65536)).sum()) for first in range(0, 700_000, 65536)
    ]
    expected = [
        torch.tensor(counts, dtype=torch.int32),
        (changed % 65536).to(torch.int16),
        changed.to(torch.int16),
    ]
    monkeypatch.setattr(patches, "_SLICE_BLOCKS", 2)
    with Temporaries() as made:
        patch = patch_between(before, after)
    assert patch is not None
    assert torch.equal(
        patch[: 44 + 4 * len(changed)], torch.cat([part.view(torch.uint8) for part in expected])
    )
    assert made.largest_besides(before, after, patch) <= 8 * 2 * 65536
    with Temporaries() as made:
        apply_patch(patch, before)
    assert torch.equal(before, after) and made.largest_besides(before, patch) <= 8 * 2 * 65536


def test_a_bucket_of_which_nothing_is_known_is_neither_copied_nor_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent = LastSent()
    weight = SourceParameter("a", 2000, (Piece("a", "bfloat16", (1000,), 0),), 1)
    sent.begin([weight], None)
    with monkeypatch.context() as changes, Temporaries() as made:
        changes.setattr(delta, "patch_between", None)
        bucket = torch.arange(250).view(torch.uint8)
        assert sent.replace(bucket, {"pieces": [("a", "bfloat16", (1000,), 0)], "stretches": []}) is None
    assert made.largest_besides(bucket, sent._bytes["a"]) == 0
    sent.commit()
    sent.begin([weight], set())
    patch = sent.replace(bucket, {"pieces": [("a", "bfloat16", (1000,), 0)], "stretches": []})
    assert patch is not None and patch.nbytes == 8 and sent.spared == 2000 - 8


def test_weights_that_engines_reprocess_are_neither_kept_nor_patched() -> None:
    sent, bucket = LastSent(), torch.arange(250).view(torch.uint8)
    weights = [SourceParameter(name, 1000, (Piece(name, "bfloat16", (500,), 0),), 1) for name in "ab"]
    fields = {"pieces": [("a", "bfloat16", (500,), 0), ("b", "bfloat16", (500,), 1000)], "stretches": []}
    for unrecorded in (None, {"b"}, None, {"b"}):
        sent.begin(weights, unrecorded)
        patch = sent.replace(bucket, fields)
        sent.commit()
    assert patch is None, "all words of `b` are half of the words, and take 4 bytes each"
    assert sent.unpatched == "50 % of the bytes cannot be patched, since engines re-process b"
    assert sent._bytes.keys() == {"a"}
    sent.begin(weights, {"b"})
    with Temporaries() as made:
        assert (
            sent.replace(bucket[1000:], {"pieces": [("b", "bfloat16", (500,), 0)], "stretches": []})
            is None
        )
    assert made.largest_besides(bucket) == 0
