"""vLLM's own events in blocks of the routing chain.

An event names blocks by hashes that only vLLM can make, and says what made them: the ids of their
tokens, what is before them, and extra keys. That is all the routing chain is made of, but for rows:
of these an event has a digest of vLLM's, SHA-256 of a block's embeddings with zeros in the place of
tokens. So whoever admits a prompt with rows notes it here first, and the digests of its rows are
found again by the digests of its blocks.

What cannot be translated (media, rows nobody noted, a page that is no multiple of a block) is not
told, nor is what follows it.
"""

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

from inlay.card import ModelCard
from inlay.digest import BLOCK_SIZE, Chain, Secret, root_digest, row_digests
from inlay.engine.kv_events import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    EventBatch,
)
from inlay.prompt import ROW_DIGEST_SIZE, Prompt, Rows, Segment
from inlay.routing import Cleared, KvEvent, Removed, Stored, keys_of

log = logging.getLogger(__name__)

_MOST_NOTED = 1 << 16
"""Blocks with rows that are remembered until an event tells of them.

Of the oldest an event is not understood any more.
"""

_MARK_SIZE = 1 + ROW_DIGEST_SIZE

_PASSED_BY = ("sliding", "chunked", "mamba", "cross", "encoder")
"""Kinds of groups of layers that do not keep all positions."""


class _Block(NamedTuple):
    """Attributes: the last digest of the chain up to its end, and the routing keys of its blocks."""

    digest: bytes
    keys: bytes


NotedBlock: TypeAlias = tuple[bytes, bytes]
"""vLLM's digest of a block's embeddings, and for each position 1 and the digest of its row, or zeros for a token."""


def blocks_of(
    prompt: Prompt, secret: Secret, block_size: int, embeds: memoryview
) -> list[NotedBlock]:
    """The blocks of a prompt with rows. Reads all embeddings once; from any thread.

    Args:
        prompt: in the model's activation dtype, with the earlier output of a request that is
            resumed.
        secret: of the namespace.
        block_size: positions of the engine's pages.
        embeds: bytes of what the engine is given for all positions: rows, and zeros in the place of
            tokens.
    """
    row_bytes = len(embeds) // len(prompt)
    known = b"".join(_marks(segment, secret) for segment in prompt.segments)
    # What follows the prompt has no embeddings at all.
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

    Holds a few dozen bytes for each block the engine has cached.

    Args:
        card: the engine's.
        secret: of the namespace.
        adapter: the content id of an adapter by its name at the engine; None where it is not known.
    """

    def __init__(
        self, card: ModelCard, secret: Secret, adapter: Callable[[str], str | None] = lambda _: None
    ) -> None:
        self._card = card
        self._secret = secret
        self._adapter = adapter
        self._group: int | None = None
        self._grouped = False
        self._blocks: dict[BlockHash, _Block] = {}
        self._noted: OrderedDict[bytes, bytes] = OrderedDict()

    def __len__(self) -> int:
        """Blocks of the engine that are known."""
        return len(self._blocks)

    def note(self, found: Iterable[NotedBlock]) -> None:
        """Remember the blocks of a prompt with rows that the engine is given, as `blocks_of` finds them."""
        for name, known in found:
            self._noted[name] = known
            self._noted.move_to_end(name)
        while len(self._noted) > _MOST_NOTED:
            self._noted.popitem(last=False)

    def forget(self) -> None:
        """Events are missing.

        What the engine has cached is not known any more, nor what continues it.
        """
        self._blocks.clear()

    def read(self, batch: EventBatch) -> tuple[KvEvent, ...]:
        """What a batch says of the routing chain, in order."""
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
                # Another tier than the memory the engine computes in.
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
        """Whether an event is of the group of layers that is followed.

        The first that keeps all positions.
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
            known = _rows_of(extra[index])
            if known is None or (known and known not in self._noted):
                break
            parent = self._chained(parent, ids, self._noted[known] if known else b"")
            if name not in self._blocks:
                told += parent.keys
            self._blocks[name] = parent
        return told

    def _parent(self, event: BlockStored, extra: Sequence[object] | None) -> _Block | None:
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
        return _Block(root, b"")

    def _chained(self, parent: _Block, ids: Sequence[int], rows: bytes) -> _Block:
        """A page after `parent`: rows where `rows` has their digests, tokens elsewhere."""
        chain = Chain(parent.digest, self._secret)
        for index, id_ in enumerate(ids):
            mark = rows[index * _MARK_SIZE : (index + 1) * _MARK_SIZE]
            if mark[:1] == b"\1":
                chain.extend_rows(mark[1:])
            else:
                chain.extend_tokens((id_,))
        return _Block(chain.blocks[-1], keys_of(chain.blocks))


def _rows_of(extra: Sequence[object] | None) -> bytes | None:
    """VLLM's digest of a block's embeddings, empty where it has none.

    None where the block is of something else too.
    """
    keys = extra or ()
    if not all(isinstance(key, (str, bytes)) for key in keys):
        return None
    return next((key for key in keys if isinstance(key, bytes)), b"")


__all__ = ["KvChain", "NotedBlock", "blocks_of"]
