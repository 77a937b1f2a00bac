"""The Grafana dashboards that vLLM 0.33 publishes: `examples/observability` of its sources."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILES = sorted((Path(__file__).parent / "dashboards").glob("*.json"))

_CHOSEN = {
    "$__rate_interval": "1m",
    "$__interval": "1m",
    "$__range": "5m",
    "$model_name": "m",
    "$Deployment_id": "m",
}


def queries() -> Iterator[str]:
    """Every query of their panels, as Grafana sends it once the model `m` is chosen."""
    for file in FILES:
        yield from _of_panels(json.loads(file.read_text()))


def series() -> set[str]:
    """Names that the queries ask for, without `vllm:`."""
    return {name for query in queries() for name in re.findall(r"\bvllm:(\w+)", query)}


def _of_panels(within: dict[str, Any]) -> Iterator[str]:
    for panel in within.get("panels", ()):
        for target in panel.get("targets", ()):
            query = target["expr"]
            for variable, value in _CHOSEN.items():
                query = query.replace(variable, value)
            assert "$" not in query, query
            yield query
        yield from _of_panels(panel)
