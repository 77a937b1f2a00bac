"""Log line and spans of a finished request.

They hold counts and times, never text of requests or answers.
"""

import hashlib
import logging
import time

from inlay.base.errors import InlayError
from inlay.http.errors import ClientGone
from inlay.http.server import Call
from inlay.telemetry.logs import log_fields
from inlay.telemetry.tracing import PROVIDER, Value

_log = logging.getLogger("inlay.requests")

HTTP_500 = 500
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/embeddings": "embeddings",
    "/pooling": "embeddings",
}
"""`gen_ai.operation.name` of OpenTelemetry's list, by route; none fits the others."""

CLIENT_GONE = 499
"""Status in the log of a request whose client left, as in nginx."""


def begin_span(call: Call) -> None:
    """Begin the span of a request, within the client's span if it sends a `traceparent`."""
    tracing = call.server.tracing
    if tracing is not None:
        given = call.headers.get(b"traceparent")
        parent = None if given is None else given.decode("latin-1")
        call.span = tracing.begin(
            f"{call.scope['method']} {call.route}", parent, "server", time.time_ns()
        )


def log_request(call: Call, status: int, error: BaseException | None) -> None:
    """Log a finished request and end its span."""
    fields = _fields(call, status, error)
    if call.server.settings.log_requests:
        log_fields(_log, logging.DEBUG if call.quiet else logging.INFO, "request", fields)
    if call.span is not None:
        _end_span(call, fields, error)


def _fields(call: Call, status: int, error: BaseException | None) -> dict[str, Value]:
    fields: dict[str, Value] = {
        "id": call.request_id,
        "method": call.scope["method"],
        "route": call.route,
        "status": CLIENT_GONE if isinstance(error, ClientGone) else status,
    }
    if call.caller.tenant.id:
        fields["tenant"] = hashlib.blake2b(
            call.caller.tenant.id.encode(), digest_size=6
        ).hexdigest()
    if call.times is not None:
        fields |= call.times.log_fields()
    fields["ms"] = round((time.perf_counter() - call.began) * 1000, 3)
    kind = _kind(error)
    if kind is None:
        return fields
    # After the first event `status` is 200 whatever follows: the client got the error as an event.
    return fields | {"error" if error is not call.failed else "stream_error": kind}


def _kind(error: BaseException | None) -> str | None:
    if isinstance(error, InlayError):
        return error.code or error.type
    return None if error is None else type(error).__name__


def _end_span(call: Call, fields: dict[str, Value], error: BaseException | None) -> None:
    if call.span is None or call.server.tracing is None:
        return
    names = {
        "id": "inlay.request.id",
        "method": "http.request.method",
        "route": "http.route",
        "status": "http.response.status_code",
        "model": "gen_ai.request.model",
        "prompt_tokens": "gen_ai.usage.input_tokens",
        "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
        "output_tokens": "gen_ai.usage.output_tokens",
    }
    if call.sent is not None:
        now, clock = time.time_ns(), time.perf_counter()
        began, sent = (now - int((clock - at) * 1e9) for at in (call.began, call.sent))
        call.server.tracing.record("inlay.prepare", call.span.traceparent, began, sent, {})
    attributes = {names.get(name, f"inlay.{name}"): value for name, value in fields.items()}
    operation = _OPERATIONS.get(call.route)
    if operation is not None:
        attributes |= PROVIDER | {"gen_ai.operation.name": operation}
    if "model" in fields:
        attributes["gen_ai.response.model"] = fields["model"]
    status = fields["status"]
    at_fault = error is call.failed or not isinstance(status, int) or status >= HTTP_500
    call.span.end(attributes, failed=_kind(error), at_fault=at_fault)
