"""Responses of the admin routes."""

from typing import Literal

import msgspec

from inlay.errors import ErrorBody


class WorkerAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """Result of a command on one worker.

    Attributes:
        id: the worker's id.
        model: name of the model it serves.
        status: HTTP status of the command; 200 for success.
        error: the error, where `status` is not 200.
        blocks: cached blocks that were freed; blocks of running requests stay.
        level: sleep level.
        awake: True if weights and KV cache are both restored.
    """

    id: str
    model: str
    status: int
    error: ErrorBody | None = None
    blocks: int | None = None
    level: int | None = None
    awake: bool | None = None


class CacheReset(msgspec.Struct, frozen=True):
    """Response of `/reset_prefix_cache` and `/clear_kv_blocks`.

    `success` is True if every worker succeeded.
    """

    success: bool
    workers: list[WorkerAnswer]


class Asleep(msgspec.Struct, frozen=True):
    """Response of `/sleep`."""

    status: Literal["sleeping"]
    level: int
    workers: list[WorkerAnswer]


class Awake(msgspec.Struct, frozen=True):
    """Response of `/wake_up`; "sleeping" until every worker is fully awake."""

    status: Literal["awake", "sleeping"]
    tags: list[str] | None
    workers: list[WorkerAnswer]


class WorkerSleep(msgspec.Struct, frozen=True):
    """Sleep level of one worker; 0 while it is awake."""

    id: str
    model: str
    level: int


class IsSleeping(msgspec.Struct, frozen=True):
    """Response of `/is_sleeping`: True if any worker sleeps."""

    is_sleeping: bool
    workers: list[WorkerSleep]
