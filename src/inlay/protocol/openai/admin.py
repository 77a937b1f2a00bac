"""What those who run a server are answered."""

import msgspec


class WorkerReset(msgspec.Struct, frozen=True):
    """One worker whose prefix cache was emptied.

    Attributes:
        id: of the worker.
        model: it serves.
        blocks: cached blocks it forgot; those a running request uses stay.
    """

    id: str
    model: str
    blocks: int


class PrefixCacheReset(msgspec.Struct, frozen=True):
    """The answer of `/reset_prefix_cache`."""

    workers: list[WorkerReset]
