"""The event of an error, in streams of images and of sound."""

from typing import Annotated

import msgspec

from inlay.base.errors import ErrorBody
from inlay.messages.fields import field


class StreamFailure(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="error"):
    """Event of an error that ends a stream."""

    error: Annotated[
        dict[str, str | None],
        field(
            "the error, in the form of other routes.",
            {"message": "the worker was lost", "type": "server_error"},
        ),
    ]

    @classmethod
    def of(cls, body: ErrorBody) -> "StreamFailure":
        """Return the event of an error as clients see it."""
        return cls(error={"message": body.message, "type": body.type, "code": None})
