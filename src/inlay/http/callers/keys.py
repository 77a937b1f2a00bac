"""API keys and their file: a list of entries in YAML or JSON.

    - name: alice                    # the tenant; entries of one name are keys of one tenant
      key: sk-...                    # or sha256: its SHA-256 in hex
      rate: 600                      # requests a minute
      max_requests: 8                # running at a time
      max_bytes: 67108864            # held at a time
      hidden_states: true            # it may read those of its own requests
      admin: false
      expires: 2027-01-31T00:00:00Z

No message quotes the file's content: messages go to logs, and a mistyped line may hold a key.
"""

import hashlib
import json
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import yaml

from inlay.base.errors import InvalidRequestError, why_unusable

MAX_BYTES = 4 * 1024 * 1024
"""Maximum bytes of a key file."""

_name = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_key = re.compile(r"[\x21-\x7e]{1,512}")
_unknown = re.compile(r"unknown field `(.*)`", re.DOTALL)
_field = re.compile(r"[a-z_]{1,20}")
_sha256 = re.compile(r"[0-9a-fA-F]{64}")


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Rate limit, quota and rights of one client; None means the settings' default.

    Attributes:
        rate: requests a minute.
        max_requests: running requests.
        max_bytes: bytes held.
        hidden_states: it may read the hidden states of its requests.
    """

    rate: float | None = None
    max_requests: int | None = None
    max_bytes: int | None = None
    hidden_states: bool | None = None


DEFAULT_LIMITS = ClientLimits()


@dataclass(frozen=True, slots=True)
class Key:
    """An accepted API key.

    Attributes:
        sha256: SHA-256 of the key, 32 bytes; the key itself is not kept.
        name: name of its tenant. A tenant may have several keys, such as an old and a new one.
        admin: True if it may use the admin routes.
        share: limits of the tenant.
        expires: Unix time from which it is refused, or None.
    """

    sha256: bytes
    name: str
    admin: bool = False
    share: ClientLimits = DEFAULT_LIMITS
    expires: float | None = None

    @classmethod
    def unnamed(cls, key: str, *, admin: bool = False) -> "Key":
        """Return a key that is a tenant of its own."""
        digest = hashlib.blake2b(key.encode(), digest_size=8, person=b"inlay tenant").hexdigest()
        return cls(hashlib.sha256(key.encode()).digest(), UNNAMED + digest, admin)


UNNAMED = "key-"
"""Prefix of the tenants of keys without a name; names in a key file may not begin with it."""


class KeyEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of the file.

    Unknown fields are refused, so that a mistyped limit is an error.
    """

    name: str
    key: str | None = None
    sha256: str | None = None
    rate: float | None = None
    max_requests: int | None = None
    max_bytes: int | None = None
    hidden_states: bool | None = None
    admin: bool = False
    expires: str | None = None


def read_keys(path: Path) -> list[Key]:
    """Return the keys in a file.

    Raises:
        InvalidRequestError: it cannot be read, is not a list of entries, or holds no key.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise _refused(path, why_unusable(error)) from error
    if len(data) > MAX_BYTES:
        raise _refused(path, f"it is over {MAX_BYTES} bytes")
    raw = _parsed(path, data)
    if not isinstance(raw, list):
        got = "nothing" if raw is None else type(raw).__name__
        raise _refused(path, f"it must be a list of entries, got {got}")
    if not raw:
        raise _refused(path, "it holds no key; without the option no key is asked for")
    keys = [_entry(path, number, item) for number, item in enumerate(raw)]
    _check_tenants(path, keys)
    return keys


def _parsed(path: Path, data: bytes) -> Any:
    try:
        if path.suffix.lower() == ".json":
            return json.loads(data)
        # Scalars stay text: a key may look like a number, a time or a boolean.
        return yaml.load(data, Loader=yaml.BaseLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = "" if mark is None else f" at line {mark.line + 1}, column {mark.column + 1}"
        raise _refused(path, f"it is not valid YAML{where}") from None
    except json.JSONDecodeError as error:
        raise _refused(
            path, f"it is not valid JSON at line {error.lineno}, column {error.colno}"
        ) from None
    except (ValueError, RecursionError, yaml.YAMLError):
        raise _refused(path, "it is not valid text of its format") from None


def _entry(path: Path, number: int, item: object) -> Key:
    where = f"entry {number + 1}"
    try:
        entry = msgspec.convert(item, KeyEntry, strict=False)
    except msgspec.ValidationError as error:
        raise _refused(path, f"{where}: {_complaint(str(error))}") from None
    if not _name.fullmatch(entry.name) or entry.name.startswith(UNNAMED):
        raise _refused(
            path,
            f"{where}: a name is 1 to 64 letters, digits or ._@- and does not begin with "
            f"{UNNAMED!r}",
        )
    where += f" ({entry.name})"
    for field in ("rate", "max_requests", "max_bytes"):
        value = getattr(entry, field)
        if value is not None and not 0 < value < float("inf"):
            raise _refused(path, f"{where}: {field} must be more than 0, got {value:g}")
    return Key(
        _digest(path, where, entry),
        entry.name,
        entry.admin,
        ClientLimits(entry.rate, entry.max_requests, entry.max_bytes, entry.hidden_states),
        None if entry.expires is None else _time(path, where, entry.expires),
    )


def _complaint(text: str) -> str:
    unknown = _unknown.search(text)
    if unknown is None:
        return text
    # Only what looks like a field's name is quoted: it may be a key in the wrong place.
    shown = f" {unknown[1]!r}" if _field.fullmatch(unknown[1]) else ""
    return f"unknown field{shown}; known: {', '.join(KeyEntry.__struct_fields__)}"


def _digest(path: Path, where: str, entry: KeyEntry) -> bytes:
    if (entry.key is None) == (entry.sha256 is None):
        raise _refused(path, f"{where}: give exactly one of key and sha256")
    if entry.key is not None:
        if not _key.fullmatch(entry.key):
            raise _refused(path, f"{where}: a key is 1 to 512 visible ASCII characters")
        return hashlib.sha256(entry.key.encode()).digest()
    if entry.sha256 is None or not _sha256.fullmatch(entry.sha256):
        raise _refused(path, f"{where}: sha256 must be 64 hex digits")
    return bytes.fromhex(entry.sha256)


def _time(path: Path, where: str, text: str) -> float:
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise _refused(path, f"{where}: expires must be a date or a time as in ISO 8601") from None
    return (time if time.tzinfo is not None else time.replace(tzinfo=UTC)).timestamp()


def _check_tenants(path: Path, keys: Sequence[Key]) -> None:
    shares: dict[str, ClientLimits] = {}
    digests: set[bytes] = set()
    for number, key in enumerate(keys):
        where = f"entry {number + 1} ({key.name})"
        if shares.setdefault(key.name, key.share) != key.share:
            raise _refused(
                path, f"{where}: other limits or rights than in an earlier entry of that name"
            )
        if key.sha256 in digests:
            raise _refused(path, f"{where}: the key of an earlier entry")
        digests.add(key.sha256)


def exposure(path: Path) -> str | None:
    """Return a warning if other users of the machine may read or write the file, else None."""
    mode = path.stat().st_mode
    if os.name != "posix":
        return None
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "others may write to it"
    return "everyone on this machine may read it" if mode & stat.S_IROTH else None


def _refused(path: Path, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"API key file {str(path)!r}: {why}", param="api_key_file")
