"""Sockets for the addresses a server listens on."""

from errno import EACCES, EADDRINUSE
from socket import AI_PASSIVE, SO_REUSEADDR, SOCK_STREAM, SOL_SOCKET, getaddrinfo, socket

from inlay.base.errors import InvalidRequestError


def bound(host: str, port: int, *, options: str = "") -> socket:
    """Return a socket that is bound to an address and does not listen yet.

    Args:
        host: a name or an address.
        port: 0 for a free port.
        options: prefix of both options behind `--`: "admin-" for `--admin-host` and
            `--admin-port`.

    Raises:
        InvalidRequestError: it cannot be bound; the message names the reason and the option.
    """
    try:
        family, kind, protocol, _, address = getaddrinfo(
            host, port, type=SOCK_STREAM, flags=AI_PASSIVE
        )[0]
        listening = socket(family, kind, protocol)
        try:
            listening.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
            listening.bind(address)
        except OSError:
            listening.close()
            raise
    except OSError as error:
        other = "port" if error.errno in (EADDRINUSE, EACCES) else "host"
        raise InvalidRequestError(
            f"cannot listen on {host}:{port}: {error.strerror} (--{options}{other} takes another)",
            param=f"{options}{other}".replace("-", "_"),
        ) from error
    return listening


def check_address(host: str, port: int, *, options: str = "") -> None:
    """Check that an address can be bound, before a model is loaded.

    Arguments and errors as `bound`'s.
    """
    bound(host, port, options=options).close()
