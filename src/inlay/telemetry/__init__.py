"""Logs and OpenTelemetry spans of a process.

Neither ever contains text, tokens or embeddings of a prompt or an answer.
"""

from inlay.telemetry.logs import configure
from inlay.telemetry.settings import TelemetrySettings
from inlay.telemetry.tracing import Span, Tracing

__all__ = ["Span", "TelemetrySettings", "Tracing", "configure"]
