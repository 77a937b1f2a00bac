"""The event of an error, in streams of images and of sound."""

import msgspec

from inlay.base.errors import ErrorBody


class StreamFailure(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="error"):
    """Event of an error that ends a stream."""

    error: dict[str, str | None]

    @classmethod
    def of(cls, body: ErrorBody) -> "StreamFailure":
        """Return the event of an error as clients see it."""
        return cls(error={"message": body.message, "type": body.type, "code": None})
