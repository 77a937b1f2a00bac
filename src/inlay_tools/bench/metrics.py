"""Figures of a measurement, by the names and definitions of `vllm bench serve`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from inlay.cli.command import UsageError
from inlay_tools.bench.load import SentRequest

TIMES: Mapping[str, tuple[str, str]] = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
"""Key of a time to its name and its heading."""

BOUNDABLE = ("ttft", "tpot", "e2el")


def bounds_of(words: Iterable[str], names: Sequence[str], flag: str) -> dict[str, float]:
    """Bounds by metric, in seconds, from words such as `ttft:200`, in milliseconds.

    Raises:
        UsageError: none of these names, or no such number.
    """
    bounds = {}
    for word in words:
        name, _, value = word.partition(":")
        try:
            milliseconds = float(value)
        except ValueError:
            milliseconds = 0.0
        if name not in names or not 0 < milliseconds < float("inf"):
            raise UsageError(
                f"{flag} takes {', '.join(names)} with milliseconds, as ttft:200, got {word}"
            )
        bounds[name] = milliseconds / 1000
    return bounds


@dataclass(frozen=True)
class Round:
    """Requests that were sent together.

    Attributes:
        sent: all of them.
        duration: seconds from the first to the end of the last.
    """

    sent: Sequence[SentRequest]

    @property
    def duration(self) -> float:
        """Seconds from the start to the end of the last answer."""
        ended = [each.ended for each in self.sent if each.error is None]
        began = min(each.due for each in self.sent)
        return max(ended, default=began) - began


@dataclass(frozen=True)
class BenchFigures:
    """The figures of one or more rounds.

    Attributes:
        rounds: one at least.
        bounds: of goodput, by metric, in seconds.
        percentiles: to report.
    """

    rounds: Sequence[Round]
    bounds: Mapping[str, float]
    percentiles: Sequence[float]

    @property
    def good(self) -> list[SentRequest]:
        """Requests that were answered."""
        return [each for round_ in self.rounds for each in round_.sent if each.error is None]

    @property
    def errors(self) -> dict[str, int]:
        """Reasons of failures, with how many failed for each."""
        found: dict[str, int] = {}
        for round_ in self.rounds:
            for each in round_.sent:
                if each.error is not None:
                    found[each.error] = found.get(each.error, 0) + 1
        return found

    @property
    def lateness(self) -> float:
        """Largest delay of a request that was this machine's fault, in seconds.

        Only without a bound of concurrency: with one, requests wait for others.
        """
        return max((each.started - each.due for each in self.good), default=0.0)

    def seconds(self, key: str) -> list[float]:
        """All values of one of `TIMES`."""
        good = self.good
        if key == "ttft":
            return [each.ttft for each in good]
        if key == "tpot":
            return [tpot for each in good if (tpot := each.tpot) is not None]
        if key == "itl":
            return [gap for each in good for gap in each.itl]
        return [each.latency for each in good]

    def goodput(self) -> float | None:
        """Requests per second that keep all bounds, or None without any."""
        if not self.bounds:
            return None
        kept = sum(
            all(_value(each, key) <= bound for key, bound in self.bounds.items())
            for each in self.good
        )
        return _per_second(kept, self._duration)

    @property
    def _duration(self) -> float:
        return sum(round_.duration for round_ in self.rounds)

    def totals(self) -> dict[str, float | int | None]:
        """Counts and rates, by vLLM's keys; None where nothing was bounded."""
        good = self.good
        inputs = sum(each.input_tokens for each in good)
        outputs = sum(each.output_tokens for each in good)
        duration = self._duration
        return {
            "duration": duration,
            "completed": len(good),
            "failed": sum(self.errors.values()),
            "total_input_tokens": inputs,
            "total_output_tokens": outputs,
            "request_throughput": _per_second(len(good), duration),
            "request_goodput": self.goodput(),
            "output_throughput": _per_second(outputs, duration),
            "max_output_tokens_per_s": max(
                (_busiest(round_.sent) for round_ in self.rounds), default=0.0
            ),
            "total_token_throughput": _per_second(inputs + outputs, duration),
            "max_concurrent_requests": max(
                (_peak(round_.sent) for round_ in self.rounds), default=0
            ),
        }

    def times(self) -> dict[str, float]:
        """Mean, median, deviation and percentiles of each of `TIMES`, in ms, by vLLM's keys."""
        found: dict[str, float] = {}
        for key in TIMES:
            values = np.array(self.seconds(key)) * 1000
            if not len(values):
                continue
            found[f"mean_{key}_ms"] = float(values.mean())
            found[f"median_{key}_ms"] = float(np.median(values))
            found[f"std_{key}_ms"] = float(values.std())
            for percentile in self.percentiles:
                name = percentile_name(percentile)
                found[f"{name}_{key}_ms"] = float(np.percentile(values, percentile))
        return found


def percentile_name(percentile: float) -> str:
    """`p99`, `p99.9`."""
    return f"p{percentile:g}"


def _value(sent: SentRequest, key: str) -> float:
    if key == "ttft":
        return sent.ttft
    return sent.latency if key == "e2el" else (sent.tpot or 0.0)


def _per_second(count: float, duration: float) -> float:
    return count / duration if duration > 0 else 0.0


def _peak(sent: Sequence[SentRequest]) -> int:
    """Largest number of requests that were answered at one time."""
    changes = [(each.started, 1) for each in sent if each.error is None]
    changes += [(each.ended, -1) for each in sent if each.error is None]
    return max(accumulate(change for _, change in sorted(changes)), default=0)


def _busiest(sent: Sequence[SentRequest]) -> float:
    """Output tokens of the second with most; those of an event count alike for a request."""
    good = [each for each in sent if each.error is None and each.came]
    if not good:
        return 0.0
    began = min(each.started for each in good)
    seconds = np.concatenate([np.asarray(each.came) - began for each in good]).astype(np.int64)
    tokens = np.concatenate(
        [np.full(len(each.came), each.output_tokens / len(each.came)) for each in good]
    )
    return float(np.bincount(seconds, weights=tokens).max())
