"""What frontends and workers of a fleet say to each other.

A *stream* is one attempt at one request at one worker; the frontend numbers its streams, and a
number is never used again. So what belongs to an earlier attempt carries a number nobody waits for,
whenever it comes. The pieces of a stream are numbered from 0 by its worker and kept until they are
acknowledged.
"""

from typing import TypeAlias

import msgspec

from inlay.card import PROTOCOL, Stats
from inlay.request import Command, EmbedOutput, EmbedRequest, Output, Reply, Request
from inlay.routing import KvEvents
from inlay.transport.messages import Cache, GetCache


class Submit(msgspec.Struct, frozen=True, tag="submit", array_like=True):
    """Do this request. Said again when nothing shows that it was heard.

    The second time is ignored.
    """

    stream: int
    request: Request


class Embed(msgspec.Struct, frozen=True, tag="embed", array_like=True):
    """Make vectors of this request. As `Submit`."""

    stream: int
    request: EmbedRequest


class Cancel(msgspec.Struct, frozen=True, tag="cancel", array_like=True):
    """Stop these streams; the last piece of each still comes."""

    streams: tuple[int, ...]


class Acknowledge(msgspec.Struct, frozen=True, tag="acknowledge", array_like=True):
    """Of (stream, pieces), so many pieces have been used and need not be kept.

    With `all`, these are all streams the frontend has at this worker: others were given up, and
    end.
    """

    streams: tuple[tuple[int, int], ...]
    all: bool = False


class Again(msgspec.Struct, frozen=True, tag="again", array_like=True):
    """Send the pieces of the stream from number `start` on again: some did not arrive."""

    stream: int
    start: int


class Call(msgspec.Struct, frozen=True, tag="call", array_like=True):
    """Run a command; the answer carries the same number."""

    number: int
    command: Command


class Pieces(msgspec.Struct, frozen=True, tag="pieces", array_like=True):
    """(stream, number, output): the next pieces of some streams.

    The outputs do not repeat their request's id.
    """

    pieces: tuple[tuple[int, int, Output], ...]


class EncodedPieces(msgspec.Struct, frozen=True, tag="pieces", array_like=True):
    """`Pieces` as they are sent: each was encoded when it was made."""

    pieces: tuple[msgspec.Raw, ...]


class Embedded(msgspec.Struct, frozen=True, tag="embedded", array_like=True):
    """A stream's vectors, or why there are none."""

    stream: int
    vectors: EmbedOutput


class Open(msgspec.Struct, frozen=True, tag="open", array_like=True):
    """(stream, pieces sent) of all streams the frontend has at this worker."""

    streams: tuple[tuple[int, int], ...]


class Answer(msgspec.Struct, frozen=True, tag="answer", array_like=True):
    """What a command gave."""

    number: int
    reply: Reply


ToWorker: TypeAlias = Submit | Embed | Cancel | Acknowledge | Again | Call | GetCache
ToFrontend: TypeAlias = Pieces | Embedded | Open | Answer | Cache


class CacheEvents(msgspec.Struct, frozen=True, array_like=True):
    """What changed in the cache of one incarnation of a worker, to all frontends."""

    incarnation: int
    events: KvEvents


class Beat(msgspec.Struct, frozen=True, array_like=True):
    """A worker's heartbeat, to all frontends.

    Attributes:
        protocol: version of the messages it speaks.
        incarnation: counts the engines it has run: a new one knows nothing of the requests and the
            cache of the last.
        revision: of its card in the key-value bucket; 0 while it has none, as it loads its model
            for the first time.
        state: "ready"; "draining": sends what it has and takes nothing more; "away": has no engine
            now; "left": it ends.
        stats: of its engine, as last told; totals restart with the incarnation.
        stats_age: seconds since they were told: a worker whose engine hangs is still there.
    """

    protocol: int
    incarnation: int
    revision: int
    state: str = "ready"
    stats: Stats = Stats()
    stats_age: float = 0.0


OLDEST = PROTOCOL - 1
"""The oldest version that is understood."""
