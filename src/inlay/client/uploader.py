"""Embeddings sent once and referred to afterwards, for clients that reuse the same rows."""

import threading
import time
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar
from urllib.parse import quote, urlencode

import msgspec
from blake3 import blake3

from inlay.client.connection import JSON, Connection
from inlay.errors import EngineError, InvalidRequestError, NotFoundError
from inlay.media.image import read_image_header

UPLOAD_FROM = 64 * 1024
"""Default size, in bytes, from which on a container is uploaded.

Below, a reference saves nothing.
"""

FRESH_SECONDS = 30.0
"""Seconds for which an id is used without asking the server again."""

T = TypeVar("T")


class StoredEmbeds(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="prompt_embeds"
):
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


class StoredImage(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="image"):
    """Metadata of a stored image.

    Attributes:
        id: for references.
        format: of the file, by its content.
        width: in pixels as it is seen.
        height: likewise.
        num_tokens: positions it takes in a prompt of the model it was uploaded for; None where
            none was named.
        bytes: of the file.
        expires_at: as of `StoredEmbeds`.
        pinned: likewise.
    """

    id: str
    format: str
    width: int
    height: int
    num_tokens: int | None
    bytes: int
    expires_at: int | None
    pinned: bool


Stored: TypeAlias = StoredEmbeds | StoredImage

_Kind = TypeVar("_Kind", StoredEmbeds, StoredImage)
_PATH = "/prompt_embeds"
_OCTETS = "application/octet-stream"
_ANY_SIZE = 1 << 62


def image_type(data: bytes) -> str:
    """The media type of an image file, by its content.

    Raises:
        InvalidRequestError: no image of a format that servers read.
    """
    return f"image/{read_image_header(data, max_pixels=_ANY_SIZE).format.lower()}"


def is_image(data: bytes) -> bool:
    """True for a file that `image_type` has a type for."""
    try:
        image_type(data)
    except InvalidRequestError:
        return False
    return True


class Uploader:
    """Uploads embeddings and images to one server and remembers what is there.

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
        self.upload_from = upload_from
        self._connection = Connection(base_url, api_key, timeout)
        self._lock = threading.Lock()
        self._known: dict[tuple[str, bytes], tuple[str, float]] = {}

    def ref(self, data: bytes) -> str:
        """The id of container bytes on the server, uploaded unless they are there.

        An id that was not asked for lately is asked for again, so one that has expired is uploaded
        anew.

        Raises:
            InlayError: as the server answers, or `OverloadedError` when it cannot be reached.
        """
        return self._ref("embeds", data, self.upload)

    def image_ref(self, data: bytes) -> str:
        """The id of an image file on the server, as `ref`."""
        return self._ref("image", data, self.upload_image)

    def _ref(self, kind: str, data: bytes, upload: Callable[[bytes], Stored]) -> str:
        digest = kind, blake3(data).digest()
        with self._lock:
            known = self._known.get(digest)
        now = time.monotonic()
        if known is not None and (now - known[1] < FRESH_SECONDS or self._is_there(known[0])):
            id_ = known[0]
        else:
            id_ = upload(data).id
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
        return self._upload(data, model, _OCTETS, StoredEmbeds)

    def upload_image(self, data: bytes, *, model: str | None = None) -> StoredImage:
        """Store an image file, as `upload`; a model also tells the positions that it takes.

        Raises:
            InvalidRequestError: no image of a format that servers read.
            InlayError: as `ref`.
        """
        return self._upload(data, model, image_type(data), StoredImage)

    def _upload(self, data: bytes, model: str | None, media: str, kind: type[_Kind]) -> _Kind:
        query = "" if model is None else "?" + urlencode({"model": model})
        stored: _Kind = self._stored("POST", query, kind, data, media)
        return stored

    def get(self, id_: str) -> Stored:
        """Metadata of an id. Does not extend its TTL. Raises `NotFoundError`, or as `ref`."""
        stored: Stored = self._stored("GET", "/" + quote(id_, safe=""), Stored)
        return stored

    def pin(self, id_: str, pinned: bool = True) -> Stored:
        """Keep a stored prompt until it is unpinned or deleted, or let it expire again.

        Raises as `get`.
        """
        body = msgspec.json.encode({"pinned": pinned})
        stored: Stored = self._stored("POST", f"/{quote(id_, safe='')}/pin", Stored, body, JSON)
        return stored

    def delete(self, id_: str) -> None:
        """Delete a stored prompt. Raises as `get`."""
        self._connection.send("DELETE", f"{_PATH}/{quote(id_, safe='')}")
        self.forget()

    def _stored(
        self, method: str, path: str, kind: Any, body: bytes | None = None, media: str = ""
    ) -> Any:
        answer = self._connection.send(method, _PATH + path, body, media)
        try:
            return msgspec.json.decode(answer, type=kind)
        except msgspec.MsgspecError as error:
            raise EngineError(
                f"{method} {_PATH}{path} answered something else than a stored prompt: {error}"
            ) from error
