"""Single values that all of a namespace share, changed by compare-and-set."""

import nats.errors
import nats.js.errors
from nats.js.kv import KeyValue

from inlay.base.errors import OverloadedError

TRIES = 3
"""Attempts to change a value that others change at the same time."""


async def read(storage: KeyValue, key: str, what: str) -> tuple[bytes, int | None] | None:
    """The value and its revision, or None where there is none.

    Raises `OverloadedError`, which names `what` it is, when NATS does not answer.
    """
    try:
        entry = await storage.get(key)
    except nats.js.errors.KeyNotFoundError:
        return None
    except (nats.errors.Error, TimeoutError) as error:
        raise OverloadedError(f"NATS does not show {what}: {error}", retry_after=1) from error
    return entry.value or b"", entry.revision


async def write(storage: KeyValue, key: str, value: bytes, revision: int | None, what: str) -> bool:
    """Replace the value of that revision; None: there is none. False if it is another now.

    Raises as `read`.
    """
    try:
        if revision is None:
            await storage.create(key, value)
        else:
            await storage.update(key, value, last=revision)
    except nats.js.errors.KeyWrongLastSequenceError:
        return False
    except (nats.errors.Error, TimeoutError) as error:
        raise OverloadedError(f"NATS does not keep {what}: {error}", retry_after=1) from error
    return True
