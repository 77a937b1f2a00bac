"""Cutting and joining what an engine says, without changing it."""

import struct
from collections.abc import Sequence
from itertools import islice

import msgspec

from inlay.request import Output, PromptLogprobs


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


def split(output: Output) -> tuple[Output, Output] | None:
    """`output` as two that say the same together; None where it holds no more than one position."""
    scores = output.prompt_logprobs
    if scores is not None and len(scores) > 1:
        middle = len(scores) // 2
        first = Output(
            output.request_id,
            output.attempt,
            output.offset,
            prompt_logprobs=slice_prompt_logprobs(scores, 0, middle),
        )
        return first, msgspec.structs.replace(
            output, prompt_logprobs=slice_prompt_logprobs(scores, middle, len(scores))
        )
    if len(output.token_ids) < 2:
        return None
    middle = len(output.token_ids) // 2
    first = Output(
        output.request_id,
        output.attempt,
        output.offset,
        output.token_ids[:middle],
        output.logprobs[:middle],
        prompt_logprobs=scores,
    )
    rest = msgspec.structs.replace(
        trim_to_offset(output, output.offset + middle), prompt_logprobs=None
    )
    return first, rest


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
    return not output.logprobs and output.prompt_logprobs is None and output.error is None


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
