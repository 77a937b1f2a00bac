"""Calls that no connection stands behind: requests that a part of the server makes for a tenant."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from inlay.http.asgi import Message, Send
from inlay.http.bodies.accounting import ByteBudget, Reservation
from inlay.http.callers.auth import Caller
from inlay.http.callers.clients import Client
from inlay.http.server import Call, Server

Receive: TypeAlias = Callable[[], Awaitable[Message]]


def receiver(body: bytes) -> Receive:
    """Return what receives a body, and then waits: nobody leaves."""
    sent = False

    async def receive() -> Message:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}
        await asyncio.Event().wait()
        raise AssertionError

    return receive


def inner_call(
    server: Server,
    path: str,
    body: bytes,
    send: Send,
    *,
    request_id: str,
    caller: Caller,
    client: Client,
    budget: ByteBudget,
    background: bool = False,
) -> Call:
    """Return a call of a JSON body, to be answered with its reservation and `ending` entered.

    Args:
        server: answers.
        path: of the route.
        body: JSON.
        send: takes the answer.
        request_id: of the call.
        caller: in whose name it is made.
        client: by which engines and queues are shared; its bytes count in its own share.
        budget: its bytes count here.
        background: its engine requests give way to all others.
    """
    reservation = Reservation(budget)
    reservation.client = client
    return Call(
        server,
        {"type": "http", "method": "POST", "path": path, "headers": []},
        receiver(body),
        send,
        request_id,
        reservation,
        {b"content-type": b"application/json"},
        declared=len(body),
        route=path,
        caller=caller,
        background=background,
    )
