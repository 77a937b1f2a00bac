"""One connection to NATS, which comes back by itself."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeAlias

import nats
import nats.errors
from nats.aio.msg import Msg
from nats.js import JetStreamContext

from inlay.base import liveness
from inlay.base.errors import InvalidRequestError, OverloadedError
from inlay.transport.nats.client import NatsClient
from inlay.transport.nats.settings import NatsSettings

log = logging.getLogger(__name__)

Take: TypeAlias = Callable[[Msg], None]
"""Takes a message on the event loop; must not block."""

CONNECT_SECONDS = 10.0
"""Seconds that the first connection may take where something listens.

Where nothing does, the settings say how long to wait.
"""

_PROBE_SECONDS = 0.5
_STALE_SECONDS = 2.0
"""Seconds that a message to ourselves may take before the connection counts as cut."""
_RETRY_SECONDS = 0.25
_ATTEMPT_SECONDS = 2
_AUTHORIZATION = "authorization violation"
_SUBSCRIPTION_BYTES = 256 * 1024 * 1024


class NatsConnection:
    """A client of NATS that publishes without waiting and knows since when it has been connected.

    What is published while there is no connection is dropped: whoever needs an answer asks again.

    Attributes:
        max_payload: bytes of a message at most.
    """

    def __init__(self, settings: NatsSettings, name: str) -> None:
        """Not connected."""
        self._settings = settings
        self._name = name
        self._client = NatsClient()
        self._outbox: deque[tuple[str, bytes]] = deque()
        self._filled = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._on_reconnect: list[Callable[[], None]] = []
        self._since: float | None = None
        self._lost_at = 0.0
        self._problem: Exception | None = None
        self._closing = False
        self._echoed = asyncio.Event()
        self._echo_sent: float | None = None
        self._refused = asyncio.Event()

    async def open(self) -> None:
        """Connect.

        Raises:
            InvalidRequestError: a file of the settings cannot be used, or the server does not let
                us in.
            OverloadedError: no server answered in time.
        """
        settings = self._settings
        tls = settings.tls()
        # Set only where given: the client takes a context that is None for a wish to have one.
        extra = settings.login() | ({} if tls is None else {"tls": tls})
        connecting = asyncio.create_task(
            self._client.connect(
                settings.urls,
                name=self._name,
                error_cb=self._failed,
                disconnected_cb=self._disconnected,
                reconnected_cb=self._reconnected,
                connect_timeout=_ATTEMPT_SECONDS,
                reconnect_time_wait=_RETRY_SECONDS,  # type: ignore[arg-type]  # it is slept for
                max_reconnect_attempts=-1,
                **extra,  # type: ignore[arg-type]
            )
        )
        refused = asyncio.create_task(self._refused.wait())
        try:
            for seconds in (settings.nats_wait, max(0.0, CONNECT_SECONDS - settings.nats_wait)):
                await asyncio.wait(
                    {connecting, refused}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
                )
                if connecting.done() or refused.done() or self._nobody_listens:
                    break
            if not connecting.done():
                raise self._unreachable()
            connecting.result()
        except (OSError, ValueError, ImportError) as error:
            raise InvalidRequestError(f"NATS credentials cannot be used: {error}") from error
        finally:
            refused.cancel()
            if not connecting.done():
                connecting.cancel()
                await asyncio.gather(connecting, return_exceptions=True)
                await self._close_client()
        self._since = liveness.now()
        echo = self._client.new_inbox()
        await self.subscribe(echo, lambda _: self._echoed.set())
        self._tasks = [asyncio.create_task(self._pump()), asyncio.create_task(self._probe(echo))]

    @property
    def _nobody_listens(self) -> bool:
        return isinstance(self._problem, OSError) and not isinstance(self._problem, TimeoutError)

    def _unreachable(self) -> InvalidRequestError | OverloadedError:
        where, problem = self._settings.shown_urls, self._problem
        if isinstance(problem, ConnectionRefusedError):
            said = "nothing listens there"
        else:
            said = str(problem or "no answer").removeprefix("nats: ")
        if self._refused.is_set():
            hint = (
                ""
                if self._settings.has_login
                else ". Give it --nats-nkey-seed, as `inlay nats` says"
            )
            return InvalidRequestError(
                f"the NATS server at {where} does not let us in: {said}{hint}"
            )
        return OverloadedError(
            f"cannot reach NATS at {where}: {said}. Start it with `inlay nats`, or say where it "
            "is with --nats",
            retry_after=1,
        )

    @property
    def connected(self) -> bool:
        """True if there is a connection now."""
        return self._since is not None and self._client.is_connected

    @property
    def since(self) -> float | None:
        """Time of `inlay.base.liveness` at which it was established; None while there is none."""
        return self._since if self.connected else None

    @property
    def silent_for(self) -> float:
        """Seconds in which nothing was shown to have passed.

        Without a connection, or since a message to ourselves that has not come back.
        """
        if self._since is None:
            return liveness.now() - self._lost_at
        return 0.0 if self._echo_sent is None else liveness.now() - self._echo_sent

    @property
    def max_payload(self) -> int:
        """Bytes of a message at most, as the server says."""
        return self._client.max_payload

    @property
    def jetstream(self) -> JetStreamContext:
        """The server's storage."""
        return self._client.jetstream(timeout=2)

    def on_reconnect(self, act: Callable[[], None]) -> None:
        """Have `act` called whenever the connection is back."""
        self._on_reconnect.append(act)

    def publish(self, subject: str, payload: bytes) -> None:
        """Send a message, in the order of the calls."""
        if self.connected:
            self._outbox.append((subject, payload))
            self._filled.set()

    async def subscribe(self, subject: str, take: Take) -> Callable[[], Awaitable[None]]:
        """Hand every message on `subject` to `take`, in order.

        Returns a function that ends that; the end of the connection does, too.
        """

        async def taken(message: Msg) -> None:
            take(message)

        subscription = await self._client.subscribe(
            subject, cb=taken, pending_bytes_limit=_SUBSCRIPTION_BYTES
        )

        async def stop() -> None:
            # What a closed or cut connection makes of it is nothing to whoever ends it.
            with suppress(nats.errors.Error):
                await subscription.unsubscribe()

        return stop

    async def settle(self) -> None:
        """Return when the server knows of all subscriptions so far.

        Raises `OverloadedError` when it does not answer.
        """
        try:
            # The client's ping overtakes what it has not written yet; after its answer all of that
            # is written, so the second is behind it.
            for _ in range(2):
                await self._client.flush(timeout=_ATTEMPT_SECONDS)
        except nats.errors.Error as error:
            raise OverloadedError(
                f"the connection to NATS is cut: {error}", retry_after=1
            ) from error

    async def close(self) -> None:
        """Send what is still to be sent, and disconnect."""
        self._closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with suppress(TimeoutError):
            async with asyncio.timeout(_STALE_SECONDS):
                while self._outbox and self._client.is_connected:
                    await self._client.publish(*self._outbox.popleft())
                if self._client.is_connected:
                    await self._client.flush(timeout=_ATTEMPT_SECONDS)
        self._client.abort()
        # What has not left by now never will.
        self._client.drop_unsent()
        await self._close_client()

    async def _close_client(self) -> None:
        # An attempt to connect that was just about to succeed may have done so meanwhile.
        while not self._client.is_closed:
            await self._client.close()

    async def _pump(self) -> None:
        while True:
            await self._filled.wait()
            self._filled.clear()
            while self._outbox:
                subject, payload = self._outbox.popleft()
                try:
                    await self._client.publish(subject, payload)
                except nats.errors.MaxPayloadError:
                    # A cluster whose servers do not agree on the limit: it must not end the pump.
                    log.error("a message of %d bytes is over the limit of NATS", len(payload))
                except nats.errors.Error:
                    self._outbox.clear()

    async def _probe(self, echo: str) -> None:
        """Notice a connection that carries nothing, long before TCP does, or is not read."""
        while True:
            await asyncio.sleep(_PROBE_SECONDS)
            since = self.since
            if since is None:
                continue
            self._echoed.clear()
            self._echo_sent = liveness.now()
            try:
                async with liveness.timeout(_STALE_SECONDS):
                    # What becomes of the connection is told by its own callbacks.
                    with suppress(nats.errors.Error):
                        await self._client.publish(echo, b"")
                    await self._echoed.wait()
            except TimeoutError:
                if self.since == since:
                    log.warning("NATS has not answered for %g s: connecting again", _STALE_SECONDS)
                    self._client.abort()
                    await self._client.force_reconnect()
            self._echo_sent = None

    def _read_access_again(self) -> None:
        """Use for the next attempt what the files of password and certificates hold now."""
        try:
            login, tls = self._settings.login(), self._settings.tls()
        except InvalidRequestError as error:
            log.error("%s; what was read before is used", error.message)
            return
        self._client.use_access(login, tls)

    async def _failed(self, error: Exception) -> None:
        self._problem = error
        if self._since is None and self._lost_at:
            self._read_access_again()
        if _AUTHORIZATION in str(error).lower():
            self._refused.set()
        if not self._client.is_connected:
            # The client forgets the connection of an attempt that failed, without closing it.
            self._client.abort()
        if self._since is not None and not isinstance(error, OSError | nats.errors.UnexpectedEOF):
            log.warning("NATS: %s", str(error) or type(error).__name__)

    async def _disconnected(self) -> None:
        was, self._since = self._since, None
        # A message that has not come back was lost before, and connecting again does not change it.
        self._lost_at = liveness.now() if self._echo_sent is None else self._echo_sent
        self._outbox.clear()
        if not self._closing:
            self._read_access_again()
        if was is not None and not self._closing:
            log.warning(
                "%s: the connection to NATS at %s is cut; it is tried again until it holds",
                self._name,
                self._settings.shown_urls,
            )

    async def _reconnected(self) -> None:
        self._since = liveness.now()
        log.warning(
            "%s: connected to NATS again, after %.1f s", self._name, self._since - self._lost_at
        )
        for act in self._on_reconnect:
            act()
