"""Translation of vLLM's KV events into blocks of the routing chain.

An event names blocks by hashes that only vLLM can compute, and lists their inputs: token ids, the
parent block, and extra keys. The routing chain is computed from the same inputs, except for
embedding vectors: of these an event has only vLLM's digest, SHA-256 of a block's embeddings with
zeros for tokens. So prompts with embedding vectors are noted here when they are admitted, and the
digests of their vectors are looked up by the digests of their blocks. Of a model that takes images,
vLLM names each image, and each run of vectors, by an identifier that it was given: what an
identifier stands for is noted likewise.

A vector's digest is that of a group, which may end behind its block. Where prompts share a block
but not the groups in it, the key that is told is that of the prompt noted last; rows that begin a
prompt have their groups in its blocks.

Blocks that cannot be translated (vectors or images that were not noted, pages that are no multiple
of a block) are left out, and so is everything that follows them.
"""

import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

from inlay.base.lru import LruBytes
from inlay.engine.kv_events import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    EventBatch,
)
from inlay.messages.card import ModelCard
from inlay.messages.digest import BLOCK_SIZE, Chain, Secret, root_digest, row_digests
from inlay.messages.prompt import ROW_DIGEST_SIZE, Media, Prompt, Rows, Segment, Tokens
from inlay.messages.routing import Cleared, KvEvent, Removed, Stored, keys_of

log = logging.getLogger(__name__)

_MOST_NOTED = 1 << 16
"""Maximum number of remembered blocks with embedding vectors.

Events for older ones cannot be translated.
"""

_MOST_NOTED_ITEMS = 1 << 14
"""Maximum number of remembered identifiers."""

_MARK_SIZE = 1 + ROW_DIGEST_SIZE

_PASSED_BY = ("sliding", "chunked", "mamba", "cross", "encoder")
"""Kinds of layer groups that do not keep all positions."""


class _ChainBlock(NamedTuple):
    """Attributes: the chain's digest at the block's end, and the routing keys of its blocks."""

    digest: bytes
    keys: bytes


NotedBlock: TypeAlias = tuple[bytes, bytes]
"""vLLM's digest of a block's embeddings; per position 1 and its vector's digest, or zeros."""


_Mark: TypeAlias = tuple[bytes, int] | None
"""A position: digest and index of a row of media, digest and -1 of a vector, None for a token."""


class NotedItem(NamedTuple):
    """Positions that vLLM names together.

    Attributes:
        identifier: their name.
        segments: what they are, in order: tokens, media, or digests of embedding vectors, each of
            `ROW_DIGEST_SIZE` bytes.
    """

    identifier: str
    segments: tuple[Tokens | Media | bytes, ...]

    def mark(self, block: list[_Mark], first: int) -> None:
        """Put them into a block, of which they begin at position `first`; it may be negative."""
        for segment in self.segments:
            plain = isinstance(segment, bytes)
            count = len(segment) // ROW_DIGEST_SIZE if plain else len(segment)
            for at in range(max(0, first), min(len(block), first + count)):
                index = at - first
                if isinstance(segment, bytes):
                    start = index * ROW_DIGEST_SIZE
                    block[at] = segment[start : start + ROW_DIGEST_SIZE], -1
                elif isinstance(segment, Media):
                    block[at] = segment.digest, segment.start + index
            first += count


_Named: TypeAlias = tuple[str, int]
"""An identifier, and where its first position is from the beginning of a block; may be negative."""


class _Extra(NamedTuple):
    """Inputs of a block beside its ids.

    Attributes:
        rows: vLLM's digest of its embeddings, empty if it has none.
        items: the named items that it has positions of.
    """

    rows: bytes
    items: list[_Named]


def blocks_of(
    prompt: Prompt, secret: Secret, block_size: int, embeds: memoryview
) -> list[NotedBlock]:
    """Compute the blocks of a prompt with embedding vectors. Thread-safe; reads all embeddings.

    Args:
        prompt: in the model's activation dtype, with the earlier output of a resumed request.
        secret: secret of the namespace.
        block_size: positions of the engine's pages.
        embeds: bytes of the engine's input for all positions: embedding vectors, and zeros for
            tokens.
    """
    row_bytes = len(embeds) // len(prompt)
    known = b"".join(_marks(segment, secret) for segment in prompt.segments)
    # Positions after the prompt have no embeddings at all.
    found = [(hashlib.sha256().digest(), b"")]
    for start in range(0, len(prompt), block_size):
        stop = min(start + block_size, len(prompt))
        name = hashlib.sha256(embeds[start * row_bytes : stop * row_bytes]).digest()
        found.append((name, known[start * _MARK_SIZE : stop * _MARK_SIZE]))
    return found


def _marks(segment: Segment, secret: Secret) -> bytes:
    if not isinstance(segment, Rows):
        return bytes(_MARK_SIZE * len(segment))
    digests = row_digests(segment, secret)
    return b"".join(
        b"\1" + digests[start : start + ROW_DIGEST_SIZE]
        for start in range(0, len(digests), ROW_DIGEST_SIZE)
    )


class KvChain:
    """Translates the events of one engine.

    Needs a few dozen bytes for each block the engine has cached.

    Args:
        card: metadata of the engine.
        secret: secret of the namespace.
        adapter: content id of an adapter by its name in the engine; None if unknown.
    """

    def __init__(
        self, card: ModelCard, secret: Secret, adapter: Callable[[str], str | None] = lambda _: None
    ) -> None:
        self._card = card
        self._secret = secret
        self._adapter = adapter
        self._group: int | None = None
        self._grouped = False
        self._blocks: dict[BlockHash, _ChainBlock] = {}
        self._noted: LruBytes[bytes, bytes] = LruBytes(_MOST_NOTED)
        self._items: LruBytes[str, NotedItem] = LruBytes(_MOST_NOTED_ITEMS)

    def __len__(self) -> int:
        """Number of the engine's blocks that are known."""
        return len(self._blocks)

    def note(self, found: Iterable[NotedBlock]) -> None:
        """Remember the blocks of a prompt with embedding vectors, as returned by `blocks_of`."""
        for name, known in found:
            self._noted.put(name, known)

    def note_items(self, found: Iterable[NotedItem]) -> None:
        """Remember what identifiers stand for."""
        for item in found:
            self._items.put(item.identifier, item)

    def forget(self) -> None:
        """Reset after missed events.

        All known blocks are dropped, and blocks that continue them cannot be translated.
        """
        self._blocks.clear()

    def read(self, batch: EventBatch) -> tuple[KvEvent, ...]:
        """Translate a batch into events of the routing chain, in order."""
        found: list[KvEvent] = []
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self._blocks.clear()
                found.append(Cleared())
            elif (
                event.medium not in (None, "GPU")
                or event.ownership is not None
                or event.locality == "REMOTE"
            ):
                # A cache tier other than the engine's own memory.
                continue
            elif isinstance(event, BlockRemoved):
                if event.group_idx in (None, self._group):
                    gone = [self._blocks.pop(name, None) for name in event.block_hashes]
                    keys = b"".join(block.keys for block in gone if block is not None)
                    found += [Removed(keys)] if keys else []
            elif self._is_ours(event):
                keys = self._stored(event)
                found += [Stored(keys)] if keys else []
        return tuple(found)

    def _is_ours(self, event: BlockStored) -> bool:
        """Return True if an event is of the layer group that is followed.

        That is the first group that keeps all positions.
        """
        if not self._grouped and not (event.kv_cache_spec_kind or "").startswith(_PASSED_BY):
            self._group, self._grouped = event.group_idx, True
        return self._grouped and event.group_idx == self._group

    def _stored(self, event: BlockStored) -> bytes:
        size, count = event.block_size, len(event.block_hashes)
        if size <= 0 or size % BLOCK_SIZE or len(event.token_ids) != size * count:
            log.debug(
                "blocks of %d positions with %d ids are not followed", size, len(event.token_ids)
            )
            return b""
        extra = event.extra_keys or [None] * count
        parent = self._parent(event, extra[0] if extra else None)
        told = b""
        for index, name in enumerate(event.block_hashes[: len(extra)]):
            if parent is None:
                break
            ids = event.token_ids[index * size : (index + 1) * size]
            marks = self._marks(extra[index], size)
            if marks is None:
                break
            parent = self._chained(parent, ids, marks)
            if name not in self._blocks:
                told += parent.keys
            self._blocks[name] = parent
        return told

    def _parent(self, event: BlockStored, extra: Sequence[object] | None) -> _ChainBlock | None:
        if event.parent_block_hash is not None:
            return self._blocks.get(event.parent_block_hash)
        adapter = None
        keys = list(extra or ())
        if event.lora_name is not None:
            adapter = self._adapter(event.lora_name)
            if adapter is None:
                return None
            if event.lora_name in keys:
                keys.remove(event.lora_name)
        salt = next((key for key in keys if isinstance(key, str)), None)
        if any(isinstance(key, bytes) for key in keys) and not self._card.shares_text_prefix:
            salt = f"rows/{salt or ''}"
        root = root_digest(
            self._secret,
            weights_id=self._card.weights_id,
            dtype=self._card.dtype,
            adapter=adapter,
            salt=salt,
        )
        return _ChainBlock(root, b"")

    def _marks(self, extra: Sequence[object] | None, size: int) -> "list[_Mark] | None":
        """Return what stands at the positions of a block; None if that is not known."""
        found = _read(extra)
        if found is None:
            return None
        marks: list[_Mark] = [None] * size
        if found.rows:
            rows = self._noted.peek(found.rows)
            if rows is None:
                return None
            for index in range(len(rows) // _MARK_SIZE):
                mark = rows[index * _MARK_SIZE : (index + 1) * _MARK_SIZE]
                marks[index] = (mark[1:], -1) if mark[:1] == b"\1" else None
        for name, first in found.items:
            item = self._items.peek(name)
            if item is None:
                return None
            item.mark(marks, first)
        return marks

    def _chained(
        self, parent: _ChainBlock, ids: Sequence[int], marks: "list[_Mark]"
    ) -> _ChainBlock:
        """Append a page to `parent`, where `marks` has None by its token."""
        chain = Chain(parent.digest, self._secret)
        for id_, mark in zip(ids, marks, strict=True):
            if mark is None:
                chain.extend_tokens((id_,))
            elif mark[1] < 0:
                chain.extend_rows(mark[0])
            else:
                chain.extend_media(*mark, 1)
        return _ChainBlock(chain.blocks[-1], keys_of(chain.blocks))


def _read(extra: Sequence[object] | None) -> _Extra | None:
    """Read the extra keys of a block; None if it also depends on something else."""
    rows, items = b"", []
    for key in extra or ():
        match key:
            case bytes():
                rows = rows or key
            case [str(name), int(first)]:
                items.append((name, first))
            case str():
                continue
            case _:
                return None
    return _Extra(rows, items)
