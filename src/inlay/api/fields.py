"""Checks of fields that many routes have."""

import re
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import msgspec

from inlay.api.schema.unserved import reason_for, unserved
from inlay.base.errors import InlayError, InvalidRequestError, Path
from inlay.base.pace import yield_gil
from inlay.http.quoting import shown_at, shown_value
from inlay.http.server import Call

MAX_DEPTH = 64
"""Maximum levels of nesting in the free-form parts of a request."""

Named: TypeAlias = Callable[[InlayError], InlayError]
"""Returns an error that names fields as its client does."""

_VISIBLE = re.compile(r"[!-~]{1,128}")


@contextmanager
def own_names(names: Mapping[str, str], both: Collection[str] = ()) -> Iterator[Named]:
    """Make errors of a request that another API's code runs name the fields that its client sent.

    Yields what does so for an error that is not raised, as in a stream.

    Args:
        names: fields of the other API, and those they come from, their steps joined by dots and
            `*` for any index: `{"tools.*.function": "tools.*"}`. The first that fits counts.
        both: of these fields, which have other values there: a message has both names.
    """
    named = partial(in_own_names, names=names, both=both)
    try:
        yield named
    except InvalidRequestError as error:
        raise named(error) from None


def in_own_names(
    error: InlayError, names: Mapping[str, str], both: Collection[str] = ()
) -> InlayError:
    """Return an error that names fields as its client does, in its message too.

    Of the message those that are no English word; `names` and `both` are as of `own_names`.
    """
    words = {
        theirs: f"{theirs} (sent as {ours})" if theirs in both else ours
        for theirs, ours in names.items()
        if "_" in theirs and "." not in theirs
    }
    return error.mapped(partial(renamed, names)).worded(words)


def renamed(names: Mapping[str, str], path: Path) -> Path:
    """Return the field that the field at `path` of another API comes from."""
    for theirs, ours in names.items():
        steps = theirs.split(".")
        begin, rest = path[: len(steps)], path[len(steps) :]
        if ["*" if isinstance(step, int) else step for step in begin] == steps:
            indices = (step for step in begin if isinstance(step, int))
            return (*(next(indices) if step == "*" else step for step in ours.split(".")), *rest)
    return path


def check_unserved(request: msgspec.Struct) -> None:
    """Raise `InvalidRequestError` for the first field of `request` that is set and not served."""
    for name in unserved(type(request)):
        value = getattr(request, name)
        if value is None:
            continue
        reason = reason_for(type(request), name)
        if not reason.allows(value):
            raise InvalidRequestError(
                f"{name} is not supported: {reason.text}; got {shown_value(value)}", param=name
            )


def check_common(call: Call, request: Any) -> None:
    """Check what all requests for engines have: refused fields, `cache_salt`, `priority`.

    A request of `service_tier` "flex" is background work from here on.

    Raises `InvalidRequestError`.
    """
    check_unserved(request)
    call.background |= getattr(request, "service_tier", None) == "flex"
    if request.cache_salt == "":
        raise InvalidRequestError(
            "cache_salt must be a non-empty string if provided", param="cache_salt"
        )
    if request.priority and call.server.settings.scheduling_policy != "priority":
        raise InvalidRequestError(
            f"priority {request.priority} was asked for; this server serves first come, first "
            "served unless it is started with --scheduling-policy priority",
            param="priority",
        )


def check_depths(request: msgspec.Struct, *names: str) -> None:
    """Raise `InvalidRequestError` for a field that is nested deeper than `MAX_DEPTH`."""
    for name in names:
        value = getattr(request, name)
        if value is not None:
            check_depth(value, name)


def check_depth(value: object, param: str) -> None:
    """Raise `InvalidRequestError` when `value` is nested deeper than `MAX_DEPTH`."""
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        deeper: list[object] = []
        for item in level:
            yield_gil()
            if isinstance(item, dict):
                deeper.extend(child for child in item.values() if isinstance(child, dict | list))
            elif isinstance(item, list):
                deeper.extend(child for child in item if isinstance(child, dict | list))
        if not deeper:
            return
        level = deeper
    raise InvalidRequestError(f"{param} is nested more than {MAX_DEPTH} levels deep", param=param)


def string_at(item: Mapping[str, Any], field: str, where: str) -> str:
    """Return a field of an object at `where`. Raises `InvalidRequestError` if it is no string."""
    value = item.get(field)
    if not isinstance(value, str):
        raise InvalidRequestError(
            f"{where}.{field} must be a string, got {shown_at(item, field)}",
            param=f"{where}.{field}",
        )
    return value


def one_of(value: object, allowed: Collection[str], param: str) -> str | None:
    """Return a client's value of a field that has a few; None where it is null.

    Raises `InvalidRequestError` for any other value, of whatever JSON type.
    """
    if value is None or (isinstance(value, str) and value in allowed):
        return value
    raise InvalidRequestError(
        f"{param} must be one of {', '.join(allowed)}, got {shown_value(value)}", param=param
    )


def check_ids(ids: "list[int] | tuple[int, ...]", vocab_size: int, param: str) -> None:
    """Raise `InvalidRequestError` unless every id is in the vocabulary."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        bad = next(id_ for id_ in ids if not 0 <= id_ < vocab_size)
        raise InvalidRequestError(
            f"{param}: token id {bad} is out of vocabulary; ids go from 0 to {vocab_size - 1}",
            param=param,
        )


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
