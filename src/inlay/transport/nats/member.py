"""A participant's connections to its fleet."""

from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any, Literal, TypeVar

from inlay.digest import Secret
from inlay.transport.nats.cards import CARD_SECONDS, Cards, bucket
from inlay.transport.nats.connection import Connection
from inlay.transport.nats.embeds_cache import EmbedsCache
from inlay.transport.nats.mailbox import Mailbox
from inlay.transport.nats.secret import agree
from inlay.transport.nats.settings import NatsSettings
from inlay.transport.nats.subjects import Subjects, participant_id
from inlay.transport.nats.transfers import Room

T = TypeVar("T")


class Member:
    """A frontend or a worker that has joined a namespace.

    Attributes:
        id: its own, new each time.
        subjects: of the namespace.
        control: the connection of messages.
        bulk: the connection of what is too large for them.
        cards: the workers' cards.
    """

    def __init__(
        self, id_: str, settings: NatsSettings, control: Connection, bulk: Connection, cards: Cards
    ) -> None:
        self.id = id_
        self._settings = settings
        self.subjects = Subjects(settings.namespace)
        self.control = control
        self.bulk = bulk
        self.cards = cards

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
            control, bulk = (
                Connection(settings, id_),
                Connection(settings, f"{id_}-bulk", direct=True),
            )
            for connection in (control, bulk):
                await connection.open()
                undo.push_async_callback(connection.close)
            cards = await bucket(
                control, subjects.cards, replicas=settings.nats_replicas, seconds=CARD_SECONDS
            )
            undo.pop_all()
        return cls(id_, settings, control, bulk, Cards(cards))

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

    def mailbox(
        self,
        hears: Any,
        *,
        take: Callable[[str, T], None],
        unheard: Callable[[str], None],
        room: Room | None = None,
        kept: EmbedsCache | None = None,
    ) -> Mailbox[T]:
        """Its end of all its conversations; as `Mailbox`."""
        return Mailbox(
            self.control,
            self.bulk,
            self.subjects,
            self.id,
            hears,
            take=take,
            unheard=unheard,
            room=room,
            kept=kept,
        )

    async def leave(self) -> None:
        """Disconnect, after what was sent has left."""
        await self.control.close()
        await self.bulk.close()
