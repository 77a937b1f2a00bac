"""Messages between frontends and workers, over any connection."""

from typing import TypeAlias

import msgspec

from inlay.base.errors import ErrorFrame
from inlay.messages.card import Address, ModelCard, Stage
from inlay.messages.commands import AnyCommand, Reply
from inlay.messages.request import Output, Request
from inlay.messages.routing import KvEvents, KvSnapshot
from inlay.transport.buffer_offers import BufferPlace


class Listen(msgspec.Struct, frozen=True, array_like=True):
    """The address on which a worker process listens for frontends of other machines.

    Attributes:
        host: name or address that frontends dial.
        bind: address it listens on.
        port: of TCP; 0 for any free one.
        identity: private key and certificate as PEM.
        cache_bytes: of stored prompts kept after their use.
        dials: it listens nowhere and connects to frontends that ask it to.
    """

    host: str
    bind: str
    port: int
    identity: bytes
    cache_bytes: int = 0
    dials: bool = False


class Boot(msgspec.Struct, frozen=True, tag="boot", array_like=True):
    """The first message to a process that is to become a worker.

    Settings as JSON, and the root secret.

    On the connection, so that the secret is in no argument and no environment.

    Attributes:
        telemetry: settings of logs and traces, as JSON.
        restore: commands to run before it announces itself: they make it what a worker was whose
            place it takes.
        prompt_embeds: whether clients may send embeddings as prompts, where the model takes them.
        listen: where it takes requests from other machines, if from any.
        stage: of a pipeline that it is, or None.
    """

    settings: str
    secret: bytes
    restore: tuple[AnyCommand, ...] = ()
    telemetry: str = "{}"
    prompt_embeds: bool = True
    listen: Listen | None = None
    stage: Stage | None = None


class Submit(msgspec.Struct, frozen=True, tag="submit", array_like=True):
    """Do this request.

    Attributes:
        request: to do.
        into: memory that its answer may be made in, until its last output.
    """

    request: Request
    into: BufferPlace | None = None


class Cancel(msgspec.Struct, frozen=True, tag="cancel", array_like=True):
    """Stop that request; its last output still comes."""

    request_id: str


class CommandCall(msgspec.Struct, frozen=True, tag="call", array_like=True):
    """Run a command; the answer carries the same number.

    `command` is encoded by `inlay.messages.commands`: one that is not known ends with an error, not
    with the connection.
    """

    number: int
    command: msgspec.Raw


class Dial(msgspec.Struct, frozen=True, tag="dial", array_like=True):
    """Connect to a frontend that listens at `address`, and say `Hello` with its token there."""

    address: Address
    token: bytes


class ForgetPrompt(msgspec.Struct, frozen=True, tag="forget-prompt", array_like=True):
    """Drop the copy of a stored prompt that was deleted; of every one for None."""

    key: str | None = None


class WatchCache(msgspec.Struct, frozen=True, tag="watch-cache", array_like=True):
    """Tell from now on what changes in the cache."""


class GetCache(msgspec.Struct, frozen=True, tag="ask-cache", array_like=True):
    """Tell all that is cached; the answer carries the same number."""

    number: int


class SettledReference(msgspec.Struct, frozen=True, tag="settled-reference", array_like=True):
    """The answer to `SettleReference`: what is kept, if anything is."""

    number: int
    data: bytes | None = None


class Ready(msgspec.Struct, frozen=True, tag="ready", array_like=True):
    """The worker can be sent request, as the card says; sent again whenever that has changed."""

    card: ModelCard


class Hello(msgspec.Struct, frozen=True, tag="hello", array_like=True):
    """The first message of a worker that dialled: the token of the frontend's invitation."""

    token: bytes


class WorkerFailed(msgspec.Struct, frozen=True, tag="failed", array_like=True):
    """The worker will never be ready."""

    error: ErrorFrame


class SettleReference(msgspec.Struct, frozen=True, tag="settle-reference", array_like=True):
    """Tell what a fleet keeps under a key of references; asked before the worker is ready.

    Attributes:
        number: that the answer carries.
        key: of the reference.
        own: what is kept from now on where there is nothing.
        replace: it is kept in any case.
    """

    number: int
    key: str
    own: bytes | None = None
    replace: bool = False


class Outputs(msgspec.Struct, frozen=True, tag="deltas", array_like=True):
    """All that the engine said since the last message."""

    outputs: tuple[Output, ...]


class ReplyFrame(msgspec.Struct, frozen=True, tag="answer", array_like=True):
    """The reply to a command, or the error."""

    number: int
    reply: Reply | None = None
    error: ErrorFrame | None = None


class CacheChanged(msgspec.Struct, frozen=True, tag="cache-told", array_like=True):
    """Changes of the prefix cache."""

    events: KvEvents


class Cache(msgspec.Struct, frozen=True, tag="cache", array_like=True):
    """The state of the prefix cache, or the error."""

    number: int
    snapshot: KvSnapshot | None = None
    error: ErrorFrame | None = None


ToWorker: TypeAlias = (
    Boot
    | Submit
    | Cancel
    | CommandCall
    | Dial
    | ForgetPrompt
    | WatchCache
    | GetCache
    | SettledReference
)
FromWorker: TypeAlias = (
    Hello | Ready | WorkerFailed | Outputs | ReplyFrame | CacheChanged | Cache | SettleReference
)
