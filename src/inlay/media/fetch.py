"""Fetching of media that a request names by URL, for a server that strangers send URLs to.

A client that names a URL makes this machine open a connection (SSRF). So:

- https and data: URLs alone. http, files and private addresses must be allowed by settings.
- With a list of hosts, no other host is asked.
- A name is resolved once. Unless every address is public, none is used; one of those that were
  checked is dialled, with the name for TLS. So nothing can change between check and use.
- Each redirection is a new URL and passes all of this again.
- Clients take turns, and none can hold up another's: neither with servers that are slow, nor with
  names whose resolution is.
- Header, body and time are bounded while they arrive. Proxies of the environment are not used.
- Whatever the network did, the client reads one and the same error; the reason is logged. Precise
  errors are for what the URL itself says.
"""

import asyncio
import logging
import os
import re
import ssl
import stat
from collections.abc import Awaitable, Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from socket import SOCK_STREAM, getaddrinfo
from typing import Any, NamedTuple
from urllib.parse import unquote, urljoin, urlsplit

import httptools
import msgspec

from inlay.base.errors import (
    BodyTooLargeError,
    InlayError,
    InvalidRequestError,
    OverloadedError,
    RateLimitedError,
)
from inlay.base.single_flight import shielded
from inlay.base.slots import Slot, Slots
from inlay.media.addresses import Network, address_of, is_public, networks
from inlay.media.data_url import decode_data_url

logger = logging.getLogger(__name__)

_MAX_URL = 8192
_MAX_HEADER_BYTES = 65536
_PIECE = 65536
_MAX_ADDRESSES = 3
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_host = re.compile(r"[a-z0-9_]([a-z0-9_.-]{0,252}[a-z0-9_])?")
_plain = re.compile(r"[!-\[\]-~]*")

Hold = Callable[[int], None]
"""Reserves bytes, or raises an `InlayError`."""

Resolve = Callable[[str, int], Awaitable[list[str]]]
"""Addresses of a host, to be dialled at a port."""


def _nothing(_: int) -> None:
    """Reserve nothing."""


class FetchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of fetching.

    Attributes:
        domains: hosts that may be asked, exactly; any where empty.
        http: http: URLs are allowed.
        private_networks: networks beside the public internet that may be asked.
        local: directory that file: URLs may be below; None for none.
        max_bytes: of one item.
        seconds: for one item, from its name to its last byte.
        redirects: most redirections that are followed.
        places: items that are fetched at the same time, of all clients.
    """

    domains: tuple[str, ...] = ()
    http: bool = False
    private_networks: tuple[str, ...] = ()
    local: Path | None = None
    max_bytes: int = 64 * 2**20
    seconds: float = 10.0
    redirects: int = 3
    places: int = 128


class _ParsedUrl(NamedTuple):
    """A parsed URL."""

    scheme: str
    host: str
    port: int
    path: str

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"


_PORTS = {"https": 443, "http": 80}


class _RefusedError(Exception):
    """A reason for the log, never for the client."""


class Fetcher:
    """Fetches media by URL within settings.

    Args:
        settings: limits.
        resolve: looks names up; the system's resolver where None.
        context: verifies servers; the system's authorities where None.

    Raises:
        InvalidRequestError: settings that name no network or host.
    """

    def __init__(
        self,
        settings: FetchSettings,
        *,
        resolve: Resolve | None = None,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self._settings = settings
        self._networks: tuple[Network, ...] = networks(settings.private_networks)
        self._domains = frozenset(_normal(domain) for domain in settings.domains)
        # Of its own: names that are slow to resolve must not occupy the threads of others. They
        # cannot be ended, so each occupies its place until it is done.
        self._resolvers = ThreadPoolExecutor(settings.places, "inlay-resolver")
        self._resolve = resolve or self._resolved
        self._context = context
        self._turns = Slots(settings.places)

    async def fetch(self, url: str, *, hold: Hold = _nothing, client: Hashable = None) -> bytes:
        """The bytes that a URL names.

        Args:
            url: of the item.
            hold: called with the bytes that arrived, before they are kept; may refuse them.
            client: whose turn is waited for; the time for the item begins then.

        Raises:
            InvalidRequestError: a URL that is not allowed, or that could not be had within the
                limits.
            InlayError: `hold` refuses the bytes, as the memory of requests does.
        """
        scheme = url[:16].partition(":")[0].lower()
        if scheme == "data":
            most = self._settings.max_bytes
            return bytes(await asyncio.to_thread(decode_data_url, url, max_bytes=most))
        if scheme == "file":
            data = await asyncio.to_thread(self._read_file, url)
            hold(len(data))
            return data
        target = self._parse(url)
        try:
            async with self._turns.taken(client) as place:
                async with asyncio.timeout(self._settings.seconds):
                    return await self._follow(target, hold, place)
        except (BodyTooLargeError, OverloadedError, RateLimitedError):
            raise  # by `hold`
        except (
            _RefusedError,
            InlayError,
            OSError,
            ValueError,  # a name that cannot be encoded
            httptools.HttpParserError,
            httptools.HttpParserUpgrade,
        ) as error:
            logger.info("media of %s not fetched: %r", target.host, error)
            raise self._failed(target) from None

    def _failed(self, target: _ParsedUrl) -> InvalidRequestError:
        settings = self._settings
        return InvalidRequestError(
            f"media of {target.host[:100]} cannot be fetched; a URL must lead to a public host "
            f"that answers 200 within {settings.seconds:g} s with at most {settings.max_bytes} "
            f"bytes (--media-timeout, --max-media-bytes), after at most {settings.redirects} "
            "redirections"
        )

    def _parse(self, url: str) -> _ParsedUrl:
        """A URL that settings allow, by what it says.

        Raises:
            InvalidRequestError: any other.
        """
        if len(url) > _MAX_URL:
            raise InvalidRequestError(
                f"the URL of media has {len(url)} characters; allowed: {_MAX_URL}"
            )
        allowed = ("https", "http") if self._settings.http else ("https",)
        scheme = url[:16].partition(":")[0].lower()
        if scheme not in allowed:
            raise InvalidRequestError(
                f"media are fetched from {', '.join(allowed)} and data: URLs, got {url[:40]!r}"
            )
        if not _plain.fullmatch(url):
            raise InvalidRequestError(f"{url[:80]!r} has characters that no URL has; escape them")
        try:
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port
        except ValueError as error:
            raise InvalidRequestError(f"{url[:80]!r} is not a URL: {error}") from error
        host = _normal(host)
        if "@" in parts.netloc or port == 0 or not (_host.fullmatch(host) or address_of(host)):
            raise InvalidRequestError(
                f"{url[:80]!r} has no plain host: no name, no password, no other signs"
            )
        if self._domains and host not in self._domains:
            raise InvalidRequestError(
                f"media may not be fetched from {host[:100]} (--allowed-media-domains)"
            )
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        return _ParsedUrl(scheme, host, port or _PORTS[scheme], path)

    async def _follow(self, target: _ParsedUrl, hold: Hold, place: Slot) -> bytes:
        for _ in range(self._settings.redirects + 1):
            answer = await self._get(target, hold, place)
            if answer.status == 200:
                return bytes(answer.body)
            location = answer.headers.get("location")
            if answer.status not in _REDIRECTS or location is None:
                raise _RefusedError(f"status {answer.status}")
            here = f"{target.scheme}://{target.authority}{target.path}"
            target = self._parse(urljoin(here, location[:_MAX_URL]).partition("#")[0])
        raise _RefusedError("too many redirections")

    async def _addresses(self, target: _ParsedUrl, place: Slot) -> list[str]:
        """Checked addresses of a host, to be dialled as they are."""
        found = [target.host]
        if not address_of(target.host):
            lookup = asyncio.ensure_future(self._resolve(target.host, target.port))
            place.occupy(lookup)
            found = await shielded(lookup)
        if not found:
            raise _RefusedError("no address")
        for text in found:
            address = address_of(text)
            if address is None or not (
                is_public(address) or any(address in network for network in self._networks)
            ):
                raise _RefusedError(f"address {text} is not public")
        return found[:_MAX_ADDRESSES]

    async def _resolved(self, host: str, port: int) -> list[str]:
        """Addresses of a host by the system's resolver."""
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(
            self._resolvers, partial(getaddrinfo, host, port, type=SOCK_STREAM)
        )
        return [str(entry[4][0]) for entry in found]

    def close(self) -> None:
        """End the threads once they have resolved what they are at."""
        self._resolvers.shutdown(wait=False, cancel_futures=True)

    async def _get(self, target: _ParsedUrl, hold: Hold, place: Slot) -> "_Answer":
        reader, writer = await self._connect(target, place)
        try:
            writer.write(
                f"GET {target.path} HTTP/1.1\r\nHost: {target.authority}\r\n"
                "User-Agent: inlay\r\nAccept: */*\r\nAccept-Encoding: identity\r\n"
                "Connection: close\r\n\r\n".encode("ascii")
            )
            answer = _Answer(self._settings.max_bytes)
            while not answer.done:
                piece = await reader.read(_PIECE)
                if not piece:
                    answer.end()
                    break
                hold(len(piece))
                answer.feed(piece)
            return answer
        finally:
            writer.transport.abort()

    async def _connect(
        self, target: _ParsedUrl, place: Slot
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        context: ssl.SSLContext | None = None
        if target.scheme == "https":
            if self._context is None:
                self._context = await asyncio.to_thread(ssl.create_default_context)
            context = self._context
        last: OSError | None = None
        for address in await self._addresses(target, place):
            try:
                return await asyncio.open_connection(
                    address,
                    target.port,
                    ssl=context,
                    server_hostname=target.host if context else None,
                )
            except OSError as error:
                last = error
        raise last or _RefusedError("no address")

    def _read_file(self, url: str) -> bytes:
        root = self._settings.local
        if root is None:
            raise InvalidRequestError("file: URLs are not allowed (--allowed-local-media-path)")
        path = Path(unquote(url[5:].removeprefix("//")))
        failed = InvalidRequestError(
            f"no file of at most {self._settings.max_bytes} bytes below the allowed path has this "
            "file: URL"
        )
        try:
            real = path.resolve(strict=True)
            if not path.is_absolute() or not real.is_relative_to(root.resolve(strict=True)):
                raise failed
            # Not a pipe or a device; nor a link that took the file's place since.
            with os.fdopen(
                os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb"
            ) as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode) or status.st_size > self._settings.max_bytes:
                    raise failed
                return file.read(self._settings.max_bytes)
        except (OSError, ValueError, RuntimeError) as error:
            logger.info("media file not read: %s", error)
            raise failed from None


class _Answer:
    """A response while it arrives.

    Raises `_RefusedError` from `feed` and `end` where it breaks a limit.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max = max_bytes
        self._parser: Any = httptools.HttpResponseParser(self)
        self._received = 0
        self._in_body = False
        self.done = False
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = bytearray()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_body:  # not of a trailer
            self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._in_body = True

    def on_body(self, piece: bytes) -> None:
        self.body += piece

    def on_message_complete(self) -> None:
        # An interim response is followed by the one that counts.
        self.done = self.status >= 200
        self._in_body = False
        if not self.done:
            self.headers.clear()

    def feed(self, piece: bytes) -> None:
        self._received += len(piece)
        # The frames of chunks take some room beside the body.
        most = _MAX_HEADER_BYTES + _PIECE + (self._max + self._max // 8) * self._in_body
        if self._received > most:
            raise _RefusedError(f"over {most} bytes with header and frames")
        try:
            self._parser.feed_data(piece)
        except httptools.HttpParserError:
            if not self.done:  # whatever follows a whole response does not matter
                raise
        if self._in_body or self.done:
            self._check()

    def end(self) -> None:
        """Take the end of the connection: the end of a body without a length alone."""
        if not self._in_body or "content-length" in self.headers or self._is_chunked:
            raise _RefusedError("it ended early")
        self.done = True

    @property
    def _is_chunked(self) -> bool:
        return "transfer-encoding" in self.headers

    def _check(self) -> None:
        length = self.headers.get("content-length", "0")
        if len(self.body) > self._max or not length.isdecimal() or int(length[:20]) > self._max:
            raise _RefusedError(f"over {self._max} bytes")
        if self.headers.get("content-encoding", "identity").lower() != "identity":
            raise _RefusedError("it is compressed, which was not asked for")


def _normal(host: str) -> str:
    return host.lower().removesuffix(".")
