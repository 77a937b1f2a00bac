"""Who asks: API keys, the tenant each of them names, and what it may do."""

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from inlay.errors import AuthenticationError


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whose data a request's is.

    Attributes:
        id: the key's name, or derived from the key where it has none; never the key itself; ""
            where no key is asked for.
        salt: keeps what is cached for this caller apart, or None where all callers share.
    """

    id: str
    salt: str | None

    def salted(self, cache_salt: str | None) -> str | None:
        """The salt of a request that may bring its own."""
        if cache_salt is None:
            return self.salt
        return f"{self.salt or ''}/{cache_salt}"


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """What one client may take; None is what the settings say for all.

    Attributes:
        rate: requests a minute.
        max_requests: requests under way.
        max_bytes: bytes held.
    """

    rate: float | None = None
    max_requests: int | None = None
    max_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Key:
    """A key that is accepted.

    Attributes:
        sha256: of the key, 32 bytes; the key itself is not kept.
        name: of its tenant. A tenant may have several keys, such as an old and a new one.
        admin: whether it may use the admin routes.
        share: of the tenant.
        expires: Unix time from which on it is refused, or None.
    """

    sha256: bytes
    name: str
    admin: bool = False
    share: ClientLimits = ClientLimits()
    expires: float | None = None

    @classmethod
    def unnamed(cls, key: str, *, admin: bool = False) -> "Key":
        """A key that is its own tenant."""
        digest = hashlib.blake2b(key.encode(), digest_size=8, person=b"inlay tenant").hexdigest()
        return cls(hashlib.sha256(key.encode()).digest(), UNNAMED + digest, admin)


UNNAMED = "key-"
"""How the tenants of keys without a name begin; no name may."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, and what they may do."""

    tenant: Tenant
    admin: bool = False
    share: ClientLimits = ClientLimits()


ANYONE = Caller(Tenant("", None))
"""The caller where no key is asked for."""


class KeySet:
    """The keys that are accepted at one time.

    Args:
        keys: none means that no key is asked for.
        apart: whether tenants are kept from seeing what is cached for others.

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
        # Keyed, so that how long a look-up takes says nothing of any key's hash to those who choose
        # what is looked up.
        return hashlib.blake2b(sha256, digest_size=16, key=self._secret).digest()

    def check(self, authorization: bytes | None, now: float) -> Caller:
        """The caller. Takes as long for a key that is almost right as for one far off.

        Args:
            authorization: the header of that name.
            now: Unix time.

        Raises:
            AuthenticationError: no key, a wrong one, or one that has expired.
        """
        if not self._keys:
            return ANYONE
        if authorization is None:
            raise AuthenticationError(
                "no API key was given; send it as `Authorization: Bearer KEY`"
            )
        scheme, _, token = authorization.partition(b" ")
        given = hashlib.sha256(token.strip()).digest()
        key = self._keys.get(self._slot(given))
        if key is None or not hmac.compare_digest(key.sha256, given) or scheme.lower() != b"bearer":
            raise AuthenticationError("the API key is not valid")
        if key.expires is not None and now >= key.expires:
            raise AuthenticationError("the API key has expired", code="expired_api_key")
        return Caller(self._tenants[key.name], key.admin, key.share)
