"""What a process tells those who run it: lines of log, and spans.

Neither ever holds what a prompt or an answer says.
"""

from inlay.telemetry.logs import configure
from inlay.telemetry.settings import TelemetrySettings
from inlay.telemetry.tracing import Span, Tracing

__all__ = ["Span", "TelemetrySettings", "Tracing", "configure"]
