"""API keys, their tenants and their rights."""

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from inlay.errors import AuthenticationError


@dataclass(frozen=True, slots=True)
class Tenant:
    """Owner of a request's data.

    Attributes:
        id: the key's name, or a digest of the key if it has none; never the key itself; "" where
            no key is required.
        salt: separates this tenant's cached prefixes from others'; None if all tenants share.
    """

    id: str
    salt: str | None

    def salted(self, cache_salt: str | None) -> str | None:
        """Return the salt of a request that may have a `cache_salt` of its own."""
        if cache_salt is None:
            return self.salt
        return f"{self.salt or ''}/{cache_salt}"


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Rate limit and quota of one client; None means the settings' default.

    Attributes:
        rate: requests a minute.
        max_requests: running requests.
        max_bytes: bytes held.
    """

    rate: float | None = None
    max_requests: int | None = None
    max_bytes: int | None = None


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
    share: ClientLimits = ClientLimits()
    expires: float | None = None

    @classmethod
    def unnamed(cls, key: str, *, admin: bool = False) -> "Key":
        """Return a key that is a tenant of its own."""
        digest = hashlib.blake2b(key.encode(), digest_size=8, person=b"inlay tenant").hexdigest()
        return cls(hashlib.sha256(key.encode()).digest(), UNNAMED + digest, admin)


UNNAMED = "key-"
"""Prefix of the tenants of keys without a name; names in a key file may not begin with it."""


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated caller: its tenant, its admin right and its limits."""

    tenant: Tenant
    admin: bool = False
    share: ClientLimits = ClientLimits()


ANYONE = Caller(Tenant("", None))
"""Caller where no key is required."""


class KeySet:
    """Set of accepted keys.

    Args:
        keys: an empty sequence means that no key is required.
        apart: True if tenants have prefix caches of their own.

    Raises:
        ValueError: two entries have the same key.
    """

    def __init__(self, keys: Sequence[Key], *, apart: bool) -> None:
        self._secret = secrets.token_bytes(32)
        self._keys: dict[bytes, Key] = {}
        for key in keys:
            other = self._keys.setdefault(self._slot(key.sha256), key)
            if other is not key:
                raise ValueError(f"{other.name!r} and {key.name!r} have the same key")
        self._tenants = {key.name: Tenant(key.name, key.name if apart else None) for key in keys}

    def __len__(self) -> int:
        return len(self._keys)

    def _slot(self, sha256: bytes) -> bytes:
        # Keyed, so that the time of a look-up tells a client nothing about the hashes of keys.
        return hashlib.blake2b(sha256, digest_size=16, key=self._secret).digest()

    def check(self, authorization: bytes | None, now: float) -> Caller:
        """Return the caller. The time taken does not depend on how much of a key is right.

        Args:
            authorization: value of the header `Authorization`.
            now: Unix time.

        Raises:
            AuthenticationError: no key, a wrong one, or one that has expired.
        """
        if not self._keys:
            return ANYONE
        if authorization is None:
            raise AuthenticationError(
                "no API key was given; send it as `Authorization: Bearer KEY`, or "
                "as `x-api-key: KEY`"
            )
        scheme, _, token = authorization.partition(b" ")
        given = hashlib.sha256(token.strip()).digest()
        key = self._keys.get(self._slot(given))
        if key is None or not hmac.compare_digest(key.sha256, given) or scheme.lower() != b"bearer":
            raise AuthenticationError("the API key is not valid")
        if key.expires is not None and now >= key.expires:
            raise AuthenticationError("the API key has expired", code="expired_api_key")
        return Caller(self._tenants[key.name], key.admin, key.share)
