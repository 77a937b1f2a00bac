"""Runs the app on a port, and ends it well."""

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager
from socket import socket
from typing import TypeAlias

import uvicorn

from inlay import liveness
from inlay.frontend.access import ADMIN_PORT
from inlay.frontend.address import bound
from inlay.frontend.app import App
from inlay.frontend.bodies.allocator import give_back_memory, keep_freed_memory
from inlay.frontend.bodies.body import Receive, Scope, Send
from inlay.frontend.bodies.http import BoundedHttp
from inlay.frontend.callers.keys_file import read_keys
from inlay.frontend.references import sweep
from inlay.frontend.renderers import read_template
from inlay.frontend.settings import FrontendSettings
from inlay.frontend.tls import Tls
from inlay.pace import set_switch_interval

_log = logging.getLogger(__name__)
ASGI: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_HANGUP: signal.Signals | None = getattr(signal, "SIGHUP", None)
KEEP_ALIVE = 30
"""Seconds an idle connection is kept."""

_BACKLOG = 65_535
"""Connections that wait to be accepted, or as many as the system allows.

One more is refused, and tried again after 1, 3 and 7 s.
"""

_LAST_WORDS = 0.8
"""Part of the drain time after which open streams are ended.

The rest is for their last events to leave.
"""


class _Draining(uvicorn.Server):
    """uvicorn's server, but what is open when it stops ends with an error and not with a cut."""

    def __init__(
        self,
        config: uvicorn.Config,
        app: App,
        drain_timeout: float,
        tls: Tls | None,
        on_stopping: Callable[[int], None] | None,
    ) -> None:
        super().__init__(config)
        self._on_stopping = on_stopping
        self._tls = tls
        self._reloading: asyncio.Task[None] | None = None
        self._app = app
        self._drain_timeout = drain_timeout

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The first SIGINT or SIGTERM drains, the second ends at once; neither is raised again.

        SIGHUP reloads.
        """
        loop = asyncio.get_running_loop()
        # Without anything to read again it ends the process, as when a terminal is closed.
        reload = _HANGUP if self._tls is not None or self._app.server.keys.reloadable else None
        try:
            for number in _SIGNALS:
                loop.add_signal_handler(number, self.stop)
            if reload is not None:
                loop.add_signal_handler(reload, self.reload)
        except (RuntimeError, ValueError):  # not the main thread: whoever runs it there stops it
            yield
            return
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)
            if reload is not None:
                loop.remove_signal_handler(reload)

    def reload(self) -> None:
        """Read keys and certificate again."""
        self._reloading = asyncio.create_task(self._app.server.keys.reload())
        if self._tls is not None:
            self._tls.reload()

    def stop(self) -> None:
        """Stop accepting and drain; called again, end at once."""
        if self.should_exit:
            self.force_exit = True
            self._app.server.inflight.end_all()
        elif self._on_stopping is not None:
            self._on_stopping(self._app.server.inflight.count)
        self.should_exit = True
        self._app.server.inflight.draining = True

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        """Let what is open run on for most of the drain time, then end it."""
        inflight = self._app.server.inflight
        inflight.draining = True
        timer = asyncio.get_running_loop().call_later(
            self._drain_timeout * _LAST_WORDS, inflight.end_all
        )
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()


class _Beside(uvicorn.Server):
    """uvicorn's server on a second port, which leaves signals to the first."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take none."""
        yield


def _config(app: ASGI, settings: FrontendSettings, tls: Tls | None) -> uvicorn.Config:
    config = uvicorn.Config(
        app,
        http=BoundedHttp,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        root_path=settings.root_path,
        timeout_keep_alive=KEEP_ALIVE,
        backlog=_BACKLOG,
    )
    # A float is fine for `asyncio.wait_for`, which is where it goes.
    config.timeout_graceful_shutdown = settings.drain_timeout  # type: ignore[assignment]
    config.load()
    config.ssl = None if tls is None else tls.context
    return config


def _url(host: str, listening: socket, settings: FrontendSettings) -> str:
    scheme = "http" if settings.ssl_certfile is None else "https"
    shown = f"[{host}]" if ":" in host else host
    return f"{scheme}://{shown}:{listening.getsockname()[1]}{settings.root_path}"


def check(settings: FrontendSettings) -> None:
    """Say now, before a model is loaded for them, which of the files and templates in `settings` cannot be used.

    Raises:
        InvalidRequestError: one cannot; the message says why.
    """
    Tls.of(settings)
    if settings.api_key_file is not None:
        read_keys(settings.api_key_file)
    if settings.chat_template is not None:
        read_template(settings.chat_template)


async def serve(
    app: App,
    settings: FrontendSettings,
    *,
    on_started: Callable[[str], None] | None = None,
    on_admin_started: Callable[[str], None] | None = None,
    on_stopping: Callable[[int], None] | None = None,
    stop: asyncio.Event | None = None,
) -> bool:
    """Serve `app` until SIGINT or SIGTERM, then drain.

    On the first signal no more connections are taken, new requests on open ones get 503, and what
    is under way may go on; streams that are still open when the drain time is nearly over end with
    an error event. On the second everything ends at once. SIGHUP has the API keys and the
    certificate read again. Run it in uvloop's event loop; outside the main thread only `stop` ends
    it.

    Args:
        app: from `build_app`; it is closed in the end.
        settings: hosts, ports, certificate, drain time.
        on_started: called once with the base URL, when the port is bound.
        on_admin_started: called before it with the admin port's URL, where there is one.
        on_stopping: called on the first signal with the number of requests under way.
        stop: ends the serving when set, as the first signal does.

    Returns:
        Whether it drained: False where a second signal cut that short.

    Raises:
        InvalidRequestError: an address cannot be listened on, or the certificate not be used.
    """
    keep_freed_memory()
    set_switch_interval()
    liveness.clock()
    async with AsyncExitStack() as stack:
        stack.callback(app.server.close)
        tls = Tls.of(settings)
        listening = stack.enter_context(closing(bound(settings.host, settings.port)))
        await stack.enter_async_context(_admin_port(app, settings, tls, on_admin_started))
        if on_started is not None:
            on_started(_url(settings.host, listening, settings))
        server = _Draining(
            _config(app, settings, tls), app, settings.drain_timeout, tls, on_stopping
        )
        beside = [
            asyncio.create_task(app.server.keys.watch()),
            asyncio.create_task(give_back_memory(app.server.budget)),
        ]
        if stop is not None:
            beside.append(asyncio.create_task(_stop(server, stop)))
        if app.server.store is not None:
            beside.append(asyncio.create_task(sweep(app.server.store)))
        try:
            await server.serve(sockets=[listening])
        finally:
            for task in beside:
                task.cancel()
        return not server.force_exit


@asynccontextmanager
async def _admin_port(
    app: App, settings: FrontendSettings, tls: Tls | None, on_started: Callable[[str], None] | None
) -> AsyncIterator[None]:
    """Serve the admin port, if there is to be one, until the block ends."""
    if settings.admin_port is None:
        yield
        return

    async def marked(scope: Scope, receive: Receive, send: Send) -> None:
        scope[ADMIN_PORT] = True
        await app(scope, receive, send)

    with closing(bound(settings.admin_host, settings.admin_port, options="admin-")) as listening:
        url = _url(settings.admin_host, listening, settings)
        _log.info("admin operations need no key at %s", url)
        server = _Beside(_config(marked, settings, tls))
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        if on_started is not None:
            on_started(url)
        try:
            yield
        finally:
            server.should_exit = True
            await serving


async def _stop(server: _Draining, stop: asyncio.Event) -> None:
    await stop.wait()
    server.stop()
