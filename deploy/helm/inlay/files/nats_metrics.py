"""Show what a NATS server says of itself in Prometheus' format: `metrics.py MONITOR PORT SERVERS`.

MONITOR is the server's monitoring address, SERVERS how many a cluster should have.
"""

import json
import sys
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MONITOR, PORT, SERVERS = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
_SECONDS = 5


def asked(path: str) -> dict[str, Any]:
    """The JSON of a monitoring page."""
    with urllib.request.urlopen(MONITOR + path, timeout=_SECONDS) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def lines() -> list[str]:
    """The samples; of a server that does not answer only that."""
    try:
        server, routes = asked("/varz"), asked("/routez")
    except (OSError, ValueError):
        return ["inlay:nats_up 0"]
    jetstream = server.get("jetstream", {})
    stats, config = jetstream.get("stats", {}), jetstream.get("config", {})
    peers = {route["remote_id"] for route in routes.get("routes") or ()}
    samples = {
        "up": 1,
        "connections": server["connections"],
        "memory_bytes": server["mem"],
        "in_messages_total": server["in_msgs"],
        "out_messages_total": server["out_msgs"],
        "in_bytes_total": server["in_bytes"],
        "out_bytes_total": server["out_bytes"],
        "slow_consumers_total": server["slow_consumers"],
        "store_bytes": stats.get("storage", 0),
        "store_limit_bytes": config.get("max_storage", 0),
        "store_errors_total": stats.get("api", {}).get("errors", 0),
        "missing_servers": max(0, SERVERS - 1 - len(peers)),
    }
    return [f"inlay:nats_{name} {value}" for name, value in samples.items()]


class Metrics(BaseHTTPRequestHandler):
    """Answers /metrics."""

    def do_GET(self) -> None:
        """Write the samples."""
        found = self.path == "/metrics"
        body = ("\n".join(lines()) + "\n").encode() if found else b""
        self.send_response(200 if found else 404)
        self.send_header("content-type", "text/plain; version=0.0.4")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing of scrapes."""


if __name__ == "__main__":
    ThreadingHTTPServer(("", PORT), Metrics).serve_forever()
