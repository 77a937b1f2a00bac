"""An answer that fails after its first bytes is cut, so that nobody takes it for whole."""

import asyncio

import httpx
import pytest

from inlay.base.errors import EngineError
from inlay.http import App, FrontendSettings
from inlay.http.openapi import Operation
from inlay.http.serve import serve
from inlay.http.server import Call, Server
from inlay.messages.digest import Secret
from inlay.router import Router
from inlay.transport.local import LocalPlane


async def breaking(call: Call) -> None:
    """Fail after the first piece."""
    await call.send({"type": "http.response.start", "status": 200, "headers": []})
    await call.send({"type": "http.response.body", "body": b"first", "more_body": True})
    raise EngineError("the model failed")


async def test_the_connection_of_an_answer_that_fails_in_its_middle_ends_without_its_end() -> None:
    settings = FrontendSettings(port=0)
    server = Server(Router(LocalPlane([])), settings, Secret(bytes(32)))
    app = App(
        server,
        ((Operation("GET", "/piece", "A piece.", open=True), breaking),),
        lambda _, name: name,
    )
    stop = asyncio.Event()
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve(app, settings, on_started=url.set_result, stop=stop))
    async with (
        httpx.AsyncClient() as client,
        client.stream("GET", f"{await url}/piece") as answer,
    ):
        pieces = answer.aiter_bytes()
        assert await anext(pieces) == b"first"
        with pytest.raises(httpx.RemoteProtocolError, match="without sending complete"):
            await anext(pieces)
    stop.set()
    await serving
