"""The spans of a work in its worker: the work, and in it how long it was queued, prefilled and decoded."""

import time

from inlay.protocol.work import Delta, Emit, Usage, Work
from inlay.telemetry import Tracing


def traced(tracing: Tracing, work: Work, emit: Emit, engine: str) -> Emit:
    """`emit` for `work`, whose spans are made when it has ended.

    Prefill ends with the first token: what the engine computes of the prompt, and the step that chooses that token.
    """
    began = time.time_ns()
    span = tracing.begin("inlay.work", work.trace, "consumer", began)
    first: int | None = None

    def noticing(delta: Delta) -> None:
        nonlocal first
        if first is None and delta.token_ids:
            first = time.time_ns()
        if delta.finish_reason is not None:
            ended = time.time_ns()
            usage = delta.usage or Usage(len(work.prompt), delta.offset + len(delta.token_ids))
            queued = min(began + int(usage.queued_seconds * 1e9), first or ended)
            if usage.queued_seconds:
                tracing.record("inlay.queue", span.traceparent, began, queued, {})
            computed = {"inlay.cached_tokens": usage.cached_tokens}
            tracing.record("inlay.prefill", span.traceparent, queued, first or ended, computed)
            if first is not None:
                tracing.record("inlay.decode", span.traceparent, first, ended, {})
            span.end(
                {
                    "inlay.work.id": work.id,
                    "inlay.work.attempt": work.attempt,
                    "inlay.engine": engine,
                    "gen_ai.usage.input_tokens": usage.prompt_tokens,
                    "gen_ai.usage.output_tokens": usage.completion_tokens,
                    "inlay.finish_reason": delta.finish_reason,
                },
                failed=None if delta.error is None else delta.error.kind,
            )
        emit(delta)

    return noticing
