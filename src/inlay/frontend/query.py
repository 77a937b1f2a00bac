"""Query parameters of a URL."""

from urllib.parse import parse_qs

from inlay.errors import InvalidRequestError
from inlay.frontend.server import Call

_FIELDS = 16


def query_of(call: Call, *names: str) -> dict[str, list[str]]:
    """Return the values of the parameters `names`, as far as they are given.

    Raises:
        InvalidRequestError: the query cannot be parsed, or has another parameter.
    """
    query: bytes = call.scope.get("query_string", b"")
    try:
        found = parse_qs(query.decode("latin-1"), max_num_fields=_FIELDS)
    except ValueError as error:
        raise InvalidRequestError(f"the query cannot be read: {error}", param="query") from error
    unknown = next((name for name in found if name not in names), None)
    if unknown is not None:
        allowed = ", ".join(names) or "none"
        raise InvalidRequestError(
            f"unknown query parameter {unknown[:40]!r}; allowed: {allowed}", param="query"
        )
    return found
