"""A participant's connections to its fleet."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from typing import Literal

from nats.js.kv import KeyValue

from inlay.base.errors import InlayError
from inlay.messages.digest import Secret
from inlay.transport.nats.cards import CARD_SECONDS, Cards, bucket
from inlay.transport.nats.connection import NatsConnection
from inlay.transport.nats.secret import SecretRecord, agree, recorded, uphold
from inlay.transport.nats.settings import NatsSettings
from inlay.transport.nats.subjects import Subjects, participant_id

log = logging.getLogger(__name__)

KEEP_SECONDS = 60.0
"""Seconds between two looks at what the namespace keeps, at most.

They are more frequent after each new connection, when others may write too.
"""
_RETRY_SECONDS = 1.0


class Member:
    """A frontend or a worker that has joined a namespace.

    Attributes:
        id: its own, new each time.
        subjects: of the namespace.
        control: the connection of messages.
        cards: the workers' cards.
    """

    def __init__(
        self, id_: str, settings: NatsSettings, control: NatsConnection, cards: Cards
    ) -> None:
        self.id = id_
        self._settings = settings
        self.subjects = Subjects(settings.namespace)
        self.control = control
        self.cards = cards
        self._further: list[NatsConnection] = []
        self._keeps: list[Callable[[], Awaitable[object]]] = [self._cards_bucket]
        self._keeping: asyncio.Task[None] | None = None
        self._stranger: str | None = None

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
            control = NatsConnection(settings, id_)
            await control.open()
            undo.push_async_callback(control.close)
            cards = await _cards(control, subjects, settings)
            undo.pop_all()
        return cls(id_, settings, control, Cards(cards))

    @property
    def replicas(self) -> int:
        """Servers that each keep what the namespace keeps."""
        return self._settings.nats_replicas

    async def secret(self, own: Secret | None) -> Secret:
        """The namespace's secret, as `inlay.transport.nats.secret.agree`.

        From then on this member writes back what an emptied store has lost.
        """
        secret, kept = await agree(await self.facts(), own, self._settings.namespace)
        if self._keeping is None:
            self.keep(lambda: self._uphold(kept))
            lost = asyncio.Event()
            self.control.on_reconnect(lost.set)
            self._keeping = asyncio.create_task(self._keep_on(lost))
        return secret

    async def recorded_fingerprint(self) -> str | None:
        """The fingerprint of the namespace's secret, if it has one. Raises as `secret`."""
        return await recorded(await self.facts())

    @property
    def stranger(self) -> str | None:
        """Reason for which this member cannot meet others of the namespace; None while it can."""
        return self._stranger

    def keep(self, make: Callable[[], Awaitable[object]]) -> None:
        """Have `make` make something of the namespace again where its store was emptied."""
        self._keeps.append(make)

    async def facts(self) -> KeyValue:
        """The bucket of what all of the namespace share. Raises as `cards.bucket`."""
        name = self.subjects.namespace_facts
        return await bucket(self.control, name, replicas=self.replicas, seconds=None)

    async def _cards_bucket(self) -> KeyValue:
        return await _cards(self.control, self.subjects, self._settings)

    async def _uphold(self, kept: SecretRecord) -> None:
        other = await uphold(await self.facts(), kept)
        reason = None
        if other is not None:
            reason = (
                f"the namespace {self._settings.namespace} has the secret {other}, and this member "
                f"{kept.fingerprint}, made later while the store of NATS was empty: start it again"
            )
        if reason != self._stranger:
            log.error("%s", reason or "the namespace has this member's secret again")
        self._stranger = reason

    async def _keep_on(self, lost: asyncio.Event) -> None:
        said = ""
        seconds = _RETRY_SECONDS
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await lost.wait()
            seconds = _RETRY_SECONDS if lost.is_set() else min(2 * seconds, KEEP_SECONDS)
            lost.clear()
            try:
                for make in self._keeps:
                    await make()
                said = ""
            except InlayError as error:
                seconds = _RETRY_SECONDS
                if error.message != said:
                    log.warning("%s", error.message)
                    said = error.message

    async def connect(self, purpose: str) -> NatsConnection:
        """Open a further connection, closed when the member leaves. Raises as `join`."""
        connection = NatsConnection(self._settings, f"{self.id}-{purpose}")
        await connection.open()
        self._further.append(connection)
        return connection

    async def leave(self) -> None:
        """Disconnect, after what was sent has left."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        for connection in (self.control, *self._further):
            await connection.close()


async def _cards(control: NatsConnection, subjects: Subjects, settings: NatsSettings) -> KeyValue:
    return await bucket(
        control, subjects.cards, replicas=settings.nats_replicas, seconds=CARD_SECONDS
    )
