"""Addresses a server listens on."""

from errno import EACCES, EADDRINUSE
from socket import AI_PASSIVE, SO_REUSEADDR, SOCK_STREAM, SOL_SOCKET, getaddrinfo, socket

from inlay.errors import InvalidRequestError


def bound(host: str, port: int, *, options: str = "") -> socket:
    """A socket that is bound to an address, and does not listen yet.

    Args:
        host: a name or an address.
        port: 0 for any that is free.
        options: what the options of both begin with behind `--`: "admin-" for `--admin-host` and
            `--admin-port`.

    Raises:
        InvalidRequestError: it cannot be had; the message says why, and which option takes another.
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
    """Say now, before a model is loaded for it, that an address cannot be listened on.

    Arguments and errors as `bound`'s.
    """
    bound(host, port, options=options).close()


__all__ = ["bound", "check_address"]
