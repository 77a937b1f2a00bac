"""Callers of requests: their keys, admin rights, time limits and sessions."""

import asyncio
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path

from inlay.errors import InlayError, InvalidRequestError, PermissionDeniedError
from inlay.http.asgi import Headers, Scope, header
from inlay.http.callers.auth import ANYONE, Caller, Key, KeySet
from inlay.http.callers.keys_file import Stamp, exposure, read_keys
from inlay.http.openapi import Operation
from inlay.http.settings import FrontendSettings

_log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
"""Interval at which the key file is checked for changes, with one `stat`."""


class Keys:
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
        self._path: Path | None = settings.api_key_file
        self._apart = not settings.share_prefix_cache and (
            len(self._fixed) > 1 or self._path is not None
        )
        self._clock = clock
        self._stamp: Stamp | None = None
        self._keys = self._load()

    @property
    def required(self) -> bool:
        """True if a key is required."""
        return len(self._keys) > 0

    @property
    def reloadable(self) -> bool:
        """True if there is a key file."""
        return self._path is not None

    def check(self, authorization: bytes | None) -> Caller:
        """Return the caller from the header `Authorization`. Raises `AuthenticationError`."""
        return self._keys.check(authorization, self._clock())

    def _load(self) -> KeySet:
        if self._path is None:
            return KeySet(self._fixed, apart=self._apart)
        # Taken before reading: a change during the reading is then seen at the next check.
        self._stamp = Stamp.of(self._path)
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

    async def reload(self) -> None:
        """Read the file again, in a thread.

        If it cannot be used, the old keys stay and the log says why.
        """
        if self._path is None:
            return
        try:
            self._keys = await asyncio.to_thread(self._load)
        except (InlayError, OSError) as error:
            _log.error("the API keys were not reloaded: %s", error)

    async def watch(self, every: float = POLL_SECONDS) -> None:
        """Reload the file whenever it has changed, until cancelled."""
        while self._path is not None:
            await asyncio.sleep(every)
            if Stamp.of(self._path) != self._stamp:
                await self.reload()


ADMIN_PORT = "inlay.admin_port"
"""Key in the ASGI scope of a request that came through the admin port."""

TIMEOUT_HEADER = b"x-request-timeout"
SESSION_HEADER = b"x-session-id"

_MAX_SESSION = 512
"""Maximum characters of a session's name."""


def caller_of(keys: Keys, settings: FrontendSettings, operation: Operation, scope: Scope) -> Caller:
    """Return the caller of `operation`.

    Raises:
        AuthenticationError: a key is required, and it is missing, wrong or expired.
        PermissionDeniedError: an admin operation, and the caller is not an admin.
    """
    if not is_admin(operation, settings):
        return ANYONE if operation.open else keys.check(_credentials(scope["headers"]))
    if scope.get(ADMIN_PORT, False):
        _check_no_page(scope["headers"])
        return ANYONE
    if not keys.required:
        if settings.admin_port is not None:
            raise PermissionDeniedError(
                f"{operation.path} is for admins: ask at the server's admin port"
            )
        raise PermissionDeniedError(
            f"{operation.path} is for admins, and this server has none: start it with "
            "--admin-port, --admin-api-key, or an admin key in --api-key-file"
        )
    caller = keys.check(_credentials(scope["headers"]))
    if not caller.admin:
        raise PermissionDeniedError(
            f"{operation.path} is for admins; the API key may not use it. It takes an admin key, "
            "or the admin port"
        )
    return caller


def _credentials(headers: Headers) -> bytes | None:
    """Return the value of `Authorization`; without it, that of `x-api-key` as such a value."""
    key = header(headers, b"authorization")
    if key is None:
        plain = header(headers, b"x-api-key")
        key = None if plain is None else b"Bearer " + plain
    return key


def is_admin(operation: Operation, settings: FrontendSettings) -> bool:
    """Return True if an operation is for admins only."""
    if operation.path in ("/metrics", "/load"):
        return not settings.metrics_public
    if operation.path == "/tokenizer_info":
        return not settings.enable_tokenizer_info_endpoint
    return operation.admin


WORKERS_HEADER = b"x-show-workers"


def shows_workers(call_headers: Headers, caller: Caller) -> bool:
    """Return True if a caller asks which worker makes its stream, and may know."""
    return caller.admin and header(call_headers, WORKERS_HEADER) is not None


def _check_no_page(headers: Headers) -> None:
    # The admin port needs no key, so any web page open in a browser on this machine could use it.
    # Browsers send one of these headers with every request that has an effect; tools send neither.
    if header(headers, b"origin") is not None or header(headers, b"sec-fetch-site") not in (
        None, b"none", b"same-origin",
    ):  # fmt: skip
        raise PermissionDeniedError("web pages may not use the admin port")


def timeout_of(headers: Headers, settings: FrontendSettings) -> float | None:
    """Seconds a request may take: the client's value, bounded by the server's.

    Raises:
        InvalidRequestError: the header is not a number of seconds.
    """
    bound = settings.request_timeout
    value = header(headers, TIMEOUT_HEADER)
    if value is None:
        return bound
    try:
        asked = float(value)
    except ValueError:
        asked = math.nan
    if not (0 < asked < math.inf):
        raise InvalidRequestError(
            "X-Request-Timeout must be a number of seconds, more than 0, got "
            f"{value[:40].decode('latin-1')!r}",
            param="X-Request-Timeout",
        )
    return asked if bound is None else min(asked, bound)


def session_of(
    headers: Headers, session_id: str | None, prompt_cache_key: str | None, tenant: str
) -> str | None:
    """Name of a request's session, prefixed by its tenant; None if the request names none.

    Fields of the body take precedence over the header.

    Raises:
        InvalidRequestError: the name is empty or too long.
    """
    named, param = session_id, "session_id"
    if named is None:
        named, param = prompt_cache_key, "prompt_cache_key"
    if named is None:
        value = header(headers, SESSION_HEADER)
        if value is None:
            return None
        named, param = value.decode("latin-1"), "X-Session-Id"
    if not 0 < len(named) <= _MAX_SESSION:
        raise InvalidRequestError(
            f"{param} must have 1 to {_MAX_SESSION} characters, got {len(named)}", param=param
        )
    return f"{tenant}/{named}"
