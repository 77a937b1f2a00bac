"""The embedding engine: batches across requests in a thread of its own, answers on the event loop."""

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from inlay import __version__
from inlay.digest import Secret
from inlay.engine.admission import PromptAdmission
from inlay.engine.embed.encoder import Encoder
from inlay.engine.embed.queue import Item, Queue
from inlay.engine.probe import FIRST
from inlay.engine.settings import EngineSettings
from inlay.errors import (
    ContextLengthError,
    DeadlineExceededError,
    EngineError,
    ErrorFrame,
    InlayError,
    InvalidRequestError,
    OverloadedError,
)
from inlay.prompt import Buffer, Prompt, Tokens
from inlay.protocol.embedding import EmbedWork, EmitVectors, Vectors
from inlay.protocol.work import Limits, ModelCard, Stats, Task

log = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_AFTER = 1.0
"""Seconds after which to ask again when too much waits."""


@dataclass(slots=True)
class _Receiver:
    """A work under way.

    Attributes:
        rows: float32 [prompts, size], filled as batches end; empty until the first does.
        left: prompts that are not computed yet.
    """

    work: EmbedWork
    emit: EmitVectors
    expires: float | None
    left: int
    rows: npt.NDArray[np.float32] = field(default_factory=lambda: np.empty((0, 0), np.float32))

    def answer(self) -> Vectors:
        return Vectors(
            self.work.id,
            self.work.attempt,
            Buffer(self.rows.data),
            self.rows.shape[1],
            self.work.positions,
        )

    def lost(self, error: InlayError) -> Vectors:
        return Vectors(self.work.id, self.work.attempt, Buffer(b""), error=ErrorFrame.of(error))


class EmbedEngine:
    """A transformers model that makes vectors, or scores pairs, in this process.

    The event loop owns all that waits; the engine's thread is given one batch at a time and gives back its vectors. When the model
    itself fails, the works of that batch end with an error and the next batch is tried.
    """

    def __init__(self, settings: EngineSettings, secret: Secret) -> None:
        self._settings = settings
        self._secret = secret
        self._queue = Queue(settings.max_num_batched_tokens)
        self._receivers: dict[str, _Receiver] = {}
        self._encoder: Encoder | None = None
        self._card: ModelCard | None = None
        self._admission: PromptAdmission | None = None
        self._worker = _Thread()
        self._batch: asyncio.Task[None] | None = None
        self._running = 0
        self._stats = Stats()
        self._closing = False
        self._probes = itertools.count()

    @property
    def card(self) -> ModelCard:
        """What it serves. Raises `EngineError` before it is started."""
        if self._card is None:
            raise EngineError("the engine is not started")
        return self._card

    async def start(self) -> None:
        """Load the model.

        Raises:
            InvalidRequestError: a model or settings it refuses.
            EngineError: it was started before.
        """
        if self._card is not None:
            raise EngineError("the engine was started before")
        encoder = self._encoder = await self._worker.run(partial(Encoder.load, self._settings))
        self._card = _card(self._settings, encoder, self._secret)
        self._admission = PromptAdmission(
            vocab_size=encoder.vocab_size,
            hidden_size=encoder.hidden_size,
            dtype=self._card.dtype,
            refuses_rows=encoder.refuses_rows,
        )

    async def close(self) -> None:
        """End every work with an error, stop the thread and let go of the model."""
        self._closing = True
        for work_id in tuple(self._receivers):
            self.abort(work_id)
        if self._batch is not None:
            await self._batch
        await asyncio.to_thread(self._worker.close)
        self._encoder = None

    def embed(self, work: EmbedWork, emit: EmitVectors) -> None:
        """Admit `work`.

        Raises:
            InvalidRequestError: it can never run here.
            EngineError: the engine is not started.
            OverloadedError: too much is waiting, or the engine is closing.
        """
        if self._closing:
            raise OverloadedError("the engine is closing")
        if work.id in self._receivers:
            raise InvalidRequestError(f"a work with id {work.id!r} is under way")
        self._check(work)
        most = self._settings.max_num_queued_tokens
        if self._queue.positions and self._queue.positions + work.positions > most:
            raise OverloadedError(
                f"{self._queue.positions} positions wait to be embedded; {work.positions} more would pass the limit of {most}",
                retry_after=RETRY_AFTER,
            )
        expires = None if work.deadline is None else time.monotonic() + work.deadline
        self._receivers[work.id] = _Receiver(work, emit, expires, len(work.prompts))
        self._queue.add(work.id, [len(prompt) for prompt in work.prompts], priority=work.priority)
        if self._batch is None:
            self._batch = asyncio.create_task(self._run())

    def _check(self, work: EmbedWork) -> None:
        if self._admission is None:
            raise EngineError("the engine is not started")
        if work.adapter is not None:
            raise InvalidRequestError(
                f"adapter {work.adapter!r} does not exist: this engine has none", param="model"
            )
        if not work.prompts:
            raise InvalidRequestError("a work has one prompt at least", param="input")
        if len(work.second_from) not in (0, len(work.prompts)):
            raise InvalidRequestError("either all prompts of a work are pairs or none is", param="input")
        limit = self.card.limits.max_model_len
        for prompt in work.prompts:
            if not 0 < len(prompt) <= limit:
                raise ContextLengthError(
                    f"This model's maximum context length is {limit} tokens; an input has {len(prompt)}, and one at least is needed.",
                    param="input",
                )
            self._admission.check_prompt(prompt, "input")

    def abort(self, work_id: str) -> None:
        """End a work; what a batch already computes of it is dropped."""
        receiver = self._receivers.get(work_id)
        if receiver is not None:
            self._end(receiver, receiver.lost(EngineError("the work was aborted")))

    async def probe(self) -> float:
        """Run one token through the model, before all that waits, and time it.

        Raises:
            EngineError: the engine is not running, or failed now.
        """
        started = time.monotonic()
        done: asyncio.Future[Vectors] = asyncio.get_running_loop().create_future()
        work = EmbedWork(
            id=f"probe-{next(self._probes)}",
            prompts=(Prompt.of(Tokens((0,))),),
            second_from=(1,) if self._encoder is not None and self._encoder.scores else (),
            priority=FIRST,
        )
        self.embed(work, done.set_result)
        try:
            found = await done
        finally:
            self.abort(work.id)
        if found.error is not None:
            raise EngineError(found.error.message)
        return time.monotonic() - started

    def stats(self) -> Stats:
        """The counters now."""
        return Stats(
            running=self._running,
            waiting=len(self._queue),
            prompt_tokens=self._stats.prompt_tokens,
            rows_served=self._stats.rows_served,
            steps=self._stats.steps,
            progress=self._stats.progress,
        )

    def _end(self, receiver: _Receiver, answer: Vectors) -> None:
        self._queue.remove(receiver.work.id)
        del self._receivers[receiver.work.id]
        try:
            receiver.emit(answer)
        except Exception:
            log.exception("the receiver of work %s failed", receiver.work.id)

    async def _run(self) -> None:
        """Compute batches until nothing waits."""
        try:
            while True:
                self._expire()
                batch = self._queue.next_batch()
                if not batch:
                    return
                await self._compute(batch)
        finally:
            self._batch = None

    def _expire(self) -> None:
        now = time.monotonic()
        for receiver in tuple(self._receivers.values()):
            if receiver.expires is not None and now > receiver.expires:
                late = DeadlineExceededError("the deadline passed before the embedding was computed")
                self._end(receiver, receiver.lost(late))

    async def _compute(self, batch: Sequence[Item]) -> None:
        works = {item.work_id: self._receivers[item.work_id] for item in batch}
        prompts = [works[item.work_id].work.prompts[item.index] for item in batch]
        pairs = [works[item.work_id].work.second_from for item in batch]
        seconds = [
            second[item.index] if second else item.length for second, item in zip(pairs, batch, strict=True)
        ]
        self._running = len(batch)
        encoder = self._encoder
        if encoder is None:
            raise EngineError("the engine is not started")
        try:
            found = await self._worker.run(partial(_vectors, encoder, prompts, seconds))
        except Exception as error:
            log.exception("a batch failed")
            failed = EngineError(f"the model failed: {type(error).__name__}: {error}")
            for work_id, receiver in works.items():
                if self._receivers.get(work_id) is receiver:
                    self._end(receiver, receiver.lost(failed))
            return
        finally:
            self._running = 0
        self._count(batch, prompts)
        for work_id, receiver in works.items():
            if self._receivers.get(work_id) is receiver:
                mine = [place for place, item in enumerate(batch) if item.work_id == work_id]
                self._take(receiver, [batch[place].index for place in mine], found[mine])

    def _count(self, batch: Sequence[Item], prompts: Sequence[Prompt]) -> None:
        positions = sum(item.length for item in batch)
        stats = self._stats
        self._stats = Stats(
            prompt_tokens=stats.prompt_tokens + positions,
            rows_served=stats.rows_served
            + sum(len(prompt) - len(prompt.token_ids()) for prompt in prompts if prompt.has_rows),
            steps=stats.steps + 1,
            progress=stats.progress + positions,
        )

    def _take(self, receiver: _Receiver, indices: list[int], vectors: npt.NDArray[np.float32]) -> None:
        """Some of a work's vectors have come."""
        finite = np.isfinite(vectors).all(axis=1)
        if not finite.all():
            wrong = indices[int(np.argmin(finite))]
            self._end(
                receiver,
                receiver.lost(EngineError(f"the model's output for input {wrong} of the work is not finite")),
            )
            return
        if not receiver.rows.size:
            receiver.rows = np.empty((len(receiver.work.prompts), vectors.shape[1]), np.float32)
        receiver.rows[indices] = vectors
        receiver.left -= len(indices)
        if not receiver.left:
            self._end(receiver, receiver.answer())


class _Thread:
    """One thread that computes for the event loop, a thing at a time."""

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    async def run(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises, computed in the thread."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def settle(result: T | None, error: BaseException | None) -> None:
            if done.cancelled():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)  # type: ignore[arg-type]

        def compute() -> None:
            result: T | None = None
            failure: Exception | None = None
            try:
                result = work()
            except Exception as error:  # handed on: raised where it is awaited
                failure = error
            try:
                loop.call_soon_threadsafe(settle, result, failure)
            except RuntimeError:
                log.warning("the event loop closed while the engine was computing")

        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="inlay-engine", daemon=True)
            self._thread.start()
        self._work.put(compute)
        return await done

    def _loop(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def close(self) -> None:
        """End the thread; nothing is being computed."""
        if self._thread is not None:
            self._work.put(None)
            self._thread.join()


def _vectors(encoder: Encoder, prompts: Sequence[Prompt], seconds: Sequence[int]) -> npt.NDArray[np.float32]:
    found: npt.NDArray[np.float32] = encoder.vectors(prompts, seconds).numpy()
    return found


def _card(settings: EngineSettings, encoder: Encoder, secret: Secret) -> ModelCard:
    names = settings.served_model_name or [settings.model]
    max_abs = settings.max_prompt_embeds_abs
    return ModelCard(
        name=names[0],
        aliases=tuple(names[1:]),
        path=encoder.path,
        weights_id=encoder.weights_id,
        dtype=str(encoder.dtype).removeprefix("torch."),
        vocab_size=encoder.vocab_size,
        hidden_size=encoder.hidden_size,
        limits=Limits(
            max_model_len=encoder.max_model_len,
            max_num_seqs=settings.max_num_seqs,
            max_prompt_embeds_abs=100 * encoder.embedding_abs_max if max_abs is None else max_abs,
        ),
        engine="torch",
        engine_version=__version__,
        tasks=(Task.SCORE if encoder.scores else Task.EMBED,),
        embedding_table_id=encoder.embedding_table_id,
        embedding_abs_max=encoder.embedding_abs_max,
        prompt_embeds=encoder.refuses_rows,
        secret_fingerprint=secret.fingerprint,
        embedding=encoder.card,
    )


__all__ = ["EmbedEngine"]
