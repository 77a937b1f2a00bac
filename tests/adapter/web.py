"""A real HTTP server for adapters.

Directories of files, redirections, and everything a server may do wrong.
"""

import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Web:
    """Files by path, and what is done instead for some of them.

    Attributes:
        url: base URL.
        asked: (path, headers) of each request.
        files: path to content.
        instead: path to what answers.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.files: dict[str, bytes] = {}
        self.instead: dict[str, Callable[[BaseHTTPRequestHandler], None]] = {}

    def put(self, at: str, directory: Path) -> str:
        """Serve an adapter's directory below a path; its URL."""
        for file in directory.iterdir():
            self.files[f"{at}/{file.name}"] = file.read_bytes()
        return f"{self.url}{at}"

    def redirect(self, path: str, to: str) -> None:
        def answer(handler: BaseHTTPRequestHandler) -> None:
            handler.send_response(302)
            handler.send_header("location", to)
            handler.send_header("content-length", "0")
            handler.end_headers()

        self.instead[path] = answer

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.asked]


@contextmanager
def web(tls: ssl.SSLContext | None = None) -> Iterator[Web]:
    """A server on a port of its own; with `tls`, an https one for `localhost`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            served.asked.append(
                (self.path, {name.lower(): value for name, value in self.headers.items()})
            )
            path = self.path.partition("?")[0]
            if path in served.instead:
                served.instead[path](self)
                return
            content = served.files.get(path)
            self.send_response(200 if content is not None else 404)
            self.send_header("content-length", str(len(content or b"")))
            self.end_headers()
            self.wfile.write(content or b"")

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    served = Web(f"http://127.0.0.1:{server.server_port}")
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
        served = Web(f"https://localhost:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
