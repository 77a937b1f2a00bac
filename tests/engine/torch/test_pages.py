"""Pages keep what is written, slot by slot, and forget what is scrubbed."""

import torch

from inlay.engine.torch.pages import Pages


def new_pages(num_pages: int = 5) -> Pages:
    return Pages(
        num_layers=2,
        num_pages=num_pages,
        page_size=16,
        num_heads=3,
        head_size=8,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def test_what_is_written_to_a_slot_is_at_that_page_and_offset_and_nowhere_else() -> None:
    pages = new_pages()
    pages.scrub(range(5))
    keys, values = torch.randn(3, 4, 8), torch.randn(3, 4, 8)
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
        assert tensor[:, [0, 2, 3]].isnan().all()
