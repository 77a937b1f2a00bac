"""Embeddings sent once and referred to afterwards, for clients that reuse the same rows."""

import http.client
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import msgspec
from blake3 import blake3

from inlay.errors import (
    AuthenticationError,
    BodyTooLargeError,
    EngineError,
    ErrorBody,
    InlayError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    PermissionDeniedError,
    RateLimitedError,
)

UPLOAD_FROM = 64 * 1024
"""Default size, in bytes, from which on a container is uploaded.

Below, a reference saves nothing.
"""

FRESH_SECONDS = 30.0
"""Seconds for which an id is used without asking the server again."""

_ERRORS: dict[int, type[InlayError]] = {
    error.status: error
    for error in (
        InvalidRequestError,
        AuthenticationError,
        PermissionDeniedError,
        NotFoundError,
        BodyTooLargeError,
        RateLimitedError,
        OverloadedError,
    )
}

T = TypeVar("T")


class StoredEmbeds(msgspec.Struct, frozen=True, kw_only=True):
    """Metadata of stored embeddings.

    Attributes:
        id: for references.
        num_tokens: rows of one prompt.
        hidden_size: elements of a row.
        dtype: as they were uploaded.
        bytes: of the tensor.
        expires_at: Unix time they are forgotten at unless they are used; None while they are
            pinned.
        pinned: True if they are kept until they are unpinned or deleted.
        num_prompts: 1 unless a batch was uploaded.
    """

    id: str
    num_tokens: int
    hidden_size: int
    dtype: str
    bytes: int
    expires_at: int | None
    pinned: bool
    num_prompts: int


class _Answer(msgspec.Struct, frozen=True):
    error: ErrorBody


class Uploader:
    """Uploads embeddings to one server and remembers what is there.

    Safe to use from several threads.

    Args:
        base_url: the server's, as the `openai` client takes it: `http://host:8000/v1`.
        api_key: as the `openai` client's; what it uploads is found with this key alone.
        upload_from: container bytes from which on `EmbeddedPrompt.completion_args` and `chat_part`
            send a reference.
        timeout: seconds an answer may take.

    Raises:
        InvalidRequestError: not an HTTP URL.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        *,
        upload_from: int = UPLOAD_FROM,
        timeout: float = 60.0,
    ) -> None:
        if urlsplit(base_url).scheme not in ("http", "https") or not urlsplit(base_url).hostname:
            raise InvalidRequestError(
                f"{base_url!r} is not the URL of a server, such as http://host:8000/v1"
            )
        self.upload_from = upload_from
        self._url = base_url.rstrip("/") + "/prompt_embeds"
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._timeout = timeout
        self._lock = threading.Lock()
        self._known: dict[bytes, tuple[str, float]] = {}

    def ref(self, data: bytes) -> str:
        """The id of container bytes on the server, uploaded unless they are there.

        An id that was not asked for lately is asked for again, so one that has expired is uploaded
        anew.

        Raises:
            InlayError: as the server answers, or `OverloadedError` when it cannot be reached.
        """
        digest = blake3(data).digest()
        with self._lock:
            known = self._known.get(digest)
        now = time.monotonic()
        if known is not None and (now - known[1] < FRESH_SECONDS or self._is_there(known[0])):
            id_ = known[0]
        else:
            id_ = self.upload(data).id
        with self._lock:
            self._known[digest] = (id_, now)
        return id_

    def _is_there(self, id_: str) -> bool:
        try:
            self.get(id_)
        except NotFoundError:
            return False
        return True

    def forget(self) -> None:
        """Ask for every id again before it is used."""
        with self._lock:
            self._known.clear()

    def retrying(self, request: Callable[[], T]) -> T:
        """The result of `request`.

        Where the server no longer had what it refers to, of a second try.

        Args:
            request: makes its arguments with this uploader and sends them, so that the second try
                uploads again.
        """
        try:
            return request()
        except Exception as error:
            # The `openai` client's error, which this module does not need to know.
            gone = getattr(error, "status_code", None) == NotFoundError.status
            if not gone or getattr(error, "code", None) != NotFoundError.default_code:
                raise
            self.forget()
        return request()

    def upload(self, data: bytes, *, model: str | None = None) -> StoredEmbeds:
        """Store container bytes; the same bytes again only start their time to live again.

        Args:
            data: a tensor file.
            model: check them against this model at once.

        Raises:
            InlayError: as `ref`.
        """
        query = "" if model is None else "?" + urlencode({"model": model})
        return self._stored("POST", query, data, "application/octet-stream")

    def get(self, id_: str) -> StoredEmbeds:
        """Metadata of an id. Does not extend its TTL. Raises `NotFoundError`, or as `ref`."""
        return self._stored("GET", "/" + quote(id_, safe=""))

    def pin(self, id_: str, pinned: bool = True) -> StoredEmbeds:
        """Keep stored embeddings until they are unpinned or deleted, or let them expire again.

        Raises as `get`.
        """
        body = msgspec.json.encode({"pinned": pinned})
        return self._stored("POST", f"/{quote(id_, safe='')}/pin", body, "application/json")

    def delete(self, id_: str) -> None:
        """Delete stored embeddings. Raises as `get`."""
        self._send("DELETE", "/" + quote(id_, safe=""))
        self.forget()

    def _stored(
        self, method: str, path: str, body: bytes | None = None, media: str = ""
    ) -> StoredEmbeds:
        answer = self._send(method, path, body, media)
        try:
            return msgspec.json.decode(answer, type=StoredEmbeds)
        except msgspec.MsgspecError as error:
            raise EngineError(
                f"{self._url} answered something else than stored embeddings: {error}"
            ) from error

    def _send(self, method: str, path: str, body: bytes | None = None, media: str = "") -> bytes:
        headers = {**self._headers, **({"Content-Type": media} if media else {})}
        request = urllib.request.Request(self._url + path, body, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as response:
                answer: bytes = response.read()
                return answer
        except urllib.error.HTTPError as error:
            raise _refusal(error) from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise OverloadedError(f"{self._url} cannot be reached: {reason}") from error


def _refusal(error: urllib.error.HTTPError) -> InlayError:
    kind = _ERRORS.get(error.code, EngineError)
    body = error.read()
    wait: Any = error.headers.get("Retry-After")
    try:
        said = msgspec.json.decode(body, type=_Answer).error
    except msgspec.MsgspecError:
        return kind(f"the server answered {error.code}: {body[:200]!r}")
    retry_after = float(wait) if wait is not None and wait.isdigit() else None
    return kind(said.message, param=said.param, code=said.code, retry_after=retry_after)
