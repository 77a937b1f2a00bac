"""Requests of `Task.ENCODE`: images, audio or video in, rows out."""

import asyncio
import logging
from typing import NamedTuple

from inlay.base.errors import DeadlineExceededError, EngineError, InlayError, InvalidRequestError
from inlay.engine.admission import PromptAdmission
from inlay.engine.torch.media.encoder import MediaEncoder
from inlay.engine.torch.prompt_media import PromptMedia
from inlay.media.positions import grid_field, merged
from inlay.messages.prompt import Media, Prompt, Rows
from inlay.messages.request import PORTS, Emit, EngineUsage, Output, Payload, Request, Task

log = logging.getLogger(__name__)


class _Running(NamedTuple):
    """A running request."""

    request: Request
    emit: Emit
    task: "asyncio.Task[None]"


class EncodeRequests:
    """The requests of one event loop to encode media. Each ends alone, also by an error.

    Attributes:
        encoder: as above.
        num_rows: rows given so far.
    """

    def __init__(self, encoder: MediaEncoder, admission: PromptAdmission) -> None:
        self.encoder = encoder
        self.num_rows = 0
        self._admission = admission
        self._running: dict[str, _Running] = {}

    def __len__(self) -> int:
        """Number of running requests."""
        return len(self._running)

    def submit(self, request: Request, emit: Emit) -> None:
        """Admit `request`.

        Raises `InvalidRequestError` unless each of its prompts is one item that the model takes.
        """
        if request.id in self._running:
            raise InvalidRequestError(f"a request with id {request.id!r} is under way")
        if request.adapter is not None:
            raise InvalidRequestError(
                f"adapter {request.adapter!r} does not encode media: name its model",
                param="model",
            )
        runs = [self._item_of(prompt) for prompt in request.prompts]
        task = asyncio.create_task(self._answer(request, runs))
        self._running[request.id] = _Running(request, emit, task)

    def abort(self, request_id: str) -> None:
        """End a request; a file that others wait for is encoded all the same."""
        running = self._running.get(request_id)
        if running is not None:
            running.task.cancel()
            self._end(request_id, running.request.end("abort"))

    def abort_all(self) -> None:
        """End every request."""
        for request_id in tuple(self._running):
            self.abort(request_id)

    def _item_of(self, prompt: Prompt) -> Media:
        self._admission.check_prompt(prompt, "input")
        media = PromptMedia.of(prompt)
        runs = [] if media is None else media.missing(0)
        if len(runs) != 1 or prompt.has_embeds:
            raise InvalidRequestError(
                f"each input to encode is one item; one has {len(runs)} items"
                f"{' and embeddings' if prompt.has_embeds else ''}",
                param="input",
            )
        return runs[0]

    async def _answer(self, request: Request, runs: list[Media]) -> None:
        try:
            async with asyncio.timeout(request.deadline):
                answer = self._output(request, runs, await self._rows(request, runs))
        except TimeoutError:
            late = DeadlineExceededError("the deadline passed before the file was encoded")
            answer = request.end("error", late)
        except InlayError as error:
            answer = request.end("error", error)
        except Exception as error:
            log.exception("request %s was not encoded", request.id)
            failed = EngineError(f"a file was not encoded: {type(error).__name__}")
            answer = request.end("error", failed)
        self._end(request.id, answer)

    async def _rows(self, request: Request, runs: list[Media]) -> list[Rows]:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._rows_of(request, run)) for run in runs]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _rows_of(self, request: Request, run: Media) -> Rows:
        try:
            return await self.encoder.rows(
                run, salt=request.salt, client=request.client, priority=request.priority
            )
        except InvalidRequestError as error:
            raise run.located(error) from error

    def _output(self, request: Request, runs: list[Media], found: list[Rows]) -> Output:
        payloads = []
        for index, (run, rows) in enumerate(zip(runs, found, strict=True)):
            last = index == len(runs) - 1
            fields = list(rows.bundle)
            if run.grid is not None:
                times, lines, columns = merged(run.grid, run.total)
                fields.append(grid_field(lines, columns, times))
            payloads.append(Payload(PORTS[Task.ENCODE], rows.dtype, rows.shape, rows.data, last))
            payloads += [
                Payload(field.name, field.dtype, field.shape, field.data, last) for field in fields
            ]
        num_rows = sum(map(len, found))
        self.num_rows += num_rows
        return Output(
            request.id,
            request.attempt,
            0,
            finish_reason="stop",
            usage=EngineUsage(num_rows, 0),
            payloads=tuple(payloads),
        )

    def _end(self, request_id: str, answer: Output) -> None:
        running = self._running.pop(request_id)
        try:
            running.emit(answer)
        except Exception as error:
            log.exception("the receiver of request %s failed", request_id)
            failed = EngineError(f"the answer could not be sent: {type(error).__name__}: {error}")
            running.emit(running.request.end("error", failed))
