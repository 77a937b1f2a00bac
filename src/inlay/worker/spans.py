"""The spans of a request in its worker.

The request, and in it how long it was queued, prefilled and decoded.
"""

import time

from inlay.messages.request import Emit, EngineUsage, Output, Request
from inlay.telemetry import PROVIDER, Tracing


def traced(tracing: Tracing, request: Request, emit: Emit, engine: str) -> Emit:
    """`emit` for `request`, whose spans are made when it has ended.

    Prefill ends with the first token: what the engine computes of the prompt, and the step that
    chooses that token.
    """
    began = time.time_ns()
    span = tracing.begin("inlay.request", request.trace, "consumer", began)
    first: int | None = None

    def noticing(output: Output) -> None:
        nonlocal first
        if first is None and output.token_ids:
            first = time.time_ns()
        if output.finish_reason is not None:
            ended = time.time_ns()
            usage = output.usage or EngineUsage(
                request.num_positions, output.offset + len(output.token_ids)
            )
            queued = min(began + int(usage.queued_seconds * 1e9), first or ended)
            if usage.queued_seconds:
                tracing.record("inlay.queue", span.traceparent, began, queued, {})
            computed = {"inlay.cached_tokens": usage.cached_tokens}
            tracing.record("inlay.prefill", span.traceparent, queued, first or ended, computed)
            if first is not None:
                tracing.record("inlay.decode", span.traceparent, first, ended, {})
            span.end(
                {
                    "inlay.request.id": request.id,
                    "inlay.request.attempt": request.attempt,
                    "inlay.engine": engine,
                    "gen_ai.usage.input_tokens": usage.prompt_tokens,
                    "gen_ai.usage.output_tokens": usage.completion_tokens,
                    "gen_ai.response.finish_reasons": [output.finish_reason],
                    **PROVIDER,
                },
                failed=None if output.error is None else output.error.kind,
            )
        emit(output)

    return noticing
