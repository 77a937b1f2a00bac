"""Cutting and joining what an engine says, without changing it."""

import struct
from collections.abc import AsyncIterable, Sequence
from itertools import islice

import msgspec

from inlay.base.errors import OverloadedError
from inlay.messages.request import EngineUsage, Output, Payload, PromptLogprobs, Request


def pooled(request: Request, payloads: Sequence[Payload]) -> Output:
    """The only output of a request that does not generate, with what it gives."""
    return Output(
        request.id,
        request.attempt,
        0,
        finish_reason="stop",
        usage=EngineUsage(request.num_positions, 0),
        payloads=tuple(payloads),
    )


async def payloads_of(outputs: AsyncIterable[Sequence[Output]]) -> list[Payload]:
    """The payloads that a request's outputs bring, once they have ended.

    Raises:
        OverloadedError: the worker gave the request up.
        InlayError: as `outputs` does.
    """
    found: list[Payload] = []
    async for batch in outputs:
        for output in batch:
            if output.finish_reason == "abort":
                raise OverloadedError("the worker gave the request up", retry_after=1)
            found += output.payloads
    return found


def slice_prompt_logprobs(scores: PromptLogprobs, start: int, stop: int) -> PromptLogprobs:
    """Those of the `start`th to the `stop`th position of `scores`, counted from its first."""
    count = len(scores)
    ids, ranks = len(scores.ids) // count, struct.calcsize("<i")
    return PromptLogprobs(
        scores.start + start,
        scores.ids[start * ids : stop * ids],
        scores.logprobs[start * ids : stop * ids],
        scores.ranks[start * ranks : stop * ranks],
    )


def drop_known(scores: PromptLogprobs, position: int) -> PromptLogprobs | None:
    """The part of `scores` from `position` on; None if empty."""
    skipped = position - scores.start
    if skipped <= 0:
        return scores
    return slice_prompt_logprobs(scores, skipped, len(scores)) if skipped < len(scores) else None


def trim_to_offset(output: Output, offset: int) -> Output:
    """`output` without the ids before output index `offset`; it must reach at least to there."""
    skipped = offset - output.offset
    if skipped <= 0:
        return output
    return msgspec.structs.replace(
        output,
        offset=offset,
        token_ids=output.token_ids[skipped:],
        logprobs=tuple(islice(output.logprobs, skipped, None)),
    )


def coalesce(outputs: Sequence[Output]) -> list[Output]:
    """Coalesce the outputs of one request: consecutive ones that hold little but ids become one."""
    runs: list[list[Output]] = []
    for output in outputs:
        if runs and _follows(runs[-1][-1], output):
            runs[-1].append(output)
        else:
            runs.append([output])
    return [run[0] if len(run) == 1 else _merge(run) for run in runs]


def _follows(first: Output, second: Output) -> bool:
    return (
        first.finish_reason is None
        and second.finish_reason in (None, "stop", "length")
        and first.attempt == second.attempt
        and first.offset + len(first.token_ids) == second.offset
        and _is_plain(first)
        and _is_plain(second)
    )


def _is_plain(output: Output) -> bool:
    return not (
        output.logprobs
        or output.payloads
        or output.prompt_logprobs is not None
        or output.error is not None
        or output.lease is not None
        or output.held is not None
    )


def _merge(run: list[Output]) -> Output:
    last = run[-1]
    return Output(
        last.request_id,
        last.attempt,
        run[0].offset,
        tuple(id_ for output in run for id_ in output.token_ids),
        finish_reason=last.finish_reason,
        stop_token_id=last.stop_token_id,
        usage=next((output.usage for output in reversed(run) if output.usage is not None), None),
    )
