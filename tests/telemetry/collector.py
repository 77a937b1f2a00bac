"""A collector of OpenTelemetry spans over HTTP, as they come."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector:
    """Received spans.

    Attributes:
        url: takes spans.
        bodies: as they were sent, uncompressed.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.bodies: list[bytes] = []
        self.more = threading.Condition()

    def spans(self) -> list[tuple[str, Span]]:
        """(service, span) in the order they came."""
        found: list[tuple[str, Span]] = []
        for body in self.bodies:
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                named = {item.key: item.value.string_value for item in resource.resource.attributes}
                for scope in resource.scope_spans:
                    found += [(named["service.name"], span) for span in scope.spans]
        return found

    def wait_for(self, trace_id: bytes, count: int) -> dict[str, tuple[str, Span]]:
        """(service, span) by name, once a trace has `count` spans."""

        def whole() -> list[tuple[str, Span]]:
            return [found for found in self.spans() if found[1].trace_id == trace_id]

        with self.more:
            assert self.more.wait_for(lambda: len(whole()) >= count, 60), whole()
        return {span.name: (service, span) for service, span in whole()}


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            with collector.more:
                collector.bodies.append(body)
                collector.more.notify_all()
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(f"http://127.0.0.1:{server.server_port}/v1/traces")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
