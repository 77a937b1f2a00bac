"""Write docs/metrics.md from the metrics that a frontend registers."""

from collections.abc import Iterator
from pathlib import Path

from prometheus_client.core import Metric

from inlay.api.app import build_app
from inlay.http.metrics.collectors import build_metrics, file_metrics
from inlay.http.settings import FrontendSettings
from inlay.messages.digest import Secret
from inlay.router import Router
from inlay.store.settings import BatchSettings, StoreSettings
from inlay.transport.local import LocalPlane

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"

_INTRODUCTION = """\
# Metrics

    curl http://127.0.0.1:8000/metrics

What they are good for is in [Operations](operations.md#metrics). Made from the code by
`make reference`. Names that begin with `vllm:` mean what they mean in vLLM 0.33. A series appears
with what it counts; `process_*` are those of the frontend.

| name | type | |
|---|---|---|"""


def metrics() -> Iterator[Metric]:
    """Yield every metric of a frontend, without values of workers."""
    secret = Secret(bytes(32))
    app = build_app(
        Router(LocalPlane()),
        FrontendSettings(),
        secret=secret,
        store=StoreSettings().open(secret),
        batches=BatchSettings(batch_store="memory"),
    )
    app.server.metrics.add_certificate(lambda: None)
    app.server.show_metrics(lambda: build_metrics(""))
    app.server.show_metrics(lambda: file_metrics([]))
    yield from app.server.metrics.registry.collect()


def reference() -> str:
    """Return the page."""
    rows = {
        f"{one.name}_total"
        if one.type == "counter"
        else one.name: f"{one.type} | {one.documentation}"
        for one in metrics()
        if not one.name.startswith("process_")
    }
    lines = [f"| `{name}` | {rows[name]} |" for name in sorted(rows)]
    return "\n".join([_INTRODUCTION, *lines]) + "\n"
