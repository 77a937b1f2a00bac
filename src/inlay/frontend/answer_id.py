"""The `id` of an answer: random, or from vLLM's request field `request_id`."""

import re
import uuid

from inlay.errors import InvalidRequestError
from inlay.frontend.quoting import shown_value

_VISIBLE = re.compile(r"[!-~]{1,128}")


def answer_id(prefix: str, request_id: str | None) -> str:
    """Return `prefix` followed by `request_id`, or by a random id.

    Raises:
        InvalidRequestError: `request_id` is not 1 to 128 visible ASCII characters.
    """
    if request_id is None:
        return f"{prefix}{uuid.uuid4().hex}"
    if _VISIBLE.fullmatch(request_id) is None:
        raise InvalidRequestError(
            "request_id must have 1 to 128 visible ASCII characters, got "
            f"{shown_value(request_id)}",
            param="request_id",
        )
    return prefix + request_id


__all__ = ["answer_id"]
