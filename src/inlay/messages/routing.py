"""Messages to routers: cached blocks of workers, and loads of frontends.

The routing chain names the prefixes of a prompt at multiples of `inlay.messages.digest.BLOCK_SIZE`
positions, whatever an engine's pages are. A worker makes the chain of each request it admits with
`routing_chain`, remembers which of its engine's pages hold which part of it, and tells of the chain
alone; so a router needs no other key than the one it makes of a prompt itself.
"""

from collections.abc import Callable, Iterable
from typing import Protocol, TypeAlias, runtime_checkable

import msgspec

from inlay.messages.card import ModelCard
from inlay.messages.digest import Chain, Secret, root_digest
from inlay.messages.prompt import Buffer, Prompt

KEY_SIZE = 8
"""Bytes of a block digest that routing looks at.

Were two blocks in 2**64 to meet, a request would go where less of it is cached.
"""


def keys_of(digests: Iterable[bytes]) -> bytes:
    """The routing keys of block digests, `KEY_SIZE` bytes each, one after the other."""
    return b"".join([digest[:KEY_SIZE] for digest in digests])


def routing_chain(
    prompt: Prompt,
    card: ModelCard,
    secret: Secret,
    *,
    adapter: str | None = None,
    salt: str | None = None,
    output: tuple[int, ...] = (),
) -> bytes:
    """The routing keys of a prompt's full blocks, in order.

    `KEY_SIZE` bytes for each `BLOCK_SIZE` positions.

    Args:
        prompt: rows are in the model's activation dtype.
        card: of the model; only what its pool shares is looked at.
        secret: of the namespace.
        adapter: `Adapter.content_id`, or None.
        salt: of the request.
        output: token ids that follow the prompt.
    """
    if prompt.has_rows and not card.shares_text_prefix:
        # Of such an engine nothing that a text prompt left can serve this one.
        salt = f"rows/{salt or ''}"
    root = root_digest(
        secret, weights_id=card.weights_id, dtype=card.dtype, adapter=adapter, salt=salt
    )
    chain = Chain(root, secret)
    chain.extend(prompt)
    chain.extend_tokens(output)
    return keys_of(chain.blocks)


class Stored(msgspec.Struct, frozen=True, tag="stored", array_like=True):
    """These blocks are cached now: routing keys, `KEY_SIZE` bytes each.

    A key names its whole prefix, so events name no parent.

    Attributes:
        keys: as above. In a tier, of the last block of each page alone.
        tier: empty for the engine's cache; else the name of a tier behind it, as in `KvTier`.
    """

    keys: bytes
    tier: str = ""


class Removed(msgspec.Struct, frozen=True, tag="removed", array_like=True):
    """These no longer are. Attributes as in `Stored`."""

    keys: bytes
    tier: str = ""


class Cleared(msgspec.Struct, frozen=True, tag="cleared", array_like=True):
    """None is cached any more."""


class Priced(msgspec.Struct, frozen=True, tag="priced", array_like=True):
    """Measured cost of a position that a tier gives.

    Attributes:
        tier: name of it.
        price: in positions that are computed; 1 and more: it is not read.
    """

    tier: str
    price: float


KvEvent: TypeAlias = Stored | Removed | Cleared | Priced


class KvTier(msgspec.Struct, frozen=True, array_like=True):
    """Pages that a worker has without computing: its cache and its tiers up to this one.

    Attributes:
        name: of the tier, as "host memory".
        keys: routing keys in any order; of pages that only tiers have, of their last blocks alone.
        price: as in `Priced`; None where it was not measured.
    """

    name: str
    keys: Buffer
    price: float | None = None


class KvEvents(msgspec.Struct, frozen=True, array_like=True):
    """Changes of a worker's cache since its last message.

    Attributes:
        sequence: of the message; a worker counts from 1. At a gap the router asks for a snapshot.
        events: in order.
    """

    sequence: int
    events: tuple[KvEvent, ...]


class KvSnapshot(msgspec.Struct, frozen=True, array_like=True):
    """All that a worker has cached.

    Attributes:
        sequence: of the last message of events that it holds; 0 before the first.
        keys: routing keys in any order, `KEY_SIZE` bytes each.
        tiers: behind it, the fastest first.
    """

    sequence: int
    keys: Buffer
    tiers: tuple[KvTier, ...] = ()


class WorkerLoad(msgspec.Struct, frozen=True, array_like=True):
    """Load of one frontend at one worker.

    Attributes:
        requests: sequences.
        prefill: positions that are still to be computed of prompts, as far as it knows.
        decode: positions of prompts and outputs of the sequences that are being decoded.
    """

    requests: int = 0
    prefill: int = 0
    decode: int = 0


class FrontendLoad(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Loads that one frontend publishes, a few times a second, never in the path of a request.

    Numbers are totals, not changes: a lost message is made good by the next about the same worker,
    or by the next whole one. A frontend that receives the first
    message of another publishes all of its own soon, so that the new one learns it.

    Attributes:
        frontend: unique, never used again.
        sequence: grows with each message of the frontend.
        whole: every worker that is not named has nothing of this frontend's.
        loads: by id of the worker; in a message that is not whole, those that changed.
        routed: by id of the worker, routing keys of prompts it was sent since the last message; of
            workers that tell no events.
        leaving: the frontend ends, and forgets all of its requests.
    """

    frontend: str
    sequence: int
    whole: bool = False
    loads: dict[str, WorkerLoad] = {}
    routed: dict[str, bytes] = {}
    leaving: bool = False


@runtime_checkable
class RoutingFeed(Protocol):
    """A transport that carries messages to routers.

    All on the event loop; what is lost on the way must not be fatal.
    """

    def listen(
        self, events: Callable[[str, KvEvents], None], loads: Callable[[FrontendLoad], None]
    ) -> None:
        """Subscribe: `events` gets a worker's id and events, in order; `loads` frontends' loads."""

    def publish(self, load: FrontendLoad) -> None:
        """Tell the other frontends. Does not block."""

    async def kv_snapshot(self, worker_id: str) -> KvSnapshot:
        """Ask a worker for all it has cached.

        Raises `OverloadedError` when it is gone or does not answer.
        """


@runtime_checkable
class CacheEventSource(Protocol):
    """A `RequestHandler` whose engine publishes cache events; its card says `kv_events`."""

    def watch_cache(self, tell: Callable[[KvEvents], None]) -> None:
        """From now on call `tell` with what changes, in order, on the event loop."""

    async def kv_snapshot(self) -> KvSnapshot:
        """All that is cached now. Raises `OverloadedError` where there is no engine."""
