"""The report of a measurement: text as `vllm bench serve` lays it out, or JSON with its keys."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inlay.cli.process import columns
from inlay_tools.bench.metrics import TIMES, BenchFigures, percentile_name

_LABEL = 40
_RULE = 50

_TOTALS: Mapping[str, str] = {
    "completed": "Successful requests:",
    "failed": "Failed requests:",
    "duration": "Benchmark duration (s):",
    "total_input_tokens": "Total input tokens:",
    "total_output_tokens": "Total generated tokens:",
    "request_throughput": "Request throughput (req/s):",
    "request_goodput": "Request goodput (req/s):",
    "output_throughput": "Output token throughput (tok/s):",
    "max_output_tokens_per_s": "Peak output token throughput (tok/s):",
    "max_concurrent_requests": "Peak concurrent requests:",
    "total_token_throughput": "Total token throughput (tok/s):",
}
_COMPARED = (
    "request_throughput",
    "request_goodput",
    "output_throughput",
    "total_token_throughput",
)


@dataclass(frozen=True)
class Measured:
    """The rounds of one server."""

    url: str
    model: str
    metrics: BenchFigures

    def as_json(self) -> dict[str, Any]:
        """Totals and times by vLLM's keys, and errors with their counts."""
        return {
            "url": self.url,
            "model_id": self.model,
            **self.metrics.totals(),
            **self.metrics.times(),
            "errors": self.metrics.errors,
        }

    def of_round(self, index: int) -> dict[str, float]:
        """Figures of one round, those that are numbers."""
        metrics = self.metrics
        one = BenchFigures([metrics.rounds[index]], metrics.bounds, metrics.percentiles)
        return {
            name: value
            for name, value in {**one.totals(), **one.times()}.items()
            if value is not None
        }


def as_text(measured: Measured, configured: Mapping[str, float | None]) -> str:
    """The report of one server."""
    narrow = columns() < _RULE
    lines = [_rule(" Serving Benchmark Result ", "=", narrow)]
    totals = measured.metrics.totals()
    lines += [_line(_TOTALS[name], totals.pop(name), narrow) for name in ("completed", "failed")]
    if configured.get("max_concurrency") is not None:
        lines.append(_line("Maximum request concurrency:", configured["max_concurrency"], narrow))
    if configured.get("request_rate") is not None:
        rate = float(configured["request_rate"] or 0)
        lines.append(_line("Request rate configured (RPS):", rate, narrow))
    lines += [
        _line(_TOTALS[name], value, narrow) for name, value in totals.items() if value is not None
    ]
    times = measured.metrics.times()
    for key, (short, heading) in TIMES.items():
        if f"mean_{key}_ms" not in times:
            continue
        lines.append(_rule(heading, "-", narrow))
        for name, label in _statistics(key, measured.metrics.percentiles):
            lines.append(_line(f"{label} {short} (ms):", times[name], narrow))
    lines.append("=" * min(_RULE, columns()))
    return "\n".join(lines) + "\n"


def _statistics(key: str, percentiles: Sequence[float]) -> Iterator[tuple[str, str]]:
    yield f"mean_{key}_ms", "Mean"
    yield f"median_{key}_ms", "Median"
    for percentile in percentiles:
        name = percentile_name(percentile)
        yield f"{name}_{key}_ms", name.upper()


def _rule(title: str, fill: str, narrow: bool) -> str:
    return title.strip() if narrow else f"{title:{fill}^{_RULE}}"


def _line(label: str, value: float | int | None, narrow: bool) -> str:
    shown = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label}\n  {shown}" if narrow else f"{label:<{_LABEL}} {shown:<10}"


def compared(first: Measured, second: Measured) -> dict[str, dict[str, float]]:
    """Ratios of the second server to the first, by figure: overall, smallest and largest round."""
    whole = [{**each.metrics.totals(), **each.metrics.times()} for each in (first, second)]
    rounds = [
        (first.of_round(index), second.of_round(index))
        for index in range(len(first.metrics.rounds))
    ]
    ratios = {}
    for name in [*_COMPARED, *(name for name in whole[0] if name.endswith("_ms"))]:
        before, after = whole[0].get(name), whole[1].get(name)
        if not before or not after or name.startswith("std_"):
            continue
        each = [b[name] / a[name] for a, b in rounds if a.get(name) and b.get(name)]
        ratios[name] = {
            "ratio": after / before,
            "min": min(each, default=after / before),
            "max": max(each, default=after / before),
        }
    return ratios


def comparison(first: Measured, second: Measured) -> str:
    """A table of both servers, their ratios, and how far the rounds' ratios lie apart."""
    totals = [{**each.metrics.totals(), **each.metrics.times()} for each in (first, second)]
    rows = [("", "A", "B", "B/A", "rounds")]
    for name, ratio in compared(first, second).items():
        label = _TOTALS.get(name, "").rstrip(":") or _time_label(name)
        rows.append(
            (
                label,
                f"{totals[0][name]:.2f}",
                f"{totals[1][name]:.2f}",
                f"{ratio['ratio']:.3f}",
                f"{ratio['min']:.3f} to {ratio['max']:.3f}",
            )
        )
    head = [f"A  {first.url} {first.model}", f"B  {second.url} {second.model}"]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    if sum(widths) + 2 * len(widths) > columns():
        table = [
            f"{label}\n  {a}  {b}\n  {ratio} ({spread})" if label else "\n  A  B\n  B/A (rounds)"
            for label, a, b, ratio, spread in rows
        ]
    else:
        table = [
            "  ".join(
                [row[0].ljust(widths[0])]
                + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
            )
            for row in rows
        ]
    return "\n".join([*head, "", *table]) + "\n"


def _time_label(name: str) -> str:
    statistic, key, _ = name.split("_")
    word = statistic.upper() if statistic.startswith("p") else statistic.capitalize()
    return f"{word} {TIMES[key][0]} (ms)"
