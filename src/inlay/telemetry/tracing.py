"""Spans, sent over OTLP. OpenTelemetry is imported only where an endpoint is set.

A span's context crosses processes as W3C `traceparent` (https://www.w3.org/TR/trace-context/).
Names and attributes follow OpenTelemetry's conventions for HTTP and generative models; none has any
part of a prompt or an answer.
"""

import logging
import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from inlay.base import extras
from inlay.base.errors import InvalidRequestError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span as OtelSpan

log = logging.getLogger(__name__)

Value: TypeAlias = str | int | float | bool | list[str]

PROVIDER = {"gen_ai.provider.name": "inlay"}
"""On every span about a model, https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/."""
Kind: TypeAlias = Literal["server", "internal", "consumer"]

_traceparent = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")


class Span:
    """One span that has begun.

    Attributes:
        traceparent: what names it to other processes.
    """

    def __init__(self, span: "OtelSpan", traceparent: str) -> None:
        self._span = span
        self.traceparent = traceparent

    def end(
        self, attributes: Mapping[str, Value], *, failed: str | None = None, at_fault: bool = True
    ) -> None:
        """End it now.

        Args:
            attributes: of the span.
            failed: the kind of error it ended with, if it did.
            at_fault: False if the error is the client's: the status of the span then stays unset,
                as OpenTelemetry says of a server's 4xx.
        """
        from opentelemetry.trace import Status, StatusCode

        self._span.set_attributes(attributes)
        if failed is not None:
            self._span.set_attribute("error.type", failed)
            if at_fault:
                self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()


class Tracing:
    """Makes spans. Use `open`."""

    def __init__(self, provider: "TracerProvider") -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("inlay")

    @classmethod
    def open(cls, endpoint: str | None, service: str) -> "Tracing | None":
        """Spans sent to `endpoint` in the background; None where there is none.

        Args:
            endpoint: takes OTLP over HTTP. Headers, sampling and the like are read from
                OpenTelemetry's own variables.
            service: name of this process among the spans, unless OTEL_SERVICE_NAME says another.

        Raises:
            InvalidRequestError: OpenTelemetry is not installed.
        """
        if endpoint is None:
            return None
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise InvalidRequestError(
                f"--otlp-traces-endpoint needs OpenTelemetry: {extras.install('otel')} ({error})",
                param="otlp_traces_endpoint",
            ) from error
        named = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": service}
        provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        return cls(provider)

    def begin(self, name: str, parent: str | None, kind: Kind, began: int) -> Span:
        """Begin a span at `began`, in ns of Unix time.

        `parent` is a `traceparent`; an invalid one is ignored.
        """
        return self._span(name, parent, began, kind)

    def record(
        self, name: str, parent: str | None, began: int, ended: int, attributes: Mapping[str, Value]
    ) -> None:
        """A span that is over, from `began` to `ended` in ns of Unix time."""
        span = self._span(name, parent, began, "internal")
        span._span.set_attributes(attributes)
        span._span.end(ended)

    def _span(self, name: str, parent: str | None, began: int, kind: Kind) -> Span:
        from opentelemetry.trace import SpanKind

        span = self._tracer.start_span(
            name, context=_context(parent), kind=SpanKind[kind.upper()], start_time=began
        )
        context = span.get_span_context()
        return Span(
            span, f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
        )

    def close(self) -> None:
        """Send what is left, for some seconds at most. Blocks."""
        self._provider.force_flush(3000)
        self._provider.shutdown()


def _context(parent: str | None) -> "Context":
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    if parent is None or _traceparent.fullmatch(parent) is None:
        return Context()
    carrier: dict[str, Any] = {"traceparent": parent}
    return TraceContextTextMapPropagator().extract(carrier, Context())
