"""Alternative tokens in logprobs, and the names of tokens there."""

from collections.abc import Callable

from inlay.api.openai.generation import GenerationRequest
from inlay.errors import InvalidRequestError
from inlay.render import Renderer

MAX_IDS = 128
"""Maximum ids in `logprob_token_ids`, as in vLLM."""

_FIELD = "logprob_token_ids"


def named_ids(
    request: GenerationRequest, *, logprobs: int | None, max_tokens: int | None
) -> tuple[int, ...]:
    """Return the ids of `logprob_token_ids` without duplicates; empty if the field is absent.

    Args:
        request: the request.
        logprobs: alternatives for each token, or None for no logprobs.
        max_tokens: the request's value.

    Raises:
        InvalidRequestError: without logprobs, too many, or nothing is generated.
    """
    ids = request.logprob_token_ids or []
    if not ids:
        return ()
    if logprobs is None:
        raise InvalidRequestError(
            f"{_FIELD} is only allowed when logprobs are asked for", param=_FIELD
        )
    if max_tokens == 0:
        raise InvalidRequestError(f"{_FIELD} needs an output, and max_tokens is 0", param=_FIELD)
    if len(ids) > MAX_IDS:
        raise InvalidRequestError(f"{_FIELD} has {len(ids)} ids; at most {MAX_IDS}", param=_FIELD)
    return tuple(dict.fromkeys(ids))


def token_names(request: GenerationRequest, renderer: Renderer) -> Callable[[int], str]:
    """Return the function that names tokens in logprobs: by text, or as `token_id:ID`."""
    return _by_id if request.return_tokens_as_token_ids else renderer.token_text


def _by_id(id_: int) -> str:
    return f"token_id:{id_}"


__all__ = ["MAX_IDS", "named_ids", "token_names"]
