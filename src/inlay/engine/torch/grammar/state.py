"""The state of one output in its grammar, and the tokens that may come next.

A function of the grammar and the output alone.
"""

import time
from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import takewhile

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from inlay.base.errors import InlayError, InvalidRequestError
from inlay.engine.grammar.fair_executor import FairExecutor, SharedTask
from inlay.engine.grammar.matchers import PARAM, refusal
from inlay.messages.request import Grammar

Mask = NDArray[np.uint32]
"""One bit an id, lowest first, in words of 32; set where it may come next."""

MAX_SECONDS = 5.0
"""For the mask of one token, once it is begun.

Usual masks take 0.0002 s; the most costly ones the library's limits let pass took 0.1 where it was
measured.
"""

ALLOWANCE = 5.0
"""Seconds that all masks of a sequence may take on their threads, beside `A_TOKEN` for each."""

A_TOKEN = 0.002
"""Seconds: ten usual masks."""

MAX_FORCED = 16
"""Ids that are told in advance, at most."""


class GrammarState:
    """The matcher of one sequence, and how much of the sequence's output it has read.

    Masks are computed on threads of their own, at which clients take turns: one that takes long
    delays its own sequence and others of its client. Where several clients together take all
    threads, others wait until one is free and it is their turn. Between `prepare` and the end of
    what it started nothing else may touch the state.

    Attributes:
        after: the grammar's.
        slow: a step has waited for its mask in vain.
    """

    __slots__ = (
        "_forced",
        "_job",
        "_mask",
        "_masks",
        "_matcher",
        "_old",
        "_seen",
        "_spent",
        "_start",
        "_started",
        "_stop_token_ids",
        "_usable_ids",
        "after",
        "slow",
    )

    def __init__(
        self,
        matcher: LLMatcher,
        grammar: Grammar,
        stop_token_ids: tuple[int, ...],
        vocab_size: int,
        usable_ids: int | None = None,
    ) -> None:
        """At the start of an output.

        Args:
            matcher: fresh, and this state's own.
            grammar: which it was made of.
            stop_token_ids: may be chosen wherever the grammar may end, as the model's end tokens
                may.
            vocab_size: ids in a mask.
            usable_ids: ids of the model, if they are not as many.
        """
        self.after = grammar.after
        self.slow = False
        self._matcher = matcher
        self._stop_token_ids = stop_token_ids
        self._mask: Mask = np.zeros((vocab_size + 31) // 32, dtype=np.uint32)
        self._start: int | None = None if grammar.after else 0
        self._seen = 0
        self._job: SharedTask[Mask | None] | None = None
        self._forced: Future[tuple[int, ...]] = Future()
        self._usable_ids = vocab_size if usable_ids is None else usable_ids
        self._old = -1
        self._masks = 0
        self._spent = 0.0
        self._started: float | None = None

    def read(self, output: Sequence[int]) -> None:
        """Take in what `output` has gained since the last call.

        Raises:
            InvalidRequestError: it is not what the grammar allows, or the grammar is too costly to
                go on with.
        """
        new: list[int] = []
        for index in range(self._seen, len(output)):
            if self._start is not None:
                new.append(output[index])
            elif tuple(output[max(0, index + 1 - len(self.after)) : index + 1]) == self.after:
                self._start = index + 1
        self._seen = len(output)
        for id_ in new:
            # A finished grammar takes end tokens for ever: they are all that its masks allow.
            if not self._matcher.is_stopped() and not self._matcher.consume_token(id_):
                break
        self._check()

    def mask(self) -> Mask | None:
        """Which ids may come next; None when all may.

        Raises `InvalidRequestError` when the grammar is too costly.
        """
        if self._start is None:
            return None
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        self._check()
        if self._matcher.is_accepting():
            for id_ in self._stop_token_ids:
                self._mask[id_ >> 5] |= np.uint32(1 << (id_ & 31))
        return self._mask

    @property
    def complete(self) -> bool:
        """Nothing but the end may follow."""
        return self._start is not None and bool(self._matcher.is_stopped())

    def begin_masks(
        self, output: Sequence[int], turns: FairExecutor[Mask | None], client: Hashable
    ) -> None:
        """Have the mask after `output` computed, once, when it is `client`'s turn."""
        if self._old != len(output):
            self._old = len(output)
            self._started = None
            self._forced = Future()
            self._job = SharedTask(partial(self._compute, list(output), self._forced))
            turns.submit(self._job, client)

    def drop(self, turns: FairExecutor[Mask | None], client: Hashable) -> None:
        """Compute no more of what `prepare` was given, unless it has begun.

        The sequence has ended.
        """
        if self._job is not None:
            turns.unsubscribe(self._job, client)
            self._job = None

    def forced(self, length: int, timeout: float) -> tuple[int, ...] | None:
        """Return the only ids that may come next, up to `MAX_FORCED`, after an output of `length`.

        Waits at most `timeout` seconds; None if they are not known then. Empty if several ids may
        come next, or no mask after such an output is prepared.
        """
        if self._job is None or self._old != length:
            return ()
        try:
            return self._forced.result(timeout)
        except TimeoutError:
            return None

    def _only_ids(self) -> tuple[int, ...]:
        """Return the ids that must come next, one after another.

        The matcher keeps what it found: the mask after it takes no longer for it.
        """
        if self._start is None or self._matcher.is_stopped():
            return ()
        ids = self._matcher.compute_ff_tokens()[:MAX_FORCED]
        return tuple(takewhile(lambda id_: id_ < self._usable_ids, ids))

    def _compute(self, output: list[int], forced: "Future[tuple[int, ...]]") -> Mask | None:
        self._started = time.monotonic()
        # Of this thread alone: what others do to it is not the grammar's doing.
        began = time.thread_time()
        try:
            self.read(output)
            forced.set_result(self._only_ids())
        finally:
            if not forced.done():
                forced.set_result(())
        mask = self.mask()
        self._masks += 1
        self._spent += time.thread_time() - began
        if self._spent > ALLOWANCE + A_TOKEN * self._masks:
            raise _too_costly(
                f"{ALLOWANCE:g} s for {self._masks} tokens, beside {A_TOKEN:g} s for each of them"
            )
        return mask

    def ready(self, timeout: float) -> bool:
        """Return True if the mask that `prepare` began is done, within `timeout` seconds.

        Raises:
            InvalidRequestError: it takes too long; the sequence must end.
        """
        if self._job is None or self._job.done.done():
            return True
        try:
            self._job.done.exception(timeout)
        except TimeoutError:
            if self._started is not None and time.monotonic() - self._started > MAX_SECONDS:
                raise _too_costly(f"{MAX_SECONDS:g} s for one token") from None
            return False
        return True

    def prepared(self) -> Mask | None:
        """The mask, once it is `ready`.

        Raises what computing it raised: `InvalidRequestError` for a grammar that is too costly.
        """
        if self._job is None:
            raise RuntimeError("a mask is asked for that was not prepared")
        return self._job.done.result()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise refusal(self._matcher.get_error())


def _too_costly(what: str) -> InlayError:
    return InvalidRequestError(f"the grammar took more than {what}; make it simpler", param=PARAM)
