"""Memory in huge pages, and tensors one after another in it."""

import errno
import mmap
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from inlay.engine.torch import large_pages
from inlay.engine.torch.large_pages import Slabs


@pytest.mark.parametrize("there", [True, False])
def test_slabs_give_zeros_of_their_own_that_begin_a_line(
    there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small ones follow each other; one larger than a slab, or than its rest, has a new one."""
    monkeypatch.setattr(large_pages, "_SLAB", 1 << 12)
    if not there:
        monkeypatch.setattr(large_pages, "large_pages", lambda size: None)
    slabs, sizes = Slabs(), (100, 1, 0, 3000, 2000, 9000, 64)
    found = [slabs.take(size) for size in sizes]
    for number, tensor in enumerate(found):
        assert len(tensor) == sizes[number]
        assert not tensor.any()
        assert tensor.dtype is torch.uint8
        tensor.fill_(number + 1)
    assert all(bool((tensor == number + 1).all()) for number, tensor in enumerate(found))
    assert found[1].data_ptr() - found[0].data_ptr() == 128
    assert all(tensor.data_ptr() % 64 == 0 for tensor in found if len(tensor))


def test_large_pages_are_zeros_of_the_size_that_was_asked_for() -> None:
    memory = large_pages.large_pages(5 << 20)
    if memory is None:
        pytest.skip("no huge pages on this system")
    assert len(memory) == 5 << 20
    assert memory.data_ptr() % (2 << 20) == 0
    assert not memory.any()


def test_the_begin_of_each_part_stays_in_small_pages() -> None:
    whole = large_pages.large_pages(4 << 20)
    memory = large_pages.large_pages(24 << 20, parts=3, small=3 << 20)
    found = _in_huge_pages()
    if memory is None or whole is None or not found(whole.data_ptr()):
        pytest.skip("no huge pages on this system")
    start = memory.data_ptr()
    for part in range(start, start + (24 << 20), 8 << 20):
        wanted = {0: False, (4 << 20) - 1: False, 4 << 20: True, (8 << 20) - 1: True}
        assert {at: found(part + at) for at in wanted} == wanted


def _in_huge_pages() -> Callable[[int], bool]:
    """Return what says whether the system was asked for huge pages at an address."""
    ranges, begin, end = list[tuple[int, int]](), 0, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            begin, end = (int(side, 16) for side in match.groups())
        elif line.startswith("VmFlags:") and " hg" in line:
            ranges.append((begin, end))
    return lambda address: any(low <= address < high for low, high in ranges)


def test_a_kernel_that_is_built_without_huge_pages_gives_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Plain(mmap.mmap):
        def madvise(self, *_: Any) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Plain)
    memory = large_pages.large_pages(100)
    if memory is None:
        pytest.skip("no huge pages on this system")
    assert len(memory) == 100
    assert not memory.any()
