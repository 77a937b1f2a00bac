"""Pieces of a content that grows by little for long, joined so that they stay few.

A record names each piece of its contents, and goes to the storage as a whole each time: with a
piece for every half second it would soon be the most of what is written, and pass the bytes that a
message of NATS may have.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from inlay.base.errors import NoRoomError, NotFoundError, OverloadedError
from inlay.store.kept.contents import Contents, Piece
from inlay.store.kept.lease import Held, R, replace

SMALL_BYTES = 64 * 1024
MOST_SMALL = 16
"""Pieces of fewer bytes at the end of a content, from which on they are joined to one."""


async def join_small(held: Held[R], contents: Contents, field: str, name: str) -> None:
    """Make one piece of the small ones at the end of a content, where they are many.

    It saves room and is needed by nobody: what the storage does not do now is left, and done when
    the content grows again.

    Args:
        held: the record, which is ours.
        contents: where its contents are.
        field: of the record, that names the pieces.
        name: of the new piece.

    Raises:
        LeaseLostError: the record is not ours any more.
    """
    with suppress(OverloadedError):
        await _join_small(held, contents, field, name)


async def _join_small(held: Held[R], contents: Contents, field: str, name: str) -> None:
    before: tuple[Piece, ...] = getattr(held.record, field)
    tail = _small_tail(before)
    if len(tail) < MOST_SMALL:
        return
    try:
        data = b"".join([each async for each in contents.stream(tail)])
    except NotFoundError:
        return  # whoever owns it now has joined them: the next change tells
    piece = await contents.write(name, data)
    after = (*before[: -len(tail)], piece)

    def joined(record: Any) -> Any:
        return replace(record, **{field: after}) if getattr(record, field) == before else record

    try:
        found = await held.change(joined)
    except NoRoomError:
        found = await held.look()
    # After any other error the record may name the piece, or come to: the sweep finds out.
    await contents.erase(tail if getattr(found, field) == after else [piece])


def _small_tail(pieces: Sequence[Piece]) -> Sequence[Piece]:
    start = len(pieces)
    while start and pieces[start - 1].size < SMALL_BYTES:
        start -= 1
    return pieces[start:]
