"""Fetching from hostile servers: names that change, redirections, bodies without end."""

import asyncio
import base64
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inlay.base.errors import InvalidRequestError
from inlay.media.addresses import address_of, is_public, networks
from inlay.media.data_url import decode_data_url
from inlay.media.fetch import Fetcher, FetchSettings
from tests.certificates import certificate

HOST = "127.0.0.2"
"""The server's address; the tests allow it and nothing else of this machine."""

Answer = Callable[[str, asyncio.StreamWriter], Awaitable[None]]
UNIFORM = (
    "cannot be fetched; a URL must lead to a public host that answers 200 within .* redirections$"
)


class Server:
    """A server of this machine that answers as it is told.

    Attributes:
        port: its port.
        heads: the heads of requests.
        names: the names that TLS clients asked for.
        open: connections that are open.
    """

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.port = 0
        self.heads: list[str] = []
        self.names: list[str | None] = []
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            self.heads.append(head)
            await self._answer(head.split()[1], writer)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def serving(
    answer: Answer, *, tls: ssl.SSLContext | None = None, host: str = HOST
) -> AsyncIterator[Server]:
    server = Server(answer)
    if tls is not None:
        tls.sni_callback = lambda _, name, __: server.names.append(name)
    listener = await asyncio.start_server(server.serve, host, 0, ssl=tls)
    server.port = listener.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listener.close()


def say(status: int = 200, body: bytes = b"", headers: dict[str, str] | None = None) -> Answer:
    async def answer(path: str, writer: asyncio.StreamWriter) -> None:
        told = {"content-length": str(len(body)), **(headers or {})}
        lines = [f"HTTP/1.1 {status} X", *(f"{key}: {value}" for key, value in told.items())]
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)

    return answer


def raw(*pieces: bytes) -> Answer:
    async def answer(path: str, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()

    return answer


def allowing(
    *addresses: str, seconds: float = 10.0, max_bytes: int = 1000, **settings: object
) -> Fetcher:
    """A fetcher of http from the test's server, whose every name has `addresses`."""

    async def resolve(host: str, port: int) -> list[str]:
        return list(addresses or (HOST,))

    chosen = {"http": True, "private_networks": (f"{HOST}/32",), **settings}
    return Fetcher(
        FetchSettings(seconds=seconds, max_bytes=max_bytes, **chosen),  # type: ignore[arg-type]
        resolve=resolve,
    )


async def refused(fetcher: Fetcher, url: str, message: str = UNIFORM) -> str:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        await fetcher.fetch(url)
    return str(caught.value)


async def test_a_file_is_fetched_by_its_name_with_its_query() -> None:
    async with serving(say(body=b"picture")) as server:
        url = f"http://media.test:{server.port}/a/b%20c.png?key=1#part"
        assert await allowing().fetch(url) == b"picture"
    assert server.heads[0].startswith("GET /a/b%20c.png?key=1 HTTP/1.1\r\n")
    assert f"Host: media.test:{server.port}\r\n" in server.heads[0]


async def test_the_checked_address_is_dialled_with_the_name_for_tls(tmp_path: Path) -> None:
    files = certificate(tmp_path, "media", hosts=["media.test"])
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(*files)
    asked: list[str] = []

    async def resolve(host: str, port: int) -> list[str]:
        asked.append(host)
        return [HOST]

    settings = FetchSettings(private_networks=(HOST,))
    trusting = ssl.create_default_context(cafile=str(files[0]))
    async with serving(say(body=b"picture"), tls=tls) as server:
        fetcher = Fetcher(settings, resolve=resolve, context=trusting)
        assert await fetcher.fetch(f"https://MEDIA.test.:{server.port}/") == b"picture"
        assert server.names == ["media.test"]
        assert asked == ["media.test"]
        await refused(fetcher, f"https://other.test:{server.port}/")  # not in the certificate
        distrusting = Fetcher(settings, resolve=resolve)
        await refused(distrusting, f"https://media.test:{server.port}/")
    assert len(server.heads) == 1


async def test_a_name_that_changes_is_asked_once_and_cannot_reach_another_address() -> None:
    turns = iter([[HOST], ["127.0.0.1"]])

    async def resolve(host: str, port: int) -> list[str]:
        return next(turns)

    settings = FetchSettings(http=True, private_networks=(HOST,))
    async with serving(say(body=b"x")) as server:
        fetcher = Fetcher(settings, resolve=resolve)
        assert await fetcher.fetch(f"http://a.test:{server.port}/") == b"x"
        await refused(fetcher, f"http://a.test:{server.port}/")
    assert server.connections == 1


@pytest.mark.parametrize(
    "addresses",
    [
        ("127.0.0.1",),
        ("8.8.8.8", "127.0.0.1"),
        ("::1",),
        ("::ffff:127.0.0.1",),
        ("64:ff9b::7f00:1",),
        ("2002:7f00:1::",),
        ("fe80::1%lo",),
        ("169.254.169.254",),
        ("not an address",),
        (),
    ],
)
async def test_a_private_address_is_never_dialled(addresses: tuple[str, ...]) -> None:
    async def resolve(host: str, port: int) -> list[str]:
        return list(addresses)

    async with serving(say(body=b"x"), host="127.0.0.1") as server:
        fetcher = Fetcher(FetchSettings(http=True, private_networks=(HOST,)), resolve=resolve)
        await refused(fetcher, f"http://media.test:{server.port}/")
        await refused(fetcher, f"http://127.0.0.1:{server.port}/")
        await refused(fetcher, f"http://[::ffff:127.0.0.1]:{server.port}/")
    assert server.connections == 0


async def test_names_of_this_machine_are_refused_by_the_systems_resolver() -> None:
    async with serving(say(body=b"x"), host="127.0.0.1") as server:
        fetcher = Fetcher(FetchSettings(http=True))
        for host in ("localhost", "127.1", "2130706433", "0x7f000001"):
            await refused(fetcher, f"http://{host}:{server.port}/")
    assert server.connections == 0


async def test_redirections_are_checked_again() -> None:
    async def inner(path: str, writer: asyncio.StreamWriter) -> None:
        await say(body=b"secret")(path, writer)

    async with serving(inner, host="127.0.0.1") as inside:
        targets = {
            "/loopback": f"http://127.0.0.1:{inside.port}/",
            "/file": "file:///etc/hostname",
            "/data": "data:image/png;base64,AAAA",
            "/relative": "/here",
            "/loop": "/loop",
            "/elsewhere": "http://other.test/",
            "/scheme": "gopher://media.test/",
            "/nowhere": "",
        }

        async def answer(path: str, writer: asyncio.StreamWriter) -> None:
            if path in targets:
                await say(302, headers={"location": targets[path]})(path, writer)
            else:
                await say(body=path.encode())(path, writer)

        async with serving(answer) as server:
            base = f"http://media.test:{server.port}"
            fetcher = allowing(domains=("media.test",))
            assert await fetcher.fetch(f"{base}/relative") == b"/here"
            for path in targets.keys() - {"/relative"}:
                await refused(fetcher, base + path)
            assert server.heads.count(server.heads[-1]) <= 4
    assert inside.connections == 0


ENDLESS = b"x" * 65536


@pytest.mark.parametrize(
    "answer",
    [
        say(404),
        say(500, b"x"),
        say(301),
        say(204),
        say(body=b"x" * 1001),
        say(body=b"x", headers={"content-length": "5"}),
        say(body=b"x", headers={"content-length": "99999999999999999999999"}),
        say(body=b"x", headers={"content-length": "-1"}),
        say(body=b"x", headers={"content-encoding": "gzip"}),
        raw(b"HTTP/1.1 200 OK\r\n\r\n", *[ENDLESS] * 100),
        raw(b"HTTP/1.1 200 OK\r\n", *[b"a: " + ENDLESS + b"\r\n"] * 100),
        raw(b"HTTP/1.1 200 OK\r\na: ", *[ENDLESS] * 100),
        raw(*[b"HTTP/1.1 103 Early\r\na: b\r\n\r\n" * 1000] * 100),
        raw(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", *[b"1\r\nx\r\n" * 9000] * 9),
        raw(
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n",
            *[(b"a: " + b"x" * 60 + b"\r\n") * 999] * 99,
        ),
        raw(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n"),
        raw(b"SSH-2.0-OpenSSH_9.9\r\n"),
        raw(b""),
        raw(b"HTTP/1.1 200 OK\r\ncontent-length: 3"),
        raw(b"HTTP/1.1 101 Switching\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n"),
    ],
)
async def test_every_failure_reads_the_same(answer: Answer) -> None:
    async with serving(answer) as server:
        url = f"http://media.test:{server.port}/"
        found = await refused(allowing(), url)
    assert found == await refused(allowing(), url)  # nobody listens there now
    assert found == await refused(allowing("10.0.0.1"), url)


@pytest.mark.parametrize(
    "pieces",
    [
        (b"HTTP/1.1 200 OK\r\n\r\nhel", b"lo"),
        (b"HTTP/1.1 103 Early\r\na: b\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello",),
        (
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhe\r\n",
            b"3\r\nllo\r\n0\r\n\r\n",
        ),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello and more",),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 5\r\n\r\nhello",),
    ],
)
async def test_a_whole_body_is_read_however_it_is_framed(pieces: tuple[bytes, ...]) -> None:
    async with serving(raw(*pieces)) as server:
        assert await allowing().fetch(f"http://media.test:{server.port}/") == b"hello"


async def test_who_is_slow_is_left_at_the_deadline() -> None:
    left = asyncio.Event()

    async def drip(path: str, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 900\r\n\r\n")
        try:
            while True:
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.01)
        finally:
            left.set()

    async def silent(path: str, writer: asyncio.StreamWriter) -> None:
        await left.wait()

    for answer in (drip, silent):
        async with serving(answer) as server:
            await refused(allowing(seconds=0.3), f"http://media.test:{server.port}/")
    await left.wait()

    async def never(host: str, port: int) -> list[str]:
        await asyncio.Event().wait()
        return []

    await refused(Fetcher(FetchSettings(seconds=0.05), resolve=never), "https://media.test/")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://media.test/", "from https and data: URLs"),
        ("ftp://media.test/", "from https and data: URLs"),
        ("media.test/a.png", "from https and data: URLs"),
        ("", "from https and data: URLs"),
        ("file:///etc/hostname", "--allowed-local-media-path"),
        ("https://a@media.test/", "no plain host"),
        ("https://media.test:0/", "no plain host"),
        ("https://media.test:99999/", "is not a URL"),
        ("https://[::1/", "is not a URL"),
        ("https:///a", "no plain host"),
        ("https://mëdia.test/", "characters that no URL has"),
        ("https://media.test/a\r\nHost: b", "characters that no URL has"),
        ("https://media.test\\@b.test/", "characters that no URL has"),
        ("https://b.test/", "may not be fetched from b.test"),
        ("https://media.test/" + "a" * 9000, "9019 characters"),
    ],
)
async def test_a_url_that_is_not_allowed_is_refused_by_what_it_says(url: str, message: str) -> None:
    await refused(Fetcher(FetchSettings(domains=("media.test",))), url, message)


def test_special_networks_are_not_public() -> None:
    private = [
        "0.0.0.0", "10.1.2.3", "100.64.0.1", "127.9.9.9", "169.254.169.254", "172.31.0.1",
        "192.0.0.8", "192.0.2.1", "192.88.99.1", "192.168.1.1", "198.19.0.1", "198.51.100.1",
        "203.0.113.1", "224.0.0.1", "239.9.9.9", "255.255.255.255", "::", "::1", "fc00::1",
        "fe80::1", "ff02::1", "2001:db8::1", "2001::1", "2001:10::1", "3fff::1", "100::1",
        "64:ff9b:1::1", "64:ff9b::a00:1", "2002:a00:1::1", "::ffff:10.0.0.1", "::10.0.0.1",
        "5f00::1", "fec0::1",
    ]  # fmt: skip
    public = ["8.8.8.8", "1.1.1.1", "172.32.0.1", "2606:4700::1", "64:ff9b::808:808", "2002:808::"]
    for text, wanted in [*((text, False) for text in private), *((text, True) for text in public)]:
        address = address_of(text)
        assert address is not None
        assert is_public(address) is wanted, text
    assert address_of("media.test") is None
    with pytest.raises(InvalidRequestError, match="not a network"):
        networks(["10.0.0.0/99"])


@given(st.binary(max_size=300))
def test_a_data_url_is_its_bytes(data: bytes) -> None:
    text = base64.b64encode(data).decode()
    assert decode_data_url(f"data:image/png;base64,{text}", max_bytes=300) == data
    assert decode_data_url(f"DATA:;charset=x;BASE64,{text}", max_bytes=300) == data
    if data:
        with pytest.raises(InvalidRequestError, match="allowed"):
            decode_data_url(f"data:;base64,{text}", max_bytes=len(data) - 1)


def wrapped(text: str, ends: str) -> str:
    return ends.join(text[start : start + 76] for start in range(0, len(text), 76))


FORMS: dict[str, Callable[[str], str]] = {
    "lines": lambda text: wrapped(text, "\n"),
    "lines of MIME": lambda text: wrapped(text, "\r\n") + "\r\n",
    "spaces": lambda text: f" {wrapped(text, ' ')} ",
    "tabs": lambda text: wrapped(text, "\t\f"),
    "without padding": lambda text: text.rstrip("="),
    "URL-safe": lambda text: text.replace("+", "-").replace("/", "_"),
    "URL-safe without padding": lambda text: text.translate({43: "-", 47: "_", 61: None}),
    "escaped": lambda text: quote(text, safe=""),
    "escaped lines": lambda text: quote(wrapped(text, "\n"), safe=""),
    "all of it escaped": lambda text: "".join(f"%{ord(one):02x}" for one in text),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("head", ["data:image/png;base64,", "data:;charset=utf-8; Base64 ,"])
def test_base64_in_a_data_url_is_read_as_browsers_read_it(
    form: Callable[[str], str], head: str
) -> None:
    rng = np.random.default_rng(1)
    for size in (0, 1, 2, 3, 100, 300_001):
        data = rng.bytes(size)
        url = head + form(base64.b64encode(data).decode())
        assert decode_data_url(url, max_bytes=size) == data
        if size:
            with pytest.raises(InvalidRequestError, match="allowed"):
                decode_data_url(url, max_bytes=size - 1)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("data:image/png,abc", "must be in base64"),
        ("data:" + ";a" * 200 + ";base64,AAAA", "at most 256 characters"),
        ("data:image/png;base64", "is data:TYPE;base64,DATA"),
        ("data:image/png;base64,AAAAA", "valid base64: its 5 characters end within a byte"),
        ("data:image/png;base64,AA*A", r"valid base64: '\*' is character 2 of its data"),
        ("data:image/png;base64,AA%3DA", "valid base64: '=' stands before the end"),
        ("data:image/png;base64,AAA===", "valid base64: more than two '=' are at its end"),
        ("data:image/png;base64,AAA%G", "valid base64: '%' is character 3"),
        ("data:image/png;base64,ÄÄÄÄ", "valid base64: 'Ä' is character 0"),
        ("data:image/png;base64," + "A" * 2000, "1500 bytes; allowed: 1000"),
        ("data:" + ";" * 2_000_000, "is data:TYPE;base64,DATA"),
    ],
)
async def test_a_malformed_data_url_is_refused(url: str, message: str) -> None:
    await refused(allowing(), url, message)


async def test_files_are_read_below_the_allowed_directory_alone(tmp_path: Path) -> None:
    root = tmp_path / "media"
    root.mkdir()
    (root / "a b.png").write_bytes(b"picture")
    (root / "large").write_bytes(bytes(1001))
    (tmp_path / "secret").write_bytes(b"secret")
    (root / "link").symlink_to(tmp_path / "secret")
    fetcher = allowing(local=root)
    assert await fetcher.fetch(f"file://{root}/a%20b.png") == b"picture"
    for path in ("absent", "large", "link", "../secret", "%2e%2e/secret", "", "a%00b"):
        await refused(fetcher, f"file://{root}/{path}", "no file of at most 1000 bytes")
    await refused(fetcher, "file://host/etc/hostname", "no file of at most")
    await refused(fetcher, "file:///dev/zero", "no file of at most")
