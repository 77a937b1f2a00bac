"""An error in a stream names the field that the client sent, as one before it does."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from inlay.api import build_app
from inlay.base.errors import InvalidRequestError
from inlay.engine.echo import EchoEngine
from inlay.engine.settings import EngineSettings
from inlay.http import FrontendSettings
from inlay.http.serve import serve
from inlay.messages.digest import Secret
from inlay.router import Router
from tests.models import tiny
from tests.transport.direct import DirectPlane

SECRET = Secret(bytes(32))


class Refusing(EchoEngine):
    """Says after two tokens that one of the fields it was sent is wrong."""

    field = ""

    def _emit_one(self, running: Any) -> None:
        super()._emit_one(running)
        if running.emitted == 2:
            error = InvalidRequestError(f"{self.field} is off", param=self.field)
            self._shell.end(running, "error", error)


@pytest.fixture
async def engine() -> Refusing:
    settings = EngineSettings.of(model=str(tiny("llama")), served_model_name=["m"], engine="echo")
    return Refusing(settings, SECRET)


@pytest.fixture
async def url(engine: Refusing) -> AsyncIterator[str]:
    plane = await DirectPlane.around(engine)
    settings, stop = FrontendSettings(port=0), asyncio.Event()
    app = build_app(Router(plane), settings, secret=SECRET)
    started: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve(app, settings, on_started=started.set_result, stop=stop))
    yield await started
    stop.set()
    await serving
    await plane.close()


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "count"}]}


@pytest.mark.parametrize(
    ("path", "body", "field", "sent"),
    [
        (
            "chat/completions",
            {**CHAT, "max_completion_tokens": 9},
            "max_tokens",
            "max_completion_tokens",
        ),
        ("chat/completions", CHAT, "prompt", "messages"),
        ("completions", {"prompt": "count"}, "prompt", "prompt"),
        ("responses", {"input": "count"}, "prompt", "input"),
        ("responses", {"input": "count"}, "max_tokens", "max_output_tokens"),
        ("responses", {"input": "count"}, "messages[0].content", "input[0].content"),
        ("responses", {"input": "count"}, "grammar", "text.format"),
        ("messages", {**CHAT, "max_tokens": 9}, "max_tokens", "max_tokens"),
        (
            "messages",
            {**CHAT, "max_tokens": 9},
            "thinking_token_budget",
            "thinking.budget_tokens",
        ),
    ],
)
async def test_an_error_in_a_stream_names_what_was_sent(
    url: str, engine: Refusing, path: str, body: dict[str, Any], field: str, sent: str
) -> None:
    engine.field = field
    async with httpx.AsyncClient(timeout=60) as client:
        asked = {"model": "m", "stream": True, **body}
        answer = await client.post(f"{url}/v1/{path}", json=asked)
    events = [
        json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")
    ]
    assert answer.status_code == 200
    assert len(events) > 1
    error = events[-1]["error"]
    assert error["message"] == f"{sent} is off"
    assert error.get("param", sent) == sent
    if path == "responses":
        assert events[-2]["response"]["error"]["message"] == f"{sent} is off"
