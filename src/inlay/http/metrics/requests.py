"""Metrics of a frontend, under vLLM's names where the meaning is the same."""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import cache
from itertools import accumulate
from typing import NamedTuple

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from inlay.base.errors import EmbeddingsError, InlayError

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0,
    160.0,
)  # fmt: skip
_CHOICES = (1, 2, 5, 10, 20)
_LENGTHS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)


class _Intervals:
    """Intervals between the tokens of one model."""

    __slots__ = ("counts", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self.counts = [0] * (len(_SECONDS) + 1)

    def observe(self, mean: float) -> None:
        """Count some intervals of one write as one, of their mean in seconds."""
        self.counts[bisect_left(_SECONDS, mean)] += 1
        self.seconds += mean


class _TokenIntervals(Collector):
    """Histogram by model of what happens at every token.

    It is filled and read by the event loop alone, so it takes no lock: `Histogram.observe` costs
    as much as making the JSON of a token's event.
    """

    def __init__(self, name: str, text: str) -> None:
        self._name = name
        self._text = text
        self._models: dict[str, _Intervals] = {}

    def of(self, model: str) -> "_Intervals":
        found = self._models.get(model)
        if found is None:
            found = self._models[model] = _Intervals()
        return found

    def collect(self) -> Iterator[Metric]:
        """Yield the histogram."""
        family = HistogramMetricFamily(self._name, self._text, labels=("model_name",))
        bounds = [*map(floatToGoString, _SECONDS), "+Inf"]
        for model, intervals in self._models.items():
            if intervals.seconds:
                buckets = list(zip(bounds, accumulate(intervals.counts), strict=True))
                family.add_metric((model,), buckets, intervals.seconds)
        yield family


class Metrics:
    """Counters of one frontend, in a registry of their own.

    Args:
        held_bytes: returns the bytes of bodies and embeddings held now.
        running: returns the number of running requests.
    """

    def __init__(self, held_bytes: Callable[[], int], running: Callable[[], int]) -> None:
        self.registry = CollectorRegistry()
        # process_resident_memory_bytes and the like, of Linux.
        ProcessCollector(registry=self.registry)
        model = ("model_name",)

        # `labels` takes a lock and makes a tuple of strings each time.
        def counter(
            name: str, text: str, labels: tuple[str, ...] = model
        ) -> Callable[..., Counter]:
            return cache(Counter(name, text, labels, registry=self.registry).labels)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Callable[..., Histogram]:
            return cache(
                Histogram(name, text, model, buckets=buckets, registry=self.registry).labels
            )

        Gauge("inlay:requests_under_way", "Running requests.", registry=self.registry).set_function(
            running
        )
        Gauge(
            "inlay:held_bytes",
            "Bytes of bodies and embeddings held for requests.",
            registry=self.registry,
        ).set_function(held_bytes)
        self._prompt_tokens = counter(
            "vllm:prompt_tokens", "Prompt positions, embedding vectors included."
        )
        self._cached = counter(
            "vllm:prompt_tokens_cached", "Prompt positions found in the prefix cache."
        )
        self._sources = counter(
            "vllm:prompt_tokens_by_source",
            "Prompt positions computed (local_compute) and found in a cache (local_cache_hit).",
            ("model_name", "source"),
        )
        self._generated = counter("vllm:generation_tokens", "Tokens shown to clients.")
        self._success = counter(
            "vllm:request_success",
            "Choices that ended, by reason.",
            ("model_name", "finished_reason"),
        )
        self._first = histogram(
            "vllm:time_to_first_token_seconds", "From request to first token.", _SECONDS
        )
        self._between = _TokenIntervals(
            "vllm:inter_token_latency_seconds", "Between tokens of a choice."
        )
        self.registry.register(self._between)
        self._whole = histogram(
            "vllm:e2e_request_latency_seconds", "From request to last token.", _SECONDS
        )
        self._each = histogram(
            "vllm:request_time_per_output_token_seconds",
            "Decoding of a choice, divided by its tokens after the first.",
            _SECONDS,
        )
        self._queued = histogram(
            "vllm:request_queue_time_seconds",
            "Of a choice, from its worker to its first step.",
            _SECONDS,
        )
        self._decoding = histogram(
            "vllm:request_decode_time_seconds",
            "Of a choice, from its first token to its last.",
            _SECONDS,
        )
        self._prefilling = histogram(
            "vllm:request_prefill_time_seconds",
            "Of a choice, from its first step, where the engine says when, to its first token.",
            _SECONDS,
        )
        self._inference = histogram(
            "vllm:request_inference_time_seconds",
            "Of a choice, from its first step to its last token.",
            _SECONDS,
        )
        self._computed = histogram(
            "vllm:request_prefill_kv_computed_tokens",
            "Prompt positions of a request that were in no cache.",
            _LENGTHS,
        )
        self._asked_choices = histogram("vllm:request_params_n", "Choices asked for.", _CHOICES)
        self._asked_tokens = histogram(
            "vllm:request_params_max_tokens",
            "Most tokens of a choice that were asked for.",
            _LENGTHS,
        )
        self._most_tokens = histogram(
            "vllm:request_max_num_generation_tokens",
            "Tokens of the longest choice of a request.",
            _LENGTHS,
        )
        self._lengths = histogram(
            "vllm:request_prompt_tokens", "Prompt positions of a request.", _LENGTHS
        )
        self._outputs = histogram("vllm:request_generation_tokens", "Tokens of a choice.", _LENGTHS)
        self._texts = counter("inlay:embedded_texts", "Texts embedded, or pairs scored.")
        self._http = counter(
            "inlay:http_requests", "Answers, by route and status.", ("route", "status")
        )
        self._bodies = counter(
            "inlay:http_body_bytes", "Bytes of request bodies, by route.", ("route",)
        )
        self._reading = histogram(
            "inlay:prompt_embeds_decode_seconds",
            "Time to read, check, cast and hash one tensor, after its bytes have arrived.",
            _SECONDS,
        )
        self._gone = Counter(
            "inlay:client_disconnects", "Clients that left before the end.", registry=self.registry
        )
        self._bytes = counter("inlay:prompt_embeds_bytes", "Container bytes of embeddings read.")
        self._rows = counter("inlay:prompt_embeds_rows", "Embedding vectors read.")
        self._rejects = counter(
            "inlay:prompt_embeds_rejected", "Embeddings refused, by reason.", ("reason",)
        )

    def add_certificate(self, expires: Callable[[], float | None]) -> None:
        """Show when the certificate of HTTPS ends; NaN where that is not known."""
        Gauge(
            "inlay:certificate_expiry_seconds",
            "End of the certificate of HTTPS, in seconds since 1970.",
            registry=self.registry,
        ).set_function(lambda: float("nan") if (end := expires()) is None else end)

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def answered(self, route: str, status: int) -> None:
        """Count an answer."""
        self._http(route, str(status)).inc()

    def failed(self, error: InlayError) -> None:
        """Count an error of a kind that has a counter."""
        if isinstance(error, EmbeddingsError) or error.param == "prompt_embeds":
            self._rejects(error.reason or "other").inc()

    def left(self) -> None:
        """Count a client that left."""
        self._gone.inc()

    def body_read(self, route: str, size: int) -> None:
        """Count a received body."""
        self._bodies(route).inc(size)

    def embeds_read(self, model: str, size: int, rows: int, seconds: float) -> None:
        """Count embeddings, and the seconds of reading them."""
        self._reading(model).observe(seconds)
        self._bytes(model).inc(size)
        self._rows(model).inc(rows)

    def embedded(self, model: str, texts: int, positions: int, began: float) -> None:
        """Count an answered request with `texts` vectors or scores, which arrived at `began`."""
        self._prompt_tokens(model).inc(positions)
        self._lengths(model).observe(positions)
        self._texts(model).inc(texts)
        self._whole(model).observe(time.perf_counter() - began)

    def request(
        self, model: str, prompt_tokens: int, began: float, choices: int, max_tokens: int
    ) -> "RequestTimes":
        """Begin to measure a request that arrived at `began` (`time.perf_counter`).

        `choices` are those of each prompt, and `max_tokens` the most of one.
        """
        self._asked_choices(model).observe(choices)
        self._asked_tokens(model).observe(max_tokens)
        self._prompt_tokens(model).inc(prompt_tokens)
        self._lengths(model).observe(prompt_tokens)
        return RequestTimes(self, model, prompt_tokens, began)


class Spent(NamedTuple):
    """Seconds of a choice: to its first step (0 if unknown), to its first token, to its last."""

    queued: float
    prefilling: float
    decoding: float


class ChoiceTimes:
    """Times of one choice.

    Times are taken for each write, not each token: the tokens of one write share the time since
    the last one.

    Attributes:
        first: `time.perf_counter` of its first tokens; 0 before them.
        output: tokens so far.
        spent: once it has ended; None without tokens.
    """

    __slots__ = ("_began", "_last", "_metrics", "_model", "_observe", "first", "output", "spent")

    def __init__(self, metrics: Metrics, model: str, began: float) -> None:
        self._metrics = metrics
        self._model = model
        self._began = began
        self._observe = metrics._between.of(model).observe
        self._last = self.first = 0.0
        self.output = 0
        self.spent: Spent | None = None

    def tokens(self, count: int) -> None:
        """Record `count` further tokens, at least one."""
        now = time.perf_counter()
        if self.first:
            self._observe((now - self._last) / count)
        else:
            self.first = now
            self._metrics._first(self._model).observe(now - self._began)
        self._last = now
        self.output += count

    def ended(self, reason: str, tokens: int, queued: float) -> None:
        """Record the end with `tokens` in all; `queued` is seconds, 0 if unknown."""
        if self.first:
            decoding = self._last - self.first
            prefilling = max(0.0, self.first - self._began - queued)
            self.spent = Spent(queued, prefilling, decoding)
            self._metrics._prefilling(self._model).observe(prefilling)
            self._metrics._inference(self._model).observe(prefilling + decoding)
            self._metrics._decoding(self._model).observe(decoding)
            if tokens > 1:
                self._metrics._each(self._model).observe(decoding / (tokens - 1))
        if queued:
            self._metrics._queued(self._model).observe(queued)
        self._metrics._success(self._model, reason).inc()
        self._metrics._generated(self._model).inc(tokens)
        self._metrics._outputs(self._model).observe(tokens)


class RequestTimes:
    """Times of one request."""

    __slots__ = ("_began", "_cached", "_choices", "_metrics", "_model", "_prompt")

    def __init__(self, metrics: Metrics, model: str, prompt_tokens: int, began: float) -> None:
        self._metrics = metrics
        self._model = model
        self._began = began
        self._prompt = prompt_tokens
        self._cached = 0
        self._choices: list[ChoiceTimes] = []

    def choice(self) -> ChoiceTimes:
        """Begin to measure a further choice."""
        self._choices.append(ChoiceTimes(self._metrics, self._model, self._began))
        return self._choices[-1]

    def spent(self) -> Spent | None:
        """Return the times of the first choice, once it has ended; None without tokens."""
        return self._choices[0].spent if self._choices else None

    def finished(self, cached_tokens: int) -> None:
        """Record the end of the request."""
        self._cached = cached_tokens
        computed = max(0, self._prompt - cached_tokens)
        metrics, model = self._metrics, self._model
        metrics._cached(model).inc(cached_tokens)
        metrics._sources(model, "local_cache_hit").inc(cached_tokens)
        metrics._sources(model, "local_compute").inc(computed)
        metrics._computed(model).observe(computed)
        if self._choices:
            metrics._most_tokens(model).observe(max(each.output for each in self._choices))
        self._metrics._whole(self._model).observe(time.perf_counter() - self._began)

    def log_fields(self) -> dict[str, str | int | float | bool]:
        """Return the fields of the request's log line and span."""
        fields: dict[str, str | int | float | bool] = {
            "model": self._model,
            "prompt_tokens": self._prompt,
            "cached_tokens": self._cached,
            "output_tokens": sum(choice.output for choice in self._choices),
        }
        firsts = [choice.first for choice in self._choices if choice.first]
        if firsts:
            fields["ttft_ms"] = round((min(firsts) - self._began) * 1000, 3)
        return fields
