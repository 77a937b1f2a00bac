"""The embedding engine: batches prompts of many requests for an `EmbeddingModel`."""

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from msgspec.structs import replace

from inlay.base.errors import (
    EngineError,
    InlayError,
    InvalidRequestError,
    OverloadedError,
)
from inlay.embedding.bundles import FIRST_PORTS, payloads_of
from inlay.embedding.cache import Bundle
from inlay.engine.admission import PromptAdmission
from inlay.engine.embed.queue import BatchQueue, EmbedItem
from inlay.engine.embed.vector_model import (
    EmbeddingModel,
    EmbedInput,
    LoadedEmbeddingModel,
    MediaRows,
)
from inlay.engine.probe import probe
from inlay.engine.settings import EngineSettings
from inlay.engine.shell import EngineShell, send
from inlay.media.positions import placed
from inlay.messages.card import ModelCard, Stats
from inlay.messages.fields import check_length
from inlay.messages.outputs import pooled
from inlay.messages.pooling import CHUNKS
from inlay.messages.prompt import Media, Prompt, Rows, Segment
from inlay.messages.request import Emit, FinishReason, Pooling, Request, Task

log = logging.getLogger(__name__)

RETRY_AFTER = 1.0
"""Seconds after which a client may retry when the queue is full."""


@dataclass(slots=True)
class _Receiver:
    """A running request.

    Attributes:
        bundles: what its prompts get, filled batch by batch.
        left: number of prompts that are not computed yet.
        encoding: encodes its media; None if nothing is to be encoded.
    """

    request: Request
    emit: Emit
    left: int
    bundles: dict[int, Bundle] = field(default_factory=dict)
    encoding: asyncio.Task[None] | None = None

    def answer(self) -> None:
        in_order = [self.bundles[index] for index in range(len(self.bundles))]
        ports = {} if self.request.pooling.outputs else FIRST_PORTS
        send(self.request, self.emit, pooled(self.request, payloads_of(in_order, ports)))

    def end(self, reason: FinishReason, *, error: InlayError | None = None) -> None:
        send(self.request, self.emit, self.request.end(reason, error))

    def late(self) -> str:
        awaited = (
            "the embedding was computed" if self.encoding is None else "the media were encoded"
        )
        return f"the deadline passed before {awaited}"


class EmbedEngine:
    """A model that computes vectors of texts, or scores of pairs.

    The event loop owns the queue. Media are encoded before a request is queued, so a damaged file
    ends its request alone. The model gets a few batches at a time and returns their vectors.
    If a batch fails, its requests end with an error and the next batch is tried.
    """

    def __init__(self, settings: EngineSettings, model: EmbeddingModel) -> None:
        self._settings = settings
        self._model = model
        self._queue = BatchQueue(settings.batch.max_num_batched_tokens)
        self._shell: EngineShell[_Receiver] = EngineShell(self._stop, _Receiver.late)
        self._loaded: LoadedEmbeddingModel | None = None
        self._admission: PromptAdmission | None = None
        self._batches: set[asyncio.Task[None]] = set()
        self._next: asyncio.Handle | None = None
        self._running = 0
        self._encoding = 0
        self._stats = Stats()
        self._computing = 0
        self._busy_since = self._busy = 0.0

    @property
    def card(self) -> ModelCard:
        """Metadata of the served model. Raises `EngineError` before the start."""
        return self._ready.card

    @property
    def _ready(self) -> LoadedEmbeddingModel:
        if self._loaded is None:
            raise EngineError("the engine is not started")
        return self._loaded

    async def start(self) -> None:
        """Load the model.

        Raises:
            InvalidRequestError: an unsupported model or setting.
            EngineError: it was started before, or the model did not start.
        """
        self._shell.begin()
        loaded = self._loaded = await self._model.start()
        self._queue = BatchQueue(loaded.budget)
        self._admission = PromptAdmission.of_prompts(loaded.card)

    async def close(self) -> None:
        """End every request with an error and release the model."""
        await self._shell.close()
        await asyncio.gather(*self._batches)
        await self._model.close()

    async def failed(self) -> EngineError:
        """Wait for a permanent failure of the model and return it.

        All requests end with an error first.
        """
        error = await self._model.failed()
        self._shell.fail(error)
        return error

    def submit(self, request: Request, emit: Emit) -> None:
        """Admit `request`.

        Raises:
            InvalidRequestError: it can never run here.
            EngineError: the engine is not started.
            OverloadedError: the queue is full, or the engine is closing.
        """
        self._shell.check(request)
        self._check(request)
        most = self._settings.pooling.max_num_queued_tokens
        waiting = self._queue.positions + self._encoding
        if waiting and waiting + request.num_positions > most:
            raise OverloadedError(
                f"{waiting} positions wait to be embedded; {request.num_positions} more would pass "
                f"the limit of {most} (--max-num-queued-tokens)",
                retry_after=RETRY_AFTER,
            )
        receiver = _Receiver(request, emit, len(request.prompts))
        self._shell.add(receiver)
        if has_media(request):
            positions = request.num_positions
            self._encoding += positions
            receiver.encoding = asyncio.create_task(self._encode(receiver))
            # Also of a task that is cancelled before it begins.
            receiver.encoding.add_done_callback(lambda _: self._encoded(positions))
        else:
            self._enqueue(request)

    async def _encode(self, receiver: _Receiver) -> None:
        """Encode the media of a request, then queue it; it ends with the error of an item."""
        request, media = receiver.request, self._ready.media
        assert media is not None, "media are admitted only where something encodes them"
        error: InlayError
        try:
            receiver.request = await with_rows(request, media)
            receiver.encoding = None
            self._enqueue(receiver.request)
            return
        except InlayError as failed:
            error = failed
        except Exception as failed:
            log.exception("media of request %s were not encoded", request.id)
            error = EngineError(f"media were not encoded: {type(failed).__name__}")
        receiver.encoding = None
        self._shell.end(receiver, "error", error)

    def _encoded(self, positions: int) -> None:
        self._encoding -= positions

    def _enqueue(self, request: Request) -> None:
        self._queue.add(
            request.id, [len(prompt) for prompt in request.prompts], priority=request.priority
        )
        if self._next is None:
            # Deferred, so that requests that arrive together share a batch.
            self._next = asyncio.get_running_loop().call_soon(self._start_batches)

    def _check(self, request: Request) -> None:
        if self._admission is None:
            raise EngineError("the engine is not started")
        if request.adapter is not None:
            raise InvalidRequestError(
                f"adapter {request.adapter!r} does not exist: this engine has no adapters",
                param="model",
            )
        pooling, count = request.pooling, len(request.prompts)
        if len(pooling.second_from) not in (0, count) or len(pooling.visible) not in (0, count):
            raise InvalidRequestError(
                "either all prompts of a request are pairs or none is, and so of those that are "
                "partly visible",
                param="input",
            )
        check_spans(pooling, request.prompts)
        embedding = self.card.embedding
        if pooling.outputs and embedding is not None:
            for name in pooling.outputs:
                embedding.output(name, self.card.name)
        if embedding is not None and embedding.templated:
            pairs = zip(request.prompts, pooling.second_from, strict=False)
            if any(second < len(prompt) for prompt, second in pairs):
                raise InvalidRequestError(
                    "the model scores prompts that its score template makes of a pair, and got a "
                    "pair of texts: the frontend is older than this worker",
                    param="input",
                )
        limit = self.card.limits.max_model_len
        for prompt in request.prompts:
            if not len(prompt):
                raise InvalidRequestError(
                    "an input needs at least one position, got none", param="input"
                )
            check_length(len(prompt), limit, says=f"an input has {len(prompt)}", param="input")
            self._admission.check_prompt(prompt, "input")

    def abort(self, request_id: str) -> None:
        """End a request; results of batches that are being computed are dropped."""
        self._shell.abort(request_id)

    async def probe(self) -> float:
        """Run one token through the model before all queued prompts; return the seconds it took.

        Raises:
            EngineError: the engine is not running, or failed.
        """
        (task,) = self.card.tasks
        return await probe(self, task, Pooling(second_from=(1,) if task is Task.SCORE else ()))

    def stats(self) -> Stats:
        """Return the current counters."""
        media = self._ready.media
        found = Stats(
            running=self._running,
            waiting=len(self._queue),
            prompt_tokens=self._stats.prompt_tokens,
            rows_served=self._stats.rows_served,
            steps=self._stats.steps,
            progress=self._stats.progress,
            busy_seconds=self._busy
            + (time.monotonic() - self._busy_since if self._computing else 0.0),
        )
        return found if media is None else media.counted(found)

    def _stop(self, receiver: _Receiver) -> None:
        if receiver.encoding is not None:
            receiver.encoding.cancel()
        self._queue.remove(receiver.request.id)

    def _start_batches(self) -> None:
        """Give the model as many queued batches as it takes."""
        self._next = None
        while len(self._batches) < self._ready.batches and (batch := self._queue.next_batch()):
            asked = {item.request_id: self._shell.get(item.request_id) for item in batch}
            receivers = [receiver for receiver in asked.values() if receiver is not None]
            task = asyncio.create_task(self._compute(batch, receivers))
            self._batches.add(task)
            task.add_done_callback(self._end_batch)

    def _end_batch(self, task: asyncio.Task[None]) -> None:
        self._batches.discard(task)
        self._start_batches()

    async def _compute(self, batch: Sequence[EmbedItem], receivers: Sequence[_Receiver]) -> None:
        requests = {receiver.request.id: receiver.request for receiver in receivers}
        asked = [_asked(requests[item.request_id], item.index) for item in batch]
        self._running += len(batch)
        try:
            with self._at_work():
                found = await self._model.outputs(asked)
        except Exception as error:
            log.exception("a batch failed")
            failed = (
                error
                if isinstance(error, InlayError)
                else EngineError(f"the model failed: {type(error).__name__}: {error}")
            )
            for receiver in receivers:
                self._shell.end(receiver, "error", failed)
            return
        finally:
            self._running -= len(batch)
        self._count(asked)
        for receiver in receivers:
            name = receiver.request.id
            if self._shell.get(name) is receiver:
                own = zip(batch, found, strict=True)
                self._take(
                    receiver, {item.index: made for item, made in own if item.request_id == name}
                )

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """Mark the model as busy with this batch; overlapping batches count their time once."""
        if not self._computing:
            self._busy_since = time.monotonic()
        self._computing += 1
        try:
            yield
        finally:
            self._computing -= 1
            if not self._computing:
                self._busy += time.monotonic() - self._busy_since

    def _count(self, batch: Sequence[EmbedInput]) -> None:
        positions = sum(len(asked.prompt) for asked in batch)
        rows = sum(
            len(asked.prompt) - len(asked.prompt.token_ids())
            for asked in batch
            if asked.prompt.has_rows
        )
        stats = self._stats
        self._stats = Stats(
            prompt_tokens=stats.prompt_tokens + positions,
            rows_served=stats.rows_served + rows,
            steps=stats.steps + 1,
            progress=stats.progress + positions,
        )

    def _take(self, receiver: _Receiver, bundles: Mapping[int, Bundle]) -> None:
        """Store what some of a request's prompts get, by their index."""
        for index, bundle in bundles.items():
            if not all(np.isfinite(array).all() for array in bundle.values()):
                wrong = EngineError(
                    f"the model's output for input {index} of the request is not finite"
                )
                self._shell.end(receiver, "error", wrong)
                return
        receiver.bundles.update(bundles)
        receiver.left -= len(bundles)
        if not receiver.left:
            self._shell.leave(receiver)
            receiver.answer()


def check_spans(pooling: Pooling, prompts: Sequence[Prompt]) -> None:
    """Raise `InvalidRequestError` unless chunks follow one another to the end of their prompt."""
    if (CHUNKS in pooling.outputs) != bool(pooling.spans):
        raise InvalidRequestError("chunks are asked for without spans, or the other way")
    if pooling.spans and len(pooling.spans) != len(prompts):
        raise InvalidRequestError("either all prompts of a request have spans or none has")
    for spans, prompt in zip(pooling.spans, prompts, strict=False):
        if len(spans) < 2 or spans[0] < 0 or spans[-1] != len(prompt):
            raise InvalidRequestError(f"chunks end at {spans[-1:]}; the prompt has {len(prompt)}")
        if any(start >= stop for start, stop in pairwise(spans)):
            raise InvalidRequestError("each chunk needs at least one position")


def _asked(request: Request, index: int) -> EmbedInput:
    prompt, pooling = request.prompts[index], request.pooling
    return EmbedInput(
        prompt,
        pooling.second_from[index] if pooling.second_from else len(prompt),
        request.salt,
        pooling.outputs,
        pooling.visible[index] if pooling.visible else None,
        pooling.max_active,
        pooling.spans[index] if pooling.spans else (),
    )


def has_media(request: Request) -> bool:
    """Return True if a prompt of `request` has media."""
    return any(
        isinstance(segment, Media) for prompt in request.prompts for segment in prompt.segments
    )


async def with_rows(request: Request, media: MediaRows) -> Request:
    """Return `request` with rows in place of the media of its prompts.

    Rows keep the positions of their item as a field of their bundle. An item is encoded once.

    Raises:
        InlayError: an item is not valid, or cannot be encoded.
    """
    runs: dict[bytes, Media] = {}
    for prompt in request.prompts:
        for segment in prompt.segments:
            if isinstance(segment, Media):
                known = runs.get(segment.digest)
                if known is None or known.data is None:
                    runs[segment.digest] = segment
    try:
        async with asyncio.TaskGroup() as group:
            tasks = {
                digest: group.create_task(_rows_of(request, run, media))
                for digest, run in runs.items()
            }
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    rows = {digest: task.result() for digest, task in tasks.items()}
    return replace(request, prompts=tuple(_encoded(prompt, rows) for prompt in request.prompts))


async def _rows_of(request: Request, run: Media, media: MediaRows) -> Rows:
    try:
        found = await media.rows(
            run, salt=request.salt, client=request.client, priority=request.priority
        )
    except InvalidRequestError as error:
        raise run.located(error) from error
    if len(found) != run.total:
        raise EngineError(
            f"the encoder made {len(found)} rows of an {run.kind} laid out as {run.total}"
        )
    return found


def _encoded(prompt: Prompt, rows: Mapping[bytes, Rows]) -> Prompt:
    segments: list[Segment] = []
    for segment in prompt.segments:
        if isinstance(segment, Media):
            part = rows[segment.digest].slice(segment.start, segment.start + len(segment))
            segments.append(placed(part, segment))
        else:
            segments.append(segment)
    return Prompt.of(*segments)
