"""Images by URL over HTTP: redirections, orientations, and clients that take turns."""

import io
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import openai
import pytest
from PIL import Image

from tests.certificates import certificate
from tests.engine.torch.vision_reference import Picture
from tests.equality.test_images_over_http import (
    FLAGS,
    chat,
    data_url,
    directory,
    expected,
    ids_of,
    text,
)
from tests.serving import Served, serving

ONE = Picture(3, 50, 60)
PLACES = 4


class Site:
    """An https server of one picture, of redirections, and of answers that never come.

    Attributes:
        port: of the server.
        redirects: locations by path.
        asked: paths that were asked for.
        over: set when answers that never come may end.
    """

    def __init__(self) -> None:
        self.port = 0
        self.redirects: dict[str, str] = {}
        self.asked: list[str] = []
        self.over = threading.Event()

    def url(self, path: str, host: str = "localhost") -> str:
        return f"https://{host}:{self.port}{path}"

    def handler(self) -> type[BaseHTTPRequestHandler]:
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                site.asked.append(self.path)
                if self.path.startswith("/never"):
                    site.over.wait()
                    return
                location = site.redirects.get(self.path)
                body = b"" if location else ONE.data
                self.send_response(302 if location else 200)
                if location:
                    self.send_header("Location", location)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        return Handler


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Site, Path]]:
    files, key = certificate(tmp_path_factory.mktemp("https"), "localhost")
    site = Site()
    with ThreadingHTTPServer(("127.0.0.1", 0), site.handler()) as http:
        http.daemon_threads = True
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(files, key)
        http.socket = context.wrap_socket(
            http.socket, server_side=True, do_handshake_on_connect=False
        )
        site.port = http.server_port
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield site, files
        site.over.set()
        http.shutdown()


@pytest.fixture(scope="module")
def server(site: tuple[Site, Path]) -> Iterator[Served]:
    with serving(
        directory("llava"), *FLAGS, "--allowed-media-domains", "localhost", "--api-key", "a", "b",
        "--allowed-media-networks", "127.0.0.0/8", "::1/128", "--max-media-fetches", PLACES,
        "--media-timeout", 60,
        environment={"SSL_CERT_FILE": str(site[1])},
    ) as served:  # fmt: skip
        yield served


def client_of(server: Served, key: str = "a") -> openai.OpenAI:
    return openai.OpenAI(base_url=server.v1, api_key=key, max_retries=0, timeout=300)


def by_url(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def test_redirections_lead_to_allowed_hosts_alone(server: Served, site: tuple[Site, Path]) -> None:
    there, _ = site
    there.redirects |= {
        "/relative": "/picture",
        "/twice": there.url("/relative"),
        "/address": there.url("/picture", host="127.0.0.1"),
        "/http": f"http://localhost:{there.port}/picture",
        "/loop": "/loop",
        "/metadata": "https://169.254.169.254/latest",
    }
    with client_of(server) as client:
        wanted = expected("llava", ONE, "It is")
        for path in ("/relative", "/twice"):
            assert ids_of(chat(client, by_url(there.url(path)), text("It is"))) == wanted
        there.asked.clear()
        refused = []
        for path in ("/address", "/http", "/metadata", "/loop"):
            with pytest.raises(openai.BadRequestError, match="cannot be fetched") as caught:
                chat(client, by_url(there.url(path)))
            refused.append(caught.value.body)
        # Nothing tells what the network did.
        assert all(each == refused[0] for each in refused)
        assert "/picture" not in there.asked


def test_slow_urls_of_one_key_do_not_hold_those_of_another(
    server: Served, site: tuple[Site, Path]
) -> None:
    there, _ = site
    never = [by_url(there.url(f"/never/{number}")) for number in range(3)]
    with client_of(server) as attacker, client_of(server, "b") as client:
        pool = ThreadPoolExecutor(8)
        attack = [pool.submit(chat, attacker, *never) for _ in range(8)]
        while sum(path.startswith("/never") for path in there.asked) < PLACES // 2:
            time.sleep(0.01)
        answer = chat(client, by_url(there.url("/picture")), text("It is"))
        assert ids_of(answer) == expected("llava", ONE, "It is")
        assert not any(task.done() for task in attack)
        there.over.set()
        for task in attack:
            assert isinstance(task.exception(), openai.BadRequestError)
        pool.shutdown()


TURNED: dict[int, Image.Transpose] = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    6: Image.Transpose.ROTATE_90,
    8: Image.Transpose.ROTATE_270,
}
"""The way a picture lies in the file whose Exif orientation turns it back."""


@pytest.mark.parametrize("orientation", list(TURNED))
def test_an_image_is_seen_as_its_exif_orientation_says(server: Served, orientation: int) -> None:
    lying = ONE.image.transpose(TURNED[orientation])
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    lying.save(file, "PNG", exif=exif)
    with client_of(server) as client:
        seen = ids_of(chat(client, by_url(data_url(file.getvalue())), text("It is")))
        plain = io.BytesIO()
        lying.save(plain, "PNG")
        unturned = ids_of(chat(client, by_url(data_url(plain.getvalue())), text("It is")))
    assert seen == expected("llava", ONE, "It is")
    assert seen != unturned
