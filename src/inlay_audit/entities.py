"""Names and other entities in a text: those that were given, or found by simple rules."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

_WORD = re.compile(r"[^\W\d_][\w'’-]*")
_OTHER = re.compile(
    r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+"  # an e-mail address
    r"|https?://\S+"
    r"|\+?\d[\d .,:/-]*\d|\d"  # numbers, dates, times, telephone numbers
)
_ENDS_SENTENCE = ".!?:;\n\"'“‘("


class FoundEntity(NamedTuple):
    """Characters `start` to `stop` of a text, a name or another entity."""

    start: int
    stop: int
    name: bool


def entities_of(
    text: str,
    names: Sequence[str] | None,
    others: Sequence[str] | None,
    known: frozenset[str],
) -> list[FoundEntity]:
    """Every place of every entity.

    Args:
        text: where they stand.
        names: given by the user; None: the words of `known`.
        others: given by the user; None: numbers, e-mail and web addresses.
        known: see `capitalised_names`.

    Raises:
        ValueError: one that was given does not stand in the text.
    """
    found = (
        list(_places(text, names, name=True))
        if names is not None
        else [
            FoundEntity(*match.span(), True)
            for match in _WORD.finditer(text)
            if match.group() in known
        ]
    )
    found += (
        list(_places(text, others, name=False))
        if others is not None
        else [FoundEntity(*match.span(), False) for match in _OTHER.finditer(text)]
    )
    return sorted(found)


def capitalised_names(texts: Iterable[str]) -> frozenset[str]:
    """Words that begin with a capital inside of sentences, and are never written without it.

    Rough, and made for languages that write only names so: give names with the texts where it
    matters.
    """
    inside: Counter[str] = Counter()
    small: set[str] = set()
    for text in texts:
        for match in _WORD.finditer(text):
            word = match.group()
            if word[0].islower():
                small.add(word)
            elif word[0].isupper() and len(word) > 1:
                before = text[: match.start()].rstrip(" ")
                inside[word] += bool(before) and before[-1] not in _ENDS_SENTENCE
    return frozenset(word for word, count in inside.items() if count and word.lower() not in small)


def _places(text: str, entities: Sequence[str], *, name: bool) -> Iterator[FoundEntity]:
    for entity in entities:
        place = text.find(entity) if entity else -1
        if place < 0:
            raise ValueError(f"the entity {entity!r} does not stand in it")
        while place >= 0:
            yield FoundEntity(place, place + len(entity), name)
            place = text.find(entity, place + len(entity))
