"""Access to the server of `inlay nats`: one nkey, where other machines can reach it."""

import os
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path

from inlay.cli.settings import NatsServerSettings
from inlay.errors import InvalidRequestError

_OWN_WORDS = frozenset({"user", "pass", "auth", "tlsverify", "c", "config"})
"""nats-server's flags that say who is let in, or that bring a configuration of its own."""


def is_local(host: str) -> bool:
    """Return True if only this machine reaches a server that listens there."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def says_who(rest: Sequence[str]) -> bool:
    """Return True if arguments for nats-server configure access themselves."""
    return any(
        word.lstrip("-").partition("=")[0] in _OWN_WORDS for word in rest if word.startswith("-")
    )


def wants_key(settings: NatsServerSettings, rest: Sequence[str]) -> bool:
    """Return True if members must log in with the key of a seed file."""
    if settings.credentials is not None:
        return settings.credentials
    return settings.nats_nkey_seed is not None or not (is_local(settings.host) or says_who(rest))


def public_key(file: Path) -> str:
    """The public key of the nkey seed in `file`.

    Where there is no such file, a seed is made and written there, for its owner alone.

    Raises:
        InvalidRequestError: the file cannot be read or made, or has no user's seed.
    """
    import nkeys

    try:
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as new:
            new.write(nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER))
    except FileExistsError:
        pass
    except OSError as error:
        raise InvalidRequestError(f"{file} cannot be made: {error.strerror}") from error
    try:
        key: str = nkeys.from_seed(file.read_bytes().strip()).public_key.decode()
    except OSError as error:
        raise InvalidRequestError(f"{file} cannot be read: {error.strerror}") from error
    except (nkeys.NkeysError, ValueError) as error:
        raise InvalidRequestError(f"{file} has no nkey seed: {error}") from error
    if not key.startswith("U"):
        raise InvalidRequestError(f"{file} has the seed of no user: its public key is {key}")
    return key
