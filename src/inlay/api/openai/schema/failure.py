"""The event of an error, in streams of images and of sound."""

import msgspec

from inlay.errors import InlayError


class StreamFailure(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="error"):
    """Event of an error that ends a stream."""

    error: dict[str, str | None]

    @classmethod
    def of(cls, error: InlayError) -> "StreamFailure":
        """Return the event of `error`."""
        return cls(error={"message": error.message, "type": error.type, "code": None})
