"""An HTTP/1.1 client for commands that talk to a server.

It reads streams as they arrive and says when each piece came, which `inlay bench` measures by; it
keeps connections; it costs little: one pass of httptools' parser, no task for a connection.
"""

import asyncio
import os
import ssl
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

import httptools
import msgspec
from pydantic import SecretStr

import inlay
from inlay.base.errors import EngineError, InvalidRequestError, NotFoundError, OverloadedError
from inlay.client.connection import refusal

_JSON = "application/json"
_PAUSE_BYTES = 1 << 20
"""Bytes that wait to be read, from which on no more are taken from the socket."""


@dataclass(frozen=True)
class RemoteServer:
    """A server that speaks OpenAI's API.

    Attributes:
        url: base URL as OpenAI clients take it, without a slash at its end.
        api_key: key to ask with, or None.
    """

    url: str
    api_key: str | None = None

    @classmethod
    def of(cls, url: str, api_key: str | None = None) -> "RemoteServer":
        """A server by its URL; without a path, its `/v1` is meant.

        Raises:
            InvalidRequestError: not an HTTP URL.
        """
        try:
            parts = urlsplit(url)
            good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            good = False
        if not good:
            raise InvalidRequestError(
                f"{url!r} is not the URL of a server, such as http://127.0.0.1:8000/v1"
            )
        url = url.rstrip("/")
        return cls(url if parts.path.strip("/") else f"{url}/v1", api_key)

    @property
    def root(self) -> str:
        """The URL without `/v1`, below which routes of the server itself are."""
        return self.url.removesuffix("/v1")


class BodyPiece(NamedTuple):
    """Bytes of a body, and when they came, in seconds of `time.perf_counter`."""

    at: float
    data: bytes


class _LostError(Exception):
    """The connection ended before the answer did."""


class _Connection(asyncio.Protocol):
    """One connection; one request at a time."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.complete = True
        self.usable = True
        self._pieces: deque[BodyPiece] = deque()
        self._held = 0
        self._waiting: asyncio.Future[None] | None = None
        self._parser: Any = None
        self._now = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.usable = False
        self._wake()

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        if self.complete:
            # Nothing was asked: what comes belongs to no answer.
            self.usable = False
            self.transport.abort()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.usable = False
            self.transport.abort()
        self._wake()

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        self._pieces.append(BodyPiece(self._now, data))
        self._held += len(data)
        if self._held > _PAUSE_BYTES:
            self.transport.pause_reading()

    def on_message_complete(self) -> None:
        self.usable = self.usable and self._parser.should_keep_alive()
        self.complete = True

    def ask(self, head: bytes, body: bytes) -> None:
        """Send a request."""
        self.status, self.complete, self.headers = 0, False, {}
        self._parser = httptools.HttpResponseParser(self)
        self.transport.write(head)
        if body:
            self.transport.write(body)

    async def started(self) -> None:
        """Wait for the answer's head. Raises `_LostError` where there is none."""
        while not self.status:
            await self._news()

    async def pieces(self) -> AsyncGenerator[BodyPiece, None]:
        """The answer's body. Raises `_LostError` where it breaks off."""
        while True:
            while self._pieces:
                piece = self._pieces.popleft()
                self._held -= len(piece.data)
                if self._held <= _PAUSE_BYTES and self.usable:
                    self.transport.resume_reading()
                yield piece
            if self.complete:
                return
            await self._news()

    async def _news(self) -> None:
        if not self.usable:
            raise _LostError
        self._waiting = asyncio.get_running_loop().create_future()
        await self._waiting

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


class HttpClient:
    """Connections to one server. Close it in the loop that it was used in."""

    def __init__(self, server: RemoteServer) -> None:
        parts = urlsplit(server.url)
        self.server = server
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if self._tls else 80)
        self._path = parts.path
        fields = [
            f"Host: {parts.netloc.rpartition('@')[2]}",
            f"User-Agent: inlay/{inlay.__version__}",
        ]
        if server.api_key is not None:
            fields.append(f"Authorization: Bearer {server.api_key}")
        self._fields = "\r\n".join(fields)
        self._idle: list[_Connection] = []

    async def json(self, method: str, path: str, body: Any = None) -> Any:
        """The decoded answer.

        Raises:
            InlayError: as the server answers, `OverloadedError` where it cannot be reached,
                `EngineError` where it answers no JSON.
        """
        data = b"" if body is None else msgspec.json.encode(body)
        async with self.streaming(method, path, data) as pieces:
            answer = b"".join([piece.data async for piece in pieces])
        try:
            return msgspec.json.decode(answer)
        except msgspec.DecodeError as error:
            raise EngineError(
                f"{self.server.url}{path} answered something else than JSON"
            ) from error

    @asynccontextmanager
    async def streaming(
        self, method: str, path: str, body: bytes
    ) -> AsyncIterator[AsyncIterator[BodyPiece]]:
        """The body of the answer, as it arrives. Leaving early closes the connection.

        Args:
            method: of the request.
            path: below the server's URL; one that begins with `..` is beside `/v1`.
            body: JSON, or nothing.

        Raises:
            InlayError: as `json`.
        """
        target = self._path + path
        if path.startswith(".."):
            target = self._path.removesuffix("/v1") + path.removeprefix("..")
        head = (
            f"{method} {target} HTTP/1.1\r\n{self._fields}\r\nContent-Type: {_JSON}\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        ).encode("latin-1")
        connection = await self._asked(head, body)
        try:
            if connection.status >= 400:
                answer = b"".join([piece.data async for piece in connection.pieces()])
                raise refusal(connection.status, answer, connection.headers.get("retry-after"))
            async with aclosing(connection.pieces()) as pieces:
                yield pieces
        except _LostError as error:
            raise OverloadedError(f"{self.server.url}: the connection was lost") from error
        finally:
            if connection.complete and connection.usable:
                self._idle.append(connection)
            else:
                connection.transport.abort()

    async def _asked(self, head: bytes, body: bytes) -> _Connection:
        """A connection on which the answer has begun."""
        while True:
            kept = bool(self._idle)
            connection = self._idle.pop() if kept else await self._connected()
            if not connection.usable:
                continue
            connection.ask(head, body)
            try:
                await connection.started()
            except _LostError as error:
                if kept:
                    # The server closed an idle connection while the request was on its way.
                    continue
                raise OverloadedError(
                    f"{self.server.url}: the connection was lost before an answer came"
                ) from error
            except BaseException:
                connection.transport.abort()
                raise
            return connection

    async def _connected(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(
                _Connection, self._host, self._port, ssl=self._tls
            )
        except (OSError, UnicodeError) as error:
            raise OverloadedError(
                f"{self.server.url} cannot be reached: {_reason(error)}"
            ) from error
        return connection

    async def close(self) -> None:
        """Close all connections that are not in use."""
        while self._idle:
            self._idle.pop().transport.close()
        # A transport closes at the next turn of the loop, and complains if that never comes.
        await asyncio.sleep(0)


def _reason(error: Exception) -> str:
    said = getattr(error, "strerror", None) or str(error)
    return " ".join(str(said).split())


class EventReader:
    """Server-sent events out of the pieces of a body.

    `feed` returns the data of the events that are whole: JSON text. The last, `[DONE]`, is left
    out, and `done` is True after it.
    """

    def __init__(self) -> None:
        self.done = False
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Data of the events that ended within `data`.

        Raises:
            InlayError: an event is an error of the server's.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        events = []
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            event = line[5:].strip()
            if event == b"[DONE]":
                self.done = True
            elif event.startswith(b'{"error"'):
                raise refusal(EngineError.status, event)
            elif event:
                events.append(event)
        return events


DEFAULT_URL = "http://127.0.0.1:8000/v1"


@dataclass(frozen=True)
class ListedModel:
    """A model as `/v1/models` describes it.

    Attributes:
        name: to ask for.
        hidden_size: elements of a row; None if the server does not say, as others than inlay.
        dtype: of its activations, likewise.
        max_model_len: positions, likewise.
        prompt_embeds: True if embeddings are taken as prompts, as far as the server says.
    """

    name: str
    hidden_size: int | None = None
    dtype: str | None = None
    max_model_len: int | None = None
    prompt_embeds: bool = False


def server_of(url: str | None, api_key: SecretStr | None) -> RemoteServer:
    """The server that settings name, or the environment of OpenAI's clients.

    The key in that environment is sent to the server that is named there, and to no other.

    Raises:
        InvalidRequestError: not the URL of a server.
    """
    key = None if api_key is None else api_key.get_secret_value()
    if url is None:
        url = os.environ.get("OPENAI_BASE_URL")
        key = key or (os.environ.get("OPENAI_API_KEY") if url else None)
    return RemoteServer.of(url or DEFAULT_URL, key)


async def served_model(client: HttpClient, name: str | None) -> ListedModel:
    """A model by its name, or the server's first.

    Raises:
        NotFoundError: it has no such model.
        InlayError: it cannot be reached, or refuses the key.
    """
    answer = await client.json("GET", "/models")
    try:
        entries: list[dict[str, Any]] = answer["data"]
        names = [str(entry["id"]) for entry in entries]
    except (KeyError, TypeError) as error:
        raise EngineError(f"{client.server.url}/models lists no models") from error
    if not names:
        raise NotFoundError(f"{client.server.url} serves no model now")
    if name is not None and name not in names:
        raise NotFoundError(f"the model {name!r} does not exist; served: {', '.join(names)}")
    entry = entries[0 if name is None else names.index(name)]
    return ListedModel(
        name=str(entry["id"]),
        hidden_size=entry.get("hidden_size"),
        dtype=entry.get("dtype"),
        max_model_len=entry.get("max_model_len"),
        prompt_embeds="prompt_embeds" in entry.get("capabilities", ()),
    )
