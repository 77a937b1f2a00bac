"""Outputs taken where they arrive, and by the task of their request, make the same bytes."""

import asyncio
import itertools
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from benchmarks.frontend_streams import PacedStream, PacedWorker, exchange, wait_ready
from msgspec.structs import replace

from inlay.api import build_app
from inlay.digest import Secret
from inlay.engine.echo import EchoEngine
from inlay.engine.settings import EngineSettings
from inlay.http import FrontendSettings
from inlay.http.serve import serve
from inlay.request import Output, Request, TokenLogprobs, Usage
from inlay.router import Router
from inlay.router.resume import ResumingStream
from tests.models import tiny
from tests.serving import free_port

TEXT = {"prompt": "the harbour town counts its lanterns, na\u00efve or not \U0001f3ee " * 4}
CHAT = {"messages": [{"role": "user", "content": "count the lanterns \U0001f3ee " * 8}]}
USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": (COMPLETIONS, TEXT),
    "with usage": (COMPLETIONS, {**TEXT, **USAGE}),
    "with ids": (COMPLETIONS, {**TEXT, "return_token_ids": True}),
    "with logprobs": (COMPLETIONS, {**TEXT, "logprobs": 2}),
    "echoed": (COMPLETIONS, {**TEXT, "echo": True}),
    "ended by a stop string": (COMPLETIONS, {**TEXT, "stop": ["tern", "never said"]}),
    "with a stop string never said": (COMPLETIONS, {**TEXT, "stop": ["never said"]}),
    "of two choices": (COMPLETIONS, {**TEXT, "n": 2, "temperature": 1, "seed": 1}),
    "chat": (CHATS, CHAT),
    "chat with logprobs": (CHATS, {**CHAT, "logprobs": True, "top_logprobs": 2}),
    "chat with usage": (CHATS, {**CHAT, **USAGE}),
    "chat ended by a stop string": (CHATS, {**CHAT, "stop": "tern"}),
    "responses": ("/v1/responses", {"input": CHAT["messages"][0]["content"]}),
    "messages": ("/v1/messages", {"model": "m", **CHAT}),
    "whole": (COMPLETIONS, {**TEXT, "stream": False}),
    "whole with logprobs": (CHATS, {**CHAT, "stream": False, "logprobs": True}),
    "whole ended by a stop string": (CHATS, {**CHAT, "stream": False, "stop": "tern"}),
}
VARIES = re.compile(
    rb'date: .*?\r\n|"created(_at)?":[0-9]+|"completed_at":[0-9]+|x-request-id: .*?\r\n'
    rb"|request-id: .*?\r\n|(msg|resp|rs|item|cmpl|chatcmpl)[-_][0-9a-zA-Z-]+"
)


class Stream(PacedStream):
    """One, three, or twice one id at a time, with logprobs where they are asked for."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._counts = itertools.cycle([(1,), (1,), (3,), (1, 1)])

    def step(self) -> None:
        most = self._work.sampling.max_tokens
        for count in next(self._counts):
            self._put(min(count, most - self._sent), most)

    def _put(self, count: int, most: int) -> None:
        if not count:
            return
        start, self._sent = self._sent, self._sent + count
        last = self._sent == most
        ids = tuple(self._ids[place % len(self._ids)] for place in range(start, self._sent))
        output = Output(self._work.id, 0, start, ids, finish_reason="length" if last else None)
        if last or not start:
            output = replace(output, usage=Usage(len(self._ids), self._sent))
        if (wanted := self._work.sampling.logprobs) is not None:
            entry = TokenLogprobs(-0.5, tuple((id_, -1.0 - id_) for id_ in range(wanted)))
            output = replace(output, logprobs=(entry,) * count)
        self._queue.put(output)
        if last:
            self._open.discard(self)


class Worker(PacedWorker):
    """Sends such streams."""

    def send(self, request: Request) -> PacedStream:
        super().send(request).cancel()
        return Stream(request, self._streams, self._deliveries)


@pytest.fixture
async def port() -> AsyncIterator[int]:
    settings = EngineSettings(model=str(tiny("llama")), served_model_name=["m"], engine="echo")
    secret, frontend = Secret.random(), FrontendSettings(port=free_port())
    engine = EchoEngine(settings, secret)
    await engine.start()
    app = build_app(Router(Worker(engine.card)), frontend, secret=secret)
    serving = asyncio.create_task(serve(app, frontend))
    await wait_ready(frontend.port)
    yield frontend.port
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


@pytest.mark.parametrize("name", CASES)
async def test_both_ways_make_the_same_bytes(
    name: str, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, fields = CASES[name]
    limit = "max_output_tokens" if path.endswith("responses") else "max_tokens"
    body = json.dumps({"stream": True, limit: 40, **fields}).encode()
    taken = 0
    take_next = ResumingStream._take_next

    def counted(self: ResumingStream, output: Output) -> bool:
        nonlocal taken
        found = take_next(self, output)
        taken += found
        return found

    monkeypatch.setattr(ResumingStream, "_take_next", counted)
    at_once = await exchange(port, path, body)
    assert at_once.startswith(b"HTTP/1.1 200"), at_once
    assert not taken if name == "of two choices" else taken > 1
    monkeypatch.setattr(ResumingStream, "_take_next", lambda *_: False)
    by_its_task = await exchange(port, path, body)
    pair = [VARIES.sub(b"", answer) for answer in (at_once, by_its_task)]
    if "n" in fields:
        # Which of two choices comes first is up to the worker.
        assert len({tuple(sorted(re.findall(b"data: .*", answer))) for answer in pair}) == 1
    else:
        assert pair[0] == pair[1]
