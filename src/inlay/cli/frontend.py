"""`inlay frontend`: HTTP in front of a fleet."""

import sys
from contextlib import AsyncExitStack
from functools import partial

import inlay
from inlay.api import build_app
from inlay.base.errors import InvalidRequestError
from inlay.base.pace import freeze_gc
from inlay.cli.process import Console, run_until_signal
from inlay.cli.settings import FleetFrontendSettings
from inlay.http.address import check_address
from inlay.http.serve import check, serve
from inlay.messages.digest import Secret
from inlay.router import Router
from inlay.store import PromptStore
from inlay.store.fleet import FleetStore
from inlay.store.secret import read_key
from inlay.telemetry import Tracing, configure
from inlay.transport.nats.frontend import NatsPlane
from inlay.transport.nats.member import Member
from inlay.transport.nats.prompts import NatsPrompts
from inlay.transport.tls import load_identity, make_certificate


def run(settings: FleetFrontendSettings) -> int:
    """Serve until a signal; return the exit status.

    Raises:
        InlayError: the address is taken, NATS is out of reach, or the namespace has another secret.
    """
    configure(settings.telemetry.log_format, settings.telemetry.log_level)
    return run_until_signal(_host(settings, Console(sys.stdout, sys.stderr)))


async def _host(settings: FleetFrontendSettings, console: Console) -> None:
    frontend, fleet = settings.frontend, settings.fleet
    check_address(frontend.host, frontend.port)
    if frontend.admin_port is not None:
        check_address(frontend.admin_host, frontend.admin_port, options="admin-")
    check(frontend)
    given = settings.store.secret_file
    own = None if given is None else Secret(read_key(given))
    member = await Member.join(fleet, "frontend")
    async with AsyncExitStack() as undo:
        undo.push_async_callback(member.leave)
        secret = await member.secret(own)
        plane = await _plane(settings, member, secret)
        undo.pop_all()
        undo.push_async_callback(plane.close)
        store = await _store(settings, secret, member)
        undo.callback(store.close)
        tracing = Tracing.open(settings.telemetry.otlp_traces_endpoint, "inlay-frontend")
        router = Router(plane, settings.router, secret=secret)
        await router.start()
        undo.push_async_callback(router.close)
        app = build_app(
            router,
            frontend,
            secret=secret,
            store=store,
            tracing=tracing,
            batches=settings.batches,
            responses=settings.responses,
            open_shared=partial(NatsPrompts.open, member),
        )

        def started(url: str) -> None:
            console.line(
                f"inlay {inlay.__version__}: {member.id} in namespace {fleet.namespace} at "
                f"{fleet.shown_urls}; HTTP at {url}"
            )

        def stopping(requests: int) -> None:
            console.line(
                f"stopping: {requests} request{'' if requests == 1 else 's'} open, up to "
                f"{frontend.drain_timeout:g} s; Ctrl-C again ends at once"
            )

        freeze_gc()
        await serve(app, frontend, on_started=started, on_stopping=stopping)


async def _plane(settings: FleetFrontendSettings, member: Member, secret: Secret) -> NatsPlane:
    """Begin to connect to workers, and to listen for those that dial."""
    host, port = settings.transport_host, settings.transport_port
    if host is None:
        plane = NatsPlane(member, secret)
    else:
        plane = NatsPlane(member, secret, identity=load_identity(make_certificate()))
        try:
            await plane.listen_for_workers(host, settings.transport_bind or host, port)
        except OSError as error:
            raise InvalidRequestError(
                f"cannot listen for workers on {settings.transport_bind or host}:{port}: {error} "
                "(--transport-bind, --transport-port)"
            ) from error
    await plane.start()
    return plane


async def _store(
    settings: FleetFrontendSettings, secret: Secret, member: Member
) -> PromptStore | FleetStore:
    """Open the store of uploaded embeddings and images."""
    if not settings.store.prompt_store_nats:
        return settings.store.open(secret)
    store = settings.store.open_shared(secret, await NatsPrompts.open(member))
    await store.start()
    return store
