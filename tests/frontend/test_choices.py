"""A choice shows the same whatever pieces its deltas come in."""

import itertools
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inlay.errors import EngineError, ErrorFrame, OverloadedError
from inlay.frontend.generation.choices import Choice, Display, Piece
from inlay.prompt import Prompt, Tokens
from inlay.protocol.work import Delta, Sampling, Usage, Work
from inlay.render import Begins, Output, OutputFormat, ReasoningIds, Renderer, StopStrings
from inlay.render.parsers.calls import Tools
from inlay.render.parsers.hermes import HermesParser
from tests.models import EOS_ID, TURN, tiny
from tests.render.directories import qwen_like


@cache
def renderer() -> Renderer:
    return Renderer.load(tiny("llama"))


def choice(display: Display, **sampling: Any) -> Choice:
    work = Work(id="w", prompt=Prompt.of(Tokens([5])), sampling=Sampling(max_tokens=100, **sampling))
    return Choice(0, work, renderer(), display)


def deltas(ids: list[int], cuts: list[int], *, ended_by: int | None = None) -> list[Delta]:
    """Ids cut at `cuts`; the last delta ends the output."""
    bounds = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    pieces = [ids[low:high] for low, high in itertools.pairwise(bounds)] or [[]]
    made, offset = [], 0
    for piece in pieces:
        made.append(Delta("w", 0, offset, tuple(piece)))
        offset += len(piece)
    last = made[-1]
    reason: Any = "length" if ended_by is None else "stop"
    made[-1] = Delta("w", 0, last.offset, last.token_ids, (), reason, ended_by, Usage(1, len(ids), 1))
    return made


def shown(subject: Choice, pieces: list[Delta]) -> tuple[str, tuple[int, ...], Piece]:
    text = ""
    ids: tuple[int, ...] = ()
    for delta in pieces:
        piece = subject.take([delta])
        text += piece.text
        ids += piece.token_ids
        if subject.finish_reason is not None:
            break
    return text, ids, piece


IDS = st.lists(st.integers(3, 379), min_size=1, max_size=30)
CUTS = st.lists(st.integers(0, 30), max_size=6)


@given(IDS, CUTS)
def test_all_pieces_together_are_the_decoded_output(ids: list[int], cuts: list[int]) -> None:
    subject = choice(Display())
    text, taken, last = shown(subject, deltas(ids, cuts))
    assert text == renderer().decode(ids, skip_special_tokens=True)
    assert (list(taken), last.finish_reason, subject.completion_tokens) == (ids, "length", len(ids))


@given(IDS, CUTS, st.integers(0, 40), st.integers(1, 4), st.booleans())
def test_a_stop_string_cuts_text_and_tokens_at_its_first_occurrence(
    ids: list[int], cuts: list[int], start: int, length: int, include: bool
) -> None:
    text = renderer().decode(ids, skip_special_tokens=True)
    stop = text[start % max(1, len(text)) :][:length]
    if not stop:
        return
    subject = choice(Display(stops=StopStrings((stop, "\x00never")), include_stop=include))
    got, taken, last = shown(subject, deltas(ids, cuts))
    assert got == text[: text.index(stop) + (len(stop) if include else 0)]
    assert (last.finish_reason, last.stop_reason) == ("stop", stop)
    assert list(taken) == ids[: len(taken)]
    assert subject.completion_tokens == len(taken)
    again = choice(Display(stops=StopStrings((stop, "\x00never")), include_stop=include))
    assert shown(again, deltas(ids, []))[:2] == (got, taken)


def test_stop_strings_are_not_looked_for_before_min_tokens() -> None:
    ids = list(renderer().encode("a b a b a b a b", add_special_tokens=False))
    at_once = shown(choice(Display(stops=StopStrings(("b",)))), deltas(ids, []))
    later = shown(choice(Display(stops=StopStrings(("b",))), min_tokens=5), deltas(ids, []))
    assert len(at_once[1]) < 5 <= len(later[1])
    assert later[0].startswith("a b a")


@pytest.mark.parametrize("include", [True, False])
def test_the_token_that_ended_the_output_is_counted_and_has_no_text_of_its_own(include: bool) -> None:
    ids = list(renderer().encode("a b c", add_special_tokens=False))
    named = choice(Display(include_stop=include), stop_token_ids=(ids[-1],))
    text, taken, last = shown(named, deltas(ids, [], ended_by=ids[-1]))
    assert text == renderer().decode(ids if include else ids[:-1], skip_special_tokens=True)
    assert (list(taken), last.finish_reason, last.stop_reason) == (ids, "stop", ids[-1])
    own = choice(Display())
    _, _, last = shown(own, deltas([*ids, EOS_ID], [], ended_by=EOS_ID))
    assert (last.finish_reason, last.stop_reason, own.completion_tokens) == ("stop", None, len(ids) + 1)
    assert own.cached_tokens == 1


@pytest.mark.parametrize(
    ("text", "begins", "tokens"),
    [
        ("<think>a b</think> c", Begins.OPEN, "<think>a b</think>"),
        ("\n<think>a</think> c", Begins.OPEN, "\n<think>a</think>"),
        ("a b</think> c", Begins.INSIDE, "a b</think>"),
        ("a b <think> c", Begins.INSIDE, "a b <think> c"),
        ("a <think>b</think>", Begins.OPEN, ""),
        ("<think>b</think>", Begins.BEHIND, ""),
    ],
)
def test_the_tokens_before_the_answer_are_counted(text: str, begins: Begins, tokens: str) -> None:
    of = Renderer.load(qwen_like())
    start, end = of.token_id("<think>"), of.token_id("</think>")
    assert start is not None
    assert end is not None
    ids = list(of.encode(text, add_special_tokens=False))
    work = Work(id="w", prompt=Prompt.of(Tokens([5])), sampling=Sampling(max_tokens=100))
    for cuts in ([0], list(range(len(ids)))):
        subject = Choice(
            0, work, of, Display(format=OutputFormat(reasoning=ReasoningIds(start, end, begins)))
        )
        shown(subject, deltas(ids, cuts))
        assert subject.counts_reasoning
        assert subject.reasoning_tokens == len(of.encode(tokens, add_special_tokens=False))


def test_special_tokens_a_parser_reads_are_shown_to_it_and_not_to_the_client() -> None:
    calls = OutputFormat(lambda: HermesParser(Tools(make_id=lambda: "1")), frozenset({TURN}))
    made = OutputFormat(calls.parser, frozenset({"<think>"}))
    of = Renderer.load(qwen_like())
    ids = list(of.encode('a <|im_start|><tool_call>{"name": "f", "arguments": {}}</tool_call><|im_start|>'))
    work = Work(id="w", prompt=Prompt.of(Tokens([5])), sampling=Sampling(max_tokens=100))
    subject = Choice(0, work, of, Display(format=made))
    output = Output.of(subject.take(deltas(ids, [])).output)
    assert (output.content, [call.name for call in output.tool_calls], subject.calls_tools) == (
        "a",
        ["f"],
        True,
    )
    subject = Choice(0, work, of, Display(format=calls))
    assert Output.of(subject.take(deltas(ids, [])).output).content == f"a {TURN}{TURN}"


def test_a_work_that_failed_raises_what_the_worker_said() -> None:
    frame = ErrorFrame.of(OverloadedError("gone", retry_after=2))
    with pytest.raises(OverloadedError, match="gone"):
        choice(Display()).take([Delta("w", 0, 0, finish_reason="error", error=frame)])
    with pytest.raises(EngineError):
        choice(Display()).take([Delta("w", 0, 0, finish_reason="error")])
    with pytest.raises(OverloadedError, match="gave the request up"):
        choice(Display()).take([Delta("w", 0, 0, finish_reason="abort")])
