"""Logs and OpenTelemetry spans of a process.

Neither ever contains text, tokens or embeddings of a prompt or an answer.
"""

from inlay.telemetry.logs import configure, shows_json
from inlay.telemetry.settings import TelemetrySettings
from inlay.telemetry.tracing import PROVIDER, Span, Tracing

__all__ = ["PROVIDER", "Span", "TelemetrySettings", "Tracing", "configure", "shows_json"]
