"""vLLM's own events in blocks of the routing chain.

An event names blocks by hashes that only vLLM can make, and says what made them: the ids of their tokens, what is before them, and
extra keys. That is all the routing chain is made of, but for rows: of these an event has a digest of vLLM's, SHA-256 of a block's
embeddings with zeros in the place of tokens. So whoever admits a prompt with rows notes it here first, and the digests of its rows
are found again by the digests of its blocks.

What cannot be translated (media, rows nobody noted, a page that is no multiple of a block) is not told, nor is what follows it.
"""

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from inlay.digest import BLOCK_SIZE, Chain, Secret, root_digest, row_digests
from inlay.prompt import ROW_DIGEST_SIZE, Prompt, Rows
from inlay.protocol.kv_events import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, EventBatch
from inlay.protocol.routing import Cleared, KvEvent, Removed, Stored, keys_of
from inlay.protocol.work import ModelCard

log = logging.getLogger(__name__)

_MOST_NOTED = 1 << 16
"""Blocks with rows that are remembered until an event tells of them; of the oldest an event is not understood any more."""

_PASSED_BY = ("sliding", "chunked", "mamba", "cross", "encoder")
"""Kinds of groups of layers that do not keep all positions."""


class _Block(NamedTuple):
    """Attributes: the last digest of the chain up to its end, and the routing keys of its blocks."""

    digest: bytes
    keys: bytes


class KvChain:
    """Translates the events of one engine. Holds a few dozen bytes for each block the engine has cached.

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

    def note(self, prompt: Prompt, block_size: int) -> None:
        """Remember the rows of a prompt that the engine is about to be given. Reads all rows once; from any thread, one at a time.

        Args:
            prompt: in the model's activation dtype, with the earlier output of a work that is resumed.
            block_size: positions of the engine's pages.
        """
        rows = next((segment for segment in prompt.segments if isinstance(segment, Rows)), None)
        if rows is None:
            return
        # What follows the prompt has no embeddings at all.
        self._remember(hashlib.sha256().digest(), b"")
        for start in range(0, len(prompt), block_size):
            stop = min(start + block_size, len(prompt))
            hasher, known = hashlib.sha256(), bytearray()
            for _, segment in prompt.spans(start, stop):
                if isinstance(segment, Rows):
                    hasher.update(segment.data.view)
                    known += b"".join(b"\1" + digest for digest in _digests(segment, self._secret))
                else:
                    hasher.update(bytes(len(segment) * rows.row_bytes))
                    known += bytes((1 + ROW_DIGEST_SIZE) * len(segment))
            self._remember(hasher.digest(), bytes(known))

    def _remember(self, name: bytes, known: bytes) -> None:
        self._noted[name] = known
        self._noted.move_to_end(name)
        if len(self._noted) > _MOST_NOTED:
            self._noted.popitem(last=False)

    def read(self, batch: EventBatch) -> tuple[KvEvent, ...]:
        """What a batch says of the routing chain, in order."""
        found: list[KvEvent] = []
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self._blocks.clear()
                found.append(Cleared())
            elif (
                event.medium not in (None, "GPU") or event.ownership is not None or event.locality == "REMOTE"
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
        """Whether an event is of the group of layers that is followed: the first that keeps all positions."""
        if not self._grouped and not (event.kv_cache_spec_kind or "").startswith(_PASSED_BY):
            self._group, self._grouped = event.group_idx, True
        return self._grouped and event.group_idx == self._group

    def _stored(self, event: BlockStored) -> bytes:
        size, count = event.block_size, len(event.block_hashes)
        if size <= 0 or size % BLOCK_SIZE or len(event.token_ids) != size * count:
            log.debug("blocks of %d positions with %d ids are not followed", size, len(event.token_ids))
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
        width = 1 + ROW_DIGEST_SIZE
        for index, id_ in enumerate(ids):
            if rows[index * width : index * width + 1] == b"\1":
                chain.extend_rows(rows[index * width + 1 : (index + 1) * width])
            else:
                chain.extend_tokens((id_,))
        return _Block(chain.blocks[-1], keys_of(chain.blocks))


def _rows_of(extra: Sequence[object] | None) -> bytes | None:
    """VLLM's digest of a block's embeddings, empty where it has none; None where the block is of something else too."""
    keys = extra or ()
    if not all(isinstance(key, (str, bytes)) for key in keys):
        return None
    return next((key for key in keys if isinstance(key, bytes)), b"")


def _digests(rows: Rows, secret: Secret) -> list[bytes]:
    found = row_digests(rows, secret)
    return [found[start : start + ROW_DIGEST_SIZE] for start in range(0, len(found), ROW_DIGEST_SIZE)]


__all__ = ["KvChain"]
