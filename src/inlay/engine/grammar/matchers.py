"""llguidance's matchers, within limits, and its words for what it refuses."""

import logging
from contextlib import suppress
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from inlay.base.allocator import trim
from inlay.base.errors import InlayError, InvalidRequestError
from inlay.engine.grammar.parts import explained
from inlay.engine.grammar.source import schema_in
from inlay.messages.request import GrammarKind
from inlay.render.tokenizer import load_tokenizer, tokenizer_text

log = logging.getLogger(__name__)

PARAM = "grammar"
"""The parameter that errors about grammars name; a frontend knows in which field it came."""

LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    # With these an ambiguous grammar (s: A | s s | s s s) gets to masks of 0.1 s; twice as many are
    # 0.7 s.
    step_max_items=10_000,
    max_lexer_states=20_000,
    max_grammar_size=500_000,
    # Otherwise the whole vocabulary is run through large expressions in advance, outside of all
    # limits.
    precompute_large_lexemes=False,
    verbose_errors=False,
)
"""llguidance's own.

Half of its usual fuel for a token, and a twelfth of its lexer's states of 1 to 2 KB.
"""


def tokenizer_of(path: Path, eos_token_ids: tuple[int, ...]) -> LLTokenizer:
    """The tokenizer of a model directory.

    Raises:
        InvalidRequestError: it cannot be used for grammars.
    """
    ends = list(eos_token_ids) or None
    try:
        with suppress(ValueError):
            return LLTokenizer(tokenizer_text(path), eos_token=ends)
        # llguidance reads with an older library, which may know only what a newer one writes.
        return LLTokenizer(load_tokenizer(path).tokenizer.to_str(), eos_token=ends)
    except ValueError as error:
        log.exception("the tokenizer of %s cannot be used for grammars", path)
        raise InvalidRequestError(
            f"this model's tokenizer cannot be used for structured output: {error}", param=PARAM
        ) from error
    finally:
        # To read a vocabulary of 150,000 took 70 MB.
        trim()


def matcher_of(tokenizer: LLTokenizer, source: str) -> LLMatcher:
    """Compile a grammar, its first mask included. Cannot be interrupted.

    Raises:
        InvalidRequestError: it is none, or passes the limits.
    """
    try:
        matcher = LLMatcher(tokenizer, source, log_level=0, limits=LIMITS)
    except ValueError as error:
        raise refusal(str(error)) from error
    if not matcher.is_error():
        # The first token often costs the most, and is the first to tell that nothing can match.
        matcher.compute_bitmask()
    if matcher.is_error():
        raise refusal(matcher.get_error())
    return matcher


def compiled(tokenizer: LLTokenizer, kind: GrammarKind, source: str) -> LLMatcher:
    """As `matcher_of`, for a kind of grammar; errors of a JSON schema name the place in it."""
    try:
        return matcher_of(tokenizer, source)
    except InvalidRequestError as error:
        raise (explained(schema_in(source), error) if kind == "json_schema" else error) from None


def refusal(message: str) -> InlayError:
    """The library's words about the grammar, in one line; none of those about itself."""
    if message.startswith("panic"):
        text = "it is too large or too complex to be compiled; make it smaller"
    elif message.startswith("NoExtension"):
        text = "nothing can match it"
    else:
        lines = [line.strip() for line in message.split("<non-verbose/>")[0].splitlines()]
        text = " ".join(line for line in lines if line)
    return InvalidRequestError(f"the grammar cannot be used: {text[:400]}", param=PARAM)
