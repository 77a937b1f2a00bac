"""Addresses of adapters, and the list of prefixes they must begin with.

A client that may load an adapter can make this machine send requests to others (SSRF). So an
address must lie below an allowed prefix and must not contain anything that two programs could read
differently. Redirects follow the same rules.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from inlay.base.errors import InvalidRequestError

SCHEMES = ("file", "hf", "http", "https", "s3")
_MAX = 2048
_plain = re.compile(r"[\w.~!$&'()*+,;=:@/%-]*", re.ASCII)
_host = re.compile(r"[a-z0-9._-]+(:[0-9]{1,5})?|\[[0-9a-f:.]+\](:[0-9]{1,5})?")
_hidden = re.compile(r"%(2e|2f|5c|00|25)", re.IGNORECASE)
_hub_name = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)


class AdapterAddress(NamedTuple):
    """A parsed address.

    Attributes:
        scheme: one of `SCHEMES`.
        host: lower case, with its port; for s3 the bucket, for hf the owner; empty for a file.
        path: begins with a slash; for a file, as given.
        query: query of a redirect target, or "".
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

    def joined(self, name: str) -> "AdapterAddress":
        """Return the address of the file `name` in this directory."""
        return self._replace(path=f"{self.path.rstrip('/')}/{name}", query="")

    @property
    def segments(self) -> tuple[str, ...]:
        """Non-empty parts of the path."""
        return tuple(part for part in self.path.split("/") if part)


def parse(text: str, *, redirected: bool = False) -> AdapterAddress:
    """Parse an address, or the path of a local directory.

    Args:
        text: as given by the client.
        redirected: a server named this address; it may then have a query.

    Raises:
        InvalidRequestError: not an address, or an ambiguous one.
    """
    if not text or len(text) > _MAX or not text.isprintable():
        raise InvalidRequestError(
            f"the address of an adapter has 1 to {_MAX} printable characters, got {text[:80]!r}"
        )
    scheme, colon, rest = text.partition("://")
    if not colon:
        try:
            return AdapterAddress("file", "", str(Path(text).expanduser().absolute()))
        except RuntimeError as error:
            raise InvalidRequestError(f"{text[:80]!r} is below no home directory") from error
    scheme = scheme.lower()
    if scheme not in SCHEMES:
        raise InvalidRequestError(
            f"an adapter comes from {', '.join(f'{known}://' for known in SCHEMES)}; got "
            f"{text[:80]!r}"
        )
    if scheme == "file":
        if not rest.startswith("/"):
            raise InvalidRequestError(f"file:// is followed by an absolute path, got {text[:80]!r}")
        return AdapterAddress("file", "", rest)
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
    return AdapterAddress(scheme, host, parts.path or "/", parts.query)


def is_hub_name(text: str) -> bool:
    """Return True if `text` has the form of a model name on the hub, owner/name."""
    return _hub_name.fullmatch(text) is not None


class AllowedSources:
    """Allowed prefixes of addresses.

    Raises:
        InvalidRequestError: one is not an address.
    """

    def __init__(self, prefixes: Sequence[str]) -> None:
        self._prefixes = [parse(prefix) for prefix in prefixes]

    def check(self, address: AdapterAddress) -> None:
        """Raise `InvalidRequestError` unless `address` lies below an allowed prefix."""
        if not any(_below(address, prefix) for prefix in self._prefixes):
            allowed = ", ".join(prefix.shown for prefix in self._prefixes) or "none"
            raise InvalidRequestError(
                f"adapters may not come from {address.shown}; allowed are addresses below: "
                f"{allowed} (--allowed-lora-sources)"
            )

    def allow_scheme(self, scheme: str) -> bool:
        """Return True if some address of this scheme could be allowed."""
        return any(prefix.scheme == scheme for prefix in self._prefixes)


def _below(address: AdapterAddress, prefix: AdapterAddress) -> bool:
    if address.scheme != prefix.scheme or address.host != prefix.host:
        return False
    if address.scheme == "file":
        # Compare resolved paths: symbolic links may lead elsewhere, or in a circle.
        try:
            return Path(address.path).resolve().is_relative_to(Path(prefix.path).resolve())
        except RuntimeError as error:
            raise InvalidRequestError(
                f"{address.shown} is a symbolic link that leads to itself"
            ) from error
    return address.segments[: len(prefix.segments)] == prefix.segments
