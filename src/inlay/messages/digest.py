"""Digests: the identity of positions and of prefixes.

A token's identity is its id. A row's is 16 bytes of the keyed BLAKE3 of its group: `BLOCK_SIZE`
rows of one segment, in the model's activation dtype, with every bundle field at those positions. A
call for each row takes more than twice as long, and prefixes are cached by whole blocks anyway: of
rows that begin a prompt the groups are the blocks, and elsewhere at most one block fewer is shared.
An atomic segment is one group.

A position of an image or the like is (digest of the item, index of the row in the whole item),
where the item's digest covers the file's bytes and all that decides its rows; so a prefix with an
image is known before anyone has encoded it. Tokens, rows and media are told apart by a byte before
each. A chain of block digests names every prefix at multiples of `BLOCK_SIZE` positions: it keys
the engine's prefix cache and is what routers compare. All keys come from one root secret, so a
digest tells a stranger nothing and cannot be made by one.

BLAKE3: O'Connor, Aumasson, Neves, Wilcox-O'Hearn, "BLAKE3: one function, fast everywhere" (2020).
"""

import secrets
import struct
from collections.abc import Sequence

import msgspec
from blake3 import blake3

from inlay.base.pace import yield_gil
from inlay.messages.prompt import ROW_DIGEST_SIZE, Prompt, Rows, Segment, Tokens

BLOCK_SIZE = 16
"""Positions in a block of the chain, whatever the engine's page size."""

BLOCK_DIGEST_SIZE = 16
"""Bytes of a block digest."""

_TOKEN, _ROW, _ATOMIC, _MEDIA = b"\x00", b"\x01", b"\x02", b"\x03"
_WHOLE = b"whole prompt"
_token = struct.Struct("<cI")
_atomic = struct.Struct("<c16sI")


class Secret:
    """The root secret of a namespace and the keys derived from it.

    Never printed, never sent to clients.

    Attributes:
        root: 32 bytes.
        rows: key of row digests.
        media: key of digests of images and the like.
        blocks: key of block digests.
        store: key of stored prompts' ids.
        events: key of digests that leave in KV events.
        transport: key of the proofs at the beginning of a connection.
        pages: key of the checksums of pages of keys and values.
        tickets: key of the checksums of tickets for keys and values.
        references: key of the checksums of kept references.
    """

    __slots__ = (
        "blocks", "events", "media", "pages", "references", "root", "rows", "store", "tickets",
        "transport",
    )  # fmt: skip

    def __init__(self, root: bytes) -> None:
        if len(root) != 32:
            raise ValueError(f"a root secret is 32 bytes, got {len(root)}")
        self.root = root
        self.rows = self._derive("rows")
        self.media = self._derive("media")
        self.blocks = self._derive("blocks")
        self.store = self._derive("store")
        self.events = self._derive("events")
        self.transport = self._derive("transport")
        self.pages = self._derive("pages")
        self.tickets = self._derive("tickets")
        self.references = self._derive("references")

    @classmethod
    def random(cls) -> "Secret":
        """A secret that lives as long as the process."""
        return cls(secrets.token_bytes(32))

    def _derive(self, purpose: str) -> bytes:
        return blake3(self.root, derive_key_context=f"inlay 2026 {purpose}").digest()

    @property
    def fingerprint(self) -> str:
        """16 hex digits that tell two secrets apart and reveal neither."""
        return self._derive("fingerprint").hex()[:16]

    def __repr__(self) -> str:
        return f"Secret(fingerprint={self.fingerprint})"


def row_digests(rows: Rows, secret: Secret) -> bytes:
    """The digests of `rows`, 16 bytes each, in order.

    Those the rows already carry are returned as they are.

    Rows are hashed in groups of `BLOCK_SIZE`, counted from the first one; a digest is a row's part
    of its group's output. Atomic rows are one group.

    The rows must already be in the model's activation dtype, or equal prompts would not meet. They
    must be whole: a slice has other groups.
    """
    if rows.digests is not None:
        return rows.digests
    header = f"{rows.dtype}:{rows.shape[1]}"
    for field in rows.bundle:
        header += f"|{field.name}:{field.dtype}:{field.shape[1:]}"
    # The header goes into the key, so that a group costs one call over its own bytes and no more.
    key = blake3((_ATOMIC if rows.atomic else _ROW) + header.encode(), key=secret.rows).digest()
    view, size, count = rows.data.view, rows.row_bytes, len(rows)
    group = max(count, 1) if rows.atomic else BLOCK_SIZE
    found: list[bytes] = []
    for first in range(0, count, group):
        last = min(first + group, count)
        hasher = blake3(view[first * size : last * size], key=key)
        for field in rows.bundle:
            hasher.update(field.slice(first, last).data.view)
        found.append(hasher.digest(ROW_DIGEST_SIZE * (last - first)))
        yield_gil()
    return b"".join(found)


def with_digests(prompt: Prompt, secret: Secret) -> Prompt:
    """`prompt` with every `Rows` carrying its digests.

    Shares memory; computes only what is missing.
    """
    if all(
        not isinstance(segment, Rows) or segment.digests is not None for segment in prompt.segments
    ):
        return prompt
    return Prompt(
        tuple(
            msgspec.structs.replace(segment, digests=row_digests(segment, secret))
            if isinstance(segment, Rows)
            else segment
            for segment in prompt.segments
        )
    )


def media_digest(
    data: "bytes | memoryview", secret: Secret, *, kind: str, encoder_id: str, settings: str = ""
) -> bytes:
    """The digest of an image or the like, 16 bytes: equal exactly where its rows are.

    Args:
        data: the decoded file's bytes, after base64 and before any decoding of the picture.
        secret: the namespace's secret.
        kind: "image", "audio" or "video".
        encoder_id: `MediaSpec.encoder_id`.
        settings: what else decides the rows: the detail of an image, the frames of a video.
    """
    hasher = blake3(key=secret.media)
    for part in (kind, encoder_id, settings):
        name = part.encode()
        hasher.update(struct.pack("<Q", len(name)))
        hasher.update(name)
    hasher.update(data)
    return hasher.digest(ROW_DIGEST_SIZE)


def root_digest(
    secret: Secret,
    *,
    weights_id: str,
    dtype: str,
    adapter: str | None = None,
    salt: str | None = None,
) -> bytes:
    """The digest of the empty prefix: equal exactly where cached keys and values may be shared.

    Args:
        secret: the namespace's secret.
        weights_id: identity of the model's weights and configuration.
        dtype: activation dtype.
        adapter: digest of the adapter's *content*, or None.
        salt: the caller's tenant or `cache_salt`, or None.
    """
    hasher = blake3(key=secret.blocks)
    for part in (weights_id, dtype, adapter, salt):
        data = b"" if part is None else part.encode()
        hasher.update(struct.pack("<?Q", part is not None, len(data)))
        hasher.update(data)
    return hasher.digest(BLOCK_DIGEST_SIZE)


def _spread(kind: bytes, data: bytes, width: int) -> bytes:
    """`kind` before every `width` bytes of `data`."""
    stride = width + 1
    items = bytearray(kind * (len(data) // width * stride))
    for index in range(width):
        items[index + 1 :: stride] = data[index::width]
    return bytes(items)


def _items(segment: Segment, secret: Secret) -> tuple[bytes, int]:
    """The items of a segment's positions one after the other, and the bytes of each."""
    if isinstance(segment, Tokens):
        return _spread(_TOKEN, struct.pack(f"<{len(segment)}I", *segment.ids), 4), _token.size
    if isinstance(segment, Rows):
        return _spread(_ROW, row_digests(segment, secret), ROW_DIGEST_SIZE), 1 + ROW_DIGEST_SIZE
    return _media_items(segment.digest, segment.start, segment.num_positions), _atomic.size


def _media_items(digest: bytes, start: int, count: int) -> bytes:
    return b"".join(_atomic.pack(_MEDIA, digest, index) for index in range(start, start + count))


class Chain:
    """The digests of a growing sequence's full blocks.

    One chain follows a request from its prompt through its output: `extend` takes positions as they
    become known, and `blocks[i]` names the prefix of `(i + 1) * BLOCK_SIZE` positions. An engine
    whose pages are a multiple of `BLOCK_SIZE` reads its page digests off the same list.
    """

    __slots__ = ("_pending", "_pending_count", "_root", "_secret", "blocks")

    def __init__(self, root: bytes, secret: Secret) -> None:
        self._root = root
        self._secret = secret
        self._pending = b""
        self._pending_count = 0
        self.blocks: list[bytes] = []

    @property
    def length(self) -> int:
        """Positions taken so far."""
        return len(self.blocks) * BLOCK_SIZE + self._pending_count

    def extend(self, prompt: Prompt) -> None:
        """Take the positions of `prompt`."""
        for segment in prompt.segments:
            if len(segment):
                self._take(*_items(segment, self._secret))

    def extend_tokens(self, ids: Sequence[int]) -> None:
        """Take token positions."""
        if len(ids) == 1:  # a step of decoding
            self._take(_token.pack(_TOKEN, ids[0]), _token.size)
        elif ids:
            self._take(*_items(Tokens(ids), self._secret))

    def extend_rows(self, digests: bytes) -> None:
        """Take plain rows by their digests, `ROW_DIGEST_SIZE` bytes each."""
        self._take(_spread(_ROW, digests, ROW_DIGEST_SIZE), 1 + ROW_DIGEST_SIZE)

    def extend_media(self, digest: bytes, start: int, count: int) -> None:
        """Take `count` positions of an item from its row `start` on, by the item's digest."""
        self._take(_media_items(digest, start, count), _atomic.size)

    def _take(self, items: bytes, width: int) -> None:
        """Take items of `width` bytes each: first what a begun block lacks, then whole blocks.

        The rest begins another.
        """
        count = len(items) // width
        lacking = BLOCK_SIZE - self._pending_count
        if count < lacking:
            self._pending += items
            self._pending_count += count
            return
        begun = lacking * width
        self._close(self._pending + items[:begun])
        size = BLOCK_SIZE * width
        whole = begun + (len(items) - begun) // size * size
        for start in range(begun, whole, size):
            self._close(items[start : start + size])
        self._pending = items[whole:]
        self._pending_count = len(self._pending) // width

    def _close(self, block: bytes) -> None:
        parent = self.blocks[-1] if self.blocks else self._root
        self.blocks.append(
            blake3(parent + block, key=self._secret.blocks).digest(BLOCK_DIGEST_SIZE)
        )


def chain(prompt: Prompt, root: bytes, secret: Secret) -> list[bytes]:
    """The block digests of `prompt`'s full blocks of `BLOCK_SIZE` positions, in order."""
    running = Chain(root, secret)
    running.extend(prompt)
    return running.blocks


def prompt_digest(
    prompt: Prompt, root: bytes, secret: Secret, *, second_from: int | None = None
) -> bytes:
    """The digest of a whole prompt, 16 bytes.

    Equal exactly where all its positions are, under equal roots.

    Args:
        prompt: any.
        root: as `root_digest` makes it.
        secret: the namespace's secret.
        second_from: where its second text begins, of a pair of texts.
    """
    hasher = blake3(_WHOLE, key=secret.blocks)
    hasher.update(root)
    hasher.update(struct.pack("<q", -1 if second_from is None else second_from))
    for segment in prompt.segments:
        hasher.update(_items(segment, secret)[0])
    return hasher.digest(BLOCK_DIGEST_SIZE)
