"""Settings of logs and traces, the same for every process of a command."""

from typing import Literal

from pydantic import BaseModel, Field


class TelemetrySettings(BaseModel, frozen=True, defer_build=True):
    """Settings of logs and traces."""

    log_format: Literal["text", "json"] = "text"
    """Lines of log as text, or each a JSON object."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least that is logged."""
    otlp_traces_endpoint: str | None = Field(default=None, pattern="^https?://")
    """URL that takes OpenTelemetry traces over HTTP, such as http://localhost:4318/v1/traces; needs
    the extra otel. None are made unless set."""
