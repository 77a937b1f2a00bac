"""The cost of a grammar is counted on its parsed form, and too much is refused uncompiled."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inlay.base.errors import InvalidRequestError
from inlay.engine.grammar.cost import Cost, sequence
from inlay.engine.grammar.regex import cost_of_regex
from inlay.engine.grammar.source import source_of
from inlay.engine.grammar.trial import is_cheap
from inlay.messages.request import Grammar, GrammarKind


def schema(**value: Any) -> tuple[GrammarKind, str]:
    return "json_schema", json.dumps(value)


def lark(*lines: str) -> tuple[GrammarKind, str]:
    return "grammar", "\n".join(lines)


CHAIN = "a?" * 5000 + "a" * 5000
COSTLY: dict[str, tuple[tuple[GrammarKind, str], str]] = {
    "optional characters in a row": (("regex", CHAIN), "transitions"),
    "the same after something else": (("regex", "[bc]" + CHAIN), "transitions"),
    "groups of them": (("regex", "((a?a?)(a?a?))" * 500), "transitions"),
    "stars in a row": (("regex", "a*" * 2000), "transitions"),
    "a counted optional": (("regex", "(a?){5000}a{5000}"), "to visit"),
    "a star before what is counted": (("regex", "a*a{5000}"), "to visit"),
    "counts in counts": (("regex", "(a{1000}){1000}"), "states"),
    "counts with white space": (("regex", "(a{1000}){ 1000 }"), "states"),
    "a count of ten digits": (("regex", "a{1001001000}"), "states"),
    "a count that begins with zeros": (("regex", "a{,00000000001001001000}"), "states"),
    "a count of thousands of digits": (("regex", "a{" + "9" * 5000 + "}"), "states"),
    "a count of ten digits in a schema": (schema(type="string", pattern="a{1001001000}"), "states"),
    "counts behind the flag x": (("regex", "(?x)(a{1000}) {1000}"), "flag x"),
    "counts behind flags": (("regex", "(?ix-s:(a{1000}) {1000})"), "flag x"),
    "classes of Unicode": (("regex", "".join(f"[\\p{{L}}{chr(0x2200 + i)}]" for i in range(200))), "states"),
    "a pattern in a schema": (schema(type="string", pattern=CHAIN), "transitions"),
    "a name in a schema": (schema(patternProperties={CHAIN: {}}), "transitions"),
    "white space of a schema": (schema(**{"x-guidance": {"whitespace_pattern": CHAIN}}), "transitions"),
    "many patterns": (
        schema(anyOf=[{"pattern": f"(a{{9000}}){{2}}{i}"} for i in range(6)]),
        "all expressions together",
    ),
    "patterns that must match together": (
        schema(allOf=[{"type": "string", "pattern": f".*{chr(97 + i)}.*"} for i in range(20)]),
        "together",
    ),
    "the same by reference": (
        schema(
            **{"$ref": "#/$defs/0", "type": "string"},
            **{
                "$defs": {
                    f"{i}": {"pattern": f".*{chr(97 + i)}.*", "$ref": f"#/$defs/{i + 1}"} for i in range(20)
                }
            },
        ),
        "together",
    ),
    "choices that name each other": (
        schema(
            **{"$defs": {"s": {"anyOf": [{"$ref": "#/$defs/s"}] * 1000}}, "$ref": "#/$defs/s"},
        ),
        "to compare",
    ),
    "an object of very many properties": (
        schema(properties={f"p{i}": {} for i in range(2001)}),
        "properties",
    ),
    "an object of many kinds of properties": (
        schema(patternProperties={f"^a{i}$": {} for i in range(65)}),
        "patternProperties",
    ),
    "a number beyond 64 bits": (schema(type="array", minItems=3 * 10**40), "cannot be read"),
    "an expression in Lark": (lark(f"start: /{CHAIN}/"), "transitions"),
    "an expression with a line break": (lark("start: /(a{1000}\n){1000}/"), "states"),
    "an expression with the flag x": (lark("start: /(a{1000}) {1000}/x"), "flag x"),
    "an expression that ends a rule": (lark('start: %llguidance {}\na[suffix=/' + CHAIN + '/]: "x"'), "transitions"),
    "terminals in a row": (lark("start: A", "A: " + "B? " * 1000, 'B: "a"'), "transitions"),
    "terminals of terminals": (lark("start: A", "A: B{1000}", "B: C{1000}", "C: /x/"), "states"),
    "a terminal ten digits of times": (lark("start: A", 'A: "a"{1001001000}'), "states"),
    "a terminal as often with zeros": (lark("start: A", 'A: "a"~00000000001001001000'), "states"),
    "an intersection": (lark("start: A", "A: " + " & ".join("B" * 6), "B: /.*a.{20}/"), "at once"),
    "a negation": (lark("start: A", "A: ~B", "B: /(a?){400}x/"), "transitions"),
    "rules that name themselves": (lark("start: s", "s: A" + " | s" * 1000, 'A: "a"'), "to compare"),
    "a schema in Lark": (lark("start: %json " + json.dumps({"pattern": CHAIN})), "transitions"),
    "GBNF": (("grammar", "root ::= as \"b\"\nas ::= " + '"a"? ' * 2000), "transitions"),
}  # fmt: skip


@pytest.mark.parametrize("name", COSTLY)
def test_what_costs_too_much_is_refused_by_its_count(name: str) -> None:
    (kind, source), says = COSTLY[name]
    with pytest.raises(InvalidRequestError, match=says):
        source_of(Grammar(kind, source))


@pytest.mark.parametrize("kind", ["json_schema", "regex", "grammar"])
def test_a_count_with_hundreds_of_digits_is_refused_in_one_line(kind: GrammarKind) -> None:
    regex = "(" * 60 + "a" + "{99999999})" * 60
    source = {
        "regex": regex,
        "json_schema": json.dumps({"pattern": regex}),
        "grammar": f"start: /{regex}/",
    }
    with pytest.raises(InvalidRequestError) as raised:
        source_of(Grammar(kind, source[kind]))
    assert len(raised.value.message) < 200


@pytest.mark.parametrize("source", ["a{1001001000}", "a{1001001000,}", "a{0000000000000999999999}"])
def test_a_count_of_many_digits_is_not_cheap(source: str) -> None:
    assert not is_cheap(Grammar("regex", source))


@pytest.mark.parametrize("count", ["{+}", "{-}", "{+,-}", "{-3}"])
def test_a_count_that_is_no_number_is_left_to_the_library(count: str) -> None:
    assert count in source_of(Grammar(*lark(f'start: "a"{count}')))


ORDINARY: list[tuple[GrammarKind, str]] = [
    ("regex", r"\d{4}-(0[1-9]|1[0-2])-\d{2}(T([01]\d|2[0-3]):[0-5]\d(:[0-5]\d(\.\d+)?)?(Z|[+-]\d\d:\d\d)?)?"),
    ("regex", r"[\w.%+-]{1,64}@([A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,63}"),
    ("regex", r"(?s)<think>.{0,4000}</think>\s*(yes|no|maybe)( because .{10,400})?"),
    ("regex", "(" + "|".join(f"city-{i}" for i in range(2000)) + ")(, )?"),
    ("regex", r"(\w+[ ,.;!?]\s?){5,60}"),
    schema(type="string", pattern=".*[0-9].*", allOf=[{"pattern": ".*[a-z].*"}, {"maxLength": 64}, {"format": "email"}]),
    schema(patternProperties={"^x-": {}, "^y-[a-z]+$": {}, "^[0-9]{3}$": {}}, additionalProperties=False),
    schema(anyOf=[{"type": "object", "properties": {"kind": {"const": i}}} for i in range(300)]),
    lark("start: expr", "expr: term ((\"+\" | \"-\") term)*", "term: factor (\"*\" factor)*",
         "factor: NUMBER | NAME | \"(\" expr \")\"", "NUMBER: /[0-9]{1,20}(\\.[0-9]{1,20})?/", "NAME: /[a-z_]\\w*/ & ~KEYWORD",
         "KEYWORD: \"if\" | \"else\" | \"while\"", "%ignore / +/"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "source"), ORDINARY)
def test_what_people_ask_for_passes(kind: GrammarKind, source: str) -> None:
    assert source_of(Grammar(kind, source))


def test_a_schema_as_libraries_make_them_needs_no_trial() -> None:
    person = {
        "title": "Person",
        "type": "object",
        "$defs": {
            "Pet": {
                "type": "object",
                "properties": {"name": {"type": "string"}},
                "required": ["name"],
            }
        },
        "properties": {
            "name": {"type": "string", "description": "full", "maxLength": 80},
            "age": {
                "anyOf": [{"type": "integer", "minimum": 0}, {"type": "null"}],
                "default": None,
            },
            "kind": {"enum": ["a", "b"]},
            "pets": {"type": "array", "items": {"$ref": "#/$defs/Pet"}},
        },
        "required": ["name"],
        "additionalProperties": False,
    }
    assert is_cheap(Grammar("json_schema", json.dumps(person)))
    assert not is_cheap(Grammar("json_schema", json.dumps({**person, "allOf": [person]})))
    # A property may have any name, and a word that is not known may mean anything.
    assert is_cheap(Grammar("json_schema", json.dumps({"properties": {"allOf": {"type": "null"}}})))
    assert not is_cheap(Grammar("json_schema", json.dumps({"properties": {"a": {"pattern": "a"}}})))
    for other in (5, True, "ab", [1]):
        assert not is_cheap(Grammar("json_schema", json.dumps({"properties": other})))
    many: dict[str, Any] = {"properties": {f"p{i}": {} for i in range(201)}}
    assert not is_cheap(Grammar("json_schema", json.dumps(many)))


PARTS = st.recursive(
    st.sampled_from(["a", "bc", "[x-z]", r"\d", "."]),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=4).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"({'|'.join(parts)})"),
        st.tuples(inner, st.sampled_from(["?", "*", "+", "{2}", "{0,3}", "{ 1 , }"])).map(
            lambda both: f"({both[0]}){both[1]}"
        ),
    ),
    max_leaves=12,
)


@given(PARTS, PARTS)
def test_grouping_changes_no_count_and_more_never_counts_less(first: str, second: str) -> None:
    plain = cost_of_regex(first + second)
    for grouped in (f"(?:{first}){second}", f"(?:(?:{first + second}){{1}})"):
        assert cost_of_regex(grouped) == plain
    alone, repeated = cost_of_regex(first), cost_of_regex(f"(?:{first}){{3}}")
    for name in ("states", "transitions", "shortest", "longest"):
        assert getattr(plain, name) >= getattr(alone, name)
        assert getattr(repeated, name) >= getattr(alone, name)


@given(st.integers(1, 60))
def test_a_chain_of_optionals_counts_every_pair(length: int) -> None:
    optional = Cost.literal().repeated(0, 1)
    pairs = length * (length + 1) // 2
    assert pairs <= sequence([optional] * length).transitions <= pairs + 5 * length
