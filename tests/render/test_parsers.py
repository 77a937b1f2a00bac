"""Recorded forms of tool calls and reasoning, read whole and cut at every place.

What is none of them stays text.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inlay.render import Begins, ContentDelta, OutputParser, ParsedOutput, ToolCallDelta
from inlay.render.formats import REASONING_FORMS, TOOL_FORMS, ChannelForm, ReasoningForm
from inlay.render.parsers.calls import NamedParser, RequiredParser, Tools, call_id, short_call_id
from inlay.render.parsers.harmony import HarmonyParser
from inlay.render.parsers.thinking import ThinkingParser

SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "metric": {"type": ["boolean", "null"]},
            "tags": {"type": "array", "items": {"type": "string"}},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
    },
    "ring": {"type": "object", "properties": {}},
}
TOOLS = Tools(SCHEMAS, make_id=lambda: "id")
ONE_CALL = Tools(SCHEMAS, parallel=False, make_id=lambda: "id")
Make = Callable[[Tools], OutputParser]


def made_by(name: str) -> Make:
    form = TOOL_FORMS[name]
    return HarmonyParser if isinstance(form, ChannelForm) else form.parser


def read(make: Make, pieces: Iterable[str], tools: Tools = TOOLS) -> ParsedOutput:
    """Parse a text in pieces with a new parser; each delta is as the protocol says."""
    parser = make(tools)
    deltas = [delta for piece in pieces for delta in parser.push(piece)] + parser.flush()
    begun: list[int] = []
    for delta in deltas:
        if not isinstance(delta, ToolCallDelta):
            assert delta.text
        elif delta.id is not None:
            assert delta.name
            assert delta.index == len(begun)
            begun.append(delta.index)
        else:
            assert (delta.index, delta.name) == (begun[-1], None)
            assert delta.arguments
    return ParsedOutput.of(deltas)


def said(output: ParsedOutput) -> tuple[str, str, list[tuple[str | None, str]]]:
    return (
        output.content,
        output.reasoning,
        [(call.name, call.arguments) for call in output.tool_calls],
    )


WEATHER = ("get_weather", '{"city": "Paris", "days": 2}')
RING = ("ring", "{}")

HERMES = [
    ('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>', "", [WEATHER]),
    (('I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>\n'
     '<tool_call>\n{"name": "ring", "arguments": {}}\n</tool_call>'), "I look.", [WEATHER, RING]),
    ('<tool_call>{"arguments": {"city": "Paris", "days": 2}, "name": "get_weather"}</tool_call>', "", [WEATHER]),
    ('<tool_call>{"name": "ring", "arguments": "{}"}</tool_call>\nDone.', "\nDone.", [RING]),
    ('<tool_call>{"name": "ring", "arguments": null}</tool_call>', "", [RING]),
    ('<tool_call>{"name": "ring"}</tool_call>', "", [RING]),
    ('<tool_call>{"id": 7, "name": "ring", "arguments": {}, "more": [1, {"a": "}"}]}</tool_call>', "", [RING]),
    (r'<tool_call>{"name": "f", "arguments": {"a": "\"}]{</tool_call>\\"}}</tool_call>', "",
     [("f", r'{"a": "\"}]{</tool_call>\\"}')]),
    ('<tool_call>{"name": "ring", "arguments": {}}<tool_call>{"name": "ring", "arguments": {}}', "", [RING, RING]),
    # Several in one tag:
    (('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n{"name": "ring", "arguments": {}}\n'
     "</tool_call>"), "", [WEATHER, RING]),
    ('<tool_call>{"name": "ring", "arguments": {}}, {"name": "ring"}</tool_call>\nDone.', "\nDone.", [RING, RING]),
    ('<tool_call>\n[{"name": "ring", "arguments": {}}, {"name": "ring"}]\n</tool_call>', "", [RING, RING]),
    ('<tool_call>{"name": "ring"}{"name": "ring"}', "", [RING, RING]),
    ('<tool_call>{"name": "ring"}\n{"name": "ring", "argum', '\n{"name": "ring", "argum', [RING]),
    ('<tool_call>{"name": "ring"}\n{"no": 1}</tool_call> Done.', '\n{"no": 1} Done.', [RING]),
    ('<tool_call>{"name": "ring"}, and\n</tool_call>', ", and", [RING]),
    ('<tool_call>{"name": "ring"} and </tool_call><tool_call>{"name": "ring"}</tool_call>', "and", [RING, RING]),
    # Truncated, or not what they began as:
    ('<tool_call>{"name": "get_weather", "arguments": {"city": "Pa', "", [("get_weather", '{"city": "Pa')]),
    ('<tool_call>{"name": "get_wea', '<tool_call>{"name": "get_wea', []),
    ('<tool_call>{"name": "ring", "arguments": {}</tool_call> Done.', " Done.", [RING]),
    ('<tool_call>{"name": "ring", "arguments": {a: 1}}</tool_call>',
     '<tool_call>{"name": "ring", "arguments": {a: 1}}</tool_call>', []),
    ('<tool_call>{"name": "ring", "arguments": [1]}</tool_call>',
     '<tool_call>{"name": "ring", "arguments": [1]}</tool_call>', []),
    ("<tool_call> is a tag, <tool_cal is none.", "<tool_call> is a tag, <tool_cal is none.", []),
    ("a <b> c \n", "a <b> c \n", []),
]  # fmt: skip
CODER = [
    (("Let me see.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n"
     "</parameter>\n</function>\n</tool_call>"), "Let me see.", [WEATHER]),
    ("<tool_call>\n<function=ring>\n</function>\n<function=ring>\n</function>\n</tool_call>", "", [RING, RING]),
    ("<tool_call>\n<function=ring>\n</function>\n</tool_call>\n<function=ring>\n</function>", "", [RING, RING]),
    (('<tool_call><function=get_weather><parameter=city>\na "b"\n\n</parameter><parameter=metric>True</parameter>'
     '<parameter=tags>["x", 1]</parameter><parameter=note>null</parameter></function></tool_call>'), "",
     [("get_weather", '{"city": "a \\"b\\"\\n", "metric": true, "tags": ["x", 1], "note": null}')]),
    (("<tool_call><function=get_weather><parameter=note>12</parameter><parameter=days>many</parameter>"
     "<parameter=other>1</parameter></function></tool_call>"), "",
     [("get_weather", '{"note": "12", "days": "many", "other": "1"}')]),
    ("<tool_call><function=get_weather><parameter=city>Pa", "", [("get_weather", '{"city": "Pa')]),
    ("<tool_call><function get_weather>", "<tool_call><function get_weather>", []),
]  # fmt: skip
LLAMA = [
    ('{"name": "get_weather", "parameters": {"city": "Paris", "days": 2}}', "", [WEATHER]),
    ('<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris", "days": 2}}', "", [WEATHER]),
    ('{"type": "function", "name": "ring", "parameters": {}}; {"name": "ring", "parameters": {}}', "", [RING, RING]),
    ('<|python_tag|>{"name": "ring", "parameters": {}}\n{"name": "ring", "parameters": {}}', "", [RING, RING]),
    ('{"name": "ring", "parameters": {}}\n{"name": "no", "parameters": {}}', '\n{"name": "no", "parameters": {}}', [RING]),
    ('I ring.<|python_tag|>{"name": "ring", "arguments": {}}', "I ring.", [RING]),
    ('{"name": "nobody", "parameters": {}}', '{"name": "nobody", "parameters": {}}', []),
    ('{"city": "Paris", "name": "ring", "parameters": {}}', '{"city": "Paris", "name": "ring", "parameters": {}}', []),
    ('{"name": "ring"}', '{"name": "ring"}', []),
    ('<|python_tag|>brave_search.call(query="x")', '<|python_tag|>brave_search.call(query="x")', []),
    ('Then: {"name": "ring", "parameters": {}}', 'Then: {"name": "ring", "parameters": {}}', []),
]  # fmt: skip
MISTRAL = [
    ('[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}, {"name": "ring", "arguments": {}}]',
     "", [WEATHER, RING]),
    ('[TOOL_CALLS] [{"name": "ring", "arguments": {}, "id": "VvvODy9mT"}]', "", [RING]),
    ('[TOOL_CALLS]get_weather{"city": "Paris", "days": 2}[TOOL_CALLS]ring{}', "", [WEATHER, RING]),
    ('Yes.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 2}', "Yes.", [WEATHER]),
    ('[TOOL_CALLS]ring[CALL_ID]VvvODy9mT[ARGS]{}', "", [RING]),
    ("[TOOL_CALLS] no call", "[TOOL_CALLS] no call", []),
    ("[TOOL_CALLS][1]", "[TOOL_CALLS][1]", []),
]  # fmt: skip
V3 = [
    (("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
     '{"city": "Paris", "days": 2}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>ring\n```json\n{}\n```'
     "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"), "", [WEATHER, RING]),
    ("<｜tool▁calls▁begin｜> and <｜tool▁sep｜>", "<｜tool▁calls▁begin｜> and <｜tool▁sep｜>", []),
]  # fmt: skip
V31 = [
    (('Now.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris", "days": 2}<｜tool▁call▁end｜>'
     "<｜tool▁call▁begin｜>ring<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"), "Now.", [WEATHER, RING]),
]  # fmt: skip
RECORDED: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    (name, *case)
    for name, cases in {
        "hermes": HERMES, "qwen3_coder": CODER, "llama3_json": LLAMA, "mistral": MISTRAL, "deepseek_v3": V3, "deepseek_v31": V31,
    }.items()
    for case in cases
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "content", "calls"), RECORDED)
def test_recorded_calls_are_read_whatever_two_pieces_they_come_in(
    name: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert said(read(made_by(name), [text])) == (content, "", calls)
    for cut in range(len(text)):
        assert said(read(made_by(name), [text[:cut], text[cut:]])) == (content, "", calls)
    assert said(read(made_by(name), text)) == (content, "", calls)


CHANNELS = [
    ("<|channel|>analysis<|message|>They ask.<|end|><|start|>assistant<|channel|>final<|message|>Hello.\n<|return|>",
     "Hello.\n", "They ask.", []),
    (("<|channel|>analysis<|message|>Look.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
     '<|constrain|>json<|message|>{"city": "Paris", "days": 2}<|call|>'), "", "Look.", [WEATHER]),
    (("<|channel|>commentary<|message|>I ring.<|end|><|start|>assistant to=functions.ring<|channel|>commentary json"
     "<|message|>{}"), "I ring.", "", [RING]),
    ("no channel", "no channel", "", []),
    ("<|channel|>analysis<|message|>cut o", "", "cut o", []),
    ("<|channel|>anal", "", "", []),
]  # fmt: skip


@pytest.mark.parametrize(("text", "content", "reasoning", "calls"), CHANNELS)
def test_channels_are_told_apart_whatever_two_pieces_they_come_in(
    text: str, content: str, reasoning: str, calls: list[tuple[str, str]]
) -> None:
    for cut in range(len(text) + 1):
        assert said(read(HarmonyParser, [text[:cut], text[cut:]])) == (content, reasoning, calls)


def test_functions_nobody_gave_are_no_calls_in_channels() -> None:
    text = "<|channel|>commentary to=functions.ring<|message|>{}"
    assert said(read(HarmonyParser, [text], Tools())) == ("{}", "", [])


CALL = '<tool_call>\n{"name": "ring", "arguments": {}}\n</tool_call>'
THOUGHTS = [
    (Begins.OPEN, "<think>\nHm.\n</think>\n\nHello.", "Hello.", "Hm.", []),
    (Begins.OPEN, f"\n<think>\nHm.\n</think>\n\n{CALL}", "", "Hm.", [RING]),
    (Begins.OPEN, "<think>\n\n</think>\n\nHello.", "Hello.", "", []),
    (Begins.OPEN, "Hello. <think>a</think>", "Hello. <think>a</think>", "", []),
    (Begins.OPEN, "<think>\nHm. So\n", "", "Hm. So", []),
    (Begins.OPEN, " <thin", " <thin", "", []),
    (Begins.INSIDE, "Hm.\n\nOr not?\n</think>\n\nHello.", "Hello.", "Hm.\n\nOr not?", []),
    (Begins.INSIDE, "<think>\nHm.\n</think>\nHello.\n", "Hello.\n", "Hm.", []),
    (Begins.INSIDE, " no end", "", " no end", []),
    (Begins.INSIDE, f"{CALL}</think>{CALL}", "", CALL, [RING]),
    (Begins.BEHIND, "Hello.</think>", "Hello.</think>", "", []),
    (Begins.BEHIND, "<think>", "<think>", "", []),
]  # fmt: skip


@pytest.mark.parametrize(("begins", "text", "content", "reasoning", "calls"), THOUGHTS)
def test_reasoning_is_told_apart_whatever_two_pieces_it_comes_in(
    begins: Begins, text: str, content: str, reasoning: str, calls: list[tuple[str, str]]
) -> None:
    def make(tools: Tools) -> OutputParser:
        return ThinkingParser("<think>", "</think>", begins, made_by("hermes")(tools))

    for cut in range(len(text) + 1):
        assert said(read(make, [text[:cut], text[cut:]])) == (content, reasoning, calls)


FORCED = [
    ('[{"name": "get_weather", "parameters": {"city": "Paris", "days": 2}}, {"name": "ring", "parameters": {}}]',
     [WEATHER, RING]),
    (' [\n {"parameters": {}, "name": "ring"} ] ', [RING]),
    ('[{"name": "get_weather", "parameters": {"city": "Pa', [("get_weather", '{"city": "Pa')]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "calls"), FORCED)
def test_required_calls_are_a_list(text: str, calls: list[tuple[str, str]]) -> None:
    for cut in range(len(text) + 1):
        assert said(read(RequiredParser, [text[:cut], text[cut:]])) == ("", "", calls)


def test_a_named_call_is_its_arguments() -> None:
    def make(tools: Tools) -> OutputParser:
        return NamedParser(tools, "get_weather")

    for cut in range(len(WEATHER[1])):
        assert said(read(make, [WEATHER[1][:cut], WEATHER[1][cut:]])) == ("", "", [WEATHER])


@pytest.mark.parametrize(
    ("schema", "value", "shown"),
    [
        ({"type": [{}, "integer"]}, "5", "5"),
        ({"anyOf": 5, "oneOf": [{"type": "number"}, 7]}, "1.5", "1.5"),
        ({"type": "number"}, "NaN", '"NaN"'),
        ({"type": "number"}, "-Infinity", '"-Infinity"'),
    ],
)
def test_schemas_that_are_none_and_numbers_that_json_has_not_leave_arguments_that_are_json(
    schema: dict[str, Any], value: str, shown: str
) -> None:
    tools = Tools({"ring": {"properties": {"times": schema}}})
    text = f"<tool_call><function=ring><parameter=times>{value}</parameter></function></tool_call>"
    output = read(made_by("qwen3_coder"), [text], tools)
    assert said(output) == ("", "", [("ring", f'{{"times": {shown}}}')])


def test_a_request_for_one_call_gets_the_first() -> None:
    text = HERMES[1][0]
    assert said(read(made_by("hermes"), [text], ONE_CALL)) == ("I look.", "", [WEATHER])


def test_arguments_are_shown_as_they_come() -> None:
    parser = made_by("hermes")(TOOLS)
    assert parser.push('<tool_call>{"name": "get_weather", "argum') == []
    assert parser.push('ents": {"ci') == [
        ToolCallDelta(0, "id", "get_weather", ""),
        ToolCallDelta(0, None, None, "{"),
        ToolCallDelta(0, None, None, '"ci'),
    ]
    assert parser.push('ty": "Par') == [ToolCallDelta(0, None, None, 'ty": "Par')]
    assert parser.push("is, fr") == [ToolCallDelta(0, None, None, "is, fr")]


def test_content_is_held_back_no_longer_than_it_may_be_a_tag() -> None:
    parser = made_by("hermes")(TOOLS)
    assert parser.push("Hello <to") == [ContentDelta("Hello")]
    assert parser.push("wn>.") == [ContentDelta(" <town>.")]


_WORDS = (
    "<tool_call>", "</tool_call>", '{"name": "ring", "arguments": {}}', '{"name": "get_weather", "parameters": {"city": "a"}}',
    "{", "}", "[", "]", '"', "\\", ",", ":", ";", "\n", " ", "name", "<function=ring>", "<parameter=city>", "</parameter>",
    "</function>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "ring", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "```json", "```", "<think>", "</think>", "<|channel|>", "final", "<|message|>", "<|end|>",
    " to=functions.ring", "é🙂", "<", ">",
)  # fmt: skip
TEXTS = st.lists(st.sampled_from(_WORDS), max_size=14).map("".join)
MAKERS: list[Make] = [
    *(
        made_by(name)
        for name in ("hermes", "qwen3_coder", "llama3_json", "mistral", "deepseek_v3", "openai")
    ),
    RequiredParser,
    lambda tools: NamedParser(tools, "ring"),
    *(
        lambda tools, begins=begins: ThinkingParser(
            "<think>", "</think>", begins, made_by("hermes")(tools)
        )
        for begins in Begins
    ),
]


@given(TEXTS, st.lists(st.integers(0, 200), max_size=8), st.sampled_from(MAKERS))
def test_any_text_says_the_same_whatever_pieces_it_comes_in(
    text: str, cuts: list[int], make: Make
) -> None:
    bounds = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    pieces: Sequence[str] = [text[low:high] for low, high in pairwise(bounds)]
    whole = read(make, [text])
    assert read(make, pieces) == whole
    if not whole.tool_calls and make in MAKERS[:5]:
        assert whole.content == text


@given(
    st.dictionaries(
        st.text(),
        st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=8),
        max_size=4,
    )
)
def test_any_arguments_come_back_as_they_were_written(arguments: dict[str, Any]) -> None:
    for ensure_ascii in (True, False):
        written = json.dumps(arguments, ensure_ascii=ensure_ascii)
        for name, text in {
            "hermes": f'<tool_call>\n{{"name": "f", "arguments": {written}}}\n</tool_call>',
            "mistral": f"[TOOL_CALLS]f{written}",
            "deepseek_v31": f"<｜tool▁call▁begin｜>f<｜tool▁sep｜>{written}<｜tool▁call▁end｜>",
        }.items():
            assert said(read(made_by(name), text)) == ("", "", [("f", written)])


def test_ids_of_calls_are_as_those_who_made_the_form_have_them() -> None:
    assert call_id().startswith("call_")
    assert call_id() != call_id()
    assert len(short_call_id()) == 9
    assert short_call_id().isalnum()


R1, QWEN = (form for form in (REASONING_FORMS["deepseek_r1"], REASONING_FORMS["qwen3"]))


@pytest.mark.parametrize(
    ("prompt", "r1", "qwen"),
    [
        ("<｜Assistant｜><think>\n", Begins.INSIDE, Begins.INSIDE),
        ("<|im_start|>assistant\n", Begins.INSIDE, Begins.OPEN),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", Begins.BEHIND, Begins.BEHIND),
        ("tell me of <think> <|im_end|>", Begins.INSIDE, Begins.OPEN),
    ],
)
def test_the_end_of_a_prompt_says_where_its_output_begins(
    prompt: str, r1: Begins, qwen: Begins
) -> None:
    assert isinstance(R1, ReasoningForm)
    assert isinstance(QWEN, ReasoningForm)
    assert (R1.begins_after(prompt), QWEN.begins_after(prompt)) == (r1, qwen)


@pytest.mark.parametrize(
    ("content", "begins"),
    [
        ("", Begins.OPEN),
        ("It is", Begins.BEHIND),
        ("<think>Hm", Begins.INSIDE),
        ("<think>Hm</think>It", Begins.BEHIND),
    ],
)
def test_what_is_continued_says_where_its_output_begins(content: str, begins: Begins) -> None:
    assert isinstance(QWEN, ReasoningForm)
    assert QWEN.begins_within(content) is begins
