"""Lines of log, as text or as JSON, on standard error."""

import json
import logging
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Literal

FIELDS = "inlay_fields"
"""Attribute of a record that holds the fields of a structured line."""

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class TextLines(logging.Formatter):
    """A record as text, its fields after the message."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line, without what was raised."""
        line = super().formatMessage(record)
        for name, value in getattr(record, FIELDS, {}).items():
            line += f" {name}={value}"
        return line


class JsonLines(logging.Formatter):
    """A record as a JSON object on one line.

    `time` (UTC), `level`, `logger`, `message`, its fields, and `exception`.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "time": f"{when}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


FORMAT_VARIABLE = "INLAY_LOG_FORMAT"
"""Variable that says the form of the lines also where settings cannot be read."""


def configure(form: Literal["text", "json"], level: str = "info") -> None:
    """Configure logging: `level` and above to standard error, as text or JSON.

    In JSON what Python itself would write as text, warnings and what nobody caught, is a line too.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(TextLines(_TEXT) if form == "text" else JsonLines())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    if form == "json":
        logging.captureWarnings(True)
        sys.excepthook = _log_uncaught
    # Its lines about starting and stopping say what ours say.
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


def shows_json() -> bool:
    """Return True if lines are JSON."""
    return any(isinstance(each.formatter, JsonLines) for each in logging.getLogger().handlers)


def _log_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    logging.getLogger("inlay").critical("the process ends", exc_info=(kind, error, trace))


def log_fields(
    logger: logging.Logger, level: int, message: str, fields: Mapping[str, object]
) -> None:
    """Log `message` with `fields`.

    In JSON members of the object, in text after it as `name=value`.
    """
    logger.log(level, message, extra={FIELDS: fields})
