"""Outputs that must match a grammar, with models whose weights are random.

What they say is the mask's doing.
"""

import asyncio
import json
import re
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from traceback import walk_tb
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from llguidance import LLParserLimits

from inlay.base.errors import InvalidRequestError
from inlay.engine.grammar import matchers, trial
from inlay.engine.grammar import source as grammar_source
from inlay.engine.settings import EngineSettings
from inlay.engine.torch.engine import TorchEngine
from inlay.engine.torch.grammar import grammars
from inlay.engine.torch.grammar import state as grammar_state
from inlay.engine.torch.grammar.state import GrammarState
from inlay.messages.card import Exactness
from inlay.messages.digest import with_digests
from inlay.messages.prompt import Buffer, Prompt, Rows, Tokens
from inlay.messages.request import MAX_GRAMMAR, Grammar, GrammarKind, Request, Sampling
from inlay.render import Renderer
from tests.engine.conformance import SECRET, Receiver
from tests.models import EOS_ID, VOCAB_SIZE, tiny

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "maximum": 99, "minimum": 0},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
CASES: dict[GrammarKind, str] = {
    "json_schema": json.dumps(PERSON),
    "json_object": "",
    "regex": "[a-c]{3}-[0-9]{2}",
    "choice": '["yes", "no", "ü (x)"]',
    "grammar": 'start: "sum " NUMBER ("+" NUMBER)~1..2\nNUMBER: /[1-9]{1,2}/',
}


def matches(kind: GrammarKind, text: str) -> bool:
    if kind == "json_schema":
        value = json.loads(text)
        return set(value) == {"name", "age"} and len(value["name"]) <= 6 and 0 <= value["age"] <= 99
    if kind == "json_object":
        return isinstance(json.loads(text), dict)
    if kind == "regex":
        return re.fullmatch("[a-c]{3}-[0-9]{2}", text) is not None
    if kind == "choice":
        return text in ("yes", "no", "ü (x)")
    return re.fullmatch(r"sum [1-9]{1,2}(\+[1-9]{1,2}){1,2}", text) is not None


@pytest.mark.parametrize(
    ("begin", "again", "end"),
    [
        ('start: "a"\n', "a", ""),
        ('start: "', '\\"', ""),
        ('start: "', '\\"', "\\"),
        ('start: "', '\\"', "\\\n"),
        ("start: /", "\\/", ""),
        ("start: /", "\\/", "\\"),
        ("start: /", "\\/", "\n"),
    ],
)
async def test_a_grammar_without_an_end_is_read_once(begin: str, again: str, end: str) -> None:
    # Read again from each of its characters it would take minutes, most of them with the
    # interpreter's lock.
    source = begin + again * ((MAX_GRAMMAR - len(begin) - len(end)) // len(again)) + end
    with suppress(InvalidRequestError):
        grammar_source.source_of(Grammar("grammar", source))


@pytest.fixture(scope="module")
def directory() -> Path:
    return tiny("llama")


@pytest.fixture(scope="module")
def renderer(directory: Path) -> Renderer:
    return Renderer.load(directory)


@pytest.fixture(scope="module")
def blanks(renderer: Renderer) -> dict[int, float]:
    """Against white space between the parts of JSON, of which a random model has no end."""
    return {
        id_: -100.0
        for id_ in range(VOCAB_SIZE)
        if id_ != EOS_ID and not renderer.decode([id_]).strip()
    }


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(directory: Path) -> AsyncIterator[TorchEngine]:
    made = TorchEngine(EngineSettings.of(model=str(directory), max_num_seqs=8), SECRET)
    await made.start()
    yield made
    await made.close()


pytestmark = pytest.mark.asyncio(loop_scope="module")
PAGE_BYTES = 16 * 2 * 2 * 2 * 8 * 4
"""16 positions of 2 layers, keys and values of 2 heads with 8 floats."""

PROMPT = Prompt.of(Tokens((11, 12, 13, 14)))
_counter = iter(range(10**6))


def make_request(
    kind: GrammarKind | None, source: str | None = None, prompt: Prompt = PROMPT, **options: Any
) -> Request:
    prior, client = options.pop("prior_output", ()), options.pop("client", None)
    grammar = (
        None
        if kind is None
        else Grammar(kind, CASES[kind] if source is None else source, options.pop("after", ()))
    )
    sampling = Sampling(**{"max_tokens": 200, "seed": 5, "grammar": grammar, **options})
    return Request(
        id=f"w{next(_counter)}",
        prompts=(prompt,),
        params=sampling,
        prior_output=prior,
        client=client,
    )


async def run(engine: TorchEngine, *requests: Request) -> list[Receiver]:
    receivers = [Receiver(one) for one in requests]
    for one, receiver in zip(requests, receivers, strict=True):
        engine.submit(one, receiver)
    for receiver in receivers:
        await receiver.ended()
    return receivers


def text_of(renderer: Renderer, receiver: Receiver) -> str:
    return renderer.decode(receiver.output, skip_special_tokens=True)


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_an_output_matches_its_grammar_and_ends_where_it_may(
    engine: TorchEngine,
    renderer: Renderer,
    blanks: dict[int, float],
    kind: GrammarKind,
    temperature: float,
) -> None:
    allowed = None
    if kind == "json_object":  # a random model would go on with an object for ever
        allowed = (
            *renderer.encode("{}", add_special_tokens=False),
            *renderer.encode("{", add_special_tokens=False),
            EOS_ID,
        )
        allowed += renderer.encode("}", add_special_tokens=False)
    options: dict[str, Any] = {"repetition_penalty": 1.3, "logprobs": 2} if temperature else {}
    (receiver,) = await run(
        engine,
        make_request(
            kind, temperature=temperature, logit_bias=blanks, allowed_token_ids=allowed, **options
        ),
    )
    assert receiver.last.finish_reason == "stop"
    assert receiver.output[-1] == EOS_ID
    assert matches(kind, text_of(renderer, receiver))


async def test_neighbours_with_other_grammars_and_none_change_nothing(
    engine: TorchEngine, renderer: Renderer, blanks: dict[int, float]
) -> None:
    kinds: list[GrammarKind | None] = ["regex", None, "choice", "json_schema", None, "grammar"]
    options: list[dict[str, Any]] = [
        {"temperature": 0.8, "max_tokens": 60, "seed": index, "logit_bias": blanks}
        for index in range(len(kinds))
    ]
    alone = [
        (await run(engine, make_request(kind, **chosen)))[0].output
        for kind, chosen in zip(kinds, options, strict=True)
    ]
    together = await run(
        engine, *(make_request(kind, **chosen) for kind, chosen in zip(kinds, options, strict=True))
    )
    assert [receiver.output for receiver in together] == alone
    for kind, receiver in zip(kinds, together, strict=True):
        assert kind is None or matches(kind, text_of(renderer, receiver))


@pytest.mark.parametrize("after", [(), (70,)])
async def test_a_resumed_output_is_the_undisturbed_one(
    engine: TorchEngine, blanks: dict[int, float], after: tuple[int, ...]
) -> None:
    assert engine.card.resuming["grammar"] is Exactness.EXACT
    options: dict[str, Any] = {
        "temperature": 1.0,
        "after": after,
        "logit_bias": {**blanks, **dict.fromkeys(after, 60.0)},
    }
    whole = (await run(engine, make_request("json_schema", **options)))[0].output
    assert whole[-1] == EOS_ID
    for cut in (1, 2, len(whole) // 2, len(whole) - 1):
        (resumed,) = await run(
            engine, make_request("json_schema", prior_output=tuple(whole[:cut]), **options)
        )
        assert resumed.output == whole[cut:]


async def test_what_comes_before_the_grammar_begins_is_free(
    engine: TorchEngine, renderer: Renderer
) -> None:
    marks = renderer.encode("é", add_special_tokens=False)
    (free,) = await run(
        engine, make_request(None, temperature=0.9, max_tokens=30, logit_bias={marks[0]: 4.0})
    )
    begin = free.output[2:4]
    (receiver,) = await run(
        engine,
        make_request(
            "regex", after=tuple(begin), temperature=0.9, max_tokens=60, logit_bias={marks[0]: 4.0}
        ),
    )
    assert receiver.output[:4] == free.output[:4]
    assert matches("regex", renderer.decode(receiver.output[4:], skip_special_tokens=True))


async def test_rows_and_text_lead_to_the_same_structured_output(
    engine: TorchEngine, directory: Path
) -> None:
    from tests.equality.reference import model_of

    table = model_of(directory).get_input_embeddings().weight.detach()
    rows = table[[11, 12, 13, 14]].contiguous().numpy()
    mixed = Prompt.of(
        Tokens((11, 12)), Rows(Buffer(rows[2:].tobytes()), "float32", (2, rows.shape[1]))
    )
    whole = Prompt.of(Rows(Buffer(rows.tobytes()), "float32", rows.shape))
    (ids, *others) = await run(
        engine,
        *(
            make_request("json_schema", prompt=with_digests(prompt, SECRET), temperature=0.0)
            for prompt in (PROMPT, mixed, whole)
        ),
    )
    assert all(other.output == ids.output for other in others)


async def test_a_preempted_output_still_matches(directory: Path, renderer: Renderer) -> None:
    engine = TorchEngine(
        EngineSettings.of(
            model=str(directory),
            kv_cache_memory_bytes=6 * PAGE_BYTES,
            max_model_len=90,
            max_num_seqs=4,
        ),
        SECRET,
    )
    await engine.start()
    try:
        # Four that do not meet, since each waited for its grammar, preempt nobody.
        for _ in range(10):
            requests = [
                make_request("regex", "[a-z ]{40,60}", temperature=1.0, max_tokens=80, seed=seed)
                for seed in range(4)
            ]
            receivers = await run(engine, *requests)
            assert all(
                re.fullmatch("[a-z ]{40,60}", text_of(renderer, receiver)) for receiver in receivers
            )
            if engine.stats().preemptions:
                break
        assert engine.stats().preemptions > 0
    finally:
        await engine.close()


async def test_a_grammar_that_can_only_end_ends_before_min_tokens(
    engine: TorchEngine, renderer: Renderer
) -> None:
    (receiver,) = await run(engine, make_request("choice", '["no"]', min_tokens=50))
    assert text_of(renderer, receiver) == "no"
    (longer,) = await run(engine, make_request("regex", "a*", min_tokens=20, max_tokens=40))
    assert len(longer.output) >= 20


async def test_a_clients_stop_token_may_end_what_the_grammar_may_end(engine: TorchEngine) -> None:
    (receiver,) = await run(
        engine, make_request("regex", "a*", stop_token_ids=(300,), logit_bias={300: 90.0})
    )
    assert receiver.output == [300]
    (never,) = await run(
        engine, make_request("regex", "a{5}", stop_token_ids=(300,), logit_bias={300: 90.0})
    )
    assert len(never.output) > 1


async def test_where_nothing_is_left_to_choose_the_request_fails_alone(
    engine: TorchEngine, renderer: Renderer
) -> None:
    a = renderer.encode("a", add_special_tokens=False)
    contrary = make_request("regex", "b+", allowed_token_ids=a)
    failed, fine = await run(engine, contrary, make_request("regex"))
    assert failed.last.error is not None
    assert "no token is left" in failed.last.error.message
    assert matches("regex", text_of(renderer, fine))


@pytest.mark.parametrize(
    ("kind", "source", "says"),
    [
        ("json_schema", '{"type": "objekt"}', "objekt"),
        ("json_schema", '{"$ref": "#/$defs/none"}', "does not exist"),
        ("json_schema", '{"$ref": "#"}', "nothing can match"),
        ("json_schema", '{"$ref": "http://127.0.0.1:9/x"}', "127.0.0.1"),
        ("json_schema", "false", "matches nothing"),
        ("json_schema", "[1]", "must be an object"),
        ("json_schema", '{"properties": 5}', "properties"),
        ("json_schema", '{"not": {}}', "not"),
        ("json_schema", '{"multipleOf": 1000003}', "multipleOf"),
        ("json_schema", '{"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}', "multipleOf"),
        ("json_schema", '{"multipleOf": 1e300}', "digits"),
        ("json_schema", '{"pattern": "(a{1000}){1000}"}', "too large"),
        ("json_schema", '{"a":' * 200 + "1" + "}" * 200, "nested too deeply"),
        ("regex", "(a{1000}){1000}", "too large"),
        ("regex", "((((a{0,100}){100}){100}){100}){100}", "too large"),
        ("regex", "(" * 300 + "a" + ")" * 300, "nested too deeply"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", r"(a)\1", "backreferences"),
        ("regex", "(a", "unclosed group"),
        ("regex", r"[^\s\S]", "nothing can match"),
        ("grammar", "start: other", "unknown name"),
        ("grammar", "hello", "cannot be"),
        ("grammar", "start: A\nA: B{1000}\nB: C{1000}\nC: /x/", "too large"),
        ("grammar", "start: /(a{1000}){1000}/", "too large"),
        ("grammar", 'start: %json {"multipleOf": 1000003}', "multipleOf"),
        ("regex", "a" * 300_000, "at most"),
        (
            "json_schema",
            json.dumps({"properties": {f"p{n}": {} for n in range(16_000)}}),
            "at most 5000",
        ),
        ("json_schema", json.dumps({"required": [f"p{n}" for n in range(5_001)]}), "at most 5000"),
    ],
)
async def test_a_bad_or_hostile_grammar_is_the_clients_error_and_nobody_elses(
    engine: TorchEngine, renderer: Renderer, kind: GrammarKind, source: str, says: str
) -> None:
    failed, fine = await run(engine, make_request(kind, source), make_request("regex"))
    assert failed.last.error is not None
    error = failed.last.error.to_error()
    assert isinstance(error, InvalidRequestError)
    assert error.param == "grammar"
    assert says in error.message
    assert matches("regex", text_of(renderer, fine))


async def test_a_grammar_that_outgrows_its_limits_fails_alone(
    engine: TorchEngine, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = LLParserLimits(
        max_lexer_states=200, precompute_large_lexemes=False, verbose_errors=False
    )
    monkeypatch.setattr(matchers, "LIMITS", limits)
    letters = tuple(id_ for id_ in range(3, VOCAB_SIZE) if renderer.decode([id_]).isalpha())
    # Its automaton remembers the last forty letters.
    hostile = make_request(
        "regex", ".*[a-m].{40}x", temperature=1.0, seed=3, allowed_token_ids=letters
    )
    failed, fine = await run(engine, hostile, make_request("regex"))
    assert failed.last.error is not None
    error = failed.last.error.to_error()
    assert isinstance(error, InvalidRequestError)
    assert "too many states" in error.message
    assert 0 < len(failed.output) < 200
    assert matches("regex", text_of(renderer, fine))


async def test_a_request_whose_masks_cost_too_much_together_fails_alone(
    engine: TorchEngine, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_state, "ALLOWANCE", 0.0)
    monkeypatch.setattr(grammar_state, "A_TOKEN", 0.0)
    failed, fine = await run(engine, make_request("regex"), make_request(None))
    assert failed.last.error is not None
    error = failed.last.error.to_error()
    assert isinstance(error, InvalidRequestError)
    assert "the grammar took more than 0 s for 1 tokens" in error.message
    assert fine.last.finish_reason == "length"


async def test_an_aborted_requests_mask_that_waits_for_its_turn_is_not_computed(
    engine: TorchEngine, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: set[GrammarState] = set()
    begun: list[GrammarState] = []
    ready, go_on = threading.Event(), threading.Event()
    prepare, mask = GrammarState.begin_masks, GrammarState.mask

    def see() -> None:
        if len(prepared) == 4 and len(begun) == 2:
            ready.set()

    def noted(state: GrammarState, *args: Any) -> None:
        prepare(state, *args)
        prepared.add(state)
        see()

    def held(state: GrammarState) -> Any:
        begun.append(state)
        see()
        assert go_on.wait(60)
        return mask(state)

    monkeypatch.setattr(GrammarState, "begin_masks", noted)
    monkeypatch.setattr(GrammarState, "mask", held)
    requests = [make_request("regex", client="one") for _ in range(4)]
    receivers = [Receiver(one) for one in requests]
    try:
        for one, receiver in zip(requests, receivers, strict=True):
            engine.submit(one, receiver)
        assert await asyncio.to_thread(ready.wait, 120)
        for one in requests:
            engine.abort(one.id)
        for receiver in receivers:
            await receiver.ended()
    finally:
        go_on.set()
    # Comes after them in their client's line.
    (fine,) = await run(engine, make_request("regex", client="one"))
    assert matches("regex", text_of(renderer, fine))
    assert len(prepared & {*begun}) == 3


async def test_a_request_that_waits_for_its_grammar_can_be_ended(engine: TorchEngine) -> None:
    one = make_request(
        "json_schema", json.dumps({"enum": [f"value {index}" for index in range(9000)]})
    )
    receiver = Receiver(one)
    engine.submit(one, receiver)
    engine.abort(one.id)
    assert one.id not in engine._needs
    await receiver.ended()
    assert receiver.last.finish_reason == "abort"
    (other,) = await run(engine, make_request("choice"))
    assert other.last.finish_reason == "stop"


async def test_an_output_that_does_not_match_cannot_be_resumed(directory: Path) -> None:
    made = grammars.Grammars(directory, VOCAB_SIZE, (EOS_ID,))
    try:
        state = await asyncio.wrap_future(made.start(Grammar("regex", "ab"), (), ()).state)
        state.read([])
        mask = state.mask()
        assert mask is not None
        assert np.unpackbits(mask.view(np.uint8)).sum() >= 1
        with pytest.raises(InvalidRequestError):
            await asyncio.wrap_future(made.start(Grammar("regex", "ab"), (), (20, 21, 22)).state)
    finally:
        made.close()


async def test_a_refusal_that_is_kept_holds_nothing_of_whom_it_refused(directory: Path) -> None:
    made = grammars.Grammars(directory, VOCAB_SIZE, (EOS_ID,))

    def frames() -> int:
        """Of the error's traceback, once it has been given to a request."""
        state = made.start(Grammar("regex", "("), (), ()).state
        error = state.exception(60)
        assert isinstance(error, InvalidRequestError)
        return len(list(walk_tb(error.__traceback__)))

    try:
        first = await asyncio.to_thread(frames)
        assert {await asyncio.to_thread(frames) for _ in range(5)} == {first}
    finally:
        made.close()


async def test_one_grammar_is_compiled_once_and_the_oldest_is_dropped(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    real = grammar_source.source_of

    def counted(grammar: Grammar) -> str:
        compiled.append(grammar.source)
        return real(grammar)

    monkeypatch.setattr(trial, "source_of", counted)
    monkeypatch.setattr(grammars, "MAX_KEPT", 2)
    made = grammars.Grammars(directory, VOCAB_SIZE, (EOS_ID,))
    try:
        for regex in ("a", "a", "b", "a", "c", "a", "b"):
            await asyncio.wrap_future(made.start(Grammar("regex", regex), (), ()).state)
        many = [made.start(Grammar("regex", "d"), (), ()).state for _ in range(5)]
        await asyncio.gather(*map(asyncio.wrap_future, many))
        assert compiled == ["a", "b", "c", "b", "d"]
        assert len(made) == 2
    finally:
        made.close()


COSTLY = [
    json.dumps({"properties": {f"{letter}{n}": {"type": "integer"} for n in range(1900)}})
    for letter in "abcdefghij"
]
"""Each takes half a second or more."""


async def test_a_client_with_costly_schemas_delays_its_own_and_nobody_elses(
    engine: TorchEngine, renderer: Renderer
) -> None:
    hostile = [make_request("json_schema", source, client="hostile") for source in COSTLY]
    receivers = [Receiver(one) for one in hostile]
    for one, receiver in zip(hostile, receivers, strict=True):
        engine.submit(one, receiver)
    (fine,) = await run(engine, make_request("regex", "[a-d]{7}", client="good"))
    waiting = [receiver for receiver in receivers if not receiver.deltas]
    for one in hostile:
        engine.abort(one.id)
    # In the order of coming all of them would have been compiled first.
    assert waiting
    assert re.fullmatch("[a-d]{7}", text_of(renderer, fine))


async def test_bad_words_and_allowed_ids_are_held_to(engine: TorchEngine) -> None:
    (free,) = await run(engine, make_request(None, temperature=0.0, max_tokens=8))
    first, second = free.output[:2]
    (without,) = await run(
        engine, make_request(None, temperature=0.0, max_tokens=8, bad_words=((first, second),))
    )
    assert without.output[0] == first
    assert without.output[1] != second
    (banned,) = await run(
        engine, make_request(None, temperature=0.0, max_tokens=8, bad_words=((first,),))
    )
    assert first not in banned.output
    (few,) = await run(
        engine, make_request(None, temperature=1.0, max_tokens=20, allowed_token_ids=(40, 41))
    )
    assert set(few.output) <= {40, 41}
    assert len(few.output) == 20
