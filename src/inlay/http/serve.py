"""Runs the app on its ports and drains it at the end."""

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager
from functools import partial
from socket import socket
from typing import TypeAlias

import uvicorn

from inlay.base import liveness
from inlay.base.build import build_id
from inlay.base.pace import set_switch_interval
from inlay.base.watched import WatchedFiles
from inlay.http import uvicorn_inside
from inlay.http.address import bound
from inlay.http.app import App
from inlay.http.asgi import Receive, Scope, Send
from inlay.http.bodies.allocator import give_back_memory, keep_freed_memory
from inlay.http.bounded_http import BoundedHttp
from inlay.http.callers.auth import ADMIN_PORT
from inlay.http.callers.keys import read_keys
from inlay.http.listener import HttpListener
from inlay.http.metrics.collectors import build_metrics, file_metrics
from inlay.http.references import sweep
from inlay.http.settings import FrontendSettings
from inlay.http.tls import Tls
from inlay.render.template import read_template

_log = logging.getLogger(__name__)
ASGI: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_HANGUP: signal.Signals | None = getattr(signal, "SIGHUP", None)
KEEP_ALIVE = 30
"""Seconds an idle connection is kept open."""

_BACKLOG = 65_535
"""Connections that may wait to be accepted; the system may allow fewer.

A client whose connection is refused retries after 1, 3 and 7 s.
"""

_LAST_WORDS = 0.8
"""Fraction of the drain time after which open streams are ended.

The rest is for sending their last events.
"""


class _Listening(uvicorn.Server):
    """uvicorn's server with a `HttpListener` for each socket."""

    def __init__(self, config: uvicorn.Config, tls: Tls | None) -> None:
        super().__init__(config)
        self._tls = tls

    async def startup(self, sockets: list[socket] | None = None) -> None:
        """Begin to listen."""
        config = self.config
        make_protocol = partial(BoundedHttp, config, self.server_state, self.lifespan.state)
        self.servers: list[HttpListener] = [  # type: ignore[assignment]
            HttpListener(each, make_protocol, self._tls, config.backlog) for each in sockets or ()
        ]
        self.started = True


class _Draining(_Listening):
    """uvicorn's server; open streams end with an error event when it stops, not with a cut."""

    def __init__(
        self,
        config: uvicorn.Config,
        app: App,
        drain_timeout: float,
        tls: Tls | None,
        on_stopping: Callable[[int], None] | None,
    ) -> None:
        super().__init__(config, tls)
        self._on_stopping = on_stopping
        self._reloading: set[asyncio.Task[None]] = set()
        self._app = app
        self._drain_timeout = drain_timeout

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Drain at the first SIGINT or SIGTERM, end at once at the second; reload at SIGHUP.

        The signals are not raised again afterwards.
        """
        loop = asyncio.get_running_loop()
        # Without files to reload, SIGHUP keeps its default: it ends the process.
        reload = _HANGUP if any(files.paths for files in self._files) else None
        try:
            for number in _SIGNALS:
                loop.add_signal_handler(number, self.stop)
            if reload is not None:
                loop.add_signal_handler(reload, self.reload)
        except (RuntimeError, ValueError):  # not the main thread: only `stop` ends it
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
        for files in self._files:
            task = asyncio.create_task(files.reload())
            self._reloading.add(task)
            task.add_done_callback(self._reloading.discard)

    @property
    def _files(self) -> Sequence[WatchedFiles]:
        return watched(self._app, self._tls)

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
        """Let open requests run for most of the drain time, then end them."""
        inflight = self._app.server.inflight
        inflight.draining = True
        timer = asyncio.get_running_loop().call_later(
            self._drain_timeout * _LAST_WORDS, inflight.end_all
        )
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()


class _Beside(_Listening):
    """uvicorn's server on a second port; signals are handled by the first."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle no signals."""
        yield


def _config(app: ASGI, settings: FrontendSettings, tls: Tls | None) -> uvicorn.Config:
    uvicorn_inside.check()
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


async def _show_build(app: App) -> None:
    build = await asyncio.to_thread(build_id)
    app.server.show_metrics(lambda: build_metrics(build))


def watched(app: App, tls: Tls | None) -> list[WatchedFiles]:
    """The files of `app` that are read again when they change."""
    return [app.server.keys.files, *([] if tls is None else [tls.files])]


def _url(host: str, listening: socket, settings: FrontendSettings) -> str:
    scheme = "http" if settings.ssl_certfile is None else "https"
    shown = f"[{host}]" if ":" in host else host
    return f"{scheme}://{shown}:{listening.getsockname()[1]}{settings.root_path}"


def check(settings: FrontendSettings) -> None:
    """Check the files and templates that `settings` name, before a model is loaded.

    Raises:
        InvalidRequestError: one cannot be used; the message says why.
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

    After the first signal no more connections are accepted, new requests on open connections get
    503, and running requests continue; streams that are still open when the drain time is nearly
    over end with an error event. A second signal ends everything at once. SIGHUP reloads the API
    keys and the certificate. Run it in uvloop's event loop; outside the main thread only `stop`
    ends it.

    Args:
        app: from `build_app`; it is closed at the end.
        settings: hosts, ports, certificate, drain time.
        on_started: called once with the base URL, when the port is bound and all parts have
            started.
        on_admin_started: called before `on_started` with the URL of the admin port, if any.
        on_stopping: called at the first signal with the number of running requests.
        stop: drains the server when set, as the first signal does.

    Returns:
        True if it drained, False if a second signal interrupted it.

    Raises:
        InvalidRequestError: an address cannot be bound, or the certificate cannot be used.
    """
    keep_freed_memory()
    set_switch_interval()
    liveness.clock()
    async with AsyncExitStack() as stack:
        stack.callback(app.server.close)
        tls = Tls.of(settings)
        if tls is not None:
            app.server.metrics.add_certificate(lambda: tls.expires)
        app.server.show_metrics(lambda: file_metrics(watched(app, tls)))
        listening = stack.enter_context(closing(bound(settings.host, settings.port)))
        await stack.enter_async_context(_admin_port(app, settings, tls, on_admin_started))
        for part in app.server.parts.values():
            await part.start()
            stack.push_async_callback(part.close)
        if on_started is not None:
            on_started(_url(settings.host, listening, settings))
        server = _Draining(
            _config(app, settings, tls), app, settings.drain_timeout, tls, on_stopping
        )
        beside = [
            *(asyncio.create_task(files.watch()) for files in watched(app, tls)),
            asyncio.create_task(_show_build(app)),
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
    """Serve the admin port, if one is configured, until the block ends."""
    if settings.admin_port is None:
        yield
        return

    async def marked(scope: Scope, receive: Receive, send: Send) -> None:
        scope[ADMIN_PORT] = True
        await app(scope, receive, send)

    with closing(bound(settings.admin_host, settings.admin_port, options="admin-")) as listening:
        url = _url(settings.admin_host, listening, settings)
        _log.info("admin port at %s: no key needed there", url)
        server = _Beside(_config(marked, settings, tls), tls)
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
