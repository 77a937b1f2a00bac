"""What an engine says of the blocks it has cached: the events of vLLM 0.32, field for field.

A message is (topic, sequence number as 8 bytes, big endian, `EventBatch` as msgpack). Structs are
maps with their type's name as tag, but for the batch, which is an array; defaults are left out.
Whoever reads must expect fields that are not known here.
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, runtime_checkable

import msgspec

from inlay.routing import KvEvent

BlockHash: TypeAlias = bytes | int
"""Names a block and all that is before it.

VLLM's are bytes, or the last 64 bits of them where it is told so.
"""

ExtraKeys: TypeAlias = tuple[Any, ...] | None
"""What but tokens a block's hash depends on, in this order.

The name of its LoRA, (identifier, offset) of each multimodal item, the
cache salt of its prompt (in the first block alone), SHA-256 of its embeddings.
"""

SEQUENCE_SIZE = 8
END_OF_REPLAY = (-1).to_bytes(SEQUENCE_SIZE, "big", signed=True)
"""In place of a sequence number: all that was kept has been sent again."""


class BlockStored(msgspec.Struct, omit_defaults=True, tag=True, frozen=True):
    """Blocks are cached now, each the continuation of the one before.

    Attributes:
        block_hashes: theirs, in order.
        parent_block_hash: of what is before the first; None at the start of a prompt.
        token_ids: of all their positions, or none where the publisher keeps them to itself; 0 where
            a row stands.
        block_size: positions of a block.
        lora_id: vLLM's number of the LoRA; not used any more.
        medium: "GPU", "CPU" or another place.
        lora_name: None for the model alone.
        extra_keys: one entry a block; None where no block has any.
        group_idx: which group of layers.
        kv_cache_spec_kind: what the group is, such as "full_attention" or "sliding_window".
        kv_cache_spec_sliding_window: its window.
        locality: "LOCAL" or "REMOTE"; None says nothing.
        ownership: which tier beside the engine's own memory.
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
    """Blocks are cached no more. Attributes are those of `BlockStored`."""

    block_hashes: list[BlockHash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, tag=True, frozen=True):
    """Nothing is cached any more."""


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """What happened in one step of an engine.

    Attributes:
        ts: seconds since the epoch.
        events: in order.
        data_parallel_rank: of the engine.
    """

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


encode = msgspec.msgpack.Encoder().encode
"""Bytes of an `EventBatch`."""

decode = msgspec.msgpack.Decoder(EventBatch).decode
"""An `EventBatch` of bytes; raises `msgspec.DecodeError`."""


@runtime_checkable
class BlockEventSource(Protocol):
    """An engine that can tell in blocks of the routing chain what it has cached."""

    def watch_blocks(self, tell: Callable[[tuple[KvEvent, ...]], None]) -> bool:
        """From now on call `tell` with what changes, in order, on the event loop.

        Once, before the first request.

        False where it will not, as it was started.
        """
        ...


__all__ = [
    "END_OF_REPLAY",
    "SEQUENCE_SIZE",
    "AllBlocksCleared",
    "BlockEventSource",
    "BlockHash",
    "BlockRemoved",
    "BlockStored",
    "Event",
    "EventBatch",
    "ExtraKeys",
    "decode",
    "encode",
]
