"""Numbers of a file's header, and the refusal of one that is malformed."""

import struct
from typing import Any

from inlay.base.errors import InvalidRequestError


def unpack(thing: str, format_: str, layout: str, view: memoryview, at: int = 0) -> tuple[Any, ...]:
    """Return the values of `layout` (as of `struct`) at a byte of a file.

    Raises:
        InvalidRequestError: the file ends before.
    """
    try:
        return struct.unpack_from(layout, view, at)
    except struct.error as error:
        raise malformed(thing, format_, "it is truncated") from error


def shown_tag(name: bytes) -> str:
    """Return a name in a file, as of a codec, in the way that errors quote texts."""
    return repr(name.decode("latin-1"))


def malformed(thing: str, format_: str, why: str) -> InvalidRequestError:
    """Return the refusal of `thing`, as "an image", whose file is no good one of its format."""
    return InvalidRequestError(f"{thing} is a malformed {format_}: {why}")
