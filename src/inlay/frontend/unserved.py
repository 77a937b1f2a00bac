"""Refusal of fields that are known and not served."""

import msgspec

from inlay.api.openai.unserved import UNSERVED, unserved
from inlay.errors import InvalidRequestError
from inlay.frontend.quoting import shown_value


def check_unserved(request: msgspec.Struct) -> None:
    """Raise `InvalidRequestError` for the first field of `request` that is set and not served."""
    for name in unserved(type(request)):
        value, reason = getattr(request, name), UNSERVED[name]
        if not reason.allows(value):
            raise InvalidRequestError(
                f"{name} is not supported: {reason.text}; got {shown_value(value)}", param=name
            )


__all__ = ["check_unserved"]
