"""Pickles that must be refused, as opcodes, beside a part of what the refusal must say."""

from tests.tensors.containers import HOOKS, name, number, storage, tensor, text

PLAIN = tensor((4, 16), (16, 1), length=64)
"""A (4, 16) tensor in a storage of 256 bytes, as torch.save writes it."""

PICKLES: dict[str, tuple[bytes, str]] = {
    "a shape beyond the storage": (tensor((4, 17), (17, 1), length=64), "ends at byte 272"),
    "an offset beyond the storage": (
        tensor((4, 16), (16, 1), offset=1, length=64),
        "ends at byte 260",
    ),
    "a negative offset": (tensor((4, 16), (16, 1), offset=-1, length=64), "offset -1"),
    "a negative stride": (tensor((4, 16), (-16, 1), length=64), "strides (-16, 1)"),
    "a negative size": (tensor((-4, -16), (16, 1), length=64), "empty tensor of shape (-4, -16)"),
    "a product over 64 bits": (tensor((1 << 40, 1 << 40), (1 << 40, 1), length=64), "ends at byte"),
    "a product that wraps to 0": (
        tensor((1 << 32, 1 << 32), (1 << 32, 1), length=64),
        "ends at byte",
    ),
    "as many sizes as fit": (tensor((2,) * 60, (1,) * 60, length=64), "60 dimensions"),
    "fewer strides than sizes": (tensor((4, 16), (16,), length=64), "2 sizes and 1 strides"),
    "many more strides than sizes": (
        tensor((4, 16), (1,) * 400, length=64),
        "2 sizes and 400 strides",
    ),
    "a storage longer than its record": (
        tensor((4, 16), (16, 1), length=65),
        "should be 260 bytes and is 256",
    ),
    "a storage shorter than its record": (
        tensor((4, 16), (16, 1), length=63),
        "should be 252 bytes and is 256",
    ),
    "a size of 16 bytes": (b"\x8a\x10" + bytes(16), "an integer of 16 bytes"),
    "a size of 4 GB": (b"\x8b\xff\xff\xff\xff", "opcode 0x8b"),
    "a storage of another name": (
        name("torch._utils", "_rebuild_tensor_v2")
        + b"("
        + storage(64, key="../../secret")
        + number(0)
        + b"(K\x04K\x10t(K\x10K\x01t\x89"
        + HOOKS
        + b"tR",
        "'../../secret' is not in the archive",
    ),
    "sizes that are True": (
        name("torch._utils", "_rebuild_tensor_v2")
        + b"("
        + storage(64)
        + b"K\x00\x88\x85K\x01\x85\x89"
        + HOOKS
        + b"tR",
        "are not integers",
    ),
    "a persistent id that is text": (text("0") + b"Q", "other than a storage"),
    "a persistent id of another tag": (
        b"("
        + text("module")
        + name("torch", "FloatStorage")
        + text("0")
        + text("cpu")
        + b"K\x40tQ",
        "other than a storage",
    ),
    "a persistent id with a view": (
        b"("
        + text("storage")
        + name("torch", "FloatStorage")
        + text("0")
        + text("cpu")
        + b"K\x40NtQ",
        "other than a storage",
    ),
    "a persistent id of negative length": (storage(-1), "other than a storage"),
    "a textual persistent id": (b"P0\n", "opcode 0x50"),
    "a storage alone": (storage(64), "a storage without a shape"),
    "a name alone": (name("torch", "FloatStorage"), "Name"),
    "a storage made by a call": (
        name("torch", "FloatStorage") + b"K\x40\x85R",
        "calls torch.FloatStorage",
    ),
    "a tensor in no storage": (
        name("torch._utils", "_rebuild_tensor_v2")
        + b"(NK\x00K\x04\x85K\x01\x85\x89"
        + HOOKS
        + b"tR",
        "has no storage",
    ),
    "a dtype that is not the storage's": (
        tensor(
            (4, 16),
            (16, 1),
            length=64,
            rebuild=name("torch._utils", "_rebuild_tensor_v3"),
            tail=b"\x89" + HOOKS + name("torch", "float64"),
        ),
        "another dtype",
    ),
    "a parameter of nothing": (
        name("torch._utils", "_rebuild_parameter") + b"N\x88N\x87R",
        "a parameter out of something",
    ),
    "a call within calls": (
        (name("torch._tensor", "_rebuild_from_type_v2") + b"(") * 150,
        "a value that is not there",
    ),
    "a call of a call": (
        name("torch._tensor", "_rebuild_from_type_v2")
        + b"("
        + name("torch._tensor", "_rebuild_from_type_v2")
        + name("torch", "Tensor")
        + b")NtR",
        "arguments that torch.save does not write",
    ),
    "a call of a tensor": (PLAIN + b")R", "calls something that is not a name"),
    "an object built": (name("collections", "OrderedDict") + b")}b", "opcode 0x62"),
    "an object made": (name("collections", "OrderedDict") + b")\x81", "opcode 0x81"),
    "an instance": (b"(ios\nsystem\n", "opcode 0x69"),
    "an extension": (b"\x82\x01", "opcode 0x82"),
    "bytes": (b"C\x01a", "opcode 0x43"),
    "an unknown opcode": (b"\xff", "opcode 0xff"),
    "deep tuples": (b")" + b"\x85" * 8000, "tuple of 1"),
    "deep marks": (b"(" * 8000, "nested deeper than 512"),
    "deep lists": (b"]" * 8000, "nested deeper than 512"),
    "a memo that only grows": (b")" + b"\x94" * 8000, "remembers more than 4096"),
    "a far memo": (b")r\xff\xff\xff\xff0", "opcode 0x30"),
    "a memo never put": (b"h\x05", "never remembered"),
    "a list in itself": (b"]q\x00h\x00a", "list of 1"),
    "a key that is a list": (b"}]Ns", "a key that is neither"),
    "a key that is a deep tuple": (b"})" + b"\x85" * 5000 + b"Ns", "a key that is neither"),
    "odd items": (b"}(K\x01u", "sets items"),
    "items of a list": (b"](K\x01K\x02u", "sets items"),
    "an append to a dict": (b"}K\x01a", "appends to something"),
    "a mark never set": (b"t", "a mark that is not there"),
    "a value never pushed": (b"\x85", "a value that is not there"),
    "a value under a mark": (b"K\x01(\x85", "a value that is not there"),
    "no value at the end": (b"", "a value that is not there"),
    "two values at the end": (b"NN", "left after its end"),
    "a string of 4 GB": (b"X\xff\xff\xff\xffa", "cut short"),
    "a string that is not UTF-8": (b"X\x01\x00\x00\x00\xff", "not UTF-8"),
    "a name without an end": (b"ctorch", "cut short"),
    "a name of numbers": (b"K\x01K\x02\x93", "by what is not text"),
    "a pickle in it": (PLAIN + b".\x80\x02N", "left after its end"),
    "a long pickle": (b"N0" * 5000, "a pickle of 10003 bytes"),
}

CALLS = (
    ("os", "system"),
    ("posix", "system"),
    ("builtins", "eval"),
    ("builtins", "getattr"),
    ("subprocess", "Popen"),
    ("torch", "load"),
    ("torch.hub", "load"),
    ("torch._utils", "_rebuild_tensor"),
    ("torch.storage", "_load_from_bytes"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("torch.serialization", "_get_layout"),
    ("collections", "deque"),
    ("torch", "Tensor.__class__"),
)
"""Names that a pickle may want called."""
