"""CORS: web pages that may call the API from a browser (Fetch standard).

Keys are sent in a header that a page has to set itself. Cookies are never allowed, so `*` is safe.
"""

from collections.abc import Sequence
from typing import TypeAlias

from inlay.http.asgi import Headers

HeaderList: TypeAlias = list[tuple[bytes, bytes]]

_METHODS = b"GET, HEAD, POST, DELETE"
_EXPOSED = b"x-request-id, x-dropped-messages, retry-after"
_MAX_AGE = b"600"


class Cors:
    """The allowed origins.

    Args:
        origins: exact origins, or `*` for all.
    """

    def __init__(self, origins: Sequence[str]) -> None:
        self._all = "*" in origins
        self._origins = {origin.encode() for origin in origins}

    def headers(self, request: Headers) -> HeaderList:
        """Return the CORS headers of a response."""
        if self._all:
            return [
                (b"access-control-allow-origin", b"*"),
                (b"access-control-expose-headers", _EXPOSED),
            ]
        added = [(b"vary", b"Origin")]
        origin = request.get(b"origin")
        if origin is not None and origin in self._origins:
            added += [
                (b"access-control-allow-origin", origin),
                (b"access-control-expose-headers", _EXPOSED),
            ]
        return added

    def preflight(self, method: str, request: Headers) -> HeaderList | None:
        """Return the headers that answer a browser's preflight request.

        None if this is no preflight request, or the origin is not allowed.
        """
        origin = request.get(b"origin")
        asked = request.get(b"access-control-request-method")
        if method != "OPTIONS" or origin is None or asked is None:
            return None
        if not self._all and origin not in self._origins:
            return None
        allowed: HeaderList = [
            (b"access-control-allow-methods", _METHODS),
            (b"access-control-max-age", _MAX_AGE),
        ]
        wanted = request.get(b"access-control-request-headers")
        if wanted is not None:
            # Any header is allowed: none is trusted because it comes from a page.
            allowed.append((b"access-control-allow-headers", wanted))
        return allowed
