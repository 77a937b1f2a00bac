"""The check of a worker against the reference of its pool, by requests: the same for every engine.

The torch engine has compared itself with the model's own code, in more places, as it loaded; it is
held to the reference of a pool where others can join that.
"""

import asyncio
import logging
import math
import time
from collections.abc import Mapping, Sequence
from itertools import count
from typing import NoReturn, Protocol
from uuid import uuid4

import numpy as np

from inlay.base.errors import EngineError, InlayError, InvalidRequestError
from inlay.engine.api import Engine
from inlay.engine.pool_reference import (
    BOUND,
    Answer,
    PoolReference,
    PoolVectors,
    Vectors,
    key_of,
)
from inlay.engine.probe import outputs_of, probe_failed
from inlay.engine.references import references
from inlay.messages.card import ModelCard, SelfCheck
from inlay.messages.priority import FIRST
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import Output, Pooling, Request, Sampling, Task

log = logging.getLogger(__name__)

COMPARED = frozenset({"torch", "vllm", "sglang"})
"""Engines that have numbers of a model to compare."""

_TASKS = frozenset({Task.GENERATE, Task.EMBED, Task.SCORE})
"""Tasks whose numbers are compared."""

_TOP = 20
"""Most likely ids that an engine is asked for at each position."""

_EVERY = 4
"""Of an engine that gives no logprobs of prompts, each fourth beginning of a prompt is asked."""

_NOTHING_KEPT = (
    "no reference of its weights and dtype is kept: `inlay doctor {path}` makes one, and so does "
    "the torch engine"
)

_NO_PROMPTS = (
    "an SGLang that only decodes has no numbers of its own for a prompt, whose keys and values a "
    "prefill worker computes; that one is compared"
)

_numbers = count()


class SelfChecked(Protocol):
    """An engine that announces its card."""

    @property
    def card(self) -> ModelCard:
        """The card, with the engine's sleep."""

    def checked(self, check: SelfCheck) -> None:
        """Announce a result."""


async def check_pool(engine: Engine, mode: str, *, shared: bool) -> SelfCheck | None:
    """Compare a started engine with the reference of its pool.

    Args:
        engine: started, and asked by nobody else.
        mode: as `EngineSettings.self_check`.
        shared: other workers can join the pool.

    Returns:
        The result that its card is to have; None: the engine's own.

    Raises:
        EngineError: in mode strict, it differs, or nothing is kept to compare it with.
    """
    card = engine.card
    if mode == "off" or card.engine not in COMPARED or not _TASKS & {*card.tasks}:
        return None
    if card.engine == "torch" and not shared:
        return None
    if _only_decodes(card):
        return _unchecked(card, _NO_PROMPTS)
    begun = time.monotonic()
    reference = await asyncio.to_thread(_reference, card)
    if reference is None:
        return _not_compared(card, mode, _NOTHING_KEPT.format(path=card.path))
    try:
        if isinstance(reference, PoolVectors):
            unit = card.embedding is not None and card.embedding.unit
            found = reference.distances(await _vectors(engine, reference), unit=unit)
        else:
            found = reference.distances(await _answers(engine, reference))
    except InvalidRequestError as error:
        return _not_compared(card, mode, error.message)
    except InlayError as error:
        raise EngineError(
            f"the engine does not answer the prompts of its self-check: {error.message}"
        ) from error
    check = _result(reference, found, round(time.monotonic() - begun, 2))
    if check.reason and mode == "strict":
        raise EngineError(f"--self-check strict: {check.reason}")
    if check.reason:
        log.error("self-check: %s", check.reason)
        return check
    log.info(
        "self-check: %.2f of the rounding of %s (allowed: %g); %.1f s",
        check.distance, check.reference, check.bound, check.seconds,
    )  # fmt: skip
    return None if card.engine == "torch" else check


async def check_later(
    engine: Engine, host: SelfChecked, check: SelfCheck | None, interval: float
) -> NoReturn:
    """Compare an engine again while nothing is kept to compare it with, until cancelled.

    Args:
        engine: of `host`.
        host: told of the result; it says whether the engine is awake.
        check: result at its start.
        interval: seconds between two comparisons; 0 for none.
    """
    looked_for = interval and not _only_decodes(engine.card)
    while looked_for and check is not None and check.result == "unchecked":
        await asyncio.sleep(interval)
        if host.card.asleep or await asyncio.to_thread(_reference, engine.card) is None:
            continue
        try:
            check = await check_pool(engine, "start", shared=True)
        except EngineError as error:
            # What is wrong with it, its probes find.
            log.warning("%s", error.message)
            continue
        if check is not None:
            host.checked(check)
        break
    await asyncio.Event().wait()
    raise AssertionError  # an event that nobody sets


def _result(
    reference: PoolReference | PoolVectors, found: Mapping[str, float], seconds: float
) -> SelfCheck:
    # What is not a number is the largest.
    worst = max(found.values(), key=lambda each: (math.isnan(each), each))
    reason = ""
    if not worst <= BOUND:
        found_by = f"by {worst:.3g} times its rounding" if math.isfinite(worst) else "not finite"
        reason = (
            f"its {_named(reference)} are not those of {reference.by} that workers of this "
            f"model are held to: {found_by} (allowed: {BOUND:g}); --self-check full with the torch "
            "engine makes those anew, --self-check off serves without them"
        )
    return SelfCheck(
        result="differs" if reason else "passed",
        reference=f"{reference.by}, kept",
        distance=_rounded(worst),
        bound=BOUND,
        distances={kind: _rounded(each) for kind, each in found.items()},
        seconds=seconds,
        reason=reason,
    )


def _named(reference: PoolReference | PoolVectors) -> str:
    return "logprobs" if isinstance(reference, PoolReference) else "vectors or scores"


def _reference(card: ModelCard) -> PoolReference | PoolVectors | None:
    kind = PoolReference if Task.GENERATE in card.tasks else PoolVectors
    data = references().agreed(key_of(card.weights_id, card.dtype))
    try:
        return None if data is None else kind.decode(data, card.vocab_size)
    except ValueError as error:
        log.warning("the reference that is kept for %s is not used: %s", card.name, error)
        return None


def _not_compared(card: ModelCard, mode: str, why: str) -> SelfCheck | None:
    if card.engine == "torch":
        log.info("self-check: not compared with other workers of its pool: %s", why)
        return None
    if mode == "strict":
        raise EngineError(f"--self-check strict: {card.name} was not compared: {why}")
    return _unchecked(card, why)


def _unchecked(card: ModelCard, why: str) -> SelfCheck:
    log.warning("self-check: %s was not compared: %s", card.name, why)
    return SelfCheck(result="unchecked", reference="", note=why)


def _only_decodes(card: ModelCard) -> bool:
    return bool(card.kv_rooms) and card.phase == "decode"


async def _vectors(engine: Engine, reference: PoolVectors) -> Vectors:
    """Ask for the vectors, or the logits, of all prompts at once."""
    card = engine.card
    tasks = sorted(_TASKS & {*card.tasks})
    if len(tasks) > 1:
        raise InvalidRequestError(f"it has several tasks: {', '.join(tasks)}")
    if max(len(ids) for ids, _ in reference.prompts) > card.limits.max_model_len:
        raise InvalidRequestError("it takes no prompts of some tokens")
    pairs = tuple(second for ids, second in reference.prompts if second < len(ids))
    request = Request(
        id=f"self-check-{next(_numbers)}",
        task=tasks[0],
        prompts=tuple(Prompt.of(Tokens(ids)) for ids, _ in reference.prompts),
        params=Pooling(second_from=pairs),
        priority=FIRST,
    )
    outputs = await _outputs(engine, request)
    payloads = [each for output in outputs for each in output.payloads]
    found, kept = [(each.dtype, each.shape) for each in payloads], ("float32", reference.shape)
    if found != [kept]:
        raise InvalidRequestError(f"its vectors are {found}, those that are kept {kept}")
    return np.frombuffer(payloads[0].data.view, np.float32).reshape(reference.shape)


async def _answers(engine: Engine, reference: PoolReference) -> Sequence[Answer]:
    card = engine.card
    refused = any(
        refusal.feature == "prompt_logprobs" and refusal.prompts == "any"
        for refusal in card.refusals
    )
    ask = _beginnings if refused else _whole
    room = card.limits.max_model_len - 1
    if room < _EVERY or not _top(engine):
        raise InvalidRequestError("it takes no prompts of some tokens, or no logprobs")
    return await asyncio.gather(*(ask(engine, ids[:room]) for _, ids in reference.prompts))


async def _whole(engine: Engine, ids: tuple[int, ...]) -> Answer:
    """Ask for the logprobs of a prompt, whose own token comes first at each position."""
    top = _top(engine)
    outputs = await _ask(engine, ids, Sampling(max_tokens=1, temperature=0, prompt_logprobs=top))
    answer: dict[int, Mapping[int, float]] = {}
    # A prompt that is computed in several steps has as many pieces.
    for found in (each for output in outputs if (each := output.prompt_logprobs) is not None):
        shape = len(found), 1 + top
        names = np.frombuffer(found.ids, "<i4").reshape(shape)[:, 1:].tolist()
        values = np.frombuffer(found.logprobs, "<f4").reshape(shape)[:, 1:].tolist()
        # What stands at a position follows from the one before it.
        for at, both in enumerate(zip(names, values, strict=True), found.start - 1):
            answer[at] = dict(zip(*both, strict=True))
    return answer


async def _beginnings(engine: Engine, ids: tuple[int, ...]) -> Answer:
    """Ask for a token after some beginnings of a prompt."""
    top = _top(engine)
    lengths = range(_EVERY, len(ids) + 1, _EVERY)
    params = Sampling(max_tokens=1, temperature=0, ignore_eos=True, logprobs=top)
    answers = await asyncio.gather(*(_ask(engine, ids[:length], params) for length in lengths))
    return {
        length - 1: dict(next(each for output in outputs for each in output.logprobs).top)
        for length, outputs in zip(lengths, answers, strict=True)
    }


def _top(engine: Engine) -> int:
    return min(_TOP, engine.card.limits.max_logprobs)


async def _ask(engine: Engine, ids: tuple[int, ...], params: Sampling) -> Sequence[Output]:
    request = Request(
        id=f"self-check-{next(_numbers)}",
        prompts=(Prompt.of(Tokens(ids)),),
        params=params,
        # Of its own: everything is computed.
        salt=uuid4().hex,
        priority=FIRST,
    )
    return await _outputs(engine, request)


async def _outputs(engine: Engine, request: Request) -> Sequence[Output]:
    outputs = await outputs_of(request.id, lambda emit: engine.submit(request, emit), engine.abort)
    if outputs[-1].finish_reason not in ("length", "stop"):
        failed = outputs[-1].error
        raise probe_failed(outputs[-1]) if failed is None else failed.to_error()
    return outputs


def _rounded(number: float) -> float:
    """JSON has no number for what is not one, for which -1 stands."""
    return round(number, 3) if math.isfinite(number) else -1.0
