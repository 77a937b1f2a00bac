"""Length limits of an engine that may split a prompt anywhere."""

from dataclasses import dataclass

from inlay.errors import ContextLengthError, InvalidRequestError
from inlay.request import Request


@dataclass(frozen=True, slots=True)
class MaxModelLen:
    """Limit of prompt and output together.

    Attributes:
        max_model_len: maximum number of positions.
        engine: name of the engine, for messages.
    """

    max_model_len: int
    engine: str

    def check(self, request: Request) -> None:
        """Raise `ContextLengthError` or another `InvalidRequestError` if it can never run."""
        prompt, wanted = len(request.prompt), request.sampling.max_tokens
        if not prompt:
            raise InvalidRequestError(
                "a prompt needs at least one position, got none", param="prompt"
            )
        if prompt + max(1, wanted) > self.max_model_len:
            raise ContextLengthError(
                f"the maximum context length is {self.max_model_len} positions; got a prompt of "
                f"{prompt} and max_tokens of {wanted}, together {prompt + wanted}"
            )
        if request.prompt.atomic_bounds():
            raise InvalidRequestError(
                f"{self.engine} may cut a prompt anywhere; this one has rows that must stay "
                "together"
            )


__all__ = ["MaxModelLen"]
