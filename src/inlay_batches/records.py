"""Records of files and batches, as they are kept; each is replaced as a whole."""

from base64 import b32encode
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from secrets import token_bytes
from typing import Final, Literal, TypeAlias

import msgspec

from inlay.store.kept.contents import Piece
from inlay.store.kept.lease import Held, Lease

Status: TypeAlias = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling",
    "cancelled",
]  # fmt: skip
ENDED: Final[frozenset[Status]] = frozenset({"failed", "completed", "expired", "cancelled"})
Stop: TypeAlias = Literal["batch_cancelled", "batch_expired", "storage_full"]
"""Code of lines that do not run any more."""

ENDS: Final[dict[Stop | None, Status]] = {
    None: "completed",
    "batch_cancelled": "cancelled",
    "batch_expired": "expired",
    "storage_full": "failed",
}
"""Status of a batch after `finalizing`, by why its last lines did not run."""

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Numbers as ranges [start, stop), in order; none touches the next."""


def new_id(kind: Literal["file-", "batch_"]) -> str:
    """Return an id that cannot be guessed: 128 bits in base32."""
    return kind + b32encode(token_bytes(16)).decode().lower().rstrip("=")


class FileRecord(msgspec.Struct, frozen=True, array_like=True):
    """A file.

    Attributes:
        id: of the file.
        filename: as its client called it.
        purpose: what it is for.
        size: bytes.
        created_at: Unix time.
        expires_at: Unix time from which it is gone; None if it stays.
        pieces: its bytes, in order.
    """

    id: str
    filename: str
    purpose: str
    size: int
    created_at: int
    expires_at: int | None
    pieces: tuple[Piece, ...]


class LineProblem(msgspec.Struct, frozen=True):
    """An error of a batch's input; `line` counts from 1, and is None for the whole file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class UsageSum(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of all lines so far."""

    input: int = 0
    cached: int = 0
    output: int = 0
    reasoning: int = 0

    def __add__(self, other: "UsageSum") -> "UsageSum":
        return UsageSum(
            self.input + other.input,
            self.cached + other.cached,
            self.output + other.output,
            self.reasoning + other.reasoning,
        )


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Place in an input file: the number of a line, from 0, and the byte where it begins."""

    line: int = 0
    offset: int = 0


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A batch.

    Attributes:
        id: of the batch.
        endpoint: path of the route that answers its lines.
        input_file_id: of the file it was made of, which may be deleted meanwhile.
        window: as its client gave it: "24h".
        metadata: the client's own.
        output_ttl: seconds its files are kept; None for the server's.
        output_format: of the vectors: in the lines, or one matrix.
        created_at: Unix time.
        expires_at: Unix time at which lines that have not run are given up.
        times: Unix time at which it came to a status, by field of the answer: "in_progress_at".
        status: as clients see it.
        stop: why the lines that are left do not run.
        lease: who runs it.
        renewed: counts up with each renewal of the lease.
        input: its lines; empty once it has ended.
        held: content with the ids of stored prompts that its lines name.
        total: lines.
        model: that they name.
        problems: of its input.
        done: numbers of the lines that have an output.
        resume: no line before this is to be run.
        completed: lines of status 200.
        failed: all other lines that are done.
        usage: of all lines that are done.
        output: content of the output file so far.
        error: content of the error file so far.
        matrix: rows of the matrix so far, where `output_format` is one.
        width: elements of such a row.
        rows: lines of the input file up to its last request, blank ones counted.
        output_file_id: once it is finalizing, if there is such a file.
        error_file_id: likewise.
        matrix_file_id: likewise.
        faults: times that its frontend could not go on with it.
    """

    id: str
    endpoint: str
    input_file_id: str
    window: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    output_ttl: int | None = None
    output_format: Literal["jsonl", "npy", "safetensors"] = "jsonl"
    times: dict[str, int] = {}
    status: Status = "validating"
    stop: Stop | None = None
    lease: Lease = Lease()
    renewed: int = 0
    input: tuple[Piece, ...] = ()
    held: Piece | None = None
    total: int = 0
    model: str | None = None
    problems: tuple[LineProblem, ...] = ()
    done: Ranges = ()
    resume: Place = Place()
    completed: int = 0
    failed: int = 0
    usage: UsageSum = UsageSum()
    output: tuple[Piece, ...] = ()
    error: tuple[Piece, ...] = ()
    matrix: tuple[Piece, ...] = ()
    width: int = 0
    rows: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    matrix_file_id: str | None = None
    faults: int = 0

    @property
    def ended(self) -> bool:
        """True if nothing is left to do."""
        return self.status in ENDED

    @property
    def pieces(self) -> Iterable[Piece]:
        """Yield all contents that it names."""
        yield from (*self.input, *self.output, *self.error, *self.matrix)
        if self.held is not None:
            yield self.held

    def at(self, status: Status, now: float) -> "BatchRecord":
        """Return it at another status, from `now` on."""
        times = self.times if status == "validating" else self.times | {f"{status}_at": int(now)}
        return msgspec.structs.replace(self, status=status, times=times)


encode = msgspec.msgpack.Encoder().encode
_files = msgspec.msgpack.Decoder(FileRecord)
_batches = msgspec.msgpack.Decoder(BatchRecord)


def decode(key: str, record: bytes) -> FileRecord | BatchRecord:
    """Return the record that is kept under a key. Raises `msgspec.MsgspecError`."""
    kind = key.partition(".")[2]
    return _batches.decode(record) if kind.startswith("batch_") else _files.decode(record)


def decode_batch(key: str, record: bytes) -> BatchRecord | None:
    """Return the record under a key if it is a batch. Raises `msgspec.MsgspecError`."""
    found = decode(key, record)
    return found if isinstance(found, BatchRecord) else None


HeldBatch: TypeAlias = Held[BatchRecord]
"""A batch that this frontend owns."""


def with_numbers(ranges: Ranges, numbers: Iterable[int]) -> Ranges:
    """Return ranges with further numbers, which are not in them."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted([*ranges, *((number, number + 1) for number in numbers)]):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        else:
            joined.append((start, stop))
    return tuple(joined)


def holds(ranges: Sequence[tuple[int, int]], number: int) -> bool:
    index = bisect_right(ranges, number, key=lambda each: each[0]) - 1
    return index >= 0 and number < ranges[index][1]
