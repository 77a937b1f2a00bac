"""Step times of one worker, from three small measurements of a server that has one."""

import math
from typing import NamedTuple

import numpy as np

from inlay.base.errors import EngineError
from inlay.client import Uploader
from inlay_tools.bench.load import LoadSender, LoadShape
from inlay_tools.bench.workload import Workload
from inlay_tools.http_client import HttpClient, ListedModel, served_model
from inlay_tools.plan.fleet import StepTimes
from inlay_tools.settings import WorkloadSettings

_SHORT, _LONG = 16, 2048
"""Positions of the prompts."""
_TOKENS = 32
_ALONE = 5
"""Requests one after the other."""


class Seen(NamedTuple):
    """Medians of a measurement, in seconds.

    Attributes:
        positions: of a prompt, as the server counts them.
        first: to the first token.
        token: to each further one.
    """

    positions: int
    first: float
    token: float


async def measured(
    client: HttpClient, name: str | None, max_num_seqs: int, max_num_batched_tokens: int
) -> StepTimes:
    """Measure a worker: alone, with long prompts, with as many as it runs.

    Raises:
        InlayError: the server cannot be reached, or answers with an error.
    """
    model = await served_model(client, name)
    limit = model.max_model_len or _SHORT + _LONG + _TOKENS
    long = min(_LONG, limit - 2 * _TOKENS)
    if long <= _SHORT:
        raise EngineError(f"{model.name} has {limit} positions: too few to measure prompts")
    await _seen(client, model, _SHORT, 1, 1)  # what is made at the first request
    alone = await _seen(client, model, _SHORT, _ALONE, 1)
    prompts = await _seen(client, model, long, _ALONE, 1)
    many = await _seen(client, model, _SHORT, 2 * max_num_seqs, max_num_seqs)
    return fitted(alone, prompts, many, max_num_seqs, max_num_batched_tokens)


async def _seen(
    client: HttpClient, model: ListedModel, positions: int, count: int, together: int
) -> Seen:
    settings = WorkloadSettings(
        input_len=positions, output_len=_TOKENS, num_prompts=count, seed=positions + count
    )
    workload = Workload(settings, model, client, Uploader(client.server.url, client.server.api_key))
    bodies = [body async for body in workload.bodies(0, count)]
    sender = LoadSender(client, LoadShape(max_concurrency=together))
    sent = await sender.send(bodies, np.random.default_rng(0))
    for each in sent:
        if each.error is not None:
            raise EngineError(f"{client.server.url}: a request failed: {each.error}")
    token = [each.tpot for each in sent if each.tpot is not None]
    return Seen(
        int(np.median([each.input_tokens for each in sent])),
        float(np.median([each.ttft for each in sent])),
        float(np.median(token)) if token else 0.0,
    )


def fitted(
    alone: Seen, prompts: Seen, many: Seen, max_num_seqs: int, max_num_batched_tokens: int
) -> StepTimes:
    """Step times by which a worker would have been seen so.

    Args:
        alone: short prompts, one at a time.
        prompts: long ones, one at a time.
        many: short prompts, `max_num_seqs` at a time.
        max_num_seqs: sequences that run at a time.
        max_num_batched_tokens: prompt positions in a step.
    """
    others = max(max_num_seqs - 1, 1)
    per_sequence = max((many.token - alone.token) / others, 0.0)
    step = max(alone.token - per_sequence, 0.0)
    steps = math.ceil(prompts.positions / max_num_batched_tokens) - math.ceil(
        alone.positions / max_num_batched_tokens
    )
    more = prompts.positions - alone.positions
    per_position = max((prompts.first - alone.first - steps * step) / more, 0.0)
    overhead = max(alone.first - step - alone.positions * per_position, 0.0)
    return StepTimes(
        step, per_sequence, per_position, overhead, max_num_seqs, max_num_batched_tokens
    )
