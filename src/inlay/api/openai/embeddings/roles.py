"""Roles of texts: whether one asks or is to be found, and what the model puts before it."""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from inlay.base.errors import InvalidRequestError
from inlay.messages.card import EmbeddingCard

QUERY: Final = "query"
DOCUMENT: Final = "document"

_ALIASES = {
    "query": QUERY,
    "search_query": QUERY,
    "retrieval.query": QUERY,
    "document": DOCUMENT,
    "passage": DOCUMENT,
    "corpus": DOCUMENT,
    "search_document": DOCUMENT,
    "retrieval.passage": DOCUMENT,
}
"""Roles by the names that clients of Cohere, Jina, NVIDIA and Voyage send."""

_PROMPTS: Mapping[str, Sequence[str]] = {
    QUERY: ("query",),
    DOCUMENT: ("document", "passage", "corpus"),
}
"""Names of prompts of each role, in the order of sentence-transformers' `encode_document`."""


class RolePart(NamedTuple):
    """The part that texts play, as a request says it.

    Attributes:
        role: `QUERY`, `DOCUMENT`, or None where nothing names one.
        prefix: the model's prompt, which is put before each text.
    """

    role: str | None
    prefix: str


def part_of(
    given: Mapping[str, str | None], card: EmbeddingCard, model: str, default: str | None = None
) -> RolePart:
    """Return the part of texts.

    Args:
        given: value of each of the request's fields that name a role or a prompt, by field; a
            field called `prompt_name`, or that ends so, names a prompt alone.
        card: of the model.
        model: its name.
        default: role where the request names none.

    Raises:
        InvalidRequestError: a name that the model does not know, or two roles.
    """
    roles: dict[str, str] = {}
    prefix = None
    for field, name in given.items():
        if name is None:
            continue
        if name in _ALIASES:
            roles[field] = _ALIASES[name]
        if name in card.prompts:
            prefix = card.prompts[name] if prefix is None else prefix
        elif field.endswith("prompt_name"):
            raise InvalidRequestError(
                f"the model `{model}` has no prompt {name[:80]!r}; its prompts: {_known(card)}",
                param=field,
            )
        elif name not in _ALIASES:
            raise InvalidRequestError(
                f"{field} is {name[:80]!r}; allowed are the roles {', '.join(_ALIASES)} and the "
                f"prompts of the model `{model}`: {_known(card)}",
                param=field,
            )
    if len(set(roles.values())) > 1:
        said = " and ".join(f"{field} {given[field]!r}" for field in roles)
        raise InvalidRequestError(f"{said} are different roles", param=next(iter(roles)))
    role = next(iter(roles.values()), default)
    if prefix is None:
        of_role = () if role is None else _PROMPTS[role]
        found = next((name for name in of_role if name in card.prompts), card.default_prompt)
        prefix = "" if found is None else card.prompts.get(found, "")
    return RolePart(role, prefix)


def _known(card: EmbeddingCard) -> str:
    return ", ".join(sorted(card.prompts)) or "it has none"
