"""A choice shows the same whatever pieces its outputs come in."""

import asyncio
import gc
import itertools
import weakref
from contextlib import suppress
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inlay.api.generation.choices import ChoicePiece, ChoiceState, DisplayOptions
from inlay.api.generation.generation import Generation, WholeSink
from inlay.base.errors import EngineError, ErrorFrame, InvalidRequestError, OverloadedError
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import EngineUsage, Output, Request, Sampling
from inlay.render import Begins, OutputFormat, ParsedOutput, ReasoningIds, Renderer, StopStrings
from inlay.render.parsers.calls import Tools
from inlay.render.parsers.hermes import HermesParser
from inlay.transport.output_queue import OutputQueue
from tests.models import EOS_ID, TURN, tiny
from tests.render.directories import qwen_like
from tests.router.standing import CARD


@cache
def renderer() -> Renderer:
    return Renderer.load(tiny("llama"))


def choice(display: DisplayOptions, **sampling: Any) -> ChoiceState:
    request = Request(
        id="w", prompts=(Prompt.of(Tokens([5])),), params=Sampling(max_tokens=100, **sampling)
    )
    return ChoiceState(0, request, renderer(), display)


def cut_into_outputs(
    ids: list[int], cuts: list[int], *, ended_by: int | None = None
) -> list[Output]:
    """Ids cut at `cuts`; the last output ends the output."""
    bounds = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    pieces = [ids[low:high] for low, high in itertools.pairwise(bounds)] or [[]]
    made, offset = [], 0
    for piece in pieces:
        made.append(Output("w", 0, offset, tuple(piece)))
        offset += len(piece)
    last = made[-1]
    reason: Any = "length" if ended_by is None else "stop"
    made[-1] = Output(
        "w", 0, last.offset, last.token_ids, (), reason, ended_by, EngineUsage(1, len(ids), 1)
    )
    return made


def shown(subject: ChoiceState, pieces: list[Output]) -> tuple[str, tuple[int, ...], ChoicePiece]:
    text = ""
    ids: tuple[int, ...] = ()
    for output in pieces:
        piece = subject.take([output])
        text += piece.text
        ids += piece.token_ids
        if subject.finish_reason is not None:
            break
    return text, ids, piece


IDS = st.lists(st.integers(3, 379), min_size=1, max_size=30)
CUTS = st.lists(st.integers(0, 30), max_size=6)


@given(IDS, CUTS)
def test_all_pieces_together_are_the_decoded_output(ids: list[int], cuts: list[int]) -> None:
    subject = choice(DisplayOptions())
    text, taken, last = shown(subject, cut_into_outputs(ids, cuts))
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
    subject = choice(DisplayOptions(stops=StopStrings((stop, "\x00never")), include_stop=include))
    got, taken, last = shown(subject, cut_into_outputs(ids, cuts))
    assert got == text[: text.index(stop) + (len(stop) if include else 0)]
    assert (last.finish_reason, last.stop_reason) == ("stop", stop)
    assert list(taken) == ids[: len(taken)]
    assert subject.completion_tokens == len(taken)
    again = choice(DisplayOptions(stops=StopStrings((stop, "\x00never")), include_stop=include))
    assert shown(again, cut_into_outputs(ids, []))[:2] == (got, taken)


def test_stop_strings_are_not_looked_for_before_min_tokens() -> None:
    ids = list(renderer().encode("a b a b a b a b", add_special_tokens=False))
    at_once = shown(choice(DisplayOptions(stops=StopStrings(("b",)))), cut_into_outputs(ids, []))
    later = shown(
        choice(DisplayOptions(stops=StopStrings(("b",))), min_tokens=5), cut_into_outputs(ids, [])
    )
    assert len(at_once[1]) < 5 <= len(later[1])
    assert later[0].startswith("a b a")


@pytest.mark.parametrize("include", [True, False])
def test_the_token_that_ended_the_output_is_counted_and_has_no_text_of_its_own(
    include: bool,
) -> None:
    ids = list(renderer().encode("a b c", add_special_tokens=False))
    named = choice(DisplayOptions(include_stop=include), stop_token_ids=(ids[-1],))
    text, taken, last = shown(named, cut_into_outputs(ids, [], ended_by=ids[-1]))
    assert text == renderer().decode(ids if include else ids[:-1], skip_special_tokens=True)
    assert (list(taken), last.finish_reason, last.stop_reason) == (ids, "stop", ids[-1])
    own = choice(DisplayOptions())
    _, _, last = shown(own, cut_into_outputs([*ids, EOS_ID], [], ended_by=EOS_ID))
    assert (last.finish_reason, last.stop_reason, own.completion_tokens) == (
        "stop",
        None,
        len(ids) + 1,
    )
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
    request = Request(id="w", prompts=(Prompt.of(Tokens([5])),), params=Sampling(max_tokens=100))
    for cuts in ([0], list(range(len(ids)))):
        subject = ChoiceState(
            0,
            request,
            of,
            DisplayOptions(format=OutputFormat(reasoning=ReasoningIds(start, end, begins))),
        )
        shown(subject, cut_into_outputs(ids, cuts))
        assert subject.counts_reasoning
        assert subject.reasoning_tokens == len(of.encode(tokens, add_special_tokens=False))


def test_special_tokens_a_parser_reads_are_shown_to_it_and_not_to_the_client() -> None:
    calls = OutputFormat(lambda: HermesParser(Tools(make_id=lambda: "1")), frozenset({TURN}))
    made = OutputFormat(calls.parser, frozenset({"<think>"}))
    of = Renderer.load(qwen_like())
    ids = list(
        of.encode('a <|im_start|><tool_call>{"name": "f", "arguments": {}}</tool_call><|im_start|>')
    )
    request = Request(id="w", prompts=(Prompt.of(Tokens([5])),), params=Sampling(max_tokens=100))
    subject = ChoiceState(0, request, of, DisplayOptions(format=made))
    output = ParsedOutput.of(subject.take(cut_into_outputs(ids, [])).output)
    assert (output.content, [call.name for call in output.tool_calls], subject.calls_tools) == (
        "a",
        ["f"],
        True,
    )
    subject = ChoiceState(0, request, of, DisplayOptions(format=calls))
    assert (
        ParsedOutput.of(subject.take(cut_into_outputs(ids, [])).output).content == f"a {TURN}{TURN}"
    )


def test_a_request_that_failed_raises_what_the_worker_said() -> None:
    frame = ErrorFrame.of(OverloadedError("gone", retry_after=2))
    with pytest.raises(OverloadedError, match="gone"):
        choice(DisplayOptions()).take([Output("w", 0, 0, finish_reason="error", error=frame)])
    with pytest.raises(EngineError):
        choice(DisplayOptions()).take([Output("w", 0, 0, finish_reason="error")])
    with pytest.raises(OverloadedError, match="aborted the request"):
        choice(DisplayOptions()).take([Output("w", 0, 0, finish_reason="abort")])


class Following(OutputQueue):
    """A stream of a worker, as a generation follows it."""

    worker = "w"

    def cancel(self) -> None:
        """Nothing runs."""


def followed() -> tuple[Generation, Following]:
    """A generation of one choice, and its stream."""
    of_choice = SimpleNamespace(tokens=lambda _: None, ended=lambda *_: None)
    times: Any = SimpleNamespace(choice=lambda: of_choice, finished=lambda _: None)
    one = choice(DisplayOptions())
    generation = Generation([one.request], 1, times, lambda _: [one], card=CARD)
    generation.choices = [one]
    stream: Any = Following()
    sent = asyncio.get_running_loop().create_future()
    sent.set_result([stream])
    generation._sending = [sent]
    return generation, stream


async def ended_by(output: Output) -> "weakref.ref[Generation]":
    generation, stream = followed()
    stream.put(output)

    def refuse(size: int) -> None:
        raise InvalidRequestError("too large")

    with suppress(InvalidRequestError):
        await generation.each(WholeSink(refuse))
    generation.close()
    return weakref.ref(generation)


@pytest.mark.parametrize(
    "output",
    [
        Output("w", 0, 0, (5,)),
        Output("w", 0, 0, error=ErrorFrame.of(InvalidRequestError("no"))),
    ],
    ids=["by what reads it", "by its worker"],
)
async def test_what_an_error_has_ended_is_free_without_a_collection(output: Output) -> None:
    gc.collect()
    gc.disable()
    try:
        generation = await ended_by(output)
        await asyncio.sleep(0)  # this task is still being woken by the one that failed
        assert generation() is None
    finally:
        gc.enable()


async def turns() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_an_error_in_taking_ends_the_request_that_it_belongs_to() -> None:
    generation, stream = followed()
    sizes: list[int] = []

    def refuse(size: int) -> None:
        sizes.append(size)
        if len(sizes) == 2:
            raise InvalidRequestError("too large")

    following = asyncio.create_task(generation.each(WholeSink(refuse)))
    await turns()
    stream.put(Output("w", 0, 0, (5,)))
    await turns()
    stream.put(Output("w", 0, 1, (6,)))
    with pytest.raises(InvalidRequestError, match="too large"):
        await asyncio.wait_for(following, 10)
    generation.close()
