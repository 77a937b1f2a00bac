"""What those who run a server are answered."""

from typing import Literal

import msgspec

from inlay.errors import ErrorBody


class WorkerAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one worker made of a command.

    Attributes:
        id: of the worker.
        model: it serves.
        status: as of HTTP; 200 when it followed.
        error: why it did not.
        blocks: cached blocks it forgot; those a running request uses stay.
        level: of its sleep.
        awake: whether it is wholly awake.
    """

    id: str
    model: str
    status: int
    error: ErrorBody | None = None
    blocks: int | None = None
    level: int | None = None
    awake: bool | None = None


class CacheReset(msgspec.Struct, frozen=True):
    """The answer of `/reset_prefix_cache` and `/clear_kv_blocks`.

    `success` when every worker did it.
    """

    success: bool
    workers: list[WorkerAnswer]


class Asleep(msgspec.Struct, frozen=True):
    """The answer of `/sleep`."""

    status: Literal["sleeping"]
    level: int
    workers: list[WorkerAnswer]


class Awake(msgspec.Struct, frozen=True):
    """The answer of `/wake_up`; "sleeping" until all of them are wholly awake."""

    status: Literal["awake", "sleeping"]
    tags: list[str] | None
    workers: list[WorkerAnswer]


class WorkerSleep(msgspec.Struct, frozen=True):
    """How deep one worker sleeps, 0 while it is awake."""

    id: str
    model: str
    level: int


class IsSleeping(msgspec.Struct, frozen=True):
    """The answer of `/is_sleeping`: whether any worker is."""

    is_sleeping: bool
    workers: list[WorkerSleep]
