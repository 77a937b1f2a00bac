"""Cutting and joining what an engine says, without changing it."""

import struct
from collections.abc import Sequence
from itertools import islice

import msgspec

from inlay.protocol.work import Delta, PromptLogprobs


def sliced(scores: PromptLogprobs, start: int, stop: int) -> PromptLogprobs:
    """Those of the `start`th to the `stop`th position of `scores`, counted from its first."""
    count = len(scores)
    ids, ranks = len(scores.ids) // count, struct.calcsize("<i")
    return PromptLogprobs(
        scores.start + start,
        scores.ids[start * ids : stop * ids],
        scores.logprobs[start * ids : stop * ids],
        scores.ranks[start * ranks : stop * ranks],
    )


def untold(scores: PromptLogprobs, position: int) -> PromptLogprobs | None:
    """What of `scores` is of `position` and later; None where that is nothing."""
    skipped = position - scores.start
    if skipped <= 0:
        return scores
    return sliced(scores, skipped, len(scores)) if skipped < len(scores) else None


def after(delta: Delta, offset: int) -> Delta:
    """`delta` without the ids before output index `offset`; it must reach at least to there."""
    skipped = offset - delta.offset
    if skipped <= 0:
        return delta
    return msgspec.structs.replace(
        delta,
        offset=offset,
        token_ids=delta.token_ids[skipped:],
        logprobs=tuple(islice(delta.logprobs, skipped, None)),
    )


def halves(delta: Delta) -> tuple[Delta, Delta] | None:
    """`delta` as two that say the same together; None where it holds no more than one position."""
    scores = delta.prompt_logprobs
    if scores is not None and len(scores) > 1:
        middle = len(scores) // 2
        first = Delta(delta.work_id, delta.attempt, delta.offset, prompt_logprobs=sliced(scores, 0, middle))
        return first, msgspec.structs.replace(delta, prompt_logprobs=sliced(scores, middle, len(scores)))
    if len(delta.token_ids) < 2:
        return None
    middle = len(delta.token_ids) // 2
    first = Delta(
        delta.work_id,
        delta.attempt,
        delta.offset,
        delta.token_ids[:middle],
        delta.logprobs[:middle],
        prompt_logprobs=scores,
    )
    rest = msgspec.structs.replace(after(delta, delta.offset + middle), prompt_logprobs=None)
    return first, rest


def joined(deltas: Sequence[Delta]) -> list[Delta]:
    """Deltas of one work as fewer that say the same: those become one that follow each other and hold little but ids."""
    runs: list[list[Delta]] = []
    for delta in deltas:
        if runs and _follows(runs[-1][-1], delta):
            runs[-1].append(delta)
        else:
            runs.append([delta])
    return [run[0] if len(run) == 1 else _one(run) for run in runs]


def _follows(first: Delta, second: Delta) -> bool:
    return (
        first.finish_reason is None
        and second.finish_reason in (None, "stop", "length")
        and first.attempt == second.attempt
        and first.offset + len(first.token_ids) == second.offset
        and _plain(first)
        and _plain(second)
    )


def _plain(delta: Delta) -> bool:
    return not delta.logprobs and delta.prompt_logprobs is None and delta.error is None


def _one(run: list[Delta]) -> Delta:
    last = run[-1]
    return Delta(
        last.work_id,
        last.attempt,
        run[0].offset,
        tuple(id_ for delta in run for id_ in delta.token_ids),
        finish_reason=last.finish_reason,
        stop_token_id=last.stop_token_id,
        usage=next((delta.usage for delta in reversed(run) if delta.usage is not None), None),
    )
