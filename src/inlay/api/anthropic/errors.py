"""Errors in Anthropic's form."""

from collections.abc import Mapping

from inlay.api.anthropic.schema import ErrorDetail, Failure
from inlay.base.errors import InlayError
from inlay.http.errors import ErrorForm, shown

_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Types of errors by status; of others, `invalid_request_error` below 500 and else `api_error`."""


def failure(error: InlayError, request_id: str) -> Failure:
    """Return an error as a body or an event."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    body = shown(error)
    # This form has no field for the place.
    named = body.param is None or body.param in body.message
    message = body.message if named else f"{body.param}: {body.message}"
    return Failure(ErrorDetail(kind, message), request_id)


ANTHROPIC = ErrorForm(Failure, failure, b"request-id")
