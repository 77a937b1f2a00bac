"""The event of an error, in streams of images and of sound."""

import msgspec

from inlay.errors import InlayError
from inlay.http.errors import shown


class StreamFailure(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="error"):
    """Event of an error that ends a stream."""

    error: dict[str, str | None]

    @classmethod
    def of(cls, error: InlayError) -> "StreamFailure":
        """Return the event of `error`."""
        body = shown(error)
        return cls(error={"message": body.message, "type": body.type, "code": None})
