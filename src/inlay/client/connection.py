"""Requests to a server, for what the `openai` client has no call for.

Exchanges are generators (`Steps`), so that blocking and asynchronous callers share them: one yields
a `Question` and is sent the answer's body, or is thrown the server's refusal; it yields a number to
wait so many seconds. `ApiClient` runs it, blocking or not.
"""

import asyncio
import http.client
import random
import time
import urllib.error
import urllib.request
from collections.abc import Generator
from typing import NamedTuple, TypeAlias, TypeVar, cast
from urllib.parse import urlsplit

import msgspec

from inlay.base.errors import (
    BY_STATUS,
    EngineError,
    InlayError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    RateLimitedError,
)


class _ErrorObject(msgspec.Struct):
    """OpenAI's error object; other servers write numbers as codes."""

    message: str
    param: str | None = None
    code: str | int | None = None


class _ErrorAnswer(msgspec.Struct):
    error: _ErrorObject


def refusal(status: int, body: bytes, retry_after: str | None = None) -> InlayError:
    """The error that an answer stands for.

    Args:
        status: HTTP status, 400 or more.
        body: OpenAI's error object, or anything else, of which the beginning is quoted.
        retry_after: the header's value, if there is one.
    """
    kind = BY_STATUS.get(status, EngineError)
    try:
        said = msgspec.json.decode(body, type=_ErrorAnswer).error
    except msgspec.MsgspecError:
        return kind(f"the server answered {status}: {body[:200]!r}")
    waits = retry_after is not None and retry_after.isascii() and retry_after.isdigit()
    seconds = float(retry_after) if waits and retry_after is not None else None
    code = said.code if isinstance(said.code, str) else None
    return kind(said.message, param=said.param, code=code, retry_after=seconds)


T = TypeVar("T")

JSON = "application/json"

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


class ApiClient:
    """A server's base URL, and the key to ask with.

    Args:
        base_url: the server's, as the `openai` client takes it: `http://host:8000/v1`.
        api_key: as the `openai` client's.
        timeout: seconds an answer may take.

    Raises:
        InvalidRequestError: not an HTTP URL.
    """

    def __init__(self, base_url: str, api_key: str | None, timeout: float) -> None:
        if urlsplit(base_url).scheme not in ("http", "https") or not urlsplit(base_url).hostname:
            raise InvalidRequestError(
                f"{base_url!r} is not the URL of a server, such as http://host:8000/v1"
            )
        self._url = base_url.rstrip("/")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._timeout = timeout

    def run(self, steps: Steps[T]) -> T:
        """Return the result of `steps`. Raises as they do."""
        answer: bytes | None = None
        refused: InlayError | None = None
        while True:
            try:
                todo = _next(steps, answer, refused)
            except StopIteration as end:
                return cast("T", end.value)
            answer = refused = None
            if isinstance(todo, Question):
                try:
                    answer = self.send(todo)
                except InlayError as error:
                    refused = error
            else:
                time.sleep(todo)

    async def run_async(self, steps: Steps[T]) -> T:
        """As `run`; waits without blocking the event loop, and asks in a thread."""
        answer: bytes | None = None
        refused: InlayError | None = None
        while True:
            try:
                todo = _next(steps, answer, refused)
            except StopIteration as end:
                return cast("T", end.value)
            answer = refused = None
            if isinstance(todo, Question):
                try:
                    answer = await asyncio.to_thread(self.send, todo)
                except InlayError as error:
                    refused = error
            else:
                await asyncio.sleep(todo)

    def send(self, question: Question) -> bytes:
        """Return the body of an answer.

        Raises:
            InlayError: as the server answers, or `OverloadedError` when it cannot be reached.
        """
        url = self._url + question.path
        media = {"Content-Type": question.media} if question.media else {}
        request = urllib.request.Request(
            url, question.body, {**self._headers, **media}, method=question.method
        )
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as response:
                answer: bytes = response.read()
                return answer
        except urllib.error.HTTPError as error:
            wait = error.headers.get("Retry-After")
            raise refusal(error.code, error.read(), wait) from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            if question.body and isinstance(reason, ConnectionResetError | BrokenPipeError):
                # A server that refuses a body may close before it was sent, and its answer is lost.
                raise OverloadedError(
                    f"{url} closed the connection while {len(question.body)} bytes were sent: "
                    "it may take fewer (max_body_bytes among the limits of GET /v1/models)"
                ) from error
            raise OverloadedError(f"{url} cannot be reached: {reason}") from error


def _next(steps: Steps[T], answer: bytes | None, refused: InlayError | None) -> Question | float:
    """Return the next step. Raises `StopIteration` after the last one."""
    if refused is not None:
        return steps.throw(refused)
    return next(steps) if answer is None else steps.send(answer)
