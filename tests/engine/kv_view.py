"""A reader's view of vLLM's events: the cached blocks."""

from inlay.engine.kv_events import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    EventBatch,
)


class View:
    """Blocks by group, rebuilt from events alone."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[int | None, BlockHash], BlockStored] = {}
        self.parents: dict[BlockHash, BlockHash | None] = {}

    def read(self, batch: EventBatch) -> None:
        for event in batch.events:
            match event:
                case BlockStored():
                    parent = event.parent_block_hash
                    for name in event.block_hashes:
                        assert (event.group_idx, name) not in self.blocks
                        self.blocks[event.group_idx, name] = event
                        assert self.parents.setdefault(name, parent) == parent
                        parent = name
                case BlockRemoved():
                    for name in event.block_hashes:
                        del self.blocks[event.group_idx, name]
                case AllBlocksCleared():
                    self.blocks.clear()
