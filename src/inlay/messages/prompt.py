"""A prompt is a sequence of positions: tokens, rows of embeddings, or media.

Everything a client may send becomes one `Prompt`, and nothing behind the frontend knows where it
came from. The types are immutable; slicing and joining share the rows' memory. No torch, no numpy.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TypeAlias

import msgspec

from inlay.base.errors import InvalidRequestError

DTYPE_SIZES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
"""Bytes per element of the dtypes rows may have, by torch's names."""


class Buffer:
    """Contiguous read-only bytes that are passed on, never copied into a message.

    Frames carry a buffer beside their header (`inlay.transport.frames`), which is why rows hold
    this and not `bytes`. Equal when the bytes are equal.

    Attributes:
        view: the bytes.
        name: `PROMPT/PART` of what is a stored prompt's: a receiver may cache it by this
            name, whose bytes never change. Else empty.
    """

    __slots__ = ("__weakref__", "name", "view")

    def __init__(self, data: "bytes | bytearray | memoryview", name: str = "") -> None:
        view = memoryview(data)
        if not view.contiguous:
            raise ValueError("a buffer must be contiguous")
        self.view = view.cast("B").toreadonly()
        self.name = name

    def __len__(self) -> int:
        return self.view.nbytes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Buffer) and self.view == other.view

    def __hash__(self) -> int:
        return hash(self.view)

    def __repr__(self) -> str:
        return f"Buffer({len(self)} bytes)"

    def slice(self, start: int, stop: int) -> "Buffer":
        """Bytes `start` to `stop`, sharing memory, without a name."""
        return Buffer(self.view[start:stop])


class Tokens(msgspec.Struct, frozen=True, tag="tokens", array_like=True):
    """Token ids; one position each."""

    ids: Sequence[int]

    def __post_init__(self) -> None:
        if type(self.ids) is not tuple:
            msgspec.structs.force_setattr(self, "ids", tuple(self.ids))

    def __len__(self) -> int:
        return len(self.ids)

    def slice(self, start: int, stop: int) -> "Tokens":
        """Positions `start` to `stop`."""
        return Tokens(self.ids[start:stop])


class RowField(msgspec.Struct, frozen=True, array_like=True):
    """One named tensor that belongs to rows: positions, inner-layer features.

    `shape[0]` equals their number.
    """

    name: str
    data: Buffer
    dtype: str
    shape: tuple[int, ...]

    def slice(self, start: int, stop: int) -> "RowField":
        """The part of rows `start` to `stop`, sharing memory."""
        stride = len(self.data) // self.shape[0]
        return RowField(
            self.name,
            self.data.slice(start * stride, stop * stride),
            self.dtype,
            (stop - start, *self.shape[1:]),
        )


class Rows(msgspec.Struct, frozen=True, tag="rows", array_like=True):
    """Embeddings, one row a position, C order, little endian.

    Attributes:
        data: `shape[0] * shape[1]` elements of `dtype`.
        dtype: one of `DTYPE_SIZES`.
        shape: (num_rows, hidden).
        bundle: further tensors of the same rows (positions, inner-layer features).
        atomic: attention inside is bidirectional, so the rows are never split by chunking or a
            cache hit.
        digests: 16 bytes a row once `inlay.messages.digest` has computed them, else None; for
            atomic rows all the digests are those of (whole segment, index).
    """

    data: Buffer
    dtype: str
    shape: tuple[int, int]
    bundle: tuple[RowField, ...] = ()
    atomic: bool = False
    digests: bytes | None = None

    def __post_init__(self) -> None:
        size = DTYPE_SIZES.get(self.dtype)
        if size is None:
            raise InvalidRequestError(
                f"rows have dtype {self.dtype!r}; allowed: {', '.join(DTYPE_SIZES)}"
            )
        num_rows, hidden = self.shape
        if num_rows < 0 or hidden <= 0 or num_rows * hidden * size != len(self.data):
            raise InvalidRequestError(
                f"rows of shape {self.shape} and dtype {self.dtype} need "
                f"{num_rows * hidden * size} bytes, "
                f"got {len(self.data)}"
            )
        if self.digests is not None and len(self.digests) != ROW_DIGEST_SIZE * num_rows:
            raise InvalidRequestError(f"{num_rows} rows carry {len(self.digests)} bytes of digests")
        for field in self.bundle:
            if not field.shape or field.shape[0] != num_rows:
                raise InvalidRequestError(
                    f"bundle field {field.name!r} has shape {field.shape} for {num_rows} rows"
                )

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def row_bytes(self) -> int:
        return self.shape[1] * DTYPE_SIZES[self.dtype]

    def slice(self, start: int, stop: int) -> "Rows":
        """Rows `start` to `stop`, sharing memory.

        Digests of atomic rows survive, as they name the whole segment.
        """
        digests = self.digests
        return Rows(
            self.data.slice(start * self.row_bytes, stop * self.row_bytes),
            self.dtype,
            (stop - start, self.shape[1]),
            tuple(field.slice(start, stop) for field in self.bundle),
            self.atomic,
            None if digests is None else digests[start * ROW_DIGEST_SIZE : stop * ROW_DIGEST_SIZE],
        )


class Media(msgspec.Struct, frozen=True, tag="media", array_like=True):
    """A run of rows of an image or the like: sized in the frontend, encoded by a worker.

    One item may be several runs with tokens between them; they share digest and grid, and the
    first of them alone has the data.

    Attributes:
        kind: "image", "audio" or "video".
        digest: of the item, 16 bytes, as `inlay.messages.digest.media_digest` makes it.
        num_positions: rows of this run.
        data: the encoded bytes of the item; None where `ref` names them, and in later runs.
        ref: name of the bytes.
        grid: (time, height, width) in patches of the whole item, for models that number positions
            by it.
        atomic: as for `Rows`; a property of the model's family.
        start: first row of the whole item that this run covers.
        total: rows of the whole item; 0 where this run is all of it.
        detail: "low" where the item was laid out with low detail.
        interval: from one grid in time to the next, of videos: positions, or seconds where `rate`
            is set.
        rate: positions of a second, for models that number what follows from the item's last time
            on; 0 for others.
        param: place in the client's request, for errors about the item.
    """

    kind: str
    digest: bytes
    num_positions: int
    data: Buffer | None = None
    ref: str | None = None
    grid: tuple[int, int, int] | None = None
    atomic: bool = False
    start: int = 0
    total: int = 0
    detail: str | None = None
    interval: float = 1.0
    param: str | None = None
    rate: float = 0.0

    def __post_init__(self) -> None:
        if not self.total:
            msgspec.structs.force_setattr(self, "total", self.start + self.num_positions)
        if not 0 <= self.start <= self.start + self.num_positions <= self.total:
            raise InvalidRequestError(
                f"rows {self.start} to {self.start + self.num_positions} of an item of "
                f"{self.total} rows"
            )

    def __len__(self) -> int:
        return self.num_positions

    def located(self, error: InvalidRequestError) -> InvalidRequestError:
        """Return an error about the item with the item's place."""
        return error if self.param is None else error.located(self.param)

    def slice(self, start: int, stop: int) -> "Media":
        """Positions `start` to `stop`."""
        return msgspec.structs.replace(self, num_positions=stop - start, start=self.start + start)


Segment: TypeAlias = Tokens | Rows | Media

ROW_DIGEST_SIZE = 16
"""Bytes of a row's digest."""


class Prompt(msgspec.Struct, frozen=True, array_like=True):
    """A prompt: segments in order, positions numbered across them.

    `Prompt.of` is the way to make one: it drops empty segments and joins neighbouring tokens, so
    that equal sequences of positions have equal segments.
    """

    segments: tuple[Segment, ...]

    @classmethod
    def of(cls, *segments: Segment) -> "Prompt":
        """A prompt of `segments`, in normal form."""
        normal: list[Segment] = []
        # Neighbouring tokens are gathered before they are joined: a client decides how many there
        # are.
        gathered: list[int] = []
        for segment in segments:
            if isinstance(segment, Tokens):
                gathered.extend(segment.ids)
                continue
            if not len(segment):
                continue
            if gathered:
                normal.append(Tokens(gathered))
                gathered = []
            normal.append(segment)
        if gathered:
            normal.append(Tokens(gathered))
        return cls(tuple(normal))

    def __len__(self) -> int:
        return sum(map(len, self.segments))

    def __add__(self, other: "Prompt") -> "Prompt":
        return Prompt.of(*self.segments, *other.segments)

    @property
    def has_rows(self) -> bool:
        """True if any position is not a token."""
        return any(not isinstance(segment, Tokens) for segment in self.segments)

    @property
    def has_embeds(self) -> bool:
        """True if any position is a row that came as one, not as media."""
        return any(isinstance(segment, Rows) for segment in self.segments)

    @property
    def nbytes(self) -> int:
        """Bytes of row and media data, without the token ids."""
        total = 0
        for segment in self.segments:
            if isinstance(segment, Rows):
                total += len(segment.data) + sum(len(field.data) for field in segment.bundle)
            elif isinstance(segment, Media) and segment.data is not None:
                total += len(segment.data)
        return total

    def slice(self, start: int, stop: int) -> "Prompt":
        """Positions `start` to `stop`, sharing the rows' memory.

        Cost is that of the segments touched.
        """
        return Prompt.of(*(segment for _, segment in self.spans(start, stop)))

    def spans(self, start: int, stop: int) -> Iterator[tuple[int, Segment]]:
        """(first position, part) of each segment between positions `start` and `stop`."""
        position = 0
        for segment in self.segments:
            end = position + len(segment)
            if end > start and position < stop:
                low, high = max(start, position), min(stop, end)
                whole = low == position and high == end
                yield low, segment if whole else segment.slice(low - position, high - position)
            position = end
            if position >= stop:
                return

    def token_ids(self) -> tuple[int, ...]:
        """The ids of the token positions alone, in order.

        What penalties and n-gram logic may see.
        """
        return tuple(
            chain.from_iterable(part.ids for part in self.segments if isinstance(part, Tokens))
        )

    def atomic_bounds(self) -> list[tuple[int, int]]:
        """(first, past-last) position of each atomic segment, ascending."""
        bounds: list[tuple[int, int]] = []
        position = 0
        for segment in self.segments:
            if not isinstance(segment, Tokens) and segment.atomic:
                bounds.append((position, position + len(segment)))
            position += len(segment)
        return bounds


def split_point(bounds: Iterable[tuple[int, int]], position: int) -> int:
    """The largest position not beyond `position` that is not inside an atomic segment.

    Args:
        bounds: as `Prompt.atomic_bounds` returns them.
        position: where one would like to cut.
    """
    ordered = list(bounds)
    index = bisect_right(ordered, (position, -1)) - 1
    if index >= 0 and ordered[index][0] < position < ordered[index][1]:
        return ordered[index][0]
    return position
