"""A participant's connections to its fleet."""

from contextlib import AsyncExitStack
from typing import Literal

from inlay.digest import Secret
from inlay.transport.nats.cards import CARD_SECONDS, Cards, bucket
from inlay.transport.nats.connection import Connection
from inlay.transport.nats.secret import agree
from inlay.transport.nats.settings import NatsSettings
from inlay.transport.nats.subjects import Subjects, participant_id


class Member:
    """A frontend or a worker that has joined a namespace.

    Attributes:
        id: its own, new each time.
        subjects: of the namespace.
        control: the connection of messages.
        cards: the workers' cards.
    """

    def __init__(self, id_: str, settings: NatsSettings, control: Connection, cards: Cards) -> None:
        self.id = id_
        self._settings = settings
        self.subjects = Subjects(settings.namespace)
        self.control = control
        self.cards = cards
        self._further: list[Connection] = []

    @classmethod
    async def join(cls, settings: NatsSettings, kind: Literal["frontend", "worker"]) -> "Member":
        """Connect.

        Raises:
            InvalidRequestError: NATS does not let us in, or keeps nothing, or a file of the
                settings cannot be used.
            OverloadedError: it does not answer.
        """
        id_ = participant_id(kind)
        subjects = Subjects(settings.namespace)
        async with AsyncExitStack() as undo:
            control = Connection(settings, id_)
            await control.open()
            undo.push_async_callback(control.close)
            cards = await bucket(
                control, subjects.cards, replicas=settings.nats_replicas, seconds=CARD_SECONDS
            )
            undo.pop_all()
        return cls(id_, settings, control, Cards(cards))

    @property
    def replicas(self) -> int:
        """Servers that each keep what the namespace keeps."""
        return self._settings.nats_replicas

    async def secret(self, own: Secret | None) -> Secret:
        """The namespace's secret, as `inlay.transport.nats.secret.agree`."""
        storage = await bucket(
            self.control, self.subjects.namespace_facts, replicas=self.replicas, seconds=None
        )
        return await agree(storage, own, self._settings.namespace)

    async def connect(self, purpose: str) -> Connection:
        """Open a further connection, closed when the member leaves. Raises as `join`."""
        connection = Connection(self._settings, f"{self.id}-{purpose}")
        await connection.open()
        self._further.append(connection)
        return connection

    async def leave(self) -> None:
        """Disconnect, after what was sent has left."""
        for connection in (self.control, *self._further):
            await connection.close()
