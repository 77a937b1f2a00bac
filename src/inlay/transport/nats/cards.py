"""Workers' cards in the key-value storage of NATS."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
import nats.errors
import nats.js.errors
from nats.js import JetStreamContext
from nats.js.api import KeyValueConfig
from nats.js.kv import KeyValue

from inlay.base import liveness
from inlay.base.errors import InvalidRequestError, OverloadedError
from inlay.messages.card import ModelCard
from inlay.transport.nats.client import cancellable
from inlay.transport.nats.connection import NatsConnection

T = TypeVar("T")

CARD_SECONDS = 3600.0
"""Seconds for which a card is kept that nobody renews.

It only cleans up: who is there is judged by heartbeats.
"""
AGREE_SECONDS = 10.0
"""Seconds that servers which have just started may take to elect leaders."""
_RETRY_SECONDS = 0.3

_encode = msgspec.msgpack.Encoder().encode
_cards = msgspec.msgpack.Decoder(ModelCard)

NO_STORAGE = (
    "the NATS server keeps nothing: it needs JetStream (`inlay nats` has it; else `jetstream "
    "{}` in its configuration)"
)


async def bucket(
    connection: NatsConnection, name: str, *, replicas: int, seconds: float | None
) -> KeyValue:
    """The bucket called `name`, made when there is none.

    Args:
        connection: to NATS.
        name: of the bucket.
        replicas: servers that keep it.
        seconds: how long a value is kept, or None for ever.

    Raises:
        InvalidRequestError, OverloadedError: as `storage`.
    """

    async def key_value(jetstream: JetStreamContext) -> KeyValue:
        try:
            return await jetstream.key_value(name)
        except nats.js.errors.BucketNotFoundError:
            config = KeyValueConfig(bucket=name, replicas=replicas, ttl=seconds, history=1)
            return await jetstream.create_key_value(config)

    return await storage(connection, name, key_value)


async def storage(
    connection: NatsConnection, name: str, find: Callable[[JetStreamContext], Awaitable[T]]
) -> T:
    """Return what `find` finds or makes in the server's storage, once that is ready.

    Args:
        connection: to NATS.
        name: of what is looked for, in messages.
        find: asks.

    Raises:
        InvalidRequestError: the server has no JetStream, or does not let us, or too few servers for
            the replicas.
        OverloadedError: it does not answer.
    """
    until = liveness.now() + AGREE_SECONDS
    while True:
        try:
            return await _asked(connection.jetstream, name, find)
        except OverloadedError:
            # A cluster that has just started has no leader yet.
            if liveness.now() > until:
                raise
        await asyncio.sleep(_RETRY_SECONDS)


async def _asked(
    jetstream: JetStreamContext, name: str, find: Callable[[JetStreamContext], Awaitable[T]]
) -> T:
    try:
        return await find(jetstream)
    except nats.errors.NoRespondersError as error:
        raise InvalidRequestError(NO_STORAGE) from error
    except nats.js.errors.ServiceUnavailableError as error:
        if error.code is None:  # not an answer of the storage, but of the server that there is none
            raise InvalidRequestError(NO_STORAGE) from error
        raise OverloadedError(
            f"NATS keeps nothing now: {error.description}", retry_after=1
        ) from error
    except nats.js.errors.APIError as error:
        raise InvalidRequestError(
            f"NATS does not keep the bucket {name}: {error.description}"
        ) from error
    except (nats.errors.Error, TimeoutError) as error:
        raise OverloadedError(f"NATS does not answer: {error}", retry_after=1) from error


class Cards:
    """The cards of a namespace, by worker."""

    def __init__(self, storage: KeyValue) -> None:
        self._storage = storage

    async def put(self, worker: str, card: ModelCard) -> int:
        """Keep a card; its revision. Raises `OverloadedError` when that is not possible now."""
        try:
            return await self._storage.put(worker, _encode(card))
        except (nats.errors.Error, TimeoutError) as error:
            raise OverloadedError(
                f"NATS does not store the card: {error}", retry_after=1
            ) from error

    async def get(self, worker: str) -> tuple[int, ModelCard] | None:
        """(revision, card) of a worker, or None where there is none.

        Raises:
            OverloadedError: that cannot be said now.
            msgspec.DecodeError: the card is not understood.
        """
        try:
            entry = await self._storage.get(worker)
        except nats.js.errors.KeyNotFoundError:
            return None
        except (nats.errors.Error, TimeoutError) as error:
            raise OverloadedError(f"NATS does not show the card: {error}", retry_after=1) from error
        return entry.revision or 0, _cards.decode(entry.value or b"")

    @cancellable
    async def workers(self) -> set[str]:
        """The workers that have a card, those that died lately included.

        Raises `OverloadedError` when that cannot be said now.
        """
        found: set[str] = set()
        try:
            if not (await self._storage.status()).values:
                return found
            watcher = await self._storage.watchall(meta_only=True)
            try:
                # It may say that there is no more while entries are on their way. The last one,
                # which may be of a card that was removed, has none behind it.
                delta = 1
                while delta:
                    entry = await watcher.updates()  # type: ignore[no-untyped-call]
                    if entry is not None:
                        delta = entry.delta or 0
                        (found.discard if entry.operation else found.add)(entry.key)
            finally:
                await watcher.stop()  # type: ignore[no-untyped-call]
            return found
        except (nats.errors.Error, TimeoutError) as error:
            raise OverloadedError(
                f"NATS does not list the cards: {error}", retry_after=1
            ) from error

    async def remove(self, worker: str) -> None:
        """Keep it no longer. Raises `OverloadedError` when that is not possible now."""
        try:
            await self._storage.purge(worker)
        except (nats.errors.Error, TimeoutError) as error:
            raise OverloadedError(
                f"NATS does not remove the card: {error}", retry_after=1
            ) from error
