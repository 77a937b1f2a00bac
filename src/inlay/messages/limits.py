"""The length of a context: one check, for frontends and for engines, which trust no frontend."""

from inlay.base.errors import ContextLengthError


def check_length(
    length: int, limit: int, output: int | None = 0, *, says: str = "", param: str = "prompt"
) -> None:
    """Check that a prompt and its output fit.

    Args:
        length: positions of the prompt.
        limit: positions that the model has for both.
        output: maximum tokens of the output; 0 for none, None for what is left, at least one.
        says: the prompt and its length, as an error names them.
        param: field of the request that the prompt comes from.

    Raises:
        ContextLengthError: they do not.
    """
    says = says or f"the prompt has {length}"
    if length > limit or (output != 0 and length == limit):
        more = ", and needs room for at least one more" if output != 0 else ""
        raise _error(limit, f"{says}{more}", param)
    if output is not None and length + output > limit:
        raise _error(limit, f"{says} and max_tokens asks for {output} more", "max_tokens")


def _error(limit: int, says: str, param: str) -> ContextLengthError:
    return ContextLengthError(
        f"This model's maximum context length is {limit} tokens; {says} (--max-model-len).",
        param=param,
    )
