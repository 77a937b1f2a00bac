"""A canary: the same short request again and again, whose answer must stay what it was at first.

Bad memory, damaged weights and stale pages change the numbers of a model that was right at its
start. Only requests are used, so it is the same with every engine. They come behind all others.
The model is asked each time, and one of its adapters: they take turns, new ones first.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from statistics import median
from typing import NamedTuple, NoReturn
from uuid import uuid4

from inlay.base import liveness
from inlay.base.errors import InvalidRequestError
from inlay.engine.api import Engine
from inlay.engine.check_text import text_ids
from inlay.engine.probe import outputs_of
from inlay.messages.card import Adapter, CanaryResult, Exactness, ModelCard
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import Emit, Request, Sampling, Task, TokenLogprobs

log = logging.getLogger(__name__)

LAST = 2**31
"""A priority behind every client's."""

_POSITIONS, _TOKENS, _TOP = 20, 5, 20
"""Of the prompt, more than one page of 16; of the answer; and alternatives at each of its tokens.
"""

_SECONDS = 60.0
"""That an answer may take; then the canary is aborted, and comes again."""

_AGAIN = 30.0
"""Seconds until the next canary, after one that had no room or a wrong answer."""

_ALLOWED = 3.0
"""Distance over the typical rounding of the model."""

_ROUNDING = {"float32": 1e-4, "float16": 0.01, "bfloat16": 0.05}
"""Rounding of a model that was not measured at its start."""

_LEAST_ROUNDING = 1e-4

_numbers = count()


class CanaryAnswer(NamedTuple):
    """Ids of an output and their logprobs, one for each."""

    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]


def distance(first: CanaryAnswer, now: CanaryAnswer) -> float:
    """Return the relative distance of two answers to one prompt.

    The median over the tokens, up to the first where another was chosen, of the root mean square of
    what the logprobs of the most likely ids differ by, over that of the logprobs themselves, which
    counts as at least 1. An id that only one answer names is taken to have, in the other, the
    lowest of the logprobs named there, or its own if that is lower: no more is known.

    Infinite where a logprob is not a number, or an answer is shorter than the other.
    """
    found: list[float] = []
    for mine, own, other, its in zip(*first, *now, strict=False):
        found.append(_difference(_named(mine, own), _named(other, its)))
        if mine != other:
            break
    else:
        if len(first.ids) != len(now.ids):
            return math.inf
    return median(found) if all(map(math.isfinite, found)) else math.inf


def _named(id_: int, logprobs: TokenLogprobs) -> dict[int, float]:
    return {id_: logprobs.logprob, **dict(logprobs.top)}


def _difference(first: dict[int, float], now: dict[int, float]) -> float:
    low, its_low = min(first.values()), min(now.values())
    pairs = [
        (first.get(id_, min(low, now.get(id_, low))), now.get(id_, min(its_low, first.get(id_, 0))))
        for id_ in first.keys() | now.keys()
    ]
    error = math.hypot(*(mine - other for mine, other in pairs)) / math.sqrt(len(pairs))
    size = math.hypot(*first.values()) / math.sqrt(len(first))
    return error / max(size, 1.0)


def bound_of(card: ModelCard, *, invariant: bool = False) -> float:
    """Return the distance that rounding explains.

    0 where the numbers of a position do not depend on what is computed beside it, as was asked for
    (`invariant`) or as an engine in 16 bits says: all must be as it was, bit for bit.
    """
    if invariant or (card.dtype != "float32" and card.resuming.get("greedy") is Exactness.EXACT):
        return 0.0
    measured = 0.0 if card.self_check is None else card.self_check.noise
    return _ALLOWED * max(measured or _ROUNDING.get(card.dtype, 0.05), _LEAST_ROUNDING)


class Canary:
    """Canaries of one engine.

    Args:
        engine: started.
        submit: admits a request of the engine, or emits why not.
        abort: stops one.
        adapters: returns those that take requests.
        interval: seconds between two; 0 for none.
        invariant: the engine was told to be batch invariant.
        tell: called after each.

    Attributes:
        last: result of the last one that was compared, or None.
    """

    def __init__(
        self,
        engine: Engine,
        submit: Callable[[Request, Emit], None],
        abort: Callable[[str], None],
        adapters: Callable[[], Sequence[Adapter]],
        *,
        interval: float,
        invariant: bool,
        tell: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._submit = submit
        self._abort = abort
        self._adapters = adapters
        self._interval = interval
        self._invariant = invariant
        self._tell = tell
        self._due = asyncio.Event()
        self._ids: tuple[int, ...] = ()
        self._first: CanaryAnswer | None = None
        self._of_adapters: dict[str, CanaryAnswer | None] = {}
        """First answers by content, the last asked at the end; None of one that gives none."""
        self.last: CanaryResult | None = None

    def soon(self) -> None:
        """Have the next one come at once: something of the engine has changed."""
        self._due.set()

    async def prepare(self) -> None:
        """Make the prompt, which may read a tokenizer: 0.4 s in which nothing else of Python runs.

        Done before others wait for what does; else when `run`.
        """
        card = self._engine.card
        length = min(_POSITIONS, card.limits.max_model_len - _TOKENS)
        # A part of a request in a room is not a whole one.
        wanted = self._interval and Task.GENERATE in card.tasks and not card.kv_rooms and length > 0
        if wanted and not self._ids:
            self._ids = await asyncio.to_thread(_prompt, Path(card.path), card.vocab_size, length)

    async def run(self) -> NoReturn:
        """Send canaries until cancelled."""
        await self.prepare()
        card = self._engine.card
        while self._ids:
            self._due.clear()
            try:
                well = await self._try(card)
            except InvalidRequestError as error:
                log.info("no canary is sent to this model: %s", error.message)
                break
            except Exception:  # what fails here must not end the worker, which others use
                log.exception("a canary failed; no more are sent")
                break
            try:
                async with asyncio.timeout(self._interval if well else min(_AGAIN, self._interval)):
                    await self._due.wait()
            except TimeoutError:
                pass
        await asyncio.Event().wait()
        raise AssertionError  # an event that nobody sets

    async def _try(self, card: ModelCard) -> bool:
        """Send one if there is room; False if it is to come again before its time."""
        stats = self._engine.stats()
        if stats.waiting or stats.running >= card.limits.max_num_seqs:
            return False
        top = min(_TOP, card.limits.max_logprobs)
        answer = await self._ask(top)
        if answer is None:
            return False
        self._first = self._first or answer
        bound = bound_of(card, invariant=self._invariant)
        pairs = [("", self._first, answer)]
        adapter = self._next()
        if adapter is not None:
            own = await self._ask_adapter(adapter, top)
            first = self._of_adapters.setdefault(adapter.content_id, own) or own
            if first is not None and own is not None:
                pairs.append((adapter.name, first, own))
            elif first is not None and self._accuses(adapter.name):
                # Nothing says that it is right again: the alarm and its turn stay.
                pairs = [pair for pair in pairs if distance(*pair[1:]) > bound]
        if not pairs:
            return False
        right = self._compare(pairs, bound)
        if adapter is not None and right:
            self._of_adapters[adapter.content_id] = self._of_adapters.pop(adapter.content_id) or own
        return right

    def _accuses(self, adapter: str) -> bool:
        return self.last is not None and self.last.in_a_row > 0 and self.last.adapter == adapter

    def _next(self) -> Adapter | None:
        """Return the adapter that was last asked before all others, or never."""
        ready = {adapter.content_id: adapter for adapter in self._adapters()}
        known = {content: first for content, first in self._of_adapters.items() if content in ready}
        self._of_adapters = known
        for content in (*(each for each in ready if each not in known), *known):
            return ready[content]
        return None

    async def _ask_adapter(self, adapter: Adapter, top: int) -> CanaryAnswer | None:
        try:
            return await self._ask(top, adapter.name)
        except InvalidRequestError as error:
            log.info("no canary is sent to the adapter %s: %s", adapter.name, error.message)
            return None

    async def _ask(self, top: int, adapter: str | None = None) -> CanaryAnswer | None:
        """Return the answer; None if none came.

        Raises `InvalidRequestError` if the engine does not take it.
        """
        request = Request(
            id=f"canary-{next(_numbers)}",
            prompts=(Prompt.of(Tokens(self._ids)),),
            adapter=adapter,
            params=Sampling(max_tokens=_TOKENS, temperature=0.0, ignore_eos=True, logprobs=top),
            # A salt of its own: everything is computed, and nobody finds it in the cache.
            salt=uuid4().hex,
            priority=LAST,
            deadline=_SECONDS,
        )
        try:
            async with liveness.timeout(_SECONDS):
                outputs = await outputs_of(
                    request.id, lambda emit: self._submit(request, emit), self._abort
                )
        except TimeoutError:
            return None
        last = outputs[-1]
        if last.error is not None:
            error = last.error.to_error()
            if isinstance(error, InvalidRequestError):
                raise error
        if last.finish_reason != "length":
            return None
        return CanaryAnswer(
            tuple(id_ for output in outputs for id_ in output.token_ids),
            tuple(each for output in outputs for each in output.logprobs),
        )

    def _compare(
        self, pairs: Sequence[tuple[str, CanaryAnswer, CanaryAnswer]], bound: float
    ) -> bool:
        named = {name: distance(first, now) for name, first, now in pairs}
        adapter = max(named, key=named.__getitem__)
        found = named[adapter]
        right = found <= bound and (bound > 0 or all(first == now for _, first, now in pairs))
        before = self.last or CanaryResult(at=0, distance=0, bound=bound)
        self.last = CanaryResult(
            at=time.time(),
            distance=found,
            bound=bound,
            failures=before.failures + (not right),
            in_a_row=0 if right else before.in_a_row + 1,
            adapter=adapter,
        )
        if (self.last.wrong and not before.wrong) or (not right and not before.in_a_row):
            log.error("canary: %s", self.last.reason)
        elif right and before.in_a_row:
            log.warning("canary: the answer is as at the start again")
        self._tell()
        return right


def _prompt(directory: Path, vocab_size: int, length: int) -> tuple[int, ...]:
    found = text_ids(directory, vocab_size, length)
    return found or tuple((place + 1) * 7919 % vocab_size for place in range(length))
