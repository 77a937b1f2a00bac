"""Forms: text fields and one file, in any order, as OpenAI's clients send them.

The file goes to a spool as it arrives: openai-node sends it before the fields that say what it is.
"""

import errno
from typing import BinaryIO

from inlay.base.errors import BodyTooLargeError, InvalidRequestError, OverloadedError
from inlay.http.bodies.framing import Framing, PartHead
from inlay.tensors.tensor import quoted

MAX_FIELD_BYTES = 64 * 1024
MAX_FIELDS = 128
MAX_TEXT_BYTES = 1024 * 1024
"""Maximum bytes of all fields but the file."""

_MAX_FILENAME = 255
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class FieldForm:
    """Parser of one body: `feed` each piece, then `close`.

    Args:
        boundary: from the content type.
        file: name of the field that is a file; sent as any other field it is one too.
        spool: the file is written there.
        max_file_bytes: of the file.
        flag: sets that limit, for its error.

    Attributes:
        file_bytes: bytes of the file; None while there was none.
        filename: as the client calls it, without directories; "" if it does not say.

    Raises:
        InvalidRequestError: no usable boundary.
    """

    def __init__(
        self, boundary: str | None, file: str, spool: BinaryIO, *, max_file_bytes: int, flag: str
    ) -> None:
        self.file_bytes: int | None = None
        self.filename = ""
        self._fields: list[tuple[str, str]] = []
        self._framing = Framing(boundary, self)
        self._file, self._spool = file, spool
        self._max, self._flag = max_file_bytes, flag
        self._name = ""
        self._text = bytearray()
        self._all_text = 0

    def feed(self, piece: bytes | bytearray) -> None:
        """Read the next piece.

        Raises:
            InvalidRequestError: bad framing, too many fields, two files, a file in another field.
            BodyTooLargeError: a field or the file is over its limit.
            OverloadedError: the spool's disk is full.
        """
        self._framing.feed(piece)

    def close(self) -> None:
        """Check that the body is complete. Raises `InvalidRequestError`."""
        self._framing.close()

    def text(self, name: str) -> str | None:
        """Return the value of a field; None if there is none.

        Raises:
            InvalidRequestError: it was given twice.
        """
        values = [value for key, value in self._fields if key == name]
        if len(values) > 1:
            raise InvalidRequestError(f"{name} was given {len(values)} times", param=name)
        return values[0] if values else None

    def many(self, name: str) -> list[str]:
        """Return the values of a field that may be repeated, as `name` or as `name[]`."""
        return [value for key, value in self._fields if key in (name, f"{name}[]")]

    def group(self, name: str) -> dict[str, str]:
        """Return the values of `name[KEY]` by key. Raises as `text`."""
        keys = dict.fromkeys(
            key[len(name) + 1 : -1]
            for key, _ in self._fields
            if key.startswith(f"{name}[") and key.endswith("]") and key != f"{name}[]"
        )
        return {key: self.text(f"{name}[{key}]") or "" for key in keys}

    def begin(self, head: PartHead) -> None:
        """Begin a part; called by the framing, as the others below."""
        self._name = head.name
        if head.name == self._file:
            if self.file_bytes is not None:
                raise InvalidRequestError(f"the body has two files {self._file!r}", param=head.name)
            self.file_bytes = 0
            # Browsers once sent whole paths.
            tail = (head.filename or "").replace("\\", "/").rpartition("/")[2]
            self.filename = tail[-_MAX_FILENAME:]
        elif head.filename is not None:
            raise InvalidRequestError(
                f"the body has a file in its field {quoted(head.name)}; the file is {self._file!r}",
                param=head.name,
            )
        elif len(self._fields) >= MAX_FIELDS:
            raise InvalidRequestError(f"the body has more than {MAX_FIELDS} fields")

    def write(self, data: memoryview) -> None:
        """Take the next bytes of a part."""
        if self._name != self._file:
            if len(self._text) + len(data) > MAX_FIELD_BYTES:
                raise BodyTooLargeError(
                    f"field {quoted(self._name)} is over the limit of {MAX_FIELD_BYTES} bytes",
                    param=self._name,
                )
            self._all_text += len(data)
            if self._all_text > MAX_TEXT_BYTES:
                raise BodyTooLargeError(
                    f"the fields of the form are over the limit of {MAX_TEXT_BYTES} bytes"
                )
            self._text += data
            return
        self.file_bytes = (self.file_bytes or 0) + len(data)
        if self.file_bytes > self._max:
            raise BodyTooLargeError(
                f"{self._file} is over the limit of {self._max} bytes ({self._flag})",
                param=self._file,
            )
        try:
            self._spool.write(data)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            raise OverloadedError("the server has no room for the file", retry_after=60) from error

    def end(self) -> None:
        """End a part."""
        if self._name == self._file:
            return
        text, self._text = bytes(self._text), bytearray()
        try:
            self._fields.append((self._name, text.decode("utf-8")))
        except UnicodeDecodeError as error:
            raise InvalidRequestError(
                f"field {quoted(self._name)} is not UTF-8", param=self._name
            ) from error

    def finish(self) -> None:
        """Check that there was a file."""
        if self.file_bytes is None:
            raise InvalidRequestError(
                f"the form has no file; send it as its field {self._file!r}", param=self._file
            )
