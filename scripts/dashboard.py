"""Write the Grafana dashboard of a fleet: `make reference`.

`ROWS` is all of it: a row's title and its panels, each a title, a unit and queries with legends.
tests/deploy asks a real Prometheus, which scrapes a real fleet, every one of the queries.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

FILE = Path(__file__).parents[1] / "deploy" / "helm" / "inlay" / "files" / "dashboard.json"

_MODEL = 'namespace=~"$namespace", model_name=~"$model"'
_SPACE = 'namespace=~"$namespace"'
_WORKER = "namespace, model_name, engine"


class Panel(NamedTuple):
    """A graph.

    Attributes:
        title: above it.
        unit: Grafana's name of the unit.
        queries: PromQL and legend of each line.
        about: what it means when it moves.
    """

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    about: str = ""


def _of_workers(metric: str) -> str:
    """A worker's series once, although every frontend shows it."""
    return f"max by ({_WORKER}) ({metric}{{{_MODEL}}})"


def _rate_of_workers(metric: str) -> str:
    return f"max by ({_WORKER}) (rate({metric}{{{_MODEL}}}[$__rate_interval]))"


def _rate(metric: str, by: str, within: str = _MODEL) -> str:
    return f"sum by ({by}) (rate({metric}{{{within}}}[$__rate_interval]))"


def _quantiles(metric: str) -> tuple[tuple[str, str], ...]:
    buckets = _rate(f"{metric}_bucket", "model_name, le")
    return tuple(
        (f"histogram_quantile({part}, {buckets})", f"{{{{model_name}}}} p{part * 100:g}")
        for part in (0.5, 0.95, 0.99)
    )


ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "What clients see",
        (
            Panel(
                "Answers by status",
                "reqps",
                ((_rate("inlay:http_requests_total", "status", _SPACE), "{{status}}"),),
                "429: a client over its quota. 503: full, draining, or no worker.",
            ),
            Panel("Time to first token", "s", _quantiles("vllm:time_to_first_token_seconds")),
            Panel("Between tokens", "s", _quantiles("vllm:inter_token_latency_seconds")),
            Panel("Whole requests", "s", _quantiles("vllm:e2e_request_latency_seconds")),
            Panel(
                "Tokens",
                "short",
                (
                    (_rate("vllm:prompt_tokens_total", "model_name"), "{{model_name}} prompt"),
                    (
                        _rate("vllm:prompt_tokens_cached_total", "model_name"),
                        "{{model_name}} cached",
                    ),
                    (_rate("vllm:generation_tokens_total", "model_name"), "{{model_name}} output"),
                ),
            ),
        ),
    ),
    (
        "Queues and routing",
        (
            Panel(
                "Waiting in frontends",
                "short",
                (
                    (
                        f"sum by (model_name) (inlay:router_requests_waiting{{{_MODEL}}})",
                        "{{model_name}}",
                    ),
                ),
                "All workers of the model are full.",
            ),
            Panel(
                "Running and waiting in workers",
                "short",
                (
                    (_of_workers("vllm:num_requests_running"), "{{engine}} running"),
                    (_of_workers("vllm:num_requests_waiting"), "{{engine}} waiting"),
                ),
            ),
            Panel(
                "Sent on to another worker",
                "reqps",
                (
                    (
                        _rate("inlay:router_decisions_total", "model_name, attempt"),
                        "{{model_name}} {{attempt}}",
                    ),
                ),
                "further: a worker died or was cut off, and the request goes on elsewhere.",
            ),
            Panel(
                "Blocks found at the chosen worker",
                "percentunit",
                (
                    (
                        _rate("inlay:router_hit_blocks_total", "model_name")
                        + " / "
                        + _rate("inlay:router_blocks_total", "model_name"),
                        "{{model_name}}",
                    ),
                ),
            ),
            Panel(
                "Held by frontends",
                "bytes",
                ((f"sum by (instance) (inlay:held_bytes{{{_SPACE}}})", "{{instance}}"),),
                "Bodies and embeddings, against --max-inflight-bytes.",
            ),
            Panel(
                "Requests under way",
                "short",
                ((f"sum by (instance) (inlay:requests_under_way{{{_SPACE}}})", "{{instance}}"),),
            ),
        ),
    ),
    (
        "Workers",
        (
            Panel(
                "Well",
                "short",
                ((f"min by ({_WORKER}) (inlay:worker_well{{{_MODEL}}})", "{{engine}}"),),
            ),
            Panel(
                "Missing, and NATS",
                "short",
                (
                    (f"max(inlay:workers_missing{{{_SPACE}}})", "workers missing"),
                    (f"min(inlay:discovery_reachable{{{_SPACE}}})", "NATS reachable"),
                ),
            ),
            Panel(
                "Share of each set of weights",
                "percentunit",
                (
                    (
                        f"max by (model_name, weights_id, dtype) (inlay:weights_share{{{_MODEL}}})",
                        "{{model_name}} {{weights_id}} {{dtype}}",
                    ),
                ),
                "Two of one model: it is being changed.",
            ),
            Panel(
                "Builds of frontends",
                "short",
                (
                    (
                        f"count by (version, build) (inlay:build_info{{{_SPACE}}})",
                        "{{version}} {{build}}",
                    ),
                ),
            ),
            Panel(
                "KV cache in use",
                "percentunit",
                ((_of_workers("vllm:kv_cache_usage_perc"), "{{engine}}"),),
            ),
            Panel(
                "Positions found in the prefix cache",
                "percentunit",
                (
                    (
                        _rate_of_workers("vllm:prefix_cache_hits_total")
                        + " / "
                        + _rate_of_workers("vllm:prefix_cache_queries_total"),
                        "{{engine}}",
                    ),
                ),
            ),
            Panel(
                "Positions computed",
                "short",
                ((_rate_of_workers("inlay:engine_positions_total"), "{{engine}}"),),
            ),
            Panel("Steps", "ops", ((_rate_of_workers("inlay:engine_steps_total"), "{{engine}}"),)),
            Panel(
                "Preemptions",
                "ops",
                ((_rate_of_workers("vllm:num_preemptions_total"), "{{engine}}"),),
            ),
            Panel(
                "Duration of the last probe",
                "s",
                ((_of_workers("inlay:engine_probe_seconds"), "{{engine}}"),),
            ),
            Panel(
                "Asleep",
                "short",
                (
                    (
                        f"sum by (sleep_state) (max by (engine, sleep_state) (vllm:engine_sleep_state{{{_MODEL}}}))",
                        "{{sleep_state}}",
                    ),
                ),
            ),
        ),
    ),
    (
        "Embeddings",
        (
            Panel(
                "Vectors in prompts",
                "short",
                ((_rate("inlay:prompt_embeds_rows_total", "model_name"), "{{model_name}}"),),
            ),
            Panel(
                "Bytes of embeddings read",
                "Bps",
                ((_rate("inlay:prompt_embeds_bytes_total", "model_name"), "{{model_name}}"),),
            ),
            Panel(
                "Embeddings refused",
                "reqps",
                ((_rate("inlay:prompt_embeds_rejected_total", "reason", _SPACE), "{{reason}}"),),
            ),
            Panel(
                "Stored prompts",
                "bytes",
                ((f"max by (tier) (inlay:prompt_store_bytes{{{_SPACE}}})", "{{tier}}"),),
            ),
            Panel(
                "Uses of stored prompts",
                "reqps",
                (
                    (
                        f"sum(rate(inlay:prompt_store_hits_total{{{_SPACE}}}[$__rate_interval]))",
                        "from memory",
                    ),
                    (
                        f"sum(rate(inlay:prompt_store_fetches_total{{{_SPACE}}}[$__rate_interval]))",
                        "from NATS",
                    ),
                    (
                        f"sum(rate(inlay:prompt_store_misses_total{{{_SPACE}}}[$__rate_interval]))",
                        "not found",
                    ),
                    (
                        f"sum(rate(inlay:prompt_store_evictions_total{{{_SPACE}}}[$__rate_interval]))",
                        "evicted",
                    ),
                ),
            ),
        ),
    ),
)


def queries() -> Iterator[str]:
    """Every query, as Grafana sends it with all models chosen."""
    for _, panels in ROWS:
        for panel in panels:
            for query, _ in panel.queries:
                yield (
                    query.replace("$__rate_interval", "1m")
                    .replace("$namespace", ".*")
                    .replace("$model", ".*")
                )


def dashboard() -> str:
    """The file's text."""
    placed: list[dict[str, Any]] = []
    top = 0
    for title, panels in ROWS:
        placed.append(
            {"type": "row", "title": title, "collapsed": False, "panels": [], "id": len(placed) + 1}
            | {"gridPos": {"x": 0, "y": top, "w": 24, "h": 1}}
        )
        for index, panel in enumerate(panels):
            place = {"x": index % 3 * 8, "y": top + 1 + index // 3 * 8, "w": 8, "h": 8}
            placed.append(_panel(panel, len(placed) + 1, place))
        top += 1 + -(-len(panels) // 3) * 8
    whole = {
        "title": "inlay",
        "uid": "inlay-fleet",
        "tags": ["inlay"],
        "schemaVersion": 39,
        "timezone": "browser",
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {
                    "name": "source",
                    "label": "Prometheus",
                    "type": "datasource",
                    "query": "prometheus",
                },
                _variable("namespace", "label_values(inlay:requests_under_way, namespace)"),
                _variable("model", "label_values(inlay:router_requests_waiting, model_name)"),
            ]
        },
        "panels": placed,
    }
    return json.dumps(whole, indent=1) + "\n"


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "id": number,
        "title": panel.title,
        "description": panel.about,
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": query, "legendFormat": legend}
            for index, (query, legend) in enumerate(panel.queries)
        ],
    }


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "query": query,
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }


def main() -> None:
    """Write the file."""
    FILE.write_text(dashboard(), encoding="utf-8")


if __name__ == "__main__":
    main()
