"""Exchanges with a server as generators, so that blocking and asynchronous callers share them.

A generator yields a `Question` and is sent the answer's body, or is thrown the server's refusal; it
yields a number to wait so many seconds. `Connection` runs it, blocking or not.
"""

import random
from collections.abc import Generator
from typing import NamedTuple, TypeAlias, TypeVar

from inlay.errors import NotFoundError, OverloadedError, RateLimitedError

T = TypeVar("T")

RETRIES = 2
"""Default number of further tries."""

MAX_WAIT = 60.0
"""Longest wait before a further try, in seconds. A server that asks for more is not asked again."""

_FIRST_WAIT, _MOST_WAIT = 0.5, 8.0


class Question(NamedTuple):
    """A request below the base URL, whose repetition changes nothing.

    Attributes:
        path: with its query.
        body: of the request, or None.
        media: type of the body.
    """

    method: str
    path: str
    body: bytes | None = None
    media: str = ""


Steps: TypeAlias = Generator[Question | float, bytes, T]


def asked(question: Question, retries: int) -> Steps[bytes]:
    """Return the answer to a question.

    It is asked again where no server was reached or one said 429 or 503: after `Retry-After`, else
    after half a second, doubled with each try, with jitter.

    Raises:
        InlayError: as the server answers the last try, or `OverloadedError` when it cannot be
            reached.
    """
    tries = 0
    while True:
        try:
            return (yield question)
        except (OverloadedError, RateLimitedError) as error:
            wait = wait_after(error, tries)
            if tries >= retries or wait > MAX_WAIT:
                raise
        except NotFoundError:
            if question.method != "DELETE" or not tries:
                raise
            return b""  # the try before, whose answer was lost, has done it
        tries += 1
        yield wait


def wait_after(error: OverloadedError | RateLimitedError, tries: int) -> float:
    """Return the seconds to wait after `error`, which ended a try after `tries` others."""
    if error.retry_after is not None:
        return error.retry_after
    wait: float = min(_FIRST_WAIT * 2.0**tries, _MOST_WAIT)
    return wait * (1 - random.random() / 4)
