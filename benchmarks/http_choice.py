"""Which web framework, server, JSON and base64 library: the measurement behind docs/decisions.md.

Two cases matter: a 10 MB embeddings body, and many small streams. Each candidate runs in its own
process; figures are CPU-seconds of that process (they survive a noisy machine). Also the libraries
alone, in this process.

    python -m benchmarks.http_choice [--quick]
"""

import asyncio
import json
import statistics
import subprocess
import sys
import time
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

import msgspec
import psutil
import pybase64

from benchmarks._options import parser_of

MIB = 1024 * 1024
CONNECTIONS, TOKENS, TICK = 32, 128, 0.0005

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Choice(msgspec.Struct):
    index: int
    text: str
    logprobs: None = None
    finish_reason: str | None = None


class Chunk(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]


class Request(msgspec.Struct):
    prompt: str | None = None
    prompt_embeds: str | None = None
    max_tokens: int = 16


ENCODER = msgspec.json.Encoder()


def chunk_bytes(index: int) -> bytes:
    chunk = Chunk("cmpl-0123456789abcdef", "text_completion", 1, "m", [Choice(0, f" tok{index}")])
    return b"data: " + ENCODER.encode(chunk) + b"\n\n"


class Ticker:
    """All streams wake at the same time, as after an engine's step."""

    def __init__(self) -> None:
        self._future: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            future, self._future = self._future, None
            if future is not None:
                future.set_result(None)

    async def wait(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        if self._future is None:
            self._future = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._future)


TICKER = Ticker()
SSE_HEADERS = [(b"content-type", b"text/event-stream")]
JSON_HEADERS = [(b"content-type", b"application/json")]


def answer(body: bytes | bytearray) -> bytes:
    return b'{"bytes":%d}' % len(body)


async def raw_app(scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
    if scope["type"] == "lifespan":
        while True:
            message = await receive()
            await send({"type": message["type"] + ".complete"})
            if message["type"] == "lifespan.shutdown":
                return
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    if scope["path"] == "/body":
        await send({"type": "http.response.start", "status": 200, "headers": JSON_HEADERS})
        await send({"type": "http.response.body", "body": answer(body)})
        return
    await send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
    for index in range(TOKENS):
        await TICKER.wait()
        await send({"type": "http.response.body", "body": chunk_bytes(index), "more_body": True})
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


def starlette_app() -> Any:
    from starlette.applications import Starlette
    from starlette.requests import Request as HttpRequest
    from starlette.responses import Response, StreamingResponse
    from starlette.routing import Route

    async def body(request: HttpRequest) -> Response:
        return Response(answer(await request.body()), media_type="application/json")

    async def events() -> AsyncIterator[bytes]:
        for index in range(TOKENS):
            await TICKER.wait()
            yield chunk_bytes(index)
        yield b"data: [DONE]\n\n"

    async def stream(request: HttpRequest) -> Response:
        await request.body()
        return StreamingResponse(events(), media_type="text/event-stream")

    return Starlette(
        routes=[Route("/body", body, methods=["POST"]), Route("/stream", stream, methods=["POST"])]
    )


def routed_app() -> Any:
    """Starlette routes, raw ASGI endpoints."""
    from starlette.applications import Starlette
    from starlette.routing import Route

    class Endpoint:
        async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
            await raw_app(scope, receive, send)

    return Starlette(
        routes=[
            Route("/body", Endpoint(), methods=["POST"]),
            Route("/stream", Endpoint(), methods=["POST"]),
        ]
    )


def serve(name: str, port: int) -> None:
    if name == "aiohttp":
        import uvloop
        from aiohttp import web

        async def body(request: web.Request) -> web.StreamResponse:
            return web.Response(body=answer(await request.read()), content_type="application/json")

        async def stream(request: web.Request) -> web.StreamResponse:
            await request.read()
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            for index in range(TOKENS):
                await TICKER.wait()
                await response.write(chunk_bytes(index))
            await response.write(b"data: [DONE]\n\n")
            return response

        app = web.Application(client_max_size=100 * MIB)
        app.add_routes([web.post("/body", body), web.post("/stream", stream)])
        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
        web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None)
    elif name == "granian":
        from granian import Granian
        from granian.constants import Interfaces

        server: Any = Granian(
            "benchmarks.http_choice:raw_app", address="127.0.0.1", port=port, interface=Interfaces.ASGI,
            log_enabled=False,
        )  # fmt: skip
        server.serve()
    else:
        import uvicorn

        apps: dict[str, Any] = {
            "starlette": starlette_app(),
            "routed": routed_app(),
            "raw": raw_app,
        }
        uvicorn.run(
            apps[name], host="127.0.0.1", port=port, loop="uvloop", http="httptools", log_level="warning",
            access_log=False,
        )  # fmt: skip


async def exchange(port: int, path: str, body: bytes) -> tuple[float, bytes]:
    """One request on its own connection: (seconds, the response as bytes)."""
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
    writer.write(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
    await writer.drain()
    data = await reader.read(-1)
    writer.close()
    return time.perf_counter() - began, data


def cpu(process: psutil.Process) -> float:
    return sum(
        sum(part.cpu_times()[:2])
        for part in [process, *process.children(recursive=True)]
    )  # fmt: skip


async def drive(name: str, port: int, body: bytes, rounds: int) -> dict[str, float]:
    process = subprocess.Popen(  # noqa: ASYNC220  (before any load)
        [sys.executable, "-m", "benchmarks.http_choice", "--serve", name, "--port", str(port)]
    )
    try:
        for _ in range(100):
            try:
                await exchange(port, "/body", b"{}")
                break
            except OSError:
                await asyncio.sleep(0.1)
        server = psutil.Process(process.pid)
        before = cpu(server)
        walls = [(await exchange(port, "/body", body))[0] for _ in range(rounds)]
        middle = cpu(server)
        streams = 0
        for _ in range(max(2, rounds // 3)):
            results = await asyncio.gather(
                *(exchange(port, "/stream", b"{}") for _ in range(CONNECTIONS))
            )
            if any(data.count(b"data: ") != TOKENS + 1 for _, data in results):
                raise RuntimeError(f"{name} lost events")
            streams += len(results)
        after = cpu(server)
        return {
            "10 MB body, CPU ms": 1000 * (middle - before) / rounds,
            "10 MB body, wall ms": 1000 * statistics.median(walls),
            "chunks per CPU-second": streams * TOKENS / (after - middle),
        }
    finally:
        process.terminate()
        process.wait()


def best(call: Callable[[], object], times: int) -> float:
    """Least milliseconds of `times` calls."""
    least = float("inf")
    for _ in range(times):
        began = time.perf_counter()
        call()
        least = min(least, time.perf_counter() - began)
    return 1000 * least


def libraries(body: bytes, text: bytes) -> dict[str, float]:
    import orjson

    decoder = msgspec.json.Decoder(Request)
    view = memoryview(text)
    raw = pybase64.b64decode(text)
    event = {
        "id": "cmpl-0123456789abcdef", "object": "text_completion", "created": 1, "model": "m",
        "choices": [{"index": 0, "text": " tok1", "logprobs": None, "finish_reason": None}],
    }  # fmt: skip
    chunk = Chunk("cmpl-0123456789abcdef", "text_completion", 1, "m", [Choice(0, " tok1")])

    def thousand(call: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(1000):
                call()

        return run

    return {
        "memcpy of the tensor": best(lambda: bytearray(raw), 20),
        "parse 10 MB body: json": best(lambda: json.loads(body), 3),
        "parse 10 MB body: orjson": best(lambda: orjson.loads(body), 5),
        "parse 10 MB body: msgspec typed": best(lambda: decoder.decode(body), 5),
        "base64: stdlib": best(lambda: b64decode(text, validate=True), 3),
        "base64: pybase64 validate=False": best(
            lambda: pybase64.b64decode(view, validate=False), 5
        ),
        "base64: pybase64 validate=True": best(lambda: pybase64.b64decode(view, validate=True), 10),
        "1000 events: json": best(thousand(lambda: json.dumps(event).encode()), 5),
        "1000 events: orjson": best(thousand(lambda: orjson.dumps(event)), 5),
        "1000 events: msgspec struct": best(thousand(lambda: ENCODER.encode(chunk)), 5),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--serve")
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments.port)
        return
    text = b64encode(bytes(range(256)) * (10 * MIB // 256))
    body = b'{"prompt_embeds":"' + text + b'","max_tokens":8}'
    print(f"{'library':40} {'ms':>10}")
    for name, figure in libraries(body, text).items():
        print(f"{name:40} {figure:10.2f}")
    rounds = 6 if arguments.quick else 20
    for offset, name in enumerate(["raw", "routed", "starlette", "granian", "aiohttp"]):
        figures = asyncio.run(drive(name, arguments.port + offset, body, rounds))
        print(f"{name:10}", "  ".join(f"{key}: {value:.1f}" for key, value in figures.items()))


if __name__ == "__main__":
    main()
