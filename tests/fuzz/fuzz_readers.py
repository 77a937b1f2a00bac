"""Fuzz each reader of embeddings by itself, and that of checkpoints, guided by coverage.

What reaches it is always its own format.

    python -m tests.fuzz.fuzz_readers archive FOLDER -runs=10000000 -max_len=4096

Targets: `archive` (zip records), `pickle` (opcodes in an archive that is in order), `state_dict` (the
same of a checkpoint, and what `inlay convert` writes of it), `safetensors`, `npy`. What follows the target are libFuzzer's own arguments; FOLDER receives what reaches something
new. The corpus of the target goes in as well. Needs `atheris`; `fuzz_tensors` is the same check
without it.
"""

import struct
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.fuzz.guided import instrumented, run
from tests.fuzz.mutation import mutated
from tests.tensors.containers import Record, archive

CORPUS = Path(__file__).parent / "corpus" / "readers"
_STORAGE = bytes(range(64)) * 4
_NPY = b"\x93NUMPY"
_NOT_WATCHED = {
    "archive": ("inlay.tensors.pickled",),
    "pickle": ("inlay.tensors.archive",),
    "state_dict": ("inlay.tensors.archive",),
}
"""What another target is for."""


@cache
def _around_pickle(length: int) -> tuple[bytes, bytes]:
    """What stands before and after a pickle in an archive. No reader looks at its checksum."""
    name = "archive/data.pkl"
    whole = archive(
        [
            Record(name, bytes(length)),
            Record("archive/byteorder", b"little"),
            Record("archive/data/0", _STORAGE),
            Record("archive/data/1", _STORAGE[:64]),
            Record("archive/version", b"3\n"),
        ]
    )
    start = 30 + len(name)
    return whole[:start], whole[start + length :]


def _pickle(data: bytes) -> bytes:
    before, after = _around_pickle(len(data))
    return before + data + after


def _safetensors(data: bytes) -> bytes:
    # Mostly the length before the header is the header's own, or nothing behind it would ever be
    # reached.
    if not data[:1].isdigit():
        return data[1:9].ljust(8, b"\0") + b"{" + data[9:]
    header, _, rest = data[1:].partition(b"\0")
    return struct.pack("<Q", len(header) + 1) + b"{" + header + rest


class Target(NamedTuple):
    """A reader.

    Attributes:
        make: makes a file out of a fuzzer's bytes.
        within: the bytes that make a given file, if there are any.
        state_dict: checked as a checkpoint, not as embeddings.
    """

    make: Callable[[bytes], bytes]
    within: Callable[[bytes], bytes | None]
    state_dict: bool = False


def _pickle_in(file: bytes) -> bytes | None:
    start, end = file.find(b"\x80\x02"), file.find(b"PK", 4)
    return file[start:end] if file.startswith(b"PK\3\4") and 0 < start < end else None


def _safetensors_in(file: bytes) -> bytes | None:
    if file[8:9] != b"{":
        return None
    (length,) = struct.unpack("<Q", file[:8])
    header = file[9 : 8 + min(length, len(file))]
    if length > len(file) - 8 or b"\0" in header:
        return b"-" + file[:8] + file[9:]
    return b"0" + header + b"\0" + file[8 + length :]


TARGETS = {
    "archive": Target(
        lambda data: b"PK\3\4" + data,
        lambda file: file[4:] if file.startswith(b"PK\3\4") else None,
    ),
    "pickle": Target(_pickle, _pickle_in),
    "state_dict": Target(_pickle, _pickle_in, state_dict=True),
    "safetensors": Target(_safetensors, _safetensors_in),
    "npy": Target(
        lambda data: _NPY + data, lambda file: file[6:] if file.startswith(_NPY) else None
    ),
}


def seeds(target: str) -> list[bytes]:
    """Where mutation starts: the files of `fuzz_tensors` that belong to the target."""
    found = (
        TARGETS[target].within(path.read_bytes())
        for path in sorted((CORPUS.parent / "tensors").iterdir())
    )
    return [data for data in found if data is not None]


def main(arguments: Sequence[str]) -> None:
    """Run what the module's docstring says."""
    target, *options = arguments
    make, _, state_dict = TARGETS[target]
    with instrumented("inlay.tensors", but=_NOT_WATCHED.get(target, ())):
        from tests.fuzz.fuzz_tensors import WORDS, check, check_state_dict
    read = check_state_dict if state_dict else check

    inputs = seeds(target)
    with tempfile.TemporaryDirectory() as started:
        for number, data in enumerate(inputs):
            (Path(started) / str(number)).write_bytes(data)
        kept = CORPUS / target
        run(
            lambda data: read(make(data)),
            [lambda data, rng: mutated(data, inputs, WORDS, rng)],
            options,
            [Path(started), kept] if kept.is_dir() else [Path(started)],
        )


if __name__ == "__main__":
    main(sys.argv[1:])
