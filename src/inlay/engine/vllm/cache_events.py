"""vLLM's KV events: turned on where they are not, and read for routers while it runs."""

import asyncio
import logging
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from vllm.config import KVEventsConfig

from inlay.engine.kv_chain import KvChain, NotedBlock, NotedItem, blocks_of
from inlay.engine.kv_events import EventBatch
from inlay.engine.kv_events_config import endpoint_of
from inlay.engine.kv_subscriber import KvSubscriber
from inlay.messages.card import ModelCard
from inlay.messages.digest import Secret
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import Request
from inlay.messages.routing import Cleared, KvEvent

log = logging.getLogger(__name__)

Tell = Callable[[tuple[KvEvent, ...]], None]


class VllmCacheEvents:
    """The cache events of one vLLM, translated into blocks of the routing chain.

    On the event loop but for `turn_on`.

    Where a user has vLLM publish its events they are read there; else vLLM is set to publish them
    to a socket that this user alone may reach.
    """

    def __init__(self, secret: Secret) -> None:
        self._secret = secret
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._reached = False
        self._chain: KvChain | None = None
        self._block_size = 0
        self._subscriber: KvSubscriber | None = None
        self._arrived: asyncio.Queue[EventBatch | None] = asyncio.Queue()
        self._noting: set[asyncio.Task[list[NotedBlock]]] = set()
        self._reading: asyncio.Task[None] | None = None

    @property
    def followed(self) -> bool:
        """True if they are read."""
        return self._chain is not None

    def turn_on(self, config: Any, rank: int = 0) -> None:
        """See to it that vLLM publishes, if it caches prefixes at all.

        Args:
            config: its `VllmConfig`, before it starts.
            rank: of the engine among those that vLLM itself does not know of; each has ports of its
                own.

        Raises:
            InvalidRequestError: it would have no port.
        """
        if not config.cache_config.enable_prefix_caching:
            return
        given = config.kv_events_config
        if given is not None and rank:
            for name in ("endpoint", "replay_endpoint"):
                if getattr(given, name) is not None:
                    setattr(given, name, endpoint_of(getattr(given, name), rank))
        if given is not None and given.enable_kv_cache_events and given.publisher != "null":
            self._reached = _binds(given.endpoint)
            return
        self._directory = tempfile.TemporaryDirectory(prefix="inlay-")
        # vLLM adds a rank to addresses with one of two words in them, and refuses others.
        place = f"ipc://{self._directory.name}/inproc"
        config.kv_events_config = KVEventsConfig(
            enable_kv_cache_events=True,
            publisher="zmq",
            endpoint=f"{place}-events",
            replay_endpoint=f"{place}-replay",
        )
        self._reached = True

    def follow(self, llm: Any, card: ModelCard, tell: Tell) -> bool:
        """From now on call `tell` with what changes.

        Whether vLLM, as it was started, lets anybody know.

        Args:
            llm: vLLM's `AsyncLLM`, running.
            card: of its model.
            tell: called on the event loop, in order.
        """
        sources = llm.get_kv_event_sources()
        if not self._reached or len(sources) != 1:
            log.warning("routers do not learn what vLLM has cached: %s", self._why(len(sources)))
            return False
        (source,) = sources.values()
        loop = asyncio.get_running_loop()
        # Adapters are known to vLLM by the digest of their content.
        self._chain = KvChain(card, self._secret, lambda name: name)
        self._block_size = card.block_size
        self._reading = asyncio.create_task(self._read(self._chain, tell))
        self._subscriber = KvSubscriber(
            source.endpoint,
            source.replay_endpoint,
            source.topic,
            take=lambda batch: _arrive(loop, self._arrived, batch),
            lost=lambda: _arrive(loop, self._arrived, None),
        )
        return True

    def _why(self, sources: int) -> str:
        if sources > 1:
            return f"it has {sources} ranks in one engine"
        if sources == 1:
            return "it publishes its events where they cannot be read from here"
        return "it publishes no events"

    def note(self, request: Request, given: Any, items: Sequence[NotedItem]) -> None:
        """Remember the rows and images of a request before it is added."""
        if self._chain is None or not request.prompt.has_rows:
            return
        self._chain.note_items(items)
        if given["type"] != "embeds":
            return
        prompt = request.prompt + Prompt.of(Tokens(request.prior_output))
        embeds = memoryview(given["prompt_embeds"].view(-1).view(torch.uint8).numpy())
        # Beside vLLM's own reading of them, not before it.
        task = asyncio.create_task(
            asyncio.to_thread(blocks_of, prompt, self._secret, self._block_size, embeds)
        )
        self._noting.add(task)
        task.add_done_callback(self._noted)

    def _noted(self, task: "asyncio.Task[list[NotedBlock]]") -> None:
        self._noting.discard(task)
        if self._chain is not None and not task.cancelled():
            self._chain.note(task.result())

    async def _read(self, chain: KvChain, tell: Tell) -> None:
        while True:
            batch = await self._arrived.get()
            if self._noting:
                await asyncio.wait(tuple(self._noting))
            try:
                events = None if batch is None else chain.read(batch)
            except Exception:
                log.exception("KV events were not understood")
                events = None
            if events is None:
                chain.forget()
                tell((Cleared(),))
            elif events:
                tell(events)

    async def close(self) -> None:
        """Read no more."""
        if self._reading is not None:
            self._reading.cancel()
        tasks = [*self._noting, *([] if self._reading is None else [self._reading])]
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._subscriber is not None:
            await asyncio.to_thread(self._subscriber.close)
        if self._directory is not None:
            self._directory.cleanup()


def _binds(endpoint: str) -> bool:
    """Return True if vLLM waits there for readers, and this process can be one.

    Else it connects to a reader of its own.
    """
    return "*" in endpoint or "::" in endpoint or endpoint.startswith("ipc://")


def _arrive(
    loop: asyncio.AbstractEventLoop,
    arrived: "asyncio.Queue[EventBatch | None]",
    batch: EventBatch | None,
) -> None:
    with suppress(RuntimeError):  # the loop is gone, and its listener
        loop.call_soon_threadsafe(arrived.put_nowait, batch)
