"""Headers of GGUF files: what is read, and that nothing a file says costs memory or is believed."""

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inlay.base.errors import InvalidRequestError
from inlay.tensors import gguf
from inlay.tensors.blocks import dequantise
from inlay.tensors.gguf import GgufFile, GgufTensor, models_in, read_bytes
from tests.examples import examples
from tests.tensors.gguf_files import Stored, gguf_bytes, stored, text

METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.rope.freq_base": 10000.0,
    "tokenizer.ggml.tokens": ["a", "é", ""],
    "tokenizer.ggml.scores": [0.5, -1.0],
    "tokenizer.ggml.token_type": [1, 3],
    "tokenizer.ggml.add_bos_token": True,
}
VALUES = np.arange(128, dtype=np.float32).reshape(2, 64) - 50
TENSORS = {"a.weight": stored(VALUES), "b.weight": stored(VALUES, "Q8_0")}
WHOLE = gguf_bytes(METADATA, TENSORS)
SIZE = len(WHOLE) - 24
"""What Q8_0 fills: four blocks of 34 bytes, and 24 to the next 32."""


def opened(folder: Path, data: bytes, name: str = "model.gguf") -> GgufFile:
    path = folder / name
    path.write_bytes(data)
    return GgufFile.open(path)


def refusal(folder: Path, data: bytes, name: str = "model.gguf") -> str:
    with pytest.raises(InvalidRequestError) as caught:
        opened(folder, data, name)
    assert len(caught.value.message) < 1000
    assert caught.value.message.isprintable()
    return caught.value.message


def values_of(tensor: GgufTensor) -> np.ndarray:
    raw = read_bytes(tensor.file, tensor.offset, tensor.nbytes)
    return dequantise(tensor.type, raw, tensor.shape)


def test_metadata_and_tensors_are_read(tmp_path: Path) -> None:
    file = opened(tmp_path, WHOLE)
    assert file.metadata == METADATA
    assert [*file.tensors] == ["a.weight", "b.weight"]
    assert (values_of(file.tensors["a.weight"]) == VALUES).all()
    assert file.tensors["b.weight"].shape == (2, 64)
    assert np.abs(values_of(file.tensors["b.weight"]) - VALUES).max() < 0.5


def test_another_alignment_is_followed(tmp_path: Path) -> None:
    data = gguf_bytes({"general.alignment": 4096}, TENSORS, alignment=4096)
    assert (values_of(opened(tmp_path, data).tensors["a.weight"]) == VALUES).all()


def test_a_header_of_many_reads_is_the_same(tmp_path: Path) -> None:
    """Its texts go over the bounds of what is read at a time."""
    tokens = [f"{'é' * (number % 40)}{number}" for number in range(70_000)]
    file = opened(tmp_path, gguf_bytes({"tokens": tokens, "after": 7}, TENSORS))
    assert file.metadata == {"tokens": tokens, "after": 7}
    assert (values_of(file.tensors["a.weight"]) == VALUES).all()


TEXTS = st.one_of(
    st.text(max_size=12),
    st.sampled_from(["", "\0" * 7, "\0" * 16, "a" + "\0" * 7 + "b" * 9, "é" * 127, "é" * 128]),
    st.integers(250, 70_000).map(lambda length: "x" * length),
)


@given(parts=st.lists(st.tuples(st.lists(TEXTS, max_size=8), st.integers(0, 400)), max_size=6))
@settings(max_examples=examples(100), deadline=None)
def test_texts_are_read_alone_or_in_runs(
    tmp_path_factory: pytest.TempPathFactory, parts: list[tuple[list[str], int]]
) -> None:
    tokens = ["first"]
    for own, usual in parts:
        tokens += [*own, *(f"Ġ{number}" for number in range(usual))]
    file = opened(tmp_path_factory.mktemp("texts"), gguf_bytes({"tokens": tokens, "z": 7}, TENSORS))
    assert file.metadata == {"tokens": tokens, "z": 7}


def test_runs_are_looked_for_less_and_less_where_they_are_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = []
    usual = gguf._GgufHeader._short_texts

    def look(header: gguf._GgufHeader, most: int) -> list[str]:
        looked.append(most)
        return usual(header, most)

    monkeypatch.setattr(gguf._GgufHeader, "_short_texts", look)
    tokens = ["a", "\0"] * 16_384
    assert opened(tmp_path, gguf_bytes({"tokens": tokens}, TENSORS)).metadata == {"tokens": tokens}
    assert len(looked) < 25


def test_every_beginning_of_a_file_is_refused(tmp_path: Path) -> None:
    for length in range(SIZE):
        assert str(tmp_path) in refusal(tmp_path, WHOLE[:length])


def test_a_cut_file_says_how_many_bytes_are_missing(tmp_path: Path) -> None:
    said = refusal(tmp_path, WHOLE[: SIZE - 100])
    assert f"has {SIZE - 100} of {SIZE} bytes; 100 are missing" in said


@pytest.mark.thorough
def test_extremes_in_place_of_any_number_cost_no_memory(tmp_path: Path) -> None:
    """Of each four and each eight bytes of the header: refused, or another file that is sound."""
    extremes = (b"\xff" * 8, b"\xff" * 4, b"\0\0\0\x80", (1 << 40).to_bytes(8, "little"))
    tracemalloc.start()
    try:
        for at in range(WHOLE.index(b"b.weight") + 40):
            for extreme in extremes:
                _sound_or_refused(tmp_path, WHOLE[:at] + extreme + WHOLE[at + len(extreme) :])
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def _sound_or_refused(folder: Path, data: bytes) -> None:
    path = folder / "model.gguf"
    path.write_bytes(data)
    try:
        file = GgufFile.open(path)
    except InvalidRequestError:
        return
    assert all(each.offset + each.nbytes <= len(data) for each in file.tensors.values())


def _header(tensors: int, keys: int, *rest: bytes, version: int = 3) -> bytes:
    head = struct.pack("<4sIQQ", b"GGUF", version, tensors, keys) + b"".join(rest)
    return head + bytes(4096)


def _tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + sizes + struct.pack("<IQ", kind, offset)


def _array(kind: int, count: int) -> bytes:
    return text("k") + struct.pack("<IIQ", 9, kind, count)


HOSTILE: dict[str, tuple[bytes, str]] = {
    "no such file": (b"PK\3\4" + bytes(100), "begins with b'PK"),
    "a pointer of Git LFS": (b"version https://git-lfs" + bytes(100), "git lfs pull"),
    "version 1": (_header(0, 0, version=1), "of version 1"),
    "big-endian": (_header(0, 0, version=3 << 24), "it is big-endian"),
    "more tensors than fit": (_header(1000, 0), "are missing"),
    "2^63 tensors": (_header(1 << 63, 0), "9223372036854775808 tensors; allowed"),
    "2^40 keys": (_header(0, 1 << 40), "1099511627776 keys; allowed"),
    "a key of 2^62 bytes": (_header(0, 1, struct.pack("<Q", 1 << 62)), "are missing"),
    "a key twice": (_header(0, 2, (text("k") + struct.pack("<II", 4, 1)) * 2), "key 'k' twice"),
    "no UTF-8": (_header(0, 1, struct.pack("<Q", 2) + b"\xff\xfe"), "not UTF-8"),
    "an unknown type of value": (_header(0, 1, text("k") + struct.pack("<I", 77)), "type 77"),
    "no boolean": (_header(0, 1, text("k") + struct.pack("<IB", 7, 9)), "is 9, and true or false"),
    "2^60 items": (_header(0, 1, _array(4, 1 << 60)), "are missing"),
    "2^61 texts": (_header(0, 1, _array(8, 1 << 61)), "are missing"),
    "nested arrays": (_header(0, 1, _array(9, 4)), "items of type 9"),
    "a text of 2^63 bytes": (_header(0, 1, _array(8, 4), b"\xff" * 8), "are missing"),
    "an alignment of 0": (
        _header(0, 1, text("general.alignment") + struct.pack("<II", 4, 0)),
        "power of two",
    ),
    "an alignment of 48": (
        _header(0, 1, text("general.alignment") + struct.pack("<II", 4, 48)),
        "power of two",
    ),
    "no dimension": (_header(1, 0, _tensor("t", ())), "0 dimensions"),
    "nine dimensions": (_header(1, 0, _tensor("t", (1,) * 9)), "9 dimensions"),
    "a size of 0": (_header(1, 0, _tensor("t", (4, 0))), "shape (0, 4)"),
    "a product over 64 bits": (_header(1, 0, _tensor("t", (1 << 40, 1 << 40))), "has shape"),
    "no whole blocks": (_header(1, 0, _tensor("t", (48, 2), 8)), "blocks of 32"),
    "an unknown type of tensor": (_header(1, 0, _tensor("t", (4,), 99)), "type 99, which is not"),
    "a tensor past the end": (_header(1, 0, _tensor("t", (4,), 0, 1 << 62)), "it is cut short"),
    "an offset between": (_header(1, 0, _tensor("t", (4,), 0, 8)), "no multiple of 32"),
    "tensors that overlap": (
        _header(2, 0, _tensor("t", (64,)), _tensor("u", (64,), 0, 32)),
        "'t' and 'u' overlap",
    ),
    "a tensor twice": (
        _header(2, 0, _tensor("t", (8,)), _tensor("t", (8,), 0, 32)),
        "tensor 't' twice",
    ),
}


@pytest.mark.parametrize("title", HOSTILE)
def test_a_hostile_file_is_refused_in_one_line(tmp_path: Path, title: str) -> None:
    data, said = HOSTILE[title]
    assert said in refusal(tmp_path, data)


def test_a_file_that_shrinks_later_is_noticed(tmp_path: Path) -> None:
    tensor = opened(tmp_path, WHOLE).tensors["b.weight"]
    (tmp_path / "model.gguf").write_bytes(WHOLE[: tensor.offset + 10])
    with pytest.raises(InvalidRequestError, match="and was longer before"):
        values_of(tensor)


def _part(number: int, count: int, tensors: dict[str, Stored], **more: int) -> bytes:
    split = {"split.no": number, "split.count": count, "split.tensors.count": 2}
    return gguf_bytes((METADATA if not number else {}) | split | more, tensors)


def _parts(folder: Path, first: bytes, second: bytes) -> Path:
    (folder / "m-00001-of-00002.gguf").write_bytes(first)
    (folder / "m-00002-of-00002.gguf").write_bytes(second)
    return folder / "m-00002-of-00002.gguf"


FIRST, SECOND = ({name: TENSORS[name]} for name in TENSORS)


def test_any_part_stands_for_all(tmp_path: Path) -> None:
    path = _parts(tmp_path, _part(0, 2, FIRST), _part(1, 2, SECOND))
    file = GgufFile.open(path)
    assert file.path.name == "m-00001-of-00002.gguf"
    assert file.metadata["llama.block_count"] == 2
    assert file.tensors["b.weight"].file == path
    assert (values_of(file.tensors["a.weight"]) == VALUES).all()
    assert models_in(tmp_path) == [file.path]


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    path = _parts(tmp_path, _part(0, 2, FIRST), _part(1, 2, SECOND))
    (tmp_path / "m-00001-of-00002.gguf").unlink()
    with pytest.raises(InvalidRequestError, match=r"1 of them are missing .* m-00001-of-00002"):
        GgufFile.open(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda: (_part(0, 2, FIRST), _part(1, 2, FIRST)), "'a.weight' twice"),
        (lambda: (_part(0, 2, FIRST), _part(0, 2, SECOND)), "part 0 by its metadata"),
        (lambda: (_part(0, 3, FIRST), _part(1, 3, SECOND)), "part 0 of '3' by its metadata"),
        (
            lambda: (_part(0, 2, FIRST, **{"split.tensors.count": 9}), _part(1, 2, SECOND)),
            "hold 2 tensors, and '9' is said",
        ),
    ],
)
def test_parts_that_contradict_each_other_are_refused(
    tmp_path: Path, change: Callable[[], tuple[bytes, bytes]], said: str
) -> None:
    path = _parts(tmp_path, *change())
    with pytest.raises(InvalidRequestError) as caught:
        GgufFile.open(path)
    assert said in caught.value.message
