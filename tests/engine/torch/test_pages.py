"""Pages keep what is written, slot by slot, and forget what is scrubbed."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from inlay.engine.torch.attention.pages import Pages
from inlay.engine.torch.attention.shape import LayerShape
from inlay.engine.torch.cache.kv_layout import PageGroup


def new_pages(num_pages: int = 5) -> Pages:
    return Pages(
        [LayerShape(None, 3, 8, 4)] * 2,
        [PageGroup(None, (0, 1))],
        num_pages=num_pages,
        page_size=16,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def test_what_is_written_to_a_slot_is_at_that_page_and_offset_and_nowhere_else() -> None:
    pages = new_pages()
    pages.scrub(range(6))
    keys, values = torch.randn(3, 4, 8), torch.randn(3, 4, 4)
    slots = torch.tensor([0, 17, 79, 33])

    pages.write(1, slots, keys, values)

    for index, slot in enumerate(slots.tolist()):
        assert torch.equal(pages.keys[1][:, slot // 16, slot % 16], keys[:, index])
        assert torch.equal(pages.values[1][:, slot // 16, slot % 16], values[:, index])
    assert int((pages.keys[1] != 0).any(-1).sum()) == 3 * 4
    assert not pages.keys[0].any()


def test_scrubbed_pages_hold_zeros_and_others_stay() -> None:
    pages = new_pages()
    for tensor in (*pages.keys, *pages.values):
        tensor.fill_(float("nan"))
    pages.scrub([1, 4])
    for tensor in (*pages.keys, *pages.values):
        assert not tensor[:, [1, 4]].any()
        assert tensor[:, [0, 2, 3, 5]].isnan().all()


def test_the_null_page_is_zero() -> None:
    pages = new_pages()
    assert all(
        tensor.shape[1] == 6 and not tensor[:, 0].any() for tensor in (*pages.keys, *pages.values)
    )


def test_layers_of_two_groups_share_the_memory_of_a_place_and_no_page() -> None:
    groups = [PageGroup(None, (1,)), PageGroup(24, (0, 2))]
    pages = Pages(
        [LayerShape(24, 1, 8, 8), LayerShape(None, 1, 8, 8), LayerShape(24, 1, 8, 8)],
        groups,
        num_pages=3,
        page_size=16,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    assert pages.groups == (1, 0, 1)
    assert pages.keys[0] is pages.keys[1]
    assert pages.keys[0] is not pages.keys[2]
    pages.scrub([1, 2, 3])
    ones = torch.ones(1, 1, 8)
    pages.write(0, torch.tensor([16]), ones, ones)
    pages.write(1, torch.tensor([32]), 2 * ones, 2 * ones)
    assert pages.values[0][0, :, 0, 0].tolist() == [0, 1, 2, 0]
    assert not pages.values[2].any()
    pages.scrub([1])
    assert pages.keys[1][0, :, 0, 0].tolist() == [0, 0, 2, 0]


class Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations that change memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fills = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.fills += func._schema.is_mutable
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("value_size", "fills"), [(8, 1), (4, 2)])
def test_pages_of_all_layers_are_scrubbed_by_one_call_for_each_shape(
    value_size: int, fills: int
) -> None:
    shapes = [LayerShape(None, 3, 8, value_size)] * 5
    pages = Pages(
        shapes, [PageGroup(None, tuple(range(5)))], num_pages=5, page_size=16,
        dtype=torch.bfloat16, device=torch.device("cpu"),
    )  # fmt: skip
    for tensor in (*pages.keys, *pages.values):
        tensor.fill_(1)
    with Counted() as counted:
        pages.scrub([2, 5])
    assert counted.fills == fills
    for tensor in (*pages.keys, *pages.values):
        assert tensor.is_contiguous()
        assert not tensor[:, [2, 5]].any()
        assert bool((tensor[:, [0, 1, 3, 4]] == 1).all())
