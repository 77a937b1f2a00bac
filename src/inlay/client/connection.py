"""Requests to a server, for what the `openai` client has no call for."""

import http.client
import urllib.error
import urllib.request
from urllib.parse import urlsplit

from inlay.client.refusal import refusal
from inlay.errors import InvalidRequestError, OverloadedError

JSON = "application/json"


class Connection:
    """A server's base URL, and the key to ask with.

    Args:
        base_url: the server's, as the `openai` client takes it: `http://host:8000/v1`.
        api_key: as the `openai` client's.
        timeout: seconds an answer may take.

    Raises:
        InvalidRequestError: not an HTTP URL.
    """

    def __init__(self, base_url: str, api_key: str | None, timeout: float) -> None:
        if urlsplit(base_url).scheme not in ("http", "https") or not urlsplit(base_url).hostname:
            raise InvalidRequestError(
                f"{base_url!r} is not the URL of a server, such as http://host:8000/v1"
            )
        self._url = base_url.rstrip("/")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._timeout = timeout

    def send(self, method: str, path: str, body: bytes | None = None, media: str = "") -> bytes:
        """The body of an answer.

        Args:
            method: of the request.
            path: below the base URL, with its query.
            body: of the request.
            media: its type.

        Raises:
            InlayError: as the server answers, or `OverloadedError` when it cannot be reached.
        """
        url = self._url + path
        headers = {**self._headers, **({"Content-Type": media} if media else {})}
        request = urllib.request.Request(url, body, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as response:
                answer: bytes = response.read()
                return answer
        except urllib.error.HTTPError as error:
            wait = error.headers.get("Retry-After")
            raise refusal(error.code, error.read(), wait) from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise OverloadedError(f"{url} cannot be reached: {reason}") from error
