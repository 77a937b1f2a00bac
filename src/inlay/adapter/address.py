"""Where an adapter may come from: addresses, and the list of what they may begin with.

Whoever may load an adapter may have this machine ask another for a file. So an address is taken
only if it lies below one on the list, has nothing in it that two programs may read differently, and
a redirection is held to the same.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from inlay.errors import InvalidRequestError

SCHEMES = ("file", "hf", "http", "https", "s3")
_MAX = 2048
_plain = re.compile(r"[\w.~!$&'()*+,;=:@/%-]*", re.ASCII)
_host = re.compile(r"[a-z0-9._-]+(:[0-9]{1,5})?|\[[0-9a-f:.]+\](:[0-9]{1,5})?")
_hidden = re.compile(r"%(2e|2f|5c|00|25)", re.IGNORECASE)
_hub_name = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)


class Address(NamedTuple):
    """One address, taken apart.

    Attributes:
        scheme: one of `SCHEMES`.
        host: lower case, with its port; of s3 the bucket, of hf the owner; empty for a file.
        path: begins with a slash; for a file as it was given.
        query: what follows the path in a redirection, or "".
    """

    scheme: str
    host: str
    path: str
    query: str = ""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.host}{self.path}" + (f"?{self.query}" if self.query else "")

    @property
    def shown(self) -> str:
        """The address without its query, which may hold a signature."""
        return f"{self.scheme}://{self.host}{self.path}"

    def joined(self, name: str) -> "Address":
        """Of the file `name` below it."""
        return self._replace(path=f"{self.path.rstrip('/')}/{name}", query="")

    @property
    def segments(self) -> tuple[str, ...]:
        """Of the path."""
        return tuple(part for part in self.path.split("/") if part)


def parse(text: str, *, redirected: bool = False) -> Address:
    """An address in words, or the path of a local directory.

    Args:
        text: as it was given.
        redirected: a server named it, and it may have a query.

    Raises:
        InvalidRequestError: not an address, or one that may be read in two ways.
    """
    if not text or len(text) > _MAX or not text.isprintable():
        raise InvalidRequestError(
            f"the address of an adapter has 1 to {_MAX} printable characters, got {text[:80]!r}"
        )
    scheme, colon, rest = text.partition("://")
    if not colon:
        return Address("file", "", str(Path(text).expanduser().absolute()))
    scheme = scheme.lower()
    if scheme not in SCHEMES:
        raise InvalidRequestError(
            f"an adapter comes from {', '.join(f'{known}://' for known in SCHEMES)}; got {text[:80]!r}"
        )
    if scheme == "file":
        if not rest.startswith("/"):
            raise InvalidRequestError(f"file:// is followed by an absolute path, got {text[:80]!r}")
        return Address("file", "", rest)
    try:
        parts = urlsplit(f"{scheme}://{rest}")
    except ValueError as error:
        raise InvalidRequestError(f"{text[:80]!r} is not an address: {error}") from error
    host = parts.netloc if scheme in ("hf", "s3") else parts.netloc.lower()
    if not _host.fullmatch(host.lower()):
        raise InvalidRequestError(
            f"the address {text[:80]!r} has no plain host: no name, no password, no other signs"
        )
    if parts.fragment or (parts.query and not redirected):
        raise InvalidRequestError(
            f"the address {text[:80]!r} of an adapter's directory has a query or a fragment"
        )
    segments = parts.path.split("/")
    if (
        not _plain.fullmatch(parts.path)
        or _hidden.search(parts.path)
        or {".", ".."} & set(segments)
    ):
        raise InvalidRequestError(f"the path of {text[:80]!r} may be read in two ways")
    if "" in segments[1:-1]:
        raise InvalidRequestError(f"the path of {text[:80]!r} has an empty part")
    return Address(scheme, host, parts.path or "/", parts.query)


def is_hub_name(text: str) -> bool:
    """Whether `text` is written as a model's name on the hub, owner/name."""
    return _hub_name.fullmatch(text) is not None


class AllowedSources:
    """What addresses may begin with.

    Args:
        prefixes: addresses of directories, hosts or owners.

    Raises:
        InvalidRequestError: one is not an address.
    """

    def __init__(self, prefixes: Sequence[str]) -> None:
        self._prefixes = [parse(prefix) for prefix in prefixes]

    def check(self, address: Address) -> None:
        """Raise `InvalidRequestError` unless `address` lies below one of the prefixes."""
        if not any(_below(address, prefix) for prefix in self._prefixes):
            allowed = ", ".join(prefix.shown for prefix in self._prefixes) or "none"
            raise InvalidRequestError(
                f"adapters may not come from {address.shown}; allowed are addresses below: {allowed} (--allowed-lora-sources)"
            )

    def allow_scheme(self, scheme: str) -> bool:
        """Whether any address of a scheme may be allowed."""
        return any(prefix.scheme == scheme for prefix in self._prefixes)


def _below(address: Address, prefix: Address) -> bool:
    if address.scheme != prefix.scheme or address.host != prefix.host:
        return False
    if address.scheme == "file":
        # Where it leads, not what it is called.
        return Path(address.path).resolve().is_relative_to(Path(prefix.path).resolve())
    return address.segments[: len(prefix.segments)] == prefix.segments


__all__ = ["SCHEMES", "Address", "AllowedSources", "is_hub_name", "parse"]
