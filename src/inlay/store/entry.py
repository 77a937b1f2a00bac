"""One stored prompt: its metadata for clients, the metadata in its file, its data in memory."""

import math
from typing import ClassVar, Literal, TypeAlias, cast

import msgspec

from inlay.base.errors import InvalidRequestError
from inlay.messages.prompt import Buffer, Rows
from inlay.store.names import Key
from inlay.tensors import Tensor, TensorFormat, prompts_of

PAGE = 4096
"""Bytes everything is rounded up to.

An entry costs one page more than its tensor, in memory as on disk.
"""


def cost(num_bytes: int) -> int:
    """Bytes that a tensor of `num_bytes` counts for.

    Whole pages, and one for the entry itself.
    """
    return -(-num_bytes // PAGE) * PAGE + PAGE


Kind: TypeAlias = Literal["embeds", "image", "vectors"]
"""Kinds of contents: a tensor of embeddings, the file of an image, or that of vectors."""

FileKind: TypeAlias = Literal["image", "vectors"]
"""Kinds whose content is a file that is used as it is."""

_IS: dict[Kind, tuple[str, str]] = {
    "embeds": ("holds embeddings", "as {'type': 'prompt_embeds', 'ref': id}"),
    "image": ("is an image", "where an image may stand, as {'type': 'image_url', 'ref': id}"),
    "vectors": ("holds vectors", "as {'ref': id} among the documents of a rerank or a score"),
}


class NewImage(msgspec.Struct, frozen=True):
    """An image to be stored.

    The file is kept, not its rows: it is smaller than they are, and the same for every model,
    dtype and encoder. Workers keep the rows by content while they have room.

    Attributes:
        data: the file.
        format: of the file, by Pillow's name.
        height: in pixels as it is seen, after its orientation.
        width: likewise.
    """

    data: Buffer
    format: str
    height: int
    width: int

    kind: ClassVar[FileKind] = "image"
    dtype: ClassVar[str] = ""

    @property
    def shape(self) -> tuple[int, int]:
        """(height, width)."""
        return self.height, self.width


class NewVectors(msgspec.Struct, frozen=True):
    """Outputs of one input, to be stored, that similarity is computed of.

    Attributes:
        data: a safetensors file, of `inlay.tensors.named`; its metadata says what it is of.
        shape: (vectors, elements of each) of its largest output.
        dtype: of the vectors.
    """

    data: Buffer
    shape: tuple[int, int]
    dtype: str

    kind: ClassVar[FileKind] = "vectors"
    format: ClassVar[str] = "safetensors"


Content: TypeAlias = Tensor | NewImage | NewVectors
"""Contents of the store."""


class StoredPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """Metadata of a stored prompt for its owner.

    Attributes:
        id: `pe-...`, `pv-...` of vectors.
        kind: of the content.
        format: of the file it came in.
        shape: of the tensor; (height, width) of an image; of vectors their number and size.
        num_prompts: prompts in the tensor, each `num_tokens` long: 1 unless a batch was
            uploaded.
        num_tokens: rows of one prompt; 0 for an image, whose rows depend on the model, and for
            vectors.
        hidden_size: elements of a row; 0 for an image and for vectors.
        dtype: as it was uploaded; empty for an image.
        bytes: of the tensor, or of the file.
        expires_at: seconds since the epoch; None while it is pinned.
        pinned: True if it is kept until it is unpinned or deleted.
    """

    id: str
    kind: Kind
    format: str
    shape: tuple[int, ...]
    num_prompts: int
    num_tokens: int
    hidden_size: int
    dtype: str
    bytes: int
    expires_at: float | None
    pinned: bool


class StoreStats(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of a store, and counters since it was opened.

    Attributes:
        count: prompts, in any tier.
        pinned: of these, pinned.
        memory_bytes: held in memory.
        disk_bytes: held in files.
        hits: uses answered from memory.
        loads: uses that had to read a file.
        misses: ids that were not found, those of other tenants included.
        evictions: prompts removed to make room.
        expirations: prompts removed because they were not used.
        spills: files written.
        refused_files: files removed because they were torn, changed, or written under another
            secret.
        locked_files: files left alone at the start: encrypted with another key.
        disk_errors: reads, writes and removals that failed; prompts they concerned are in memory
            only.
        fetches: uses that had to fetch from a fleet's storage.
        shared_bytes: held in a fleet's storage, by all tenants.
    """

    count: int
    pinned: int
    memory_bytes: int
    disk_bytes: int
    hits: int
    loads: int
    misses: int
    evictions: int
    expirations: int
    spills: int
    refused_files: int
    locked_files: int
    disk_errors: int
    fetches: int = 0
    shared_bytes: int = 0


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """The model that rows are wanted for.

    The fields are the arguments of `inlay.tensors.to_rows`.
    """

    hidden_size: int
    dtype: str
    max_abs: float | None = None
    table_id: str | None = None


class Description(msgspec.Struct, frozen=True, array_like=True):
    """Metadata of a content.

    Attributes:
        tenant: digest of the owner.
        id: `pe-...`, `pv-...` of vectors.
        dtype: one of `inlay.messages.prompt.DTYPE_SIZES`; empty for an image.
        shape: (num_tokens, hidden) or (batch, num_tokens, hidden); (height, width) of an image;
            of vectors their number and size.
        format: the container it came in.
        table_id: as the container said.
        num_bytes: of the elements, or of the file.
        kind: of the content.
    """

    tenant: bytes
    id: str
    dtype: str
    shape: tuple[int, ...]
    format: str
    table_id: str | None
    num_bytes: int
    kind: Kind = "embeds"

    @classmethod
    def of(cls, key: Key, content: Content) -> "Description":
        """Of a content that is to be found by `key`."""
        size, shape, format_ = len(content.data), content.shape, content.format
        if isinstance(content, Tensor):
            return cls(*key, content.dtype, shape, format_, content.table_id, size)
        return cls(*key, content.dtype, shape, format_, None, size, content.kind)

    @property
    def key(self) -> Key:
        """Key in the index."""
        return self.tenant, self.id

    def told(self, *, expires_at: float | None) -> StoredPrompt:
        """Metadata for its owner; without a time to expire it is pinned."""
        *batch, num_tokens, hidden = self.shape if self.kind == "embeds" else (0, 0)
        return StoredPrompt(
            id=self.id,
            kind=self.kind,
            format=self.format,
            shape=self.shape,
            num_prompts=math.prod(batch),
            num_tokens=num_tokens,
            hidden_size=hidden,
            dtype=self.dtype,
            bytes=self.num_bytes,
            expires_at=expires_at,
            pinned=expires_at is None,
        )

    def check_kind(self, kind: Kind) -> None:
        """Raise `InvalidRequestError` for a content of another kind."""
        if self.kind != kind:
            (own, use), wanted = _IS[self.kind], _IS[kind][0].partition(" ")[2]
            raise InvalidRequestError(
                f"the stored {self.id} {own}, not {wanted}: refer to it {use}"
            )

    def prompts(self, data: Buffer) -> list[Tensor]:
        """The prompts whose elements are in `data`, sharing its memory.

        Raises `InvalidRequestError` for a content of another kind.
        """
        self.check_kind("embeds")
        format_ = cast("TensorFormat", self.format)
        return prompts_of(Tensor(data, self.dtype, self.shape, format_, self.table_id))


class StoredFile(msgspec.Struct, frozen=True):
    """A file of the disk tier.

    Attributes:
        name: inside the store's directory, without an ending.
        cost: bytes it counts for.
    """

    name: str
    cost: int


_Check: TypeAlias = tuple[int, str, str | None]


class Entry:
    """One stored prompt in memory. Changed by `StoreIndex` alone, under the store's lock.

    Attributes:
        description: what the tensor is.
        data: its elements, while they are in memory.
        digests: by model dtype, 16 bytes a row, one item a prompt.
        file: its file, once written.
        held: bytes it counts for in memory.
        used_at: when it was uploaded, used or pinned last, seconds.
        saved_use: the `used_at` its file knows.
        pinned: neither evicted nor expired.
        memory_only: it could not be written, or its file had to go.
        gone: no longer in the store.
    """

    __slots__ = (
        "_made",
        "_made_for",
        "_passed",
        "data",
        "description",
        "digests",
        "file",
        "gone",
        "held",
        "memory_only",
        "pinned",
        "saved_use",
        "used_at",
    )

    def __init__(self, description: Description, used_at: float, *, pinned: bool = False) -> None:
        self.description = description
        self.data: Buffer | None = None
        self.digests: dict[str, tuple[bytes, ...]] = {}
        self.file: StoredFile | None = None
        self.held = 0
        self.used_at = used_at
        self.saved_use = used_at
        self.pinned = pinned
        self.memory_only = False
        self.gone = False
        self._passed: dict[_Check, float] = {}
        self._made: tuple[Rows, ...] = ()
        self._made_for: _Check | None = None

    @property
    def key(self) -> Key:
        """Key in the index."""
        return self.description.key

    def told(self, ttl: float) -> StoredPrompt:
        """Metadata for its owner."""
        return self.description.told(expires_at=None if self.pinned else self.used_at + ttl)

    def has_passed(self, target: Target) -> bool:
        """True if the tensor is known to pass all checks of `to_rows` for `target`."""
        bound = self._passed.get(_check(target))
        return bound is not None and bound <= _bound(target)

    def pass_for(self, target: Target) -> None:
        """Remember that `to_rows` accepted the tensor for `target`."""
        check = _check(target)
        self._passed[check] = min(_bound(target), self._passed.get(check, math.inf))

    def recall(self, target: Target) -> tuple[Rows, ...] | None:
        """Rows for `target` with digests, one item a prompt, if the elements need no pass."""
        if not self.has_passed(target):
            return None
        if self._made_for != _check(target):
            if self.data is None or target.dtype != self.description.dtype:
                return None
            digests = self.digests.get(target.dtype)
            if digests is None:
                return None
            self.keep(target, views(self.description, self.data, digests))
        return self._made

    def keep(self, target: Target, made: tuple[Rows, ...]) -> None:
        """Keep rows made for `target`, instead of others."""
        self._made, self._made_for = made, _check(target)

    def forget_made(self) -> int:
        """Drop the rows made last; the bytes that they held beyond the tensor's own."""
        freed = self.cast_bytes
        self._made, self._made_for = (), None
        return freed

    @property
    def cast_bytes(self) -> int:
        """Bytes of kept rows that are not the tensor's own."""
        if self._made_for is None or self._made_for[1] == self.description.dtype:
            return 0
        return sum(len(rows.data) for rows in self._made)

    @property
    def digest_bytes(self) -> int:
        """Bytes of kept digests."""
        return sum(len(part) for digests in self.digests.values() for part in digests)


def views(description: Description, data: Buffer, digests: tuple[bytes, ...]) -> tuple[Rows, ...]:
    """Rows in the tensor's own dtype, one item a prompt, sharing its memory."""
    return tuple(
        Rows(part.data, part.dtype, (part.shape[0], part.shape[1]), digests=digest)
        for part, digest in zip(description.prompts(data), digests, strict=True)
    )


def _check(target: Target) -> _Check:
    return target.hidden_size, target.dtype, target.table_id


def _bound(target: Target) -> float:
    return math.inf if target.max_abs is None else target.max_abs
