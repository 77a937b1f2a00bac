"""Records hold the bits of pages, whoever copies them, and only finite ones are good."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from inlay.engine.torch.attention.pages import Pages
from inlay.engine.torch.attention.shape import LayerShape
from inlay.engine.torch.cache.kv_layout import PageGroup
from inlay.engine.torch.native import pages as native_pages
from inlay.engine.torch.pages.copying import PageCopier, PageSealer, RecordShape
from inlay.messages.digest import Secret

CPU = torch.device("cpu")
SECRET = Secret(bytes(32))
DIGESTS = [bytes([each] * 16) for each in range(3)]

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


def sealers(shape: RecordShape, monkeypatch: pytest.MonkeyPatch) -> list[PageSealer]:
    """One whose pages the kernel copies, and one without a compiler."""
    native = PageSealer(shape, SECRET)
    assert native.sums.copies, "these tests need a C++ compiler"
    with monkeypatch.context() as patch:
        patch.setattr(native_pages, "_library", lambda: None)
        plain = PageSealer(shape, SECRET)
    assert not plain.sums.copies
    return [native, plain]


def zeroed(dtype: torch.dtype) -> Pages:
    pages = random_pages(dtype)
    for tensors in pages.kept:
        for tensor in tensors:
            tensor.zero_()
    return pages


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [0, 1, 2])
def test_kernels_and_torch_copy_the_same_bits_both_ways(
    dtype: torch.dtype, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = random_pages(dtype)
    reads = copier(source, dtype)
    both = sealers(reads.shape, monkeypatch)
    ids = [5, 1, 3]
    records = [reads.empty(group, len(ids)) for _ in both]
    for sealer, into in zip(both, records, strict=True):
        reads.read(sealer, group, ids, DIGESTS, into)
    assert torch.equal(*records)
    heads_first = source.stored(GROUPS[group].layers[0])[0][:, 5].flatten()
    (values,) = reads.shape.values(group, reads.shape.data(records[0]))
    assert torch.equal(values[0, : len(heads_first)], heads_first)

    targets = [zeroed(dtype) for _ in both]
    for sealer, pages in zip(both, targets, strict=True):
        writes = copier(pages, dtype)
        assert writes.write(sealer, group, [2, 6, 4], DIGESTS, records[0]) == 3
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
    sender.read(PageSealer(sender.shape, SECRET), 2, [1, 2], DIGESTS[:2], records)
    assert sender.shape.sizes[2] == 160 * 4 < 2 * 16 * 12 * 2
    (values,) = sender.shape.values(2, sender.shape.data(records))
    assert values.sort().values.tolist() == state.tolist()


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("group", [0, 2])
@pytest.mark.parametrize("place", [0, 16, 33, 64, -1])
def test_a_record_with_a_changed_bit_is_none(
    place: int, group: int, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = random_pages(torch.bfloat16), zeroed(torch.bfloat16)
    reads, writes = copier(source, torch.bfloat16), copier(target, torch.bfloat16)
    sealer = sealers(reads.shape, monkeypatch)[not native]
    records = reads.empty(group, 3)
    reads.read(sealer, group, [1, 2, 3], DIGESTS, records)
    records[1, place] ^= 1
    assert writes.write(sealer, group, [1, 2, 3], DIGESTS, records) == 1
    records[1, place] ^= 1
    assert writes.write(sealer, group, [1, 2, 3], [*DIGESTS[:2], bytes(16)], records) == 2
    assert (
        writes.write(
            PageSealer(reads.shape, Secret(bytes(31) + b"1")), group, [1], DIGESTS[:1], records[:1]
        )
        == 0
    )
    assert writes.write(sealer, group, [1, 2, 3], DIGESTS, records) == 3


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("value", ["nan", "-nan", "inf", "-inf", "max", "-max", "-0.0"])
def test_a_record_with_a_value_that_is_not_finite_is_none_and_no_page_takes_it(
    value: str, dtype: torch.dtype, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = [LayerShape(None, 2, 8, 4), LayerShape(None, 2, 8, 4, state_size=160)]
    groups = [PageGroup(None, (0, 1))]
    shape = RecordShape.of(layers, groups, 32, dtype)
    most = torch.finfo(dtype).max
    number = {"max": most, "-max": -most, "-nan": -float("nan")}.get(value)
    for layer in range(2):
        source, target = (
            Pages(layers, groups, num_pages=4, page_size=32, dtype=dtype, device=CPU)
            for _ in range(2)
        )
        for pages in (source, target):
            for tensors in pages.kept:
                for tensor in tensors:
                    tensor.zero_()
        for each in range(2):
            for tensor in source.stored(each):
                tensor.copy_(torch.randn(tensor.shape))
        damaged = source.stored(layer)[-1]
        if value not in ("max", "-max") or damaged.dtype == dtype:
            damaged[-1, 2].view(-1)[-1] = float(value) if number is None else number
        reads, writes = PageCopier(source, groups, shape), PageCopier(target, groups, shape)
        sealer = sealers(shape, monkeypatch)[not native]
        records = reads.empty(0, 3)
        reads.read(sealer, 0, [1, 2, 3], DIGESTS, records)
        good = writes.write(sealer, 0, [1, 2, 3], DIGESTS, records)
        assert good == (1 if value.endswith(("nan", "inf")) else 3)
        for each in range(2):
            for tensor, before in zip(target.stored(each), source.stored(each), strict=True):
                assert torch.isfinite(tensor).all()
                assert torch.equal(tensor[:, 1 : 1 + good], before[:, 1 : 1 + good])


class Recorded:
    """A stream of a device, whose waits are written down."""

    def __init__(self, name: str, log: list[str]) -> None:
        self._name = name
        self._log = log

    def wait_stream(self, other: "Recorded") -> None:
        self._log.append(f"{self._name} waits for {other._name}")


def test_copies_of_a_device_have_a_stream_and_the_order_of_its_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Order alone: what runs on the streams of a device is tested on one (`make test-gpu`)."""
    log: list[str] = []
    own, model = Recorded("copies", log), Recorded("model", log)

    @contextmanager
    def on(stream: Recorded) -> Iterator[None]:
        assert stream is own
        log.append("begins")
        yield
        log.append("ends")

    pages, other = random_pages(torch.float32), zeroed(torch.float32)
    _, sealer = sealers(copier(pages, torch.float32).shape, monkeypatch)
    copiers = [copier(each, torch.float32) for each in (pages, other)]
    for each in copiers:
        each._stream = own  # type: ignore[assignment]
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: model)
    records = copiers[0].empty(0, 3)
    copiers[0].read(sealer, 0, [5, 1, 2], DIGESTS, records)
    # The step that runs is not waited for.
    assert log == ["begins", "ends"]
    log.clear()
    assert copiers[1].write(sealer, 0, [1, 2, 3], DIGESTS, records) == 3
    assert log == ["begins", "copies waits for model", "ends", "model waits for copies"]
    for mine, theirs in zip(pages.kept[0], other.kept[0], strict=True):
        assert torch.equal(mine[:, [5, 1, 2]], theirs[:, [1, 2, 3]])
