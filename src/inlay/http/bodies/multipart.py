"""Multipart bodies of requests: JSON, then the tensor files it names.

Every byte of a file is written once, to the memory its tensor is read from.
"""

from inlay.base.errors import BodyTooLargeError, InvalidRequestError
from inlay.http.bodies.framing import Framing, PartHead, refused
from inlay.http.bodies.memory import Memory, Room, private
from inlay.messages.prompt import Buffer
from inlay.tensors import ReadLimits, check_size
from inlay.tensors.tensor import quoted

REQUEST = "request"
"""Name of the first part."""

MAX_REQUEST_BYTES = 1024 * 1024
MAX_FILES = 128
"""Maximum files in one body."""


class Form:
    """Parser of one body: `feed` each piece, then `close`.

    Args:
        boundary: from the content type.
        declared: bytes of the body, if known.
        limits: of each file.
        room: gives memory for files, if the body's size is known.

    Attributes:
        request: the first part, once complete.
        parts: complete files, by name.

    Raises:
        InvalidRequestError: no usable boundary.
    """

    def __init__(
        self, boundary: str | None, declared: int | None, limits: ReadLimits, room: Room = private
    ) -> None:
        self.request = b""
        self.parts: dict[str, Buffer] = {}
        self._framing = Framing(boundary, self)
        self._declared = declared
        self._limits = limits
        self._room = room
        self._name: str | None = None
        self._data = Memory()

    @property
    def size(self) -> int:
        """Bytes so far."""
        return self._framing.size

    def feed(self, piece: bytes | bytearray) -> None:
        """Read the next piece.

        Raises:
            InvalidRequestError: bad framing; a missing, double or unnamed part; too many parts, or
                too long a header.
            BodyTooLargeError: the request is over its limit.
            EmbeddingsError: a file is over the limit.
        """
        self._framing.feed(piece)

    def close(self) -> None:
        """Check that the body is complete. Raises `InvalidRequestError`."""
        self._framing.close()

    def begin(self, head: PartHead) -> None:
        """Begin a part; called by the framing, as the others below."""
        name = head.name
        if self._name is None:
            if name != REQUEST:
                raise refused(
                    f"its first part is {quoted(name)}; it must be {REQUEST!r}, the request as JSON"
                )
            limit = MAX_REQUEST_BYTES
        else:
            if name == REQUEST or name in self.parts:
                raise InvalidRequestError(
                    f"the body has two parts named {quoted(name)}", param=name
                )
            if len(self.parts) >= MAX_FILES:
                raise InvalidRequestError(f"the body has more than {MAX_FILES} files")
            limit = self._limits.max_bytes
        # The rest of the body bounds the part; unused memory is never written to.
        left = None if self._declared is None else max(self._declared - head.position, 0)
        room = private if name == REQUEST else self._room
        self._data = Memory(None if left is None else min(left, limit), room)
        self._name = name

    def write(self, data: memoryview) -> None:
        """Take the next bytes of a part."""
        size = len(self._data) + len(data)
        if self._name == REQUEST:
            if size > MAX_REQUEST_BYTES:
                raise BodyTooLargeError(
                    f"part {REQUEST!r} is over the limit of {MAX_REQUEST_BYTES} bytes",
                    param=REQUEST,
                )
        elif size > self._limits.max_bytes:
            check_size(size, limits=self._limits)
        self._data.write(data)

    def end(self) -> None:
        """End a part."""
        if self._name == REQUEST:
            self.request = bytes(self._data.buffer().view)
        elif self._name is not None:
            self.parts[self._name] = self._data.buffer()

    def finish(self) -> None:
        """Check that there was a request."""
        if self._name is None:
            raise refused(f"it has no part named {REQUEST!r}")
