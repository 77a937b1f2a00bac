"""Requests to a server, for what the `openai` client has no call for."""

import asyncio
import http.client
import time
import urllib.error
import urllib.request
from typing import TypeVar, cast
from urllib.parse import urlsplit

from inlay.client.refusal import refusal
from inlay.client.steps import Question, Steps
from inlay.errors import InlayError, InvalidRequestError, OverloadedError

T = TypeVar("T")

JSON = "application/json"


class Connection:
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
