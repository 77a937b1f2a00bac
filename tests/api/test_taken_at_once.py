"""Outputs taken where they arrive, and by the task of their request, make the same bytes."""

import asyncio
import itertools
import json
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from benchmarks import frontend_streams
from benchmarks.frontend_streams import PacedStream, PacedWorker, exchange, wait_ready
from msgspec.structs import replace

from inlay.api import build_app
from inlay.engine.echo import EchoEngine
from inlay.engine.settings import EngineSettings
from inlay.http import FrontendSettings
from inlay.http.serve import serve
from inlay.messages.digest import Secret
from inlay.messages.request import EngineUsage, Output, Request, TokenLogprobs
from inlay.router import Router
from inlay.router.resume import ResumingStream
from inlay.transport import output_queue
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
    "ended by a stop string that is shown": (
        COMPLETIONS,
        {**TEXT, "stop": ["tern"], "include_stop_str_in_output": True, "min_tokens": 20},
    ),
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
            output = replace(output, usage=EngineUsage(len(self._ids), self._sent))
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
def shown() -> str:
    """Name of the model in responses."""
    return "m"


@pytest.fixture
async def port(shown: str) -> AsyncIterator[int]:
    names = list({shown: 0, "m": 0})
    settings = EngineSettings.of(model=str(tiny("llama")), served_model_name=names, engine="echo")
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


async def test_an_error_in_taking_ends_its_request_alone_and_is_logged(
    port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    take_next = ResumingStream._take_next

    def broken(self: ResumingStream, output: Output) -> bool:
        if self._first.sampling.max_tokens == 41 and output.offset > 3:
            raise ZeroDivisionError("here")
        return take_next(self, output)

    monkeypatch.setattr(ResumingStream, "_take_next", broken)
    bodies = [
        json.dumps({**TEXT, "stream": stream, "max_tokens": limit}).encode()
        for stream, limit in ((True, 40), (True, 41), (True, 40), (False, 41), (False, 40))
    ]
    async with asyncio.timeout(20):
        answers = await asyncio.gather(*[exchange(port, COMPLETIONS, body) for body in bodies])
    for answer in answers[0], answers[2]:
        assert b"[DONE]" in answer
        assert b'"length"' in answer
    assert b'"type":"server_error"' in answers[1]
    assert answers[1].count(b'"text"') in range(2, 6)
    assert answers[3].startswith(b"HTTP/1.1 500")
    assert answers[4].startswith(b"HTTP/1.1 200")
    id_ = re.search(rb"x-request-id: (.*)\r\n", answers[1])
    assert id_ is not None
    logged = [record for record in caplog.records if record.exc_info]
    assert [type(record.exc_info[1]) for record in logged if record.exc_info] == [
        ZeroDivisionError,
        ZeroDivisionError,
    ]
    assert any(id_[1].decode() in record.getMessage() for record in logged)


LONG = 400
NAME = "m" * 100_000
"""Each event has it, so that few of them fill the system's buffers."""


@asynccontextmanager
async def slow_reader(port: int, **fields: Any) -> AsyncIterator[asyncio.StreamReader]:
    """Ask for a stream of `LONG` tokens, and read no more than a small buffer takes."""
    ours = socket.socket()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    ours.setblocking(False)
    await asyncio.get_running_loop().sock_connect(ours, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=ours, limit=1 << 16)
    body = json.dumps({**TEXT, "max_tokens": LONG, "stream": True, **fields})
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write((head + body).encode())
    yield reader
    writer.close()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set when the worker has made an answer of `LONG` tokens; it makes them fast."""
    put, found = Stream._put, asyncio.Event()

    def noted(self: Stream, count: int, most: int) -> None:
        put(self, count, most)
        if self._sent == most == LONG:
            found.set()

    monkeypatch.setattr(Stream, "_put", noted)
    monkeypatch.setattr(frontend_streams, "TICK", 0.004)
    return found


@pytest.mark.parametrize("shown", [NAME], ids=["a long name"])
async def test_a_client_that_does_not_read_holds_back_its_own_stream_alone(
    port: int, made: asyncio.Event
) -> None:
    body = {**TEXT, "stream": True, "max_tokens": 100}
    async with asyncio.timeout(40), slow_reader(port) as reader:
        beside = await exchange(port, COMPLETIONS, json.dumps(body).encode())
        assert not made.is_set(), "the other was to be longer"
        assert beside.count(b"data: ") > 50, "its events did not wait"
        await made.wait()
        answer = await reader.read(-1)
        body |= {"stream": False, "max_tokens": LONG}
        whole = json.loads(
            (await exchange(port, COMPLETIONS, json.dumps(body).encode())).splitlines()[-1]
        )
    # What waited was ids, and came as one event once there was room.
    assert len(answer) < LONG * len(NAME) / 4
    events = [json.loads(event) for event in re.findall(rb"data: (\{.*\})", answer)]
    (choice,) = whole["choices"]
    assert "".join(event["choices"][0]["text"] for event in events) == choice["text"]
    assert events[-1]["choices"][0]["finish_reason"] == choice["finish_reason"] == "length"
    assert b"data: [DONE]" in answer


@pytest.mark.parametrize("shown", [NAME], ids=["a long name"])
async def test_too_many_logprobs_for_a_client_that_does_not_read_end_its_stream(
    port: int, made: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_queue, "MAX_LOGPROBS", 300)
    async with asyncio.timeout(40), slow_reader(port, logprobs=2) as reader:
        await made.wait()
        answer = await reader.read(-1)
    *_, last, done = re.findall(rb"data: (.*?)\r?\n", answer)
    assert "more than 300 log-probabilities wait" in json.loads(last)["error"]["message"]
    assert done == b"[DONE]"
