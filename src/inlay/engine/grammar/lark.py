"""The cost of a Lark grammar, read and not run.

Its terminals, its expressions, and the schemas in it.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator

from inlay.base.errors import InvalidRequestError
from inlay.engine.grammar.cost import (
    MAX_STATES,
    Cost,
    check_all,
    check_expression,
    check_rules,
)
from inlay.engine.grammar.regex import MAX_DEPTH, Tree, check_regex, counted
from inlay.engine.grammar.schemas import check_schema

# As llguidance's own lexer has them. Possessive: a string or an expression without its end is read
# once.
_TOKEN = re.compile(
    r"(?P<newline>\r?\n[ \t]*)|(?P<skip>(?:\#|//)[^\n]*+|[ \t\r]++)"
    r'|(?P<string>"(?:\\[^\n]|[^"\\\n])*+(?:"i?|\\?(?=\n|\Z)))'
    r"|/(?P<regex>(?:\\[^\n]|[^/\\])++)(?:/(?P<flags>[imslux]*)|\\?(?=\n|\Z))"
    r"|(?P<json>%json\b)|(?P<arrow>->[ \t]*\w+)"
    r"|(?P<name>!?[_?]?[a-z][_a-z0-9-]*|_?[A-Z][_A-Z0-9-]*)"
    r"|\{[ \t]*(?P<count>[+-]?[0-9]*+[ \t]*(?:,[ \t]*[+-]?[0-9]*+[ \t]*)?)\}"
    r"|~[ \t]*(?P<times>[+-]?[0-9]++(?:[ \t]*\.\.[ \t]*[+-]?[0-9]++)?)|(?P<special><[^<>\s]++>)"
    r"|(?P<mark>[\s\S])"
)
_TIMES: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_SYMBOLS = ("name", "regex", "special", "json", "string")
_Token = tuple[str, str]


def check_lark(lark: str) -> None:
    """Refuse a Lark grammar whose terminals or expressions are too large.

    Raises:
        InvalidRequestError: they are; the message says which bound they pass.
    """
    bodies: dict[str, list[_Token]] = {}
    terminals = _Terminals(bodies)
    body: list[_Token] = []
    costs: list[Cost] = []
    begins, header = True, False
    for kind, text in _tokens(lark, costs):
        if kind == "newline":
            begins = True
            continue
        if kind == "name" and begins:
            body, header = bodies.setdefault(text.lstrip("!?"), []), True
        elif header:
            header = (kind, text) != ("mark", ":")
        else:
            body.append((kind, text))
        begins = False
        if kind == "regex":
            costs.append(check_regex(text))
    rules = {name: body for name, body in bodies.items() if not name.isupper()}
    costs += [terminals.cost(name) for name in bodies.keys() - rules.keys()]
    check_all(costs)
    for body in rules.values():
        _check_rule(body)
    symbols = [text for body in rules.values() for kind, text in body if kind in _SYMBOLS]
    alternatives = {name: 1 + body.count(("mark", "|")) for name, body in rules.items()}
    check_rules(alternatives, Counter(symbols), len(symbols))


def _tokens(lark: str, costs: list[Cost]) -> Iterator[_Token]:
    """Of what kind it is, and the text.

    Schemas are checked here, and the costs of their expressions added.
    """
    place = 0
    while place < len(lark):
        found = _TOKEN.match(lark, place)
        if found is None:  # cannot be: anything is a mark
            return
        kind, place = found.lastgroup or "mark", found.end()
        if kind == "flags":
            kind = "regex"
            if "x" in found["flags"]:
                raise InvalidRequestError("the flag x of regular expressions is not supported")
        if kind == "json":
            place = _schema_end(lark, place, costs)
        if kind != "skip":
            yield kind, found[kind]


class _Terminals:
    """The costs of terminals; each is as large as what it names."""

    def __init__(self, bodies: dict[str, list[_Token]]) -> None:
        self._bodies = bodies
        self._costs: dict[str, Cost] = {}

    def cost(self, name: str, depth: int = 0) -> Cost:
        """Of one. Raises `InvalidRequestError` when it is too large."""
        if name not in self._bodies:
            return Cost.literal()
        if name not in self._costs:
            if depth > MAX_DEPTH:
                raise InvalidRequestError(
                    f"the grammar's names lead to each other over more than {MAX_DEPTH} steps"
                )
            self._costs[name] = Cost.literal()  # what names itself is counted once
            tree, negated = Tree(), False
            for kind, text in self._bodies[name]:
                if kind == "name":
                    tree.add(self.cost(text, depth + 1))
                elif kind == "regex":
                    tree.add(check_regex(text))
                else:
                    negated = negated or text == "~"
                    _read(tree, kind, text)
            cost = tree.cost()
            self._costs[name] = check_expression(cost.negated() if negated else cost)
        return self._costs[name]


def _check_rule(body: list[_Token]) -> None:
    """Refuse a rule whose repetitions come to too much.

    Its parts are symbols of a parser, whose items the library bounds.
    """
    tree = Tree()
    for kind, text in body:
        _read(tree, kind, text)
    states = tree.cost().states
    if states > MAX_STATES:
        raise InvalidRequestError(
            f"the grammar is too large: a rule has more than {MAX_STATES} parts with its "
            "repetitions written out"
        )


def _read(tree: Tree, kind: str, text: str) -> None:
    if kind == "string":
        tree.add(Cost.literal(len(text)))
    elif kind in _SYMBOLS:
        tree.add(Cost.literal())
    elif kind == "count":
        low, comma, high = (part.strip() for part in text.partition(","))
        tree.repeat(*counted(low, comma, high))
    elif kind == "times":
        low, _, high = text.partition("..")
        tree.repeat(*counted(low, ",", high or low))
    elif text in _TIMES:
        tree.repeat(*_TIMES[text])
    elif text in ("(", "["):
        tree.open()
    elif text in (")", "]"):
        tree.close()
        if text == "]":
            tree.repeat(0, 1)
    elif text == "|":
        tree.alternative()
    elif text == "&":
        tree.together()


def _schema_end(lark: str, place: int, costs: list[Cost]) -> int:
    """The place behind the schema that follows `%json`."""
    start = lark.find("{", place)
    if start < 0:
        return place
    try:
        schema, end = json.JSONDecoder().raw_decode(lark, start)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the schema after %json is not JSON: {error}") from error
    costs += check_schema(schema)
    return end
