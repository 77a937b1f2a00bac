"""Compiled grammars by their source: compiled once, off the engine's loop and within limits.

They are kept while they are used.
"""

import threading
from collections.abc import Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from llguidance import LLMatcher

from inlay.base.errors import (
    EngineError,
    InlayError,
    InvalidRequestError,
    OverloadedError,
)
from inlay.base.lru import LruBytes
from inlay.engine.grammar.counting import THREADS
from inlay.engine.grammar.fair_executor import FairExecutor, SharedTask, yield_to_others
from inlay.engine.grammar.matchers import PARAM, compiled, tokenizer_of
from inlay.engine.grammar.trial import Trial, TrialProcess, checked_source
from inlay.engine.torch.grammar.state import GrammarState
from inlay.messages.request import Grammar, GrammarKind

KINDS: tuple[GrammarKind, ...] = ("json_schema", "json_object", "regex", "choice", "grammar")
"""Kinds of grammar that an output can be held to."""

MAX_KEPT = 128
"""Compiled grammars that are kept, the last used."""

MAX_KEPT_BYTES = 256 * 1024 * 1024
"""Memory that they may take together, by what each took in its trial.

None counts less than its share of it, so there are `MAX_KEPT` at most.
"""

MAX_SECONDS = 30.0
"""A request waits so long for its grammar.

On an idle core the limits of a trial allow two, and nearly all take less than 0.1.
"""


class _GrammarKey(NamedTuple):
    kind: GrammarKind
    source: str
    loose: tuple[str, ...]
    salt: str | None


class _Compiled(NamedTuple):
    matcher: LLMatcher
    num_bytes: int


class Waiting:
    """A request's wait for the state of its grammar.

    Attributes:
        state: to come. Its exception is an `InvalidRequestError` when the grammar is none, is too
            costly, or does not allow the output. Cancel it to wait no more.
        job: compiles the grammar.
    """

    __slots__ = ("job", "state")

    def __init__(self, job: SharedTask[_Compiled]) -> None:
        self.job = job
        self.state: Future[GrammarState] = Future()


class Grammars:
    """Compiles grammars for one tokenizer. Safe to use from any thread.

    All but those that are cheap by their count are compiled in a process of their own first, which
    ends at its limits, or when no client waits any more (`trial`). Only what has passed is compiled
    here, where nothing can be interrupted, and kept for those with the same salt. Clients take
    turns (`FairExecutor`).
    """

    def __init__(self, path: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        """Start to read the tokenizer, in the background."""
        self._vocab_size = vocab_size
        self._turns: FairExecutor[_Compiled] = FairExecutor(THREADS, "inlay-grammar")
        # Apart from those that compile: what has been compiled does not wait.
        self._threads = ThreadPoolExecutor(1, "inlay-grammar-state", initializer=yield_to_others)
        self._lock = threading.Lock()
        self._kept: LruBytes[_GrammarKey, SharedTask[_Compiled]] = LruBytes(
            MAX_KEPT_BYTES, _num_bytes
        )
        self._tokenizer = self._threads.submit(tokenizer_of, path, eos_token_ids)
        self._trials = TrialProcess(path, eos_token_ids)

    def __len__(self) -> int:
        """Grammars that are kept, those under way included."""
        return len(self._kept)

    def close(self) -> None:
        """Compile nothing more."""
        self._turns.close()
        self._trials.close()
        # Not cancelled: each ends at once, and its waiter gets the error.
        self._threads.shutdown(wait=False)

    def start(
        self,
        grammar: Grammar,
        stop_token_ids: tuple[int, ...],
        output: Sequence[int],
        *,
        client: Hashable = None,
        salt: str | None = None,
    ) -> "Waiting":
        """The state of a request at the end of the output it has so far.

        Raises:
            OverloadedError: the engine is closing.
        """
        key = _GrammarKey(grammar.kind, grammar.source, grammar.loose, salt)
        with self._lock:
            job = self._job(key)
            self._turns.submit(job, client)
        waiting = Waiting(job)

        def left(state: "Future[GrammarState]") -> None:
            with self._lock:
                if self._turns.unsubscribe(job, client) and not job.done.done():
                    job.stop()
                    if self._kept.peek(key) is job:
                        self._kept.pop(key)

        def begin(_: "Future[_Compiled]") -> None:
            # Only now a thread is taken: none ever waits for another.
            try:
                self._threads.submit(self._start, waiting, grammar, stop_token_ids, output)
            except RuntimeError:  # the threads are shut down
                if waiting.state.set_running_or_notify_cancel():
                    waiting.state.set_exception(EngineError("the engine is closing"))

        waiting.state.add_done_callback(left)
        job.done.add_done_callback(begin)
        return waiting

    def _start(
        self,
        waiting: "Waiting",
        grammar: Grammar,
        stop_token_ids: tuple[int, ...],
        output: Sequence[int],
    ) -> None:
        if not waiting.state.set_running_or_notify_cancel():
            return
        if (refused := waiting.job.done.exception()) is not None:
            # Not raised: kept, it would hold the frames of every request that it refused.
            waiting.state.set_exception(refused)
            return
        try:
            size = self._tokenizer.result().vocab_size
            known = tuple(id_ for id_ in stop_token_ids if id_ < size)
            state = GrammarState(
                waiting.job.done.result().matcher.deep_copy(),
                grammar,
                known,
                size,
                self._vocab_size,
            )
            state.read(output)
        except BaseException as error:  # its waiter gets it, whatever it is
            waiting.state.set_exception(error)
        else:
            waiting.state.set_result(state)

    def _job(self, key: "_GrammarKey") -> SharedTask[_Compiled]:
        found = self._kept.get(key)
        if found is None:
            grammar = Grammar(key.kind, key.source, loose=key.loose)
            trial = Trial(self._trials, grammar)
            found = SharedTask(partial(self._compile, grammar, trial), trial.stop)
            self._kept.put(key, found)
            found.done.add_done_callback(partial(self._compiled, key, found))
        return found

    def _compiled(
        self, key: "_GrammarKey", job: SharedTask[_Compiled], done: "Future[_Compiled]"
    ) -> None:
        """Keep what a grammar is, and no failure of the machine: the next request tries again."""
        error = done.exception()
        with self._lock:
            if self._kept.peek(key) is not job:
                return
            if error is None:
                self._kept.put(key, job)  # its size is known now
            elif not isinstance(error, InvalidRequestError):
                self._kept.pop(key)

    def _compile(self, grammar: Grammar, trial: Trial) -> _Compiled:
        try:
            checked = checked_source(grammar, trial)
            matcher = compiled(self._tokenizer.result(), grammar.kind, checked.source)
        except InvalidRequestError as error:
            raise InvalidRequestError(error.message, param=PARAM) from error
        return _Compiled(matcher, checked.num_bytes)


def _num_bytes(key: _GrammarKey, job: SharedTask[_Compiled]) -> int:
    """Memory of a grammar that is kept; before it is compiled, of its source."""
    compiled = job.done.done() and job.done.exception() is None
    size = len(key.source) + (job.done.result().num_bytes if compiled else 0)
    # One that is larger than the limit is kept, alone.
    return min(max(size, MAX_KEPT_BYTES // MAX_KEPT), MAX_KEPT_BYTES)


def too_late(waiting: Waiting) -> InlayError:
    """Return the error of a request whose grammar was not compiled within `MAX_SECONDS`."""
    if not waiting.job.begun:
        return OverloadedError(
            f"the grammar waited {MAX_SECONDS:g} s while others were compiled", retry_after=1
        )
    return InvalidRequestError(
        f"the grammar took more than {MAX_SECONDS:g} s to compile; make it simpler", param=PARAM
    )
