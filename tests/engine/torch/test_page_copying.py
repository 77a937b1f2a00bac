"""Records hold the bits of pages, whoever copies them, and only finite ones are good."""

import pytest
import torch

from inlay.digest import Secret
from inlay.engine.torch.attention.layers import LayerShape
from inlay.engine.torch.attention.pages import Pages
from inlay.engine.torch.cache.kv_layout import PageGroup
from inlay.engine.torch.pages import copying
from inlay.engine.torch.pages.copying import PageCopier, Part, RecordShape, Sealer

LAYERS = [
    LayerShape(None, 2, 8, 4),
    LayerShape(48, 2, 8, 4),
    LayerShape(None, 1, 16, 8),
    # In bfloat16 it takes all of the keys, and half of the values.
    LayerShape(2, 2, 8, 4, state_size=160),
]
GROUPS = [PageGroup(None, (0, 2)), PageGroup(48, (1,)), PageGroup(2, (3,))]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random_pages(dtype: torch.dtype) -> Pages:
    pages = Pages(
        LAYERS,
        GROUPS,
        num_pages=6,
        page_size=16,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    for tensors in pages.kept:
        for tensor in tensors:
            tensor.copy_(torch.randn(tensor.shape))
    return pages


def copier(pages: Pages, dtype: torch.dtype) -> PageCopier:
    return PageCopier(pages, GROUPS, RecordShape.of(LAYERS, GROUPS, 16, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [0, 1, 2])
def test_kernels_and_torch_copy_the_same_bits_both_ways(
    dtype: torch.dtype, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = random_pages(dtype)
    native = copier(source, dtype)
    assert native._kernels is not None, "these tests need a C++ compiler"
    monkeypatch.setattr(copying, "kernels", lambda: None)
    plain = copier(source, dtype)
    ids = [5, 1, 3]
    records = [each.empty(group, len(ids)) for each in (native, plain)]
    for each, into in zip((native, plain), records, strict=True):
        each.read(group, ids, into)
    data = [native.shape.data(each) for each in records]
    assert torch.equal(*data)
    heads_first = source.stored(GROUPS[group].layers[0])[0][:, 5].flatten()
    (values,) = native.shape.values(group, data[0])
    assert torch.equal(values[0, : len(heads_first)], heads_first)

    targets = [random_pages(dtype) for _ in range(2)]
    for pages in targets:
        for tensors in pages.kept:
            for tensor in tensors:
                tensor.zero_()
    copier(targets[1], dtype).write(group, [2, 6, 4], data[1])
    monkeypatch.undo()
    copier(targets[0], dtype).write(group, [2, 6, 4], data[0])
    for one, other in zip(targets[0].kept, targets[1].kept, strict=True):
        assert all(map(torch.equal, one, other))
    for layer in GROUPS[group].layers:
        for tensor, before in zip(targets[0].stored(layer), source.stored(layer), strict=True):
            assert torch.equal(tensor[:, [2, 6, 4]], before[:, ids])
        for tensor in targets[0].kept[layer]:
            assert not tensor[:, [0, 1, 3, 5]].any()


def test_what_others_left_beside_a_state_does_not_travel() -> None:
    pages = random_pages(torch.bfloat16)
    state = torch.arange(320.0).view(2, 160)
    pages.write_states(3, torch.tensor([1, 2]), state)
    sender = copier(pages, torch.bfloat16)
    records = sender.empty(2, 2)
    sender.read(2, [1, 2], records)
    assert sender.shape.sizes[2] == 160 * 4 < 2 * 16 * 12 * 2
    (values,) = sender.shape.values(2, sender.shape.data(records))
    assert values.sort().values.tolist() == state.tolist()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("value", ["nan", "-nan", "inf", "-inf", "max", "-max", "-0.0"])
def test_a_record_with_a_value_that_is_not_finite_is_none(dtype: torch.dtype, value: str) -> None:
    # A state behind keys and values, as in a group of both.
    shape = RecordShape("layout", ((Part(dtype, 64), Part(torch.float32, 8)),))
    sealer, records = Sealer(shape, Secret(bytes(32))), torch.zeros(3, shape.record_bytes(0))
    records = records.to(torch.uint8)
    most = torch.finfo(dtype).max
    number = {"max": most, "-max": -most, "-nan": -float("nan")}.get(value)
    digests = [bytes([each] * 16) for each in range(3)]
    for place in range(2):
        parts = shape.values(0, shape.data(records))
        for part in parts:
            part[:] = torch.randn(part.shape)
        if value not in ("max", "-max") or not place:
            parts[place][1, -1] = float(value) if number is None else number
        sealer.seal(0, digests, records)
        assert sealer.good(0, digests, records) == (1 if value.endswith(("nan", "inf")) else 3)
