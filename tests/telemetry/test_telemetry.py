"""Lines of log in both forms, and tracing where it is off or its parent makes no sense."""

import io
import json
import logging
import time
from collections.abc import Iterator

import pytest

from inlay.telemetry import Tracing
from inlay.telemetry.logs import JsonLines, TextLines, log_fields
from tests.telemetry.collector import collecting


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger("tests.telemetry")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    yield logger
    logger.handlers.clear()


def written(logger: logging.Logger, formatter: logging.Formatter) -> io.StringIO:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    logger.addHandler(handler)
    return stream


def test_a_line_is_one_object_whatever_is_in_it(logger: logging.Logger) -> None:
    stream = written(logger, JsonLines())
    log_fields(logger, logging.INFO, 'a "request"\nof two lines', {"id": "1\n2", "ms": 1.5})
    (line,) = stream.getvalue().splitlines()
    found = json.loads(line)
    assert (found["message"], found["id"], found["ms"]) == (
        'a "request"\nof two lines',
        "1\n2",
        1.5,
    )
    assert (found["level"], found["logger"]) == ("INFO", "tests.telemetry")
    assert found["time"].endswith("Z")


def test_an_exception_is_in_its_line(logger: logging.Logger) -> None:
    stream = written(logger, JsonLines())
    try:
        raise ValueError("no")
    except ValueError:
        logger.exception("failed %s", "here")
    found = json.loads(stream.getvalue())
    assert found["message"] == "failed here"
    assert "ValueError: no" in found["exception"]


def test_text_has_fields_after_the_message(logger: logging.Logger) -> None:
    stream = written(logger, TextLines("%(levelname)s %(message)s"))
    log_fields(logger, logging.INFO, "request", {"id": "r", "ms": 2})
    logger.info("plain %d", 1)
    assert stream.getvalue().splitlines() == ["INFO request id=r ms=2", "INFO plain 1"]


def test_without_an_endpoint_there_are_no_spans() -> None:
    assert Tracing.open(None, "none") is None


@pytest.mark.parametrize(
    "parent", ["", "00-zz-zz-01", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "x" * 9999, "é"]
)
def test_a_parent_that_makes_no_sense_begins_a_new_trace(parent: str) -> None:
    with collecting() as collector:
        tracing = Tracing.open(collector.url, "tests")
        assert tracing is not None
        tracing.begin("one", parent, "internal", time.time_ns()).end({"n": 1}, failed="some_error")
        tracing.close()
        ((service, span),) = collector.spans()
    assert (service, span.name, span.parent_span_id) == ("tests", "one", b"")
    assert span.status.code == 2
