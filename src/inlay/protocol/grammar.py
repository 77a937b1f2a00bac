"""Grammars that bind an output."""

from typing import Literal, TypeAlias

import msgspec

GrammarKind: TypeAlias = Literal["json_schema", "json_object", "regex", "choice", "grammar", "structural_tag"]
"""Kinds of grammar, by vLLM's names; see `Grammar`."""


MAX_GRAMMAR = 256 * 1024
"""Characters of a grammar's source."""


class Grammar(msgspec.Struct, frozen=True, omit_defaults=True):
    """A grammar that the whole text of an output must match; the engine compiles it.

    Attributes:
        kind: how to read `source`. "json_schema": the schema as JSON. "json_object": any JSON object, `source` is empty.
            "regex": a regular expression that matches all of the output. "choice": a JSON list of strings, one of which
            the output is. "grammar": Lark or GBNF (which vLLM calls EBNF). "structural_tag": vLLM's, as JSON.
        source: the text of it.
        after: token ids; the output is free until it holds this run of ids for the first time, and the grammar binds what
            follows. Empty: it binds from the start.
    """

    kind: GrammarKind
    source: str = ""
    after: tuple[int, ...] = ()


__all__ = ["MAX_GRAMMAR", "Grammar", "GrammarKind"]
