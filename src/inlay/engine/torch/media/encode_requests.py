"""Requests of `Task.ENCODE`: images, audio or video in, rows out."""

import asyncio
import logging
from dataclasses import dataclass

from inlay.base.errors import EngineError, InlayError, InvalidRequestError
from inlay.engine.admission import PromptAdmission
from inlay.engine.shell import EngineShell, send
from inlay.engine.torch.media.encoder import TowerEncoder
from inlay.engine.torch.prompt_media import PromptMedia
from inlay.media.positions import grid_field, merged
from inlay.messages.prompt import Media, Prompt, Rows
from inlay.messages.request import (
    PORTS,
    Emit,
    EngineUsage,
    FinishReason,
    Output,
    Payload,
    Request,
    Task,
)

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Running:
    """A running request."""

    request: Request
    emit: Emit
    task: "asyncio.Task[None] | None" = None

    def end(self, reason: FinishReason, *, error: InlayError | None = None) -> None:
        send(self.request, self.emit, self.request.end(reason, error))

    def stop(self) -> None:
        # A file that others wait for is encoded all the same.
        if self.task is not None and self.task is not asyncio.current_task():
            self.task.cancel()


class EncodeRequests:
    """The requests of one event loop to encode media. Each ends alone, also by an error.

    Attributes:
        encoder: as above.
        shell: the requests.
        num_rows: rows given so far.
    """

    def __init__(self, encoder: TowerEncoder, admission: PromptAdmission) -> None:
        self.encoder = encoder
        self.num_rows = 0
        self._admission = admission
        self.shell: EngineShell[_Running] = EngineShell(
            _Running.stop, lambda _: "the deadline passed before the file was encoded"
        )

    def submit(self, request: Request, emit: Emit) -> None:
        """Admit `request`.

        Raises `InvalidRequestError` unless each of its prompts is one item that the model takes.
        """
        self.shell.check(request)
        if request.adapter is not None:
            raise InvalidRequestError(
                f"adapter {request.adapter!r} does not encode media: name its model",
                param="model",
            )
        runs = [self._item_of(prompt) for prompt in request.prompts]
        running = _Running(request, emit)
        running.task = self.shell.spawn(self._answer(running, runs))
        self.shell.add(running)

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

    async def _answer(self, running: _Running, runs: list[Media]) -> None:
        request = running.request
        try:
            answer = self._output(request, runs, await self._rows(request, runs))
        except InlayError as error:
            self.shell.end(running, "error", error)
        except Exception as error:
            log.exception("request %s was not encoded", request.id)
            failed = EngineError(f"a file was not encoded: {type(error).__name__}")
            self.shell.end(running, "error", failed)
        else:
            if self.shell.leave(running):
                send(request, running.emit, answer)

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
