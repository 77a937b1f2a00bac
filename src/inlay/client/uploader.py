"""Embeddings sent once and referred to afterwards, for clients that reuse the same rows.

`Uploader` blocks; `AsyncUploader` is the same for event loops.
"""

import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias, TypeVar
from urllib.parse import quote, urlencode

import msgspec
from blake3 import blake3

from inlay.base.errors import EngineError, InvalidRequestError, NotFoundError
from inlay.client.connection import JSON, RETRIES, ApiClient, Question, Steps, asked
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


class StoredVectors(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="vectors"):
    """Metadata of a stored document.

    Attributes:
        id: for references in reranks and scores.
        num_vectors: of its largest output: 1 unless they are of tokens.
        size: elements of each.
        dtype: of the vectors.
        bytes: of the file.
        expires_at: as of `StoredEmbeds`.
        pinned: likewise.
    """

    id: str
    num_vectors: int
    size: int
    dtype: str
    bytes: int
    expires_at: int | None
    pinned: bool


Stored: TypeAlias = StoredEmbeds | StoredImage | StoredVectors

_Kind = TypeVar("_Kind", StoredEmbeds, StoredImage)


class _Reference(msgspec.Struct, frozen=True):
    ref: str


class _References(msgspec.Struct, frozen=True):
    data: list[_Reference]


_PATH = "/prompt_embeds"
_OCTETS = "application/octet-stream"
_FILE = "application/safetensors"
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


class _Uploads:
    """Exchanges of uploaders, and what they know to be on their server. Safe in several threads."""

    def __init__(self, retries: int) -> None:
        self._retries = retries
        self._lock = threading.Lock()
        self._known: dict[tuple[str, bytes], tuple[str, float]] = {}

    def ref(self, kind: str, data: bytes) -> Steps[str]:
        digest = kind, blake3(data).digest()
        with self._lock:
            known = self._known.get(digest)
        now = time.monotonic()
        fresh = known is not None and now - known[1] < FRESH_SECONDS
        if known is not None and (fresh or (yield from self._is_there(known[0]))):
            id_ = known[0]
        elif kind == "image":
            id_ = (yield from self.upload_media(data, None)).id
        else:
            id_ = (yield from self.upload(data, None)).id
        with self._lock:
            self._known[digest] = (id_, now)
        return id_

    def _is_there(self, id_: str) -> Steps[bool]:
        try:
            yield from self.get(id_)
        except NotFoundError:
            return False
        return True

    def forget(self) -> None:
        with self._lock:
            self._known.clear()

    def upload(self, data: bytes, model: str | None) -> Steps[StoredEmbeds]:
        return self._upload(data, model, _OCTETS, StoredEmbeds)

    def upload_media(self, data: bytes, model: str | None) -> Steps[StoredImage]:
        return self._upload(data, model, image_type(data), StoredImage)

    def upload_vectors(self, data: bytes, model: str | None) -> Steps[list[str]]:
        query = "" if model is None else "?" + urlencode({"model": model})
        found: _References = yield from self._stored("POST", query, _References, data, _FILE)
        return [each.ref for each in found.data]

    def _upload(
        self, data: bytes, model: str | None, media: str, kind: type[_Kind]
    ) -> Steps[_Kind]:
        query = "" if model is None else "?" + urlencode({"model": model})
        stored: _Kind = yield from self._stored("POST", query, kind, data, media)
        return stored

    def get(self, id_: str) -> Steps[Stored]:
        stored: Stored = yield from self._stored("GET", "/" + quote(id_, safe=""), Stored)
        return stored

    def pin(self, id_: str, pinned: bool) -> Steps[Stored]:
        body = msgspec.json.encode({"pinned": pinned})
        path = f"/{quote(id_, safe='')}/pin"
        stored: Stored = yield from self._stored("POST", path, Stored, body, JSON)
        return stored

    def delete(self, id_: str) -> Steps[None]:
        yield from asked(Question("DELETE", f"{_PATH}/{quote(id_, safe='')}"), self._retries)
        self.forget()

    def _stored(
        self, method: str, path: str, kind: Any, body: bytes | None = None, media: str = ""
    ) -> Steps[Any]:
        answer = yield from asked(Question(method, _PATH + path, body, media), self._retries)
        try:
            return msgspec.json.decode(answer, type=kind)
        except msgspec.MsgspecError as error:
            raise EngineError(
                f"{method} {_PATH}{path} answered something else than a stored prompt: {error}"
            ) from error


def _is_lost(error: Exception) -> bool:
    """True if a request failed because the server no longer has what it refers to."""
    # The `openai` client's error, which this module does not need to know.
    gone = getattr(error, "status_code", None) == NotFoundError.status
    return gone and getattr(error, "code", None) == NotFoundError.default_code


class Uploader:
    """Uploads embeddings and images to one server and remembers what is there.

    Safe to use from several threads.

    Args:
        base_url: the server's, as the `openai` client takes it: `http://host:8000/v1`.
        api_key: as the `openai` client's; what it uploads is found with this key alone.
        upload_from: container bytes from which on `EmbeddedPrompt.completion_args` and `chat_part`
            send a reference.
        timeout: seconds an answer may take.
        max_retries: further tries where the server is full (429, 503) or cannot be reached; its
            `Retry-After` is honoured.

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
        max_retries: int = RETRIES,
    ) -> None:
        self.upload_from = upload_from
        self._connection = ApiClient(base_url, api_key, timeout)
        self._uploads = _Uploads(max_retries)

    def ref(self, data: bytes) -> str:
        """The id of container bytes on the server, uploaded unless they are there.

        An id that was not asked for lately is asked for again, so one that has expired is uploaded
        anew.

        Raises:
            InlayError: as the server answers, or `OverloadedError` when it cannot be reached.
        """
        return self._connection.run(self._uploads.ref("embeds", data))

    def image_ref(self, data: bytes) -> str:
        """The id of an image file on the server, as `ref`."""
        return self._connection.run(self._uploads.ref("image", data))

    def forget(self) -> None:
        """Ask for every id again before it is used."""
        self._uploads.forget()

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
            if not _is_lost(error):
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
        return self._connection.run(self._uploads.upload(data, model))

    def upload_media(self, data: bytes, *, model: str | None = None) -> StoredImage:
        """Store an image file, as `upload`; a model also tells the positions that it takes.

        Raises:
            InvalidRequestError: no image of a format that servers read.
            InlayError: as `ref`.
        """
        return self._connection.run(self._uploads.upload_media(data, model))

    def upload_vectors(self, data: bytes, *, model: str | None = None) -> list[str]:
        """Store vectors, and return an id for each input, as `store` of /v1/embeddings gives.

        Args:
            data: an answer of /v1/embeddings with `encoding_format` "safetensors".
            model: that they are of; the server's first when None.

        Raises:
            InlayError: as `ref`.
        """
        return self._connection.run(self._uploads.upload_vectors(data, model))

    def get(self, id_: str) -> Stored:
        """Metadata of an id. Does not extend its TTL. Raises `NotFoundError`, or as `ref`."""
        return self._connection.run(self._uploads.get(id_))

    def pin(self, id_: str, pinned: bool = True) -> Stored:
        """Keep a stored prompt until it is unpinned or deleted, or let it expire again.

        Raises as `get`.
        """
        return self._connection.run(self._uploads.pin(id_, pinned))

    def delete(self, id_: str) -> None:
        """Delete a stored prompt. Raises as `get`."""
        self._connection.run(self._uploads.delete(id_))


class AsyncUploader:
    """`Uploader` for event loops, with the same arguments, errors and retries.

    Waiting does not block the loop; requests are sent in its threads.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        *,
        upload_from: int = UPLOAD_FROM,
        timeout: float = 60.0,
        max_retries: int = RETRIES,
    ) -> None:
        self.upload_from = upload_from
        self._connection = ApiClient(base_url, api_key, timeout)
        self._uploads = _Uploads(max_retries)

    async def ref(self, data: bytes) -> str:
        return await self._connection.run_async(self._uploads.ref("embeds", data))

    async def image_ref(self, data: bytes) -> str:
        return await self._connection.run_async(self._uploads.ref("image", data))

    def forget(self) -> None:
        self._uploads.forget()

    async def retrying(self, request: Callable[[], Awaitable[T]]) -> T:
        """As `Uploader.retrying`, of a request that is awaited."""
        try:
            return await request()
        except Exception as error:
            if not _is_lost(error):
                raise
            self.forget()
        return await request()

    async def upload(self, data: bytes, *, model: str | None = None) -> StoredEmbeds:
        return await self._connection.run_async(self._uploads.upload(data, model))

    async def upload_media(self, data: bytes, *, model: str | None = None) -> StoredImage:
        return await self._connection.run_async(self._uploads.upload_media(data, model))

    async def upload_vectors(self, data: bytes, *, model: str | None = None) -> list[str]:
        return await self._connection.run_async(self._uploads.upload_vectors(data, model))

    async def get(self, id_: str) -> Stored:
        return await self._connection.run_async(self._uploads.get(id_))

    async def pin(self, id_: str, pinned: bool = True) -> Stored:
        return await self._connection.run_async(self._uploads.pin(id_, pinned))

    async def delete(self, id_: str) -> None:
        await self._connection.run_async(self._uploads.delete(id_))
