"""Callers of requests: accepted keys, tenants and admin rights."""

import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from inlay.base.errors import (
    AuthenticationError,
    InvalidRequestError,
    PermissionDeniedError,
)
from inlay.base.watched import WatchedFiles
from inlay.http.asgi import Headers, Scope
from inlay.http.callers.keys import DEFAULT_LIMITS, ClientLimits, Key, exposure, read_keys
from inlay.http.openapi import Operation
from inlay.http.settings import FrontendSettings

_log = logging.getLogger(__name__)


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
class Caller:
    """An authenticated caller: its tenant, its admin right and its limits."""

    tenant: Tenant
    admin: bool = False
    share: ClientLimits = DEFAULT_LIMITS


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

    @property
    def has_admin(self) -> bool:
        """True if one of the keys is an admin's."""
        return any(key.admin for key in self._keys.values())

    def _slot(self, sha256: bytes) -> bytes:
        # Keyed, so that the time of a look-up tells a client nothing about the hashes of keys.
        return hashlib.blake2b(sha256, digest_size=16, key=self._secret).digest()

    def callers(self, now: float) -> "dict[str, Caller]":
        """Return the callers that have a key now, by the id of the tenant, without admin rights."""
        if not self._keys:
            return {ANYONE.tenant.id: ANYONE}
        return {
            key.name: Caller(self._tenants[key.name], share=key.share)
            for key in self._keys.values()
            if key.expires is None or now < key.expires
        }

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


class ApiKeys:
    """The keys that are accepted now.

    With more than one key, each tenant has a prefix cache of its own, unless the settings share it.
    Keys of a file are separated even if there is only one: a second may be added at any time.

    Args:
        settings: of the frontend.
        clock: returns the Unix time.

    Raises:
        InvalidRequestError: the key file cannot be used.
    """

    def __init__(
        self, settings: FrontendSettings, *, clock: Callable[[], float] = time.time
    ) -> None:
        admin = {key.get_secret_value() for key in settings.admin_api_key}
        plain = {key.get_secret_value() for key in settings.api_key}
        self._fixed = [Key.unnamed(key, admin=key in admin) for key in sorted(plain | admin)]
        for key in sorted(plain | admin):
            if not key.isascii() or not key.strip() or key != key.strip():
                raise InvalidRequestError(
                    "an API key is ASCII, not empty, and has no space around it", param="api_key"
                )
        self._settings = settings
        self._path: Path | None = settings.api_key_file
        self._apart = not settings.share_prefix_cache and (
            len(self._fixed) > 1 or self._path is not None
        )
        self._clock = clock
        paths = [] if self._path is None else [self._path]
        self.files = WatchedFiles("API keys", paths, self._reload)
        self._keys = self._load()

    @property
    def required(self) -> bool:
        return len(self._keys) > 0

    @property
    def admits_admins(self) -> bool:
        """True if there is an admin port, or a key that is an admin's."""
        return self._settings.admin_port is not None or self._keys.has_admin

    def caller_of(self, operation: Operation, scope: Scope, headers: Headers) -> Caller:
        """Return the caller of `operation`.

        Raises:
            AuthenticationError: a key is required, and it is missing, wrong or expired.
            PermissionDeniedError: an admin operation, and the caller is not an admin.
        """
        if not is_admin(operation, self._settings):
            return ANYONE if operation.open else self.check(_credentials(headers))
        if scope.get(ADMIN_PORT, False):
            _check_no_page(headers)
            return ANYONE
        if not self.required:
            if self._settings.admin_port is not None:
                raise PermissionDeniedError(
                    f"{operation.path} is for admins: ask at the server's admin port"
                )
            raise PermissionDeniedError(
                f"{operation.path} is for admins, and this server has none: start it with "
                "--admin-port, --admin-api-key, or an admin key in --api-key-file"
            )
        caller = self.check(_credentials(headers))
        if not caller.admin:
            raise PermissionDeniedError(
                f"{operation.path} is for admins; the API key may not use it. It takes an admin "
                "key, or the admin port"
            )
        return caller

    def check(self, authorization: bytes | None) -> Caller:
        """Return the caller from the header `Authorization`. Raises `AuthenticationError`."""
        return self._keys.check(authorization, self._clock())

    def callers(self) -> "dict[str, Caller]":
        """As `KeySet.callers`, now."""
        return self._keys.callers(self._clock())

    def _reload(self) -> None:
        self._keys = self._load()

    def _load(self) -> KeySet:
        if self._path is None:
            return KeySet(self._fixed, apart=self._apart)
        read = read_keys(self._path)
        try:
            keys = KeySet([*self._fixed, *read], apart=self._apart)
        except ValueError as error:
            raise InvalidRequestError(
                f"API key file {str(self._path)!r}: {error}", param="api_key_file"
            ) from error
        exposed = exposure(self._path)
        if exposed is not None:
            _log.warning(
                "API key file %s: %s; chmod 600 keeps it to its owner", self._path, exposed
            )
        _log.info(
            "%d API keys of %d names from %s",
            len(read),
            len({key.name for key in read}),
            self._path,
        )
        return keys


ADMIN_PORT = "inlay.admin_port"
"""Key in the ASGI scope of a request that came through the admin port."""


def is_admin(operation: Operation, settings: FrontendSettings) -> bool:
    """Return True if an operation is for admins only."""
    if operation.path in ("/metrics", "/load"):
        return not settings.metrics_public
    if operation.path == "/tokenizer_info":
        return not settings.enable_tokenizer_info_endpoint
    return operation.admin


def _credentials(headers: Headers) -> bytes | None:
    """Return the value of `Authorization`; without it, that of `x-api-key` as such a value."""
    plain = headers.get(b"x-api-key")
    return headers.get(b"authorization", None if plain is None else b"Bearer " + plain)


def _check_no_page(headers: Headers) -> None:
    # The admin port needs no key, so any web page open in a browser on this machine could use it.
    # Browsers send one of these headers with every request that has an effect; tools send neither.
    if b"origin" in headers or headers.get(b"sec-fetch-site") not in (
        None, b"none", b"same-origin",
    ):  # fmt: skip
        raise PermissionDeniedError("web pages may not use the admin port")
