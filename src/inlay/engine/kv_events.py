"""Events of an engine's cached blocks: those of vLLM 0.32, field for field.

A message is (topic, sequence number as 8 bytes, big endian, `EventBatch` as msgpack). Structs are
maps with their type's name as tag, but for the batch, which is an array; defaults are left out.
Readers must ignore unknown fields.
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, runtime_checkable

import msgspec

from inlay.messages.routing import KvEvent

BlockHash: TypeAlias = bytes | int
"""Identifies a block and everything before it.

In vLLM bytes, or their last 64 bits if so configured.
"""

ExtraKeys: TypeAlias = tuple[Any, ...] | None
"""Inputs of a block's hash beside tokens, in this order.

Name of its LoRA; (identifier, offset) of each multimodal item; cache salt (first block only);
SHA-256 of its embeddings.
"""

SEQUENCE_SIZE = 8
END_OF_REPLAY = (-1).to_bytes(SEQUENCE_SIZE, "big", signed=True)
"""End marker in place of a sequence number: everything in the buffer has been sent again."""


class BlockStored(msgspec.Struct, omit_defaults=True, tag=True, frozen=True):
    """Blocks were added to the cache, each the continuation of the one before.

    Attributes:
        block_hashes: hashes of the blocks, in order.
        parent_block_hash: hash of the block before the first; None at the start of a prompt.
        token_ids: ids of all their positions, 0 for an embedding vector; empty if the publisher
            does not disclose them.
        block_size: positions of a block.
        lora_id: vLLM's number of the LoRA; deprecated.
        medium: "GPU", "CPU" or another place.
        lora_name: None for the model alone.
        extra_keys: one entry a block; None where no block has any.
        group_idx: index of the layer group.
        kv_cache_spec_kind: kind of the group, such as "full_attention" or "sliding_window".
        kv_cache_spec_sliding_window: window of the group.
        locality: "LOCAL" or "REMOTE"; None if unspecified.
        ownership: cache tier beside the engine's own memory.
        session_id: of the request that stored it.
    """

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[ExtraKeys] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, tag=True, frozen=True):
    """Blocks were removed from the cache. Attributes as in `BlockStored`."""

    block_hashes: list[BlockHash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, tag=True, frozen=True):
    """The cache was cleared."""


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """Events of one step of an engine.

    Attributes:
        ts: seconds since the epoch.
        events: in order.
        data_parallel_rank: rank of the engine.
    """

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


encode = msgspec.msgpack.Encoder().encode
"""Encode an `EventBatch`."""

decode = msgspec.msgpack.Decoder(EventBatch).decode
"""Decode an `EventBatch`; raises `msgspec.DecodeError`."""


@runtime_checkable
class BlockEventSource(Protocol):
    """An engine that reports its cached blocks as blocks of the routing chain."""

    def watch_blocks(self, tell: Callable[[tuple[KvEvent, ...]], None]) -> bool:
        """Call `tell` with every change from now on, in order, on the event loop.

        May be called once, before the first request.

        Returns False if the engine's settings do not allow it.
        """
