"""Ports that engines listen on for one another, chosen before they listen."""

import errno
import random
import socket

from inlay.base.errors import InvalidRequestError

_PORTS = 20000, 29999
"""Below those that connections get: an engine listens only once its model is loaded."""


def free_port(host: str) -> int:
    """Return a port on which nobody listens. Raises `OSError` where `host` is not this machine."""
    for port in random.sample(range(*_PORTS), 100):
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
        return port
    raise InvalidRequestError(f"no port from {_PORTS[0]} to {_PORTS[1]} is free on {host}")
