"""Who asks: API keys, and the tenant each of them names."""

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass

from inlay.errors import AuthenticationError
from inlay.frontend.body import Headers, header


@dataclass(frozen=True, slots=True)
class Tenant:
    """A caller.

    Attributes:
        id: derived from the key, never the key itself; "" where no key is asked for.
        salt: keeps what is cached for this caller apart, or None where all callers share.
    """

    id: str
    salt: str | None

    def salted(self, cache_salt: str | None) -> str | None:
        """The salt of a request that may bring its own."""
        if cache_salt is None:
            return self.salt
        return f"{self.salt or ''}/{cache_salt}"


class Keys:
    """The keys that are accepted. With more than one, each is a tenant of its own, unless they share the prefix cache.

    Attributes:
        anyone: the caller where no key is asked for.
    """

    def __init__(self, keys: Sequence[str], *, share_prefix_cache: bool) -> None:
        self._tenants: list[tuple[bytes, Tenant]] = []
        apart = len(set(keys)) > 1 and not share_prefix_cache
        for key in keys:
            digest = _digest(key.encode())
            name = digest.hex()[:16]
            self._tenants.append((digest, Tenant(name, name if apart else None)))
        self.anyone = Tenant("", None)

    def check(self, headers: Headers) -> Tenant:
        """The caller. Raises `AuthenticationError`. Takes as long for a key that is almost right as for one far off."""
        if not self._tenants:
            return self.anyone
        value = header(headers, b"authorization")
        if value is None:
            raise AuthenticationError("no API key was given; send it as `Authorization: Bearer KEY`")
        scheme, _, token = value.partition(b" ")
        given = _digest(token.strip())
        found: Tenant | None = None
        for digest, tenant in self._tenants:
            if hmac.compare_digest(digest, given):
                found = tenant
        if found is None or scheme.lower() != b"bearer":
            raise AuthenticationError("the API key is not valid")
        return found


def _digest(key: bytes) -> bytes:
    return hashlib.blake2b(key, digest_size=32, person=b"inlay tenant").digest()
