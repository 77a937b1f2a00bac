"""State dicts of `torch.save` are read as torch reads them, without unpickling, and never more."""

import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from inlay.base.errors import InvalidRequestError
from inlay.tensors.converting import convert_file, write_tensors
from inlay.tensors.safetensors_file import NAMES
from inlay.tensors.state_dict import open_state_dict
from tests.examples import examples
from tests.tensors.containers import Record, archive

DTYPES = [getattr(torch, name) for name in NAMES]


def converted(path: Path) -> dict[str, torch.Tensor]:
    made = path.with_suffix(".safetensors")
    with open_state_dict(path) as tensors, made.open("wb") as stream:
        write_tensors(stream, tensors)
    found: dict[str, torch.Tensor] = load_file(made)
    return found


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.clone(memory_format=torch.contiguous_format).flatten()
    return flat.view(torch.uint8).numpy().tobytes()


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    count = int(np.prod(shape)) * dtype.itemsize
    seed = draw(st.integers(0, 99))
    low, high = (0, 2) if dtype == torch.bool else (0, 256)
    data = torch.from_numpy(np.random.default_rng(seed).integers(low, high, count, np.uint8))
    made = data.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)
    how = draw(st.sampled_from(["plain", "transposed", "cut", "parameter", "part of another"]))
    if how == "transposed" and made.ndim > 1:
        return made.transpose(0, -1)
    if how == "cut" and made.ndim and made.shape[0] > 1:
        return made[1:]
    if how == "parameter":
        return torch.nn.Parameter(made, requires_grad=False)
    if how == "part of another" and made.ndim and made.numel():
        return torch.stack([made, made], -1)[..., 1]
    return made


@settings(max_examples=examples(150), deadline=None)
@given(
    values=st.dictionaries(st.text(min_size=1, max_size=9), tensors(), min_size=1, max_size=6),
    tie=st.booleans(),
    form=st.sampled_from(["dict", "module", "state_dict", "model"]),
    protocol=st.sampled_from([2, 4, 5]),
)
def test_every_tensor_is_as_torch_reads_it(
    tmp_path_factory: pytest.TempPathFactory,
    values: dict[str, torch.Tensor],
    tie: bool,
    form: str,
    protocol: int,
) -> None:
    path = tmp_path_factory.mktemp("state") / "weights.pt"
    state: Any = dict(values)
    if tie:
        state["tied"] = state[next(iter(values))]
    if form == "module":
        state = OrderedDict(state)
        state._metadata = OrderedDict({"": {"version": 1}})
    saved = state if form in ("dict", "module") else {form: state, "epoch": 3, "lr": 0.1}
    torch.save(saved, path, pickle_protocol=protocol)
    found = converted(path)
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert bits(found[name]) == bits(tensor.detach())


def text(word: str) -> bytes:
    return b"X" + struct.pack("<I", len(word.encode())) + word.encode()


STORAGE = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\x10tQ"
"""Of 16 elements."""


def tensor(
    sizes: bytes = b"K\x10\x85", strides: bytes = b"K\x01\x85", offset: bytes = b"K\x00"
) -> bytes:
    rest = offset + sizes + strides + b"\x89ccollections\nOrderedDict\n)R"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + STORAGE + rest + b"tR"


def state_file(path: Path, pickle: bytes, *, storage: int = 64) -> Path:
    records = [
        Record("archive/data.pkl", b"\x80\x02" + pickle + b"."),
        Record("archive/data/0", bytes(storage)),
    ]
    path.write_bytes(archive(records))
    return path


def entry(key: str, value: bytes) -> bytes:
    return b"}(" + text(key) + value + b"u"


HOSTILE: dict[str, tuple[bytes, str]] = {
    "code": (b"cos\nsystem\n(" + text("true") + b"tR", "names 'os.system'"),
    "code as a value": (entry("a", b"cos\nsystem\n(" + text("true") + b"tR"), "names 'os.system'"),
    "builtins by stack": (text("builtins") + text("eval") + b"\x93", "names 'builtins.eval'"),
    "a state that calls": (b"}cos\nsystem\nb", "names 'os.system'"),
    "a state of a tensor": (tensor() + b"}b", "gives a state to something that is not a dict"),
    "a module": (b"ctorch.nn.modules.linear\nLinear\n", "names 'torch.nn.modules.linear.Linear'"),
    "an integer in it": (entry("a", b"K\x01"), "'a' is a int and not a tensor"),
    "a number as key": (b"}(K\x01" + tensor() + b"u", "the key '1'"),
    "no name": (entry("", tensor()), "the key ''"),
    "the name of safetensors' own": (entry("__metadata__", tensor()), "the key '__metadata__'"),
    "nothing": (b"}", "an empty state dict"),
    "one tensor": (tensor(), "a tensor and not a state dict"),
    "itself within itself": (
        b"}q\x00(" + text("model") + b"h\x00u",
        "'model' is a dict and not a tensor",
    ),
    "stride 0": (entry("a", tensor(b"J\xff\xff\xff\x7f\x85", b"K\x00\x85")), "stride 0"),
    "overlap": (entry("a", tensor(b"K\x04K\x04\x86", b"K\x01K\x01\x86")), "overlapping elements"),
    "beyond its storage": (entry("a", tensor(offset=b"K\x01")), "ends at byte 68 of a storage"),
    "a negative offset": (entry("a", tensor(offset=b"J\xff\xff\xff\xff")), "none may be negative"),
    "a huge size": (entry("a", tensor(b"\x8a\x08" + b"\xff" * 7 + b"\x7f\x85")), "ends at byte"),
    "nothing of a huge size": (
        entry("a", tensor(b"\x8a\x08" + b"\0" * 7 + b"\x40K\x02K\x00\x87")),
        "'a' has sizes beyond 64 bits",
    ),
    "another storage": (
        entry("a", tensor().replace(text("0"), text("1"))),
        "storage '1' is not in the archive",
    ),
    "complex": (b"ctorch\nComplexFloatStorage\n", "dtype 'complexfloat'"),
    "quantised": (b"ctorch._utils\n_rebuild_qtensor\n", "a quantized tensor"),
    "nothing but marks": (b"(" * 9000, "nested deeper than 8192"),
}


@pytest.mark.parametrize("title", HOSTILE)
def test_what_is_no_state_dict_is_refused_by_name_before_memory_is_taken(
    tmp_path: Path, title: str
) -> None:
    pickle, said = HOSTILE[title]
    path = state_file(tmp_path / "weights.pt", pickle)
    with pytest.raises(InvalidRequestError) as refused, open_state_dict(path):
        pass
    assert said in refused.value.message
    assert refused.value.message.startswith(f"{path} cannot be converted: it is ")
    with pytest.raises(InvalidRequestError):
        convert_file(path)
    assert [*tmp_path.iterdir()] == [path]


def test_tensors_that_share_memory_are_written_each_for_itself_and_not_without_end(
    tmp_path: Path,
) -> None:
    """As those of a T5: its table, once for the encoder, the decoder and the head."""
    table = torch.randn(64, 64)
    state = dict.fromkeys(("shared", "encoder", "decoder", "lm_head"), table)
    torch.save(state, tmp_path / "t5.bin")
    found = converted(tmp_path / "t5.bin")
    assert all(torch.equal(found[name], table) for name in state)
    torch.save({str(each): table for each in range(99)}, tmp_path / "all.bin")
    with pytest.raises(InvalidRequestError, match="share memory: they have 1622016 bytes"):
        convert_file(tmp_path / "all.bin")


@pytest.mark.thorough
def test_a_pickle_of_too_many_steps_is_refused(tmp_path: Path) -> None:
    path = state_file(tmp_path / "a.pt", b"]q\x00" + b"h\x00a" * 2_100_000)
    with pytest.raises(InvalidRequestError, match="over 4000000 opcodes"), open_state_dict(path):
        pass
    path = state_file(tmp_path / "b.pt", bytes(33 << 20))
    with pytest.raises(InvalidRequestError, match="a pickle of 346"), open_state_dict(path):
        pass


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is no file by torch.save"),
        (b"GGUF", "is no file by torch.save"),
        (b"PK\3\4", "it does not end with an end-of-directory record"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, data: bytes, said: str) -> None:
    path = tmp_path / "weights.pt"
    path.write_bytes(data)
    with pytest.raises(InvalidRequestError, match=said), open_state_dict(path):
        pass


def hole(stream: Any, name: bytes, size: int, at: int) -> tuple[int, bytes]:
    """A record of zeros that take no room on disk, as torch writes one of 64 bits.

    Returns where it ends, and its entry in the directory.
    """
    wide = size >= 0xFFFFFFFF or at >= 0xFFFFFFFF
    sizes = struct.pack("<QQ", size, size) if size >= 0xFFFFFFFF else b""
    sizes += struct.pack("<Q", at) if at >= 0xFFFFFFFF else b""
    extra = struct.pack("<HH", 1, len(sizes)) + sizes if wide else b""
    stream.seek(at)
    form = "<4sHHHHHIIIHH"
    stream.write(struct.pack(form, b"PK\3\4", 0, 0x808, 0, 0, 0, 0, 0, 0, len(name), len(extra)))
    stream.write(name + extra)
    end = stream.tell() + size
    stream.seek(end)
    stream.write(struct.pack("<4sIQQ" if wide else "<4sIII", b"PK\7\x08", 0, size, size))
    said, place = min(size, 0xFFFFFFFF), min(at, 0xFFFFFFFF)
    directory = struct.pack(
        "<4sHHHHHHIIIHHHHHII",
        *(b"PK\1\2", 0, 0, 0x808, 0, 0, 0, 0, said, said, len(name), len(extra), 0, 0, 0, 0, place),
    )
    return stream.tell(), directory + name + extra


def test_a_file_of_more_than_four_gigabytes_is_read(tmp_path: Path) -> None:
    """As large as torch's own are; a test of torch's own writer, by hand, needs the room."""
    path = tmp_path / "weights.pt"
    size = 5 << 30
    count = b"\x8a\x05" + (size // 4).to_bytes(5, "little")
    big = tensor(count + b"\x85").replace(b"K\x10tQ", count + b"tQ")
    small = tensor().replace(text("0"), text("1"))
    pickle = b"\x80\x02}(" + text("big") + big + text("small") + small + b"u."
    with path.open("wb") as stream:
        at, first = hole(stream, b"archive/data/0", size, 0)
        at, second = hole(stream, b"archive/data/1", 64, at)
        data, third = hole(stream, b"archive/data.pkl", len(pickle), at)
        stream.seek(data - len(pickle) - 24)
        stream.write(pickle)
        stream.seek(data)
        directory = first + second + third
        stream.write(directory)
        end = stream.tell()
        form = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 0, 0, 0, 0, 3, 3, len(directory), data)
        stream.write(form + struct.pack("<4sIQI", b"PK\6\7", 0, end, 1))
        stream.write(
            struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 3, 3, len(directory), 0xFFFFFFFF, 0)
        )
    with open_state_dict(path) as found:
        assert [(each.name, each.nbytes) for each in found] == [("big", size), ("small", 64)]
        assert len(found[0].read()) == size
