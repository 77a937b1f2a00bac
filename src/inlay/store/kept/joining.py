"""Pieces of a content that grows by little for long, joined so that they stay few.

A record names each piece of its contents, and goes to the storage as a whole each time: with a
piece for every half second it would soon be the most of what is written, and pass the bytes that a
message of NATS may have.
"""

from collections.abc import Sequence
from typing import Any

from inlay.base.errors import NotFoundError
from inlay.store.kept.contents import Contents, Piece
from inlay.store.kept.lease import Held, R, replace

SMALL_BYTES = 64 * 1024
MOST_SMALL = 16
"""Pieces of fewer bytes at the end of a content, from which on they are joined to one."""


async def join_small(held: Held[R], contents: Contents, field: str, name: str) -> None:
    """Make one piece of the small ones at the end of a content, where they are many.

    Args:
        held: the record, which is ours.
        contents: where its contents are.
        field: of the record, that names the pieces.
        name: of the new piece.

    Raises:
        LeaseLostError: the record is not ours any more.
        OverloadedError: the storage does not answer; it may be called again.
    """
    before: tuple[Piece, ...] = getattr(held.record, field)
    tail = _small_tail(before)
    if len(tail) < MOST_SMALL:
        return
    try:
        data = b"".join([each async for each in contents.stream(tail)])
    except NotFoundError:
        return  # whoever owns it now has joined them: the next change tells
    after = (*before[: -len(tail)], await contents.write(name, data))

    def joined(record: Any) -> Any:
        return replace(record, **{field: after}) if getattr(record, field) == before else record

    done = getattr(await held.change(joined), field) == after
    await contents.erase(tail if done else after[-1:])


def _small_tail(pieces: Sequence[Piece]) -> Sequence[Piece]:
    start = len(pieces)
    while start and pieces[start - 1].size < SMALL_BYTES:
        start -= 1
    return pieces[start:]
