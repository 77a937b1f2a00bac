"""Grammars by what they say: compiled once, off the engine's loop and within limits, kept while they are used."""

import logging
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from inlay.engine.torch.grammar_source import source_of
from inlay.engine.torch.grammar_state import PARAM, GrammarState, refusal
from inlay.errors import InlayError, InvalidRequestError, OverloadedError
from inlay.protocol.work import Grammar, GrammarKind
from inlay.render.tokenizer import load_tokenizer

log = logging.getLogger(__name__)

KINDS: tuple[GrammarKind, ...] = ("json_schema", "json_object", "regex", "choice", "grammar")
"""What can be held to."""

MAX_KEPT = 128
"""Compiled grammars that are kept, the last used."""

MAX_KEPT_SOURCE = 4 * 1024 * 1024
"""Characters their sources may have together: what they take grows with them."""

MAX_SECONDS = 30.0
"""A work waits so long for its grammar; the largest the limits let pass takes about one on an idle core."""

_THREADS = 2
_LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    max_lexer_states=20_000,
    max_grammar_size=500_000,
    # Otherwise the whole vocabulary is run through large expressions in advance, outside of all limits.
    precompute_large_lexemes=False,
    verbose_errors=False,
)
"""llguidance's own: half of its usual fuel for a token, and a twelfth of its lexer's states of 1 to 2 KB."""


class Grammars:
    """Compiles grammars for one tokenizer. Safe to use from any thread."""

    def __init__(self, path: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        """Start to read the tokenizer, in the background.

        Args:
            path: of the model directory.
            vocab_size: width of the logits.
            eos_token_ids: what ends an output where its grammar may end.
        """
        self._vocab_size = vocab_size
        self._threads = ThreadPoolExecutor(_THREADS, "inlay-grammar", initializer=_yield_to_others)
        self._lock = threading.Lock()
        self._kept: OrderedDict[Grammar, Future[LLMatcher]] = OrderedDict()
        self._tokenizer = self._threads.submit(_tokenizer, path, eos_token_ids)

    def __len__(self) -> int:
        """Grammars that are kept, those under way included."""
        return len(self._kept)

    def close(self) -> None:
        """Compile nothing more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def start(
        self, grammar: Grammar, stop_token_ids: tuple[int, ...], output: Sequence[int]
    ) -> "Future[GrammarState]":
        """The state of a work at the end of the output it has so far.

        The future's exception is an `InvalidRequestError` when the grammar is none, is too costly, or does not allow `output`.
        """
        started: Future[GrammarState] = Future()

        def begin(compiled: Future[LLMatcher]) -> None:
            # Only now a thread is taken: none ever waits for another.
            try:
                self._threads.submit(self._start, started, compiled, grammar, stop_token_ids, output)
            except RuntimeError:
                started.set_exception(OverloadedError("the engine is closing"))

        self._compiled(grammar).add_done_callback(begin)
        return started

    def _start(
        self,
        started: "Future[GrammarState]",
        compiled: "Future[LLMatcher]",
        grammar: Grammar,
        stop_token_ids: tuple[int, ...],
        output: Sequence[int],
    ) -> None:
        try:
            size = self._tokenizer.result().vocab_size
            known = tuple(id_ for id_ in stop_token_ids if id_ < size)
            state = GrammarState(compiled.result().deep_copy(), grammar, known, size)
            state.read(output)
        except BaseException as error:  # its waiter must hear of it, whatever it is
            started.set_exception(error)
        else:
            started.set_result(state)

    def _compiled(self, grammar: Grammar) -> "Future[LLMatcher]":
        key = Grammar(grammar.kind, grammar.source)
        with self._lock:
            found = self._kept.get(key)
            if found is None:
                found = self._kept[key] = self._threads.submit(self._compile, key)
            self._kept.move_to_end(key)
            size = sum(len(kept.source) for kept in self._kept)
            while len(self._kept) > MAX_KEPT or (size > MAX_KEPT_SOURCE and len(self._kept) > 1):
                dropped, _ = self._kept.popitem(last=False)
                size -= len(dropped.source)
            return found

    def _compile(self, grammar: Grammar) -> LLMatcher:
        tokenizer = self._tokenizer.result()
        try:
            matcher = LLMatcher(tokenizer, source_of(grammar), log_level=0, limits=_LIMITS)
        except InlayError as error:
            raise InvalidRequestError(error.message, param=PARAM) from error
        except ValueError as error:
            raise refusal(str(error)) from error
        if not matcher.is_error():
            # The first token often costs the most, and is the first to tell that nothing can match.
            matcher.compute_bitmask()
        if matcher.is_error():
            raise refusal(matcher.get_error())
        return matcher


def _tokenizer(path: Path, eos_token_ids: tuple[int, ...]) -> LLTokenizer:
    tokenizer = load_tokenizer(path).tokenizer
    try:
        return LLTokenizer(tokenizer.to_str(), eos_token=list(eos_token_ids) or None)
    except ValueError as error:
        log.exception("the tokenizer of %s cannot be used for grammars", path)
        raise InvalidRequestError(
            f"this model's tokenizer cannot be used for structured output: {error}", param=PARAM
        ) from error


def _yield_to_others() -> None:
    """Give way to the threads that run the model; Linux has a niceness for each thread."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 5)


__all__ = ["KINDS", "MAX_SECONDS", "Grammars"]
