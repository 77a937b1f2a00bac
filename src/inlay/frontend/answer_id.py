"""The `id` of an answer: drawn, or as the request names itself in vLLM's `request_id`."""

import re
import uuid

from inlay.errors import InvalidRequestError
from inlay.frontend.quoting import shown_value

_VISIBLE = re.compile(r"[!-~]{1,128}")


def answer_id(prefix: str, request_id: str | None) -> str:
    """`prefix` and the request's name for itself, or a drawn one.

    Raises:
        InvalidRequestError: the name is not 1 to 128 visible ASCII characters.
    """
    if request_id is None:
        return f"{prefix}{uuid.uuid4().hex}"
    if _VISIBLE.fullmatch(request_id) is None:
        raise InvalidRequestError(
            f"request_id must have 1 to 128 visible ASCII characters, got {shown_value(request_id)}",
            param="request_id",
        )
    return prefix + request_id


__all__ = ["answer_id"]
