"""Cutting what an engine says, without changing it."""

import struct
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
