"""Other names of fields of `/v1/embeddings`: Jina's and Voyage's, each of one of ours."""

from typing import Any

from inlay.api.openai.embeddings.encoding import INTEGERS
from inlay.api.openai.schema.embeddings import EmbeddingRequest
from inlay.base.errors import InvalidRequestError

_NAMES = {
    "output_dimension": "dimensions",
    "normalized": "normalize",
    "truncation": "auto_truncate",
    "truncate": "auto_truncate",
}
_TYPES = ("output_dtype", "embedding_type")


def own_names(request: EmbeddingRequest) -> EmbeddingRequest:
    """Return a request whose aliases stand under the names of ours.

    Raises:
        InvalidRequestError: two names of one field say different things.
    """
    for alias, name in _NAMES.items():
        _put(request, alias, getattr(request, alias), name)
    for alias in _TYPES:
        kind = getattr(request, alias)
        if kind in INTEGERS:
            _put(request, alias, kind, "embed_dtype")
        elif kind == "base64":
            _put(request, alias, kind, "encoding_format")
    return request


def _put(request: EmbeddingRequest, alias: str, value: Any, name: str) -> None:
    own = getattr(request, name)
    if value is None:
        return
    if own not in (None, value):
        raise InvalidRequestError(
            f"{alias} {value!r} and {name} {own!r} say different things", param=alias
        )
    setattr(request, name, value)
