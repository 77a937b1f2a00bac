"""Sums are the same with and without the kernel, and any changed bit changes them."""

import numpy as np
import pytest

from inlay.engine.torch.native import pages
from inlay.engine.torch.native.pages import BLOCK_BYTES, SUM_BYTES, Bytes, Sums

KEY = bytes(range(32))


def random_rows(count: int, size: int, seed: int = 1) -> Bytes:
    """Rows that lie apart, as the data of records do."""
    return np.random.default_rng(seed).integers(0, 256, (count, size + 32), np.uint8)[:, 32:]


@pytest.mark.parametrize(
    "size", [8, 64, BLOCK_BYTES - 8, BLOCK_BYTES, BLOCK_BYTES + 8, 3 * BLOCK_BYTES]
)
def test_the_kernel_gives_what_numpy_gives(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = random_rows(3, size)
    native = Sums(KEY)
    assert native.copies, "this test needs a C++ compiler"
    monkeypatch.setattr(pages, "_library", lambda: None)
    found = native(rows)
    assert np.array_equal(found, Sums(KEY)(rows))
    assert found.shape == (3, -(-size // BLOCK_BYTES) * SUM_BYTES)
    assert not np.array_equal(found, Sums(bytes(32))(rows))


def test_every_changed_bit_and_every_exchange_changes_them() -> None:
    rows, summed = random_rows(1, BLOCK_BYTES), Sums(KEY)
    flipped = np.repeat(rows, 8 * 128, 0)
    for bit in range(len(flipped)):
        flipped[bit, bit // 8] ^= 1 << bit % 8
    # Of words as they are, of nothing but zeros, and of nothing but ones.
    for before in (rows, np.zeros_like(rows), np.full_like(rows, 255)):
        changed = flipped ^ rows ^ before
        assert np.all(np.any(summed(changed) != summed(before), axis=1))
    swapped = rows.copy()
    swapped[:, :64], swapped[:, 64:128] = rows[:, 64:128], rows[:, :64]
    assert not np.array_equal(summed(swapped), summed(rows))
