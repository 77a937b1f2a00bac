"""Every kind of file that must be refused, by name, and a part of what the refusal must say."""

import io
import zipfile
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from tests.tensors.containers import (
    Record,
    archive,
    name,
    npy_file,
    pickled,
    safetensors_file,
    text,
    torch_file,
)
from tests.tensors.hostile_pickles import CALLS, PICKLES, PLAIN

NOT_A_TENSOR = "must be a torch.Tensor"
CLONE = "call .contiguous().clone()"


def saved(value: Any, **options: Any) -> bytes:
    """Bytes of torch.save."""
    out = io.BytesIO()
    torch.save(value, out, **options)
    return out.getvalue()


ROWS = torch.arange(64, dtype=torch.float32).reshape(4, 16)
DATA = ROWS.numpy().tobytes()


def _recompressed(container: bytes, method: int) -> bytes:
    out = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(container)) as source,
        zipfile.ZipFile(out, "w", method) as target,
    ):
        for record in source.namelist():
            target.writestr(record, source.read(record))
    return out.getvalue()


def _edited(container: bytes, at: int, change: bytes) -> bytes:
    return container[:at] + change + container[at + len(change) :]


def _numpy(array: np.ndarray[Any, Any], **options: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, array, **options)
    return out.getvalue()


def _nested() -> bytes:
    return saved(torch.nested.nested_tensor([ROWS, ROWS[:2]]))


def _jagged() -> bytes:
    return saved(torch.nested.nested_tensor([ROWS, ROWS[:2]], layout=torch.jagged))


def _expanded() -> bytes:
    return saved(torch.zeros(1, 16).expand(100_000, 16))


def _npz() -> bytes:
    out = io.BytesIO()
    np.savez(out, ROWS.numpy())
    return out.getvalue()


def _memo_bomb() -> bytes:
    doubled = b"".join(
        b"h" + bytes((i,)) + b"h" + bytes((i,)) + b"\x86q" + bytes((i + 1,)) for i in range(200)
    )
    return torch_file(text("ha") + b"q\x00" + doubled, DATA)


def _calls(module: str, attribute: str) -> bytes:
    return torch_file(name(module, attribute) + b"(" + text("true") + b"tR", DATA)


_TORCH: dict[str, tuple[Callable[[], bytes], str]] = {
    "a stride of 0": (_expanded, CLONE),
    "a stride of 0 over one float8": (
        lambda: saved(torch.zeros(1, 1).to(torch.float8_e5m2).expand(40_000, 80_000)),
        CLONE,
    ),
    "overlapping rows": (lambda: saved(torch.arange(64.0).as_strided((10, 16), (1, 1))), CLONE),
    "a deflated bomb": (
        lambda: _recompressed(saved(torch.zeros(5_000_000)), zipfile.ZIP_DEFLATED),
        "deflated",
    ),
    "bzip2": (lambda: _recompressed(saved(ROWS), zipfile.ZIP_BZIP2), "compressed by method 12"),
    "sparse": (lambda: saved(ROWS.to_sparse()), "a sparse tensor"),
    "sparse with indices out of bounds": (
        lambda: saved(
            torch.sparse_coo_tensor(
                torch.tensor([[10**6], [10**6]]), torch.ones(1), (4, 16), check_invariants=False
            )
        ),
        "a sparse tensor",
    ),
    "sparse rows": (lambda: saved(ROWS.to_sparse(1)), "a sparse tensor"),
    "meta": (lambda: saved(ROWS.to("meta")), "a meta tensor"),
    "nested": (_nested, "a nested tensor"),
    "jagged": (_jagged, "a nested"),
    "legacy": (lambda: saved(ROWS, _use_new_zipfile_serialization=False), "legacy"),
    "a dict": (lambda: saved({"prompt_embeds": ROWS}), "a dict of 1"),
    "a list": (lambda: saved([ROWS, ROWS]), "a list of 2"),
    "a tuple": (lambda: saved((ROWS,)), "a tuple of 1"),
    "a state dict": (lambda: saved(torch.nn.Linear(16, 4).state_dict()), "opcode 0x62"),
    "a module": (lambda: saved(torch.nn.Linear(16, 4)), "torch.nn.modules.linear.Linear"),
    "many tensors": (lambda: saved([torch.zeros(1) for _ in range(100)]), "more than one tensor"),
    "None": (lambda: saved(None), "NoneType"),
    "a number": (lambda: saved(1.5), "float"),
    "text": (lambda: saved("a" * 200), "str"),
    "int64": (lambda: saved(ROWS.long()), "dtype 'long'"),
    "bool": (lambda: saved(ROWS > 3), "dtype 'bool'"),
    "uint16": (lambda: saved(ROWS.to(torch.uint16)), "dtype 'uint16'"),
    "complex": (lambda: saved(ROWS.to(torch.complex64)), "dtype 'complexfloat'"),
    "float8 of another kind": (
        lambda: saved(ROWS.to(torch.float8_e4m3fnuz)),
        "dtype 'float8_e4m3fnuz'",
    ),
    "scales": (lambda: saved(ROWS.to(torch.float8_e8m0fnu)), "dtype 'float8_e8m0fnu'"),
    "negated": (lambda: saved(torch.zeros(64, dtype=torch.complex64).conj().imag), "resolve_neg"),
    "no rows": (lambda: saved(torch.zeros(0, 16)), "empty tensor of shape (0, 16)"),
    "no columns": (lambda: saved(torch.zeros(16, 0)), "empty tensor of shape (16, 0)"),
    "nine dimensions": (lambda: saved(torch.zeros(1, 1, 1, 1, 1, 1, 1, 1, 16)), "9 dimensions"),
    "TorchScript": (
        lambda: torch_file(PLAIN, DATA, Record("archive/constants.pkl", b"")),
        "TorchScript",
    ),
    "big endian": (
        lambda: saved(ROWS).replace(b"little", b"big\0\0\0"),
        "byte order",
    ),
    "cut short": (lambda: saved(ROWS)[:-30], "cut short"),
    "cut in half": (lambda: saved(ROWS)[:500], "cut short"),
    "followed by something": (lambda: saved(ROWS) + b"\0" * 10, "followed by something"),
    "npz": (_npz, "an .npz archive"),
    "two pickles": (lambda: torch_file(PLAIN, DATA, Record("more/data.pkl", b"")), "2 records"),
}


_ARCHIVES: dict[str, tuple[Callable[[], bytes], str]] = {
    "a record twice": (
        lambda: torch_file(PLAIN, DATA, Record("archive/data/0", DATA)),
        "twice",
    ),
    "records on top of each other": (
        lambda: torch_file(PLAIN, DATA, Record("archive/data/1", DATA, offset=0)),
        "does not begin where",
    ),
    "a record beyond the end": (
        lambda: torch_file(PLAIN, DATA, Record("archive/data/1", b"", size=1 << 30)),
        "disagree",
    ),
    "a record that reaches into the directory": (
        lambda: torch_file(PLAIN, DATA, Record("archive/data/1", b"", size=60)),
        "between its records and its end",
    ),
    "sizes that only the directory says": (
        lambda: torch_file(PLAIN, DATA, Record("archive/data/1", DATA, local_size=8)),
        "disagree",
    ),
    "names that disagree": (
        lambda: torch_file(
            PLAIN, DATA, Record("archive/data/1", DATA, local_name="archive/data/2")
        ),
        "disagree",
    ),
    "flags that disagree": (
        lambda: torch_file(PLAIN, DATA, Record("archive/data/1", DATA, local_flags=8)),
        "disagree",
    ),
    "a descriptor that is not there": (
        lambda: torch_file(PLAIN, DATA, Record("archive/data/1", DATA, flags=8)),
        "descriptor",
    ),
    "encrypted": (
        lambda: torch_file(PLAIN, DATA, Record("archive/data/1", DATA, flags=1)),
        "encrypted",
    ),
    "a saturated size": (
        lambda: torch_file(PLAIN, DATA, Record("archive/data/1", DATA, size=0xFFFFFFFF)),
        "flags 0x0",
    ),
    "a long name": (
        lambda: torch_file(PLAIN, DATA, Record("n" * 300, b"")),
        "reaches beyond 256 bytes",
    ),
    "a name that is not UTF-8": (
        lambda: torch_file(PLAIN, DATA, Record("éé", b"")).replace("éé".encode(), b"\xff" * 4),
        "not UTF-8",
    ),
    "more entries than there are": (
        lambda: archive([Record("archive/data.pkl", pickled(PLAIN) + bytes(100))], count=2),
        "cut short",
    ),
    "fewer entries than there are": (
        lambda: archive([Record("a", bytes(50)), Record("b", bytes(50))], count=1),
        "between its records and its end",
    ),
    "a thousand entries": (
        lambda: archive([Record(str(i), b"") for i in range(1000)]),
        "1000 records",
    ),
    "a directory elsewhere": (
        lambda: archive([Record("a", bytes(100))], directory_offset=0),
        "not where its end says",
    ),
    "bytes between records and directory": (
        lambda: archive([Record("a", bytes(100))], gap=b"gap"),
        "between its records and its end",
    ),
    "a comment": (
        lambda: archive([Record("a", bytes(100))], comment=b"hello"),
        "does not end with",
    ),
    "a 64-bit end that disagrees": (
        lambda: _edited(saved(ROWS), saved(ROWS).index(b"PK\6\6") + 24, b"\xff"),
        "64-bit end",
    ),
    "no records": (
        lambda: b"PK\3\4" + bytes(100) + archive([], directory_offset=104),
        "between its records",
    ),
    "no data": (
        lambda: archive([Record("a/data.pkl", pickled(PLAIN))]),
        "storage '0' is not in the archive",
    ),
    "a prefix before the pickle's name": (
        lambda: archive([Record("data.pkl", pickled(PLAIN)), Record("data/0", DATA)]),
        "0 records",
    ),
}

_F32 = {"dtype": "F32", "shape": [4, 16], "data_offsets": [0, 256]}

_SAFETENSORS: dict[str, tuple[bytes, str]] = {
    "two tensors": (
        safetensors_file({"a": _F32, "b": _F32}, DATA),
        "2 tensors",
    ),
    "no tensors": (safetensors_file({}, DATA), "0 tensors"),
    "a tensor twice": (
        safetensors_file(
            b'{"a":{"dtype":"F32","shape":[4,16],"data_offsets":[0,256]},"a":{}}', DATA
        ),
        "twice",
    ),
    "a field twice": (
        safetensors_file(
            b'{"a":{"dtype":"F32","shape":[4,16],"shape":[1],"data_offsets":[0,256]}}', DATA
        ),
        "twice",
    ),
    "a header of 2**63 bytes": (
        safetensors_file({"a": _F32}, DATA, length=1 << 63),
        "its header is",
    ),
    "a header beyond the file": (
        safetensors_file({"a": _F32}, DATA, length=4000),
        "its header is 4000 bytes",
    ),
    "a long header": (
        safetensors_file({"a": _F32, "__metadata__": {"a": "b" * 9000}}, DATA),
        "at most 8192",
    ),
    "a header of another kind": (
        safetensors_file(b"[" + b" " * 100 + b"]", DATA),
        "no known format",
    ),
    "a header that ends early": (safetensors_file(b'{"a":{', DATA), "not valid JSON"),
    "a deep header": (safetensors_file(b'{"a":' * 1500 + b"1" + b"}" * 100, DATA), "header"),
    "deep lists": (safetensors_file(b'{"a":' + b"[" * 8000, DATA), "not valid JSON"),
    "NaN": (safetensors_file(b'{"a":NaN}', DATA), "the number 'NaN'"),
    "Infinity": (safetensors_file(b'{"a":-Infinity}', DATA), "the number '-Infinity'"),
    "a fraction": (safetensors_file({"a": {**_F32, "shape": [4.0, 16]}}, DATA), "the number '4.0'"),
    "a long number": (safetensors_file(b'{"a":' + b"9" * 5000 + b"}", DATA), "5000 digits"),
    "a negative size": (
        safetensors_file({"a": {**_F32, "shape": [-4, -16]}}, DATA),
        "not whole numbers",
    ),
    "True as a size": (
        safetensors_file({"a": {**_F32, "shape": [True, 64]}}, DATA),
        "not whole numbers",
    ),
    "text as a shape": (safetensors_file({"a": {**_F32, "shape": "4"}}, DATA), "not whole numbers"),
    "a huge product": (
        safetensors_file({"a": {**_F32, "shape": [1 << 60, 1 << 60]}}, DATA),
        "ends at byte",
    ),
    "an empty shape": (safetensors_file({"a": {**_F32, "shape": [0, 16]}}, DATA), "empty tensor"),
    "a smaller shape": (
        safetensors_file({"a": {**_F32, "shape": [3, 16]}}, DATA),
        "need 192 bytes",
    ),
    "an offset past the data": (
        safetensors_file({"a": {**_F32, "data_offsets": [0, 1 << 40]}}, DATA),
        "does not fill",
    ),
    "an offset inside the data": (
        safetensors_file({"a": {**_F32, "data_offsets": [4, 256]}}, DATA),
        "does not fill",
    ),
    "offsets the wrong way": (
        safetensors_file({"a": {**_F32, "data_offsets": [256, 0]}}, DATA),
        "does not fill",
    ),
    "three offsets": (
        safetensors_file({"a": {**_F32, "data_offsets": [0, 256, 1]}}, DATA),
        "does not fill",
    ),
    "bytes after the data": (safetensors_file({"a": _F32}, DATA + b"more"), "does not fill"),
    "integers": (safetensors_file({"a": {**_F32, "dtype": "I32"}}, DATA), "dtype 'I32'"),
    "a dtype that is a list": (
        safetensors_file({"a": {**_F32, "dtype": []}}, DATA),
        "its dtype is not text",
    ),
    "a dtype that is deep": (
        safetensors_file(
            b'{"a":{"dtype":'
            + b"[" * 900
            + b"]" * 900
            + b',"shape":[4,16],"data_offsets":[0,256]}}',
            DATA,
        ),
        "its dtype is not text",
    ),
    "thousands of sizes": (
        safetensors_file({"a": {**_F32, "shape": [1] * 2000}}, DATA),
        "2000 dimensions",
    ),
    "an unknown field": (safetensors_file({"a": {**_F32, "more": 1}}, DATA), "not described by"),
    "a tensor that is a number": (safetensors_file({"a": 1}, DATA), "not described by"),
    "metadata that is a list": (
        safetensors_file({"a": _F32, "__metadata__": []}, DATA),
        "metadata is not text",
    ),
    "metadata of numbers": (
        safetensors_file({"a": _F32, "__metadata__": {"b": 1}}, DATA),
        "metadata is not text",
    ),
    "a lone surrogate's bytes": (safetensors_file(b'{"\xed\xa0\x80":1}', DATA), "not valid JSON"),
}

_NPY_HEADER = "{'descr': '<f4', 'fortran_order': False, 'shape': (4, 16), }"

_NPY: dict[str, tuple[Callable[[], bytes], str]] = {
    "objects": (
        lambda: _numpy(np.array([{}] * 64, dtype=object), allow_pickle=True),
        "dtype '|O'",
    ),
    "integers": (lambda: _numpy(np.zeros((4, 16), np.int32)), "dtype '<i4'"),
    "complex": (lambda: _numpy(np.zeros((4, 16), np.complex64)), "dtype '<c8'"),
    "big endian": (lambda: _numpy(np.zeros((4, 16), ">f4")), "big endian"),
    "bfloat16 without its name": (
        lambda: npy_file(_NPY_HEADER.replace("<f4", "<V2"), bytes(128)),
        "cannot name bfloat16",
    ),
    "a record dtype": (
        lambda: _numpy(np.zeros(16, [("a", "<f4"), ("b", "<f4")])),
        "its header is not",
    ),
    "text": (lambda: _numpy(np.array(["a" * 50])), "dtype '<U50'"),
    "a header to evaluate": (
        lambda: npy_file("{'descr': __import__('os').system('true'), 'shape': (4, 16), }", DATA),
        "its header is not",
    ),
    "a header of expressions": (
        lambda: npy_file("{'descr': '<f4', 'fortran_order': False, 'shape': (9**9**9,), }", DATA),
        "its header is not",
    ),
    "a header of brackets": (lambda: npy_file("(" * 3000, DATA), "its header is not"),
    "a field twice": (
        lambda: npy_file(_NPY_HEADER.replace("'shape'", "'shape': (1,), 'shape'"), DATA),
        "twice",
    ),
    "a field too few": (
        lambda: npy_file("{'descr': '<f4', 'shape': (4, 16), }", DATA),
        "its header is not",
    ),
    "another field": (
        lambda: npy_file(_NPY_HEADER.replace("}", "'a': 1}"), DATA),
        "its header is not",
    ),
    "commas": (lambda: npy_file(_NPY_HEADER.replace("(4, 16)", "(4,,16)"), DATA), "its shape is"),
    "a space that is no space": (
        lambda: npy_file(_NPY_HEADER.replace("4, ", "4,\x1f "), DATA),
        "its header is not",
    ),
    "a long size": (lambda: npy_file(_NPY_HEADER.replace("16", "9" * 40), DATA), "its shape is"),
    "a huge product": (lambda: npy_file(_NPY_HEADER.replace("16", "9" * 18), DATA), "ends at byte"),
    "an empty shape": (lambda: npy_file(_NPY_HEADER.replace("16", "0"), DATA), "empty tensor"),
    "a negative size": (
        lambda: npy_file(_NPY_HEADER.replace("16", "-1"), DATA),
        "its header is not",
    ),
    "a smaller shape": (lambda: npy_file(_NPY_HEADER.replace("16", "15"), DATA), "need 240 bytes"),
    "cut short": (lambda: npy_file(_NPY_HEADER, DATA[:-1]), "ends at byte 256"),
    "followed by something": (lambda: npy_file(_NPY_HEADER, DATA + b"a"), "it holds 257"),
    "a header beyond the file": (
        lambda: npy_file(_NPY_HEADER, DATA, length=4000),
        "its header is 4000",
    ),
    "a header of 4 GB": (
        lambda: npy_file(_NPY_HEADER, DATA, version=2, length=0xFFFFFFFF),
        "its header is 4294967295",
    ),
    "version 4": (lambda: npy_file(_NPY_HEADER, DATA, version=4), "its version is (4, 0)"),
}

_OTHER: dict[str, tuple[bytes, str]] = {
    "zeros": (bytes(1000), "no known format"),
    "a bare pickle": (b"\x80\x04" + b"N" * 200 + b".", "a bare pickle"),
    "gzip": (b"\x1f\x8b" + bytes(200), "no known format"),
    "JSON": (b'{"prompt_embeds": [' + b"0.5, " * 50 + b"]}", "no known format"),
}


def hostile_files() -> dict[str, tuple[Callable[[], bytes], str]]:
    """Maker of each file, and its error beside `NOT_A_TENSOR`."""
    files = {f"torch: {title}": case for title, case in (_TORCH | _ARCHIVES).items()}
    for title, (opcodes, message) in PICKLES.items():
        files[f"pickle: {title}"] = (partial(torch_file, opcodes, DATA), message)
    for module, attribute in CALLS:
        files[f"pickle: calls {module}.{attribute}"] = (
            partial(_calls, module, attribute),
            f"names '{module}.{attribute}'",
        )
    files["pickle: a memo bomb"] = (_memo_bomb, "left after its end")
    for room, cases in (("safetensors", _SAFETENSORS), ("bytes", _OTHER)):
        for title, (data, message) in cases.items():
            files[f"{room}: {title}"] = (partial(bytes, data), message)
    files |= {f"npy: {title}": case for title, case in _NPY.items()}
    return files
