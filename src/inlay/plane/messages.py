"""What the two ends of a plane say to each other, whatever carries it."""

from typing import TypeAlias

import msgspec

from inlay.errors import ErrorFrame
from inlay.protocol.work import Command, Delta, ModelCard, Reply, Work


class Boot(msgspec.Struct, frozen=True, tag="boot", array_like=True):
    """The first message to a process that is to become a worker: settings as JSON, and the root secret.

    On the connection, so that the secret is in no argument and no environment.
    """

    settings: str
    secret: bytes


class Submit(msgspec.Struct, frozen=True, tag="submit", array_like=True):
    """Do this work."""

    work: Work


class Cancel(msgspec.Struct, frozen=True, tag="cancel", array_like=True):
    """Stop that work; its last delta still comes."""

    work_id: str


class Call(msgspec.Struct, frozen=True, tag="call", array_like=True):
    """Run a command; the answer carries the same number."""

    number: int
    command: Command


class Ready(msgspec.Struct, frozen=True, tag="ready", array_like=True):
    """The worker can be sent work, as the card says; sent again whenever that has changed."""

    card: ModelCard


class Failed(msgspec.Struct, frozen=True, tag="failed", array_like=True):
    """The worker will never be ready."""

    error: ErrorFrame


class Deltas(msgspec.Struct, frozen=True, tag="deltas", array_like=True):
    """All that the engine said since the last message."""

    deltas: tuple[Delta, ...]


class Answer(msgspec.Struct, frozen=True, tag="answer", array_like=True):
    """What a command gave."""

    number: int
    reply: Reply


ToWorker: TypeAlias = Boot | Submit | Cancel | Call
FromWorker: TypeAlias = Ready | Failed | Deltas | Answer
