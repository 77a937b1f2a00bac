"""Other names of fields of requests for vectors and reranks: Jina's, NVIDIA's and Voyage's."""

from typing import Any, Literal, NamedTuple

import msgspec

from inlay.api.openai.embeddings.encoding import INTEGERS
from inlay.api.openai.schema.embeddings import EmbeddingRequest
from inlay.api.openai.schema.scoring import RankingRequest
from inlay.base.errors import InvalidRequestError

_NAMES = {
    "output_dimension": "dimensions",
    "normalized": "normalize",
    "truncation": "auto_truncate",
}

_RANK_NAMES = {"top_k": "top_n", "truncation": "auto_truncate"}

_TYPES = {
    "output_dtype": {"float": {"embed_dtype": "float32"}},
    "embedding_type": {
        "float": {"encoding_format": "float", "embed_dtype": "float32"},
        "base64": {"encoding_format": "base64"},
    },
}
"""Values of aliases, and the fields of ours that they stand for; others are dtypes by name."""

OTHER_VALUES = ("encoding_format", "embed_dtype")
"""Fields of ours whose values are not those of the aliases."""


class NamedTruncation(NamedTuple):
    """Truncation by the names of Cohere and NVIDIA, in our fields."""

    auto_truncate: bool
    truncation_side: Literal["left", "right"] | None

    @classmethod
    def of(cls, name: Literal["NONE", "START", "END"]) -> "NamedTruncation":
        """Return what a name stands for."""
        side: dict[str, Literal["left", "right"]] = {"START": "left", "END": "right"}
        return cls(name != "NONE", side.get(name))


def take_aliases(request: EmbeddingRequest) -> dict[str, str]:
    """Put aliases of a request under the names of ours; return, by ours, those that were sent.

    Raises:
        InvalidRequestError: two names of one field say different things.
    """
    sent: dict[str, str] = {}
    for alias, name in _NAMES.items():
        _put(request, alias, getattr(request, alias), name, sent)
    if isinstance(request.truncate, str):
        for name, value in NamedTruncation.of(request.truncate)._asdict().items():
            _put(request, "truncate", value, name, sent)
    else:
        _put(request, "truncate", request.truncate, "auto_truncate", sent)
    for alias, kinds in _TYPES.items():
        kind = getattr(request, alias)
        own = {"embed_dtype": kind} if kind in INTEGERS else kinds.get(kind, {})
        for name, value in own.items():
            _put(request, alias, value, name, sent)
    return sent


def take_rank_aliases(request: RankingRequest) -> tuple[bool, dict[str, str]]:
    """Put Voyage's fields of a rerank under the names of ours; True if there are any, also null.

    Returns and raises else as `take_aliases`.
    """
    sent: dict[str, str] = {}
    given = {alias: getattr(request, alias) for alias in _RANK_NAMES}
    for alias, value in given.items():
        if value is not msgspec.UNSET:
            _put(request, alias, value, _RANK_NAMES[alias], sent)
    return any(value is not msgspec.UNSET for value in given.values()), sent


def _put(
    request: EmbeddingRequest | RankingRequest,
    alias: str,
    value: Any,
    name: str,
    sent: dict[str, str],
) -> None:
    own = getattr(request, name)
    if value is None:
        return
    if own not in (None, value):
        raise InvalidRequestError(
            f"{alias} {getattr(request, alias)!r} and {name} {own!r} say different things",
            param=alias,
        )
    setattr(request, name, value)
    sent[name] = alias
