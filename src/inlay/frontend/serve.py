"""Runs the app on a port, and ends it well."""

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from socket import AI_PASSIVE, SO_REUSEADDR, SOCK_STREAM, SOL_SOCKET, getaddrinfo, socket

import uvicorn

from inlay.errors import InvalidRequestError
from inlay.frontend.allocator import keep_freed_memory
from inlay.frontend.app import App
from inlay.frontend.http import BoundedHttp
from inlay.frontend.references import sweep
from inlay.frontend.settings import FrontendSettings

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
KEEP_ALIVE = 30
"""Seconds an idle connection is kept."""

_LAST_WORDS = 0.8
"""Part of the drain time after which open streams are ended; the rest is for their last events to leave."""


class _Draining(uvicorn.Server):
    """uvicorn's server, but what is open when it stops ends with an error and not with a cut."""

    def __init__(self, config: uvicorn.Config, app: App, drain_timeout: float) -> None:
        super().__init__(config)
        self._app = app
        self._drain_timeout = drain_timeout

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The first SIGINT or SIGTERM drains, the second ends at once; neither is raised again afterwards."""
        loop = asyncio.get_running_loop()
        try:
            for number in _SIGNALS:
                loop.add_signal_handler(number, self.stop)
        except (RuntimeError, ValueError):  # not the main thread: whoever runs it there stops it
            yield
            return
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    def stop(self) -> None:
        """Stop accepting and drain; called again, end at once."""
        if self.should_exit:
            self.force_exit = True
            self._app.server.inflight.end_all()
        self.should_exit = True
        self._app.server.inflight.draining = True

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        """Let what is open run on for most of the drain time, then end it."""
        inflight = self._app.server.inflight
        inflight.draining = True
        timer = asyncio.get_running_loop().call_later(self._drain_timeout * _LAST_WORDS, inflight.end_all)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()


def _listen(settings: FrontendSettings) -> socket:
    try:
        family, kind, protocol, _, address = getaddrinfo(
            settings.host, settings.port, type=SOCK_STREAM, flags=AI_PASSIVE
        )[0]
        listening = socket(family, kind, protocol)
        try:
            listening.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
            listening.bind(address)
        except OSError:
            listening.close()
            raise
    except OSError as error:
        raise InvalidRequestError(
            f"cannot listen on {settings.host}:{settings.port}: {error}", param="port"
        ) from error
    return listening


async def serve(
    app: App,
    settings: FrontendSettings,
    *,
    on_started: Callable[[str], None] | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Serve `app` until SIGINT or SIGTERM, then drain.

    On the first signal no more connections are taken, new requests on open ones get 503, and what is under way may go on;
    streams that are still open when the drain time is nearly over end with an error event. On the second everything
    ends at once. Returns in either case. Run it in uvloop's event loop; outside the main thread only `stop` ends it.

    Args:
        app: from `build_app`; it is closed in the end.
        settings: host, port, drain time.
        on_started: called once with the base URL, when the port is bound.
        stop: ends the serving when set, as the first signal does.

    Raises:
        InvalidRequestError: the address cannot be listened on.
    """
    keep_freed_memory()
    with closing(_listen(settings)) as listening:
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
        )
        # A float is fine for `asyncio.wait_for`, which is where it goes.
        config.timeout_graceful_shutdown = settings.drain_timeout  # type: ignore[assignment]
        if on_started is not None:
            host = f"[{settings.host}]" if ":" in settings.host else settings.host
            on_started(f"http://{host}:{listening.getsockname()[1]}{settings.root_path}")
        server = _Draining(config, app, settings.drain_timeout)
        beside = [] if stop is None else [asyncio.create_task(_stop(server, stop))]
        if app.server.store is not None:
            beside.append(asyncio.create_task(sweep(app.server.store)))
        try:
            await server.serve(sockets=[listening])
        finally:
            for task in beside:
                task.cancel()
            app.server.close()


async def _stop(server: _Draining, stop: asyncio.Event) -> None:
    await stop.wait()
    server.stop()
