"""API keys of a running server: those of the settings, and those of a file that is reloaded."""

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

from inlay.errors import InlayError, InvalidRequestError
from inlay.frontend.callers.auth import Caller, Key, KeySet
from inlay.frontend.callers.keys_file import Stamp, exposure, read_keys
from inlay.frontend.settings import FrontendSettings

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
