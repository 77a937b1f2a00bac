"""Fuzz the count of what a grammar costs.

What it lets pass is compiled and masked by the library within the limits of a trial.

    python -m tests.fuzz.fuzz_grammars --executions 100000 [--seed 1] [--found FOLDER]
    python -m tests.fuzz.fuzz_grammars --atheris FOLDER -runs=1000000 -max_len=384 -timeout=10

An input is a kind of grammar (or `loose`: a JSON schema, all of whose definitions are), a line
break, and the grammar. The first form mutates the corpus at
random, mostly by repeating and wrapping pieces, as what costs much is made of them, and writes what
was too costly into FOLDER. It needs no `atheris`: what it looks at is not which lines run but what
the library does behind them. The second form is guided by coverage of the count, and compiles only
what the count calls cheap, which is what an engine's own process compiles without a trial.
"""

import argparse
import json
import random
import signal
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, get_args

from llguidance import LLMatcher, LLTokenizer

from inlay import demo
from inlay.base.errors import InlayError
from inlay.messages.request import Grammar, GrammarKind
from tests.fuzz.guided import instrumented, run
from tests.fuzz.mutation import mutated

CORPUS = Path(__file__).parent / "corpus" / "grammars"
MAX_MASK = 1.0
"""Seconds of processor time for one mask."""

MAX_CHEAP = 0.2
"""Seconds of processor time for what is compiled without a trial."""

_STEPS = 6
_WORDS = tuple(
    b"a? a* a+ (a?) (ab?)* a{0,9} a{3} {1,200} {50} {, 7} | & ~ ( ) [^x] [a-c] \\w \\p{L} . .* ^ $ (?: (?i) (?s) \\d \\. "
    b'"a" "ab"? /a?/ A A: B: start: %json {"pattern": "allOf":[ "anyOf":[ "maxLength":9 "multipleOf":7 "$ref":"#/$defs/a" '
    b'"format":"email" "minItems":50 "properties":{ "patternProperties":{ "enum":[ "type":"string" {}'.split(
        b" "
    )
)


class Spent(NamedTuple):
    """Seconds of processor time.

    To compile with the first mask, and for the longest of the next masks.
    """

    compiled: float
    mask: float


@cache
def _parts() -> Any:
    """What is fuzzed: imported late, so that it can be instrumented."""
    from inlay.engine.grammar.matchers import matcher_of, tokenizer_of
    from inlay.engine.grammar.source import source_of
    from inlay.engine.grammar.trial import is_cheap
    from inlay.engine.grammar.trial_process import MAX_CPU

    return SimpleNamespace(
        is_cheap=is_cheap,
        matcher_of=matcher_of,
        max_cpu=MAX_CPU,
        source_of=source_of,
        tokenizer_of=tokenizer_of,
    )


@cache
def tokenizer() -> LLTokenizer:
    """The demo model's."""
    made: LLTokenizer = _parts().tokenizer_of(demo.model_dir(), (0,))
    return made


def grammar_in(data: bytes) -> Grammar | None:
    """The grammar an input stands for, if it is one."""
    kind, _, source = data.decode("utf-8", "replace").partition("\n")
    if kind == "loose":
        return Grammar("json_schema", source, loose=_definitions(source))
    return next((Grammar(known, source) for known in get_args(GrammarKind) if known == kind), None)


def _definitions(source: str) -> tuple[str, ...]:
    try:
        definitions = json.loads(source)["$defs"]
    except (ValueError, RecursionError, LookupError, TypeError):
        return ()
    return tuple(definitions) if isinstance(definitions, dict) else ()


def check(data: bytes, seed: int = 0, *, trial: bool = True) -> Spent | None:
    """Count, compile and mask a grammar.

    Args:
        data: the input.
        seed: of the way through the masks.
        trial: also do so with grammars that are not cheap, which an engine first tries in a
            process of its own.

    Returns:
        What was spent; None for what is refused.

    Raises:
        AssertionError: it was let pass, and cost too much.
        Exception: anything but an `InlayError` came out.
    """
    grammar = grammar_in(data)
    if grammar is None:
        return None
    parts = _parts()
    begun = time.thread_time()
    try:
        source, cheap = parts.source_of(grammar), parts.is_cheap(grammar)
        if not cheap and not trial:
            return Spent(time.thread_time() - begun, 0.0)
        matcher = parts.matcher_of(tokenizer(), source)
    except InlayError as refusal:
        _check_time(time.thread_time() - begun, parts.max_cpu)
        if len(refusal.message) >= 1000:
            raise AssertionError(f"a message of {len(refusal.message)} characters") from refusal
        return None
    compiled = time.thread_time() - begun
    _check_time(compiled, MAX_CHEAP if cheap else parts.max_cpu)
    return Spent(compiled, _masks(matcher, random.Random(seed)))


def _masks(matcher: LLMatcher, rng: random.Random) -> float:
    """The longest of the masks on a way at random through what is allowed."""
    longest = 0.0
    for _ in range(_STEPS):
        begun = time.thread_time()
        mask = matcher.compute_bitmask()
        longest = max(longest, time.thread_time() - begun)
        _check_time(longest, MAX_MASK)
        if matcher.is_error() or matcher.is_stopped():
            break
        start = rng.randrange(len(mask))
        byte = next(
            (place for place in (*range(start, len(mask)), *range(start)) if mask[place]), None
        )
        if byte is None:
            break
        bits = [8 * byte + bit for bit in range(8) if mask[byte] >> bit & 1]
        matcher.consume_token(rng.choice(bits))
    return longest


def _check_time(seconds: float, most: float) -> None:
    if seconds > most:
        raise AssertionError(
            f"it took {seconds:.2f} s of processor time; at most {most:g} are allowed"
        )


def changed(data: bytes, inputs: Sequence[bytes], rng: random.Random) -> bytes:
    """Another grammar.

    A piece is repeated, wrapped into a counted group, or changed as bytes are.
    """
    kind, _, source = data.partition(b"\n")
    for _ in range(1 + rng.randrange(3)):
        start = rng.randrange(len(source) + 1)
        end = min(len(source), start + 1 + rng.randrange(12))
        piece = source[start:end]
        match rng.randrange(5):
            case 0:
                source = source[:start] + piece * rng.choice((2, 3, 10, 50, 400)) + source[end:]
            case 1:
                low, more = rng.randrange(4), rng.choice((0, 1, 5, 40, 900))
                source = source[:start] + b"(%s){%d,%d}" % (piece, low, low + more) + source[end:]
            case 2:
                source = (
                    source[:start]
                    + b"(%s)" % piece
                    + rng.choice((b"?", b"*", b"+", b"|"))
                    + source[end:]
                )
            case 3:
                source = source[:start] + rng.choice(_WORDS) + source[start:]
            case _:
                source = mutated(source, inputs, _WORDS, rng)
    return kind + b"\n" + source[:20_000]


def fuzz(executions: int, seed: int, found: Path | None = None) -> tuple[int, Spent]:
    """Check `executions` mutations of the corpus.

    Returns:
        How many were accepted, and the most that any took.
    """
    rng = random.Random(seed)
    inputs = [path.read_bytes() for path in sorted(CORPUS.iterdir())]
    accepted, most = 0, Spent(0.0, 0.0)
    for count in range(executions):
        # What passed is changed on, so that changes add up; in the end one starts again.
        data = changed(rng.choice(inputs), inputs, rng)
        if found is not None:
            (found / "last").write_bytes(data)
        try:
            spent = check(data, count)
        except BaseException as error:
            if found is not None:
                (found / f"costly-{seed}-{count}").write_bytes(data)
                print(f"{count}: {error}: {data[:200]!r}", flush=True)
                continue
            raise
        if spent is not None:
            accepted += 1
            inputs[rng.randrange(len(inputs))] = data
            if (spent.compiled > most.compiled or spent.mask > most.mask) and found is not None:
                print(f"{count}: {spent} {data[:200]!r}", flush=True)
            most = Spent(max(most.compiled, spent.compiled), max(most.mask, spent.mask))
        if count % 200 == 0:
            inputs = [path.read_bytes() for path in sorted(CORPUS.iterdir())]
    return accepted, most


def _guided(options: Sequence[str]) -> None:
    grammar = "inlay.engine.grammar"
    with instrumented(
        *(f"{grammar}.{name}" for name in ("cheap", "cost", "lark", "regex", "schemas", "source"))
    ):
        _parts()
    inputs = [path.read_bytes() for path in sorted(CORPUS.iterdir())]
    run(
        lambda data: check(data, trial=False),
        [
            lambda data, rng: changed(data, inputs, rng),
            lambda data, rng: mutated(data, inputs, _WORDS, rng),
        ],
        options,
        [CORPUS],
    )


def main() -> None:
    """Run what the module's docstring says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--executions", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--found", type=Path, default=Path("found"))
    parser.add_argument("--atheris", nargs=argparse.REMAINDER, help="libFuzzer's arguments")
    options = parser.parse_args()
    if options.atheris is not None:
        _guided(options.atheris)
        return
    options.found.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # what hangs ends the run, and is in `last`
    accepted, most = fuzz(options.executions, options.seed, options.found)
    print(f"{accepted} of {options.executions} accepted; the most: {most}")


if __name__ == "__main__":
    main()
