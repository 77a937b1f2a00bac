"""Labels of options: texts that are one token where an answer begins."""

from collections.abc import Iterator, Sequence
from itertools import product
from string import ascii_lowercase, ascii_uppercase
from threading import Lock
from typing import NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

from inlay.base.errors import InvalidRequestError
from inlay.base.lru import LruBytes
from inlay.render.renderer import Renderer

MAX_LABELS = 255
_TAIL = 32
"""Tokens at the end of a prompt that are read, where no added token is among them."""

_MOST_ENDS = 64
"""Ends of prompts whose labels are remembered; some templates end with what a client has sent."""

_Found: TypeAlias = LruBytes[tuple[int, ...], list["Label"]]

_found: "WeakKeyDictionary[Renderer, _Found]" = WeakKeyDictionary()
_lock = Lock()


class Label(NamedTuple):
    """A label, and its token."""

    text: str
    id: int


def labels_behind(renderer: Renderer, ids: Sequence[int], count: int) -> Sequence[Label]:
    """Return `count` labels: A to Z, a to z, then pairs of letters, as far as each is one token.

    Args:
        renderer: of the model.
        ids: of the prompt, or of its end.
        count: at most `MAX_LABELS`.

    Raises:
        InvalidRequestError: the tokenizer has not so many there.
    """
    tail = _tail(renderer, ids)
    with _lock:
        known = _found.setdefault(renderer, LruBytes(_MOST_ENDS))
        found = known.get(tail)
    if found is None:
        found = list(_labels(renderer, tail))
        with _lock:
            known.put(tail, found)
    if len(found) < count:
        raise InvalidRequestError(
            f"a question has {count} options, and the tokenizer of this model has {len(found)} "
            "labels that are one token where its answer begins",
            param="questions",
        )
    return found[:count]


def _tail(renderer: Renderer, ids: Sequence[int]) -> tuple[int, ...]:
    """Return the end of a prompt that is tokenized alike with nothing before it."""
    tail = tuple(ids[-_TAIL:])
    for place in range(len(tail) - 1, -1, -1):
        if renderer.is_added(tail[place]):
            return tail[place + 1 :]
    while tail and renderer.encode(renderer.decode(tail), add_special_tokens=False) != tail:
        tail = tail[1:]
    return tail


def _labels(renderer: Renderer, tail: tuple[int, ...]) -> Iterator[Label]:
    text, taken = renderer.decode(tail), set[int]()
    letters = (*ascii_uppercase, *ascii_lowercase)
    for label in (*letters, *map("".join, product(ascii_uppercase, repeat=2))):
        ids = renderer.encode(text + label, add_special_tokens=False)
        if len(taken) < MAX_LABELS and ids[:-1] == tail and ids[-1] not in taken:
            taken.add(ids[-1])
            yield Label(label, ids[-1])
