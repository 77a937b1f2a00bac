"""`SpeechEngine`: a talker or a vocoder, whose requests take turns."""

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version

from inlay.base.errors import EngineError, InlayError, InvalidRequestError, OverloadedError
from inlay.engine.compute_thread import ComputeThread
from inlay.engine.settings import EngineSettings
from inlay.engine.torch.failures import model_failed
from inlay.engine.torch.self_check.parts import checked_parts
from inlay.messages.card import Limits, ModelCard, SelfCheck, Stats
from inlay.messages.digest import Secret
from inlay.messages.request import Emit, Request, Task
from inlay_stages.cards import AudioCard
from inlay_stages.engines.jobs import EngineJobs
from inlay_stages.engines.sleep import StageSleep
from inlay_stages.engines.speech.job import SpeechJob
from inlay_stages.engines.speech.loading import SYSTEM, LoadedSpeech, load
from inlay_stages.engines.speech.vocoder import SAMPLE_RATE
from inlay_stages.params import Speech
from inlay_stages.worker.input_stream import InputStream

log = logging.getLogger(__name__)


class SpeechEngine:
    """A talker or a vocoder.

    The event loop owns the requests and chooses whose turn is next, client by client; a thread
    computes it: one code, or the sound of one chunk. A request without inputs waits for them, one
    that is paused for its reader.
    """

    def __init__(self, settings: EngineSettings, secret: Secret) -> None:
        self._settings = settings
        self._secret = secret
        self._thread = ComputeThread()
        self._sleep = StageSleep(
            self._thread, partial(load, settings), self._rest, self._begin_with
        )
        self._card: ModelCard | None = None
        self._jobs: EngineJobs[SpeechJob] = EngineJobs(
            settings.batch.max_num_seqs, "the sound was made"
        )
        self._turn: SpeechJob | None = None
        self._driver: asyncio.Task[None] | None = None
        self._closing = False
        self._steps = self._made = 0
        self._busy = 0.0

    @property
    def card(self) -> ModelCard:
        """Metadata of the served model. Raises `EngineError` before the start."""
        if self._card is None:
            raise EngineError("the engine is not started")
        return self._card

    async def start(self) -> None:
        """Load the part.

        Raises:
            InvalidRequestError: an unsupported model or setting.
            EngineError: it was started before, or what it makes is not finite.
        """
        if self._driver is not None:
            raise EngineError("the engine was started before")
        loaded = await self._thread.run(partial(load, self._settings))
        parts = loaded.model.parts()
        check = partial(checked_parts, self._settings.health.self_check, loaded.dtype, parts)
        found = await self._thread.run(check)
        self._card = _card(self._settings, loaded, self._secret, found)
        self._begin_with(loaded)

    def _begin_with(self, loaded: LoadedSpeech) -> None:
        self._closing = False
        self._loaded: LoadedSpeech = loaded
        self._driver = asyncio.create_task(self._drive())

    def check_sleep(self, level: int) -> None:
        """Accept every level."""

    async def sleep(self, level: int) -> None:
        await self._sleep.sleep(level, self.card.weights_id)

    async def wake_up(self, tags: Sequence[str]) -> bool:
        return await self._sleep.wake_up(tags)

    async def _rest(self) -> LoadedSpeech:
        if self._driver is None or self._closing:
            raise EngineError("the engine is not running")
        if self._jobs.shell:
            raise EngineError(f"{len(self._jobs.shell)} requests are under way")
        # What is still computed for a request that has left ends before the model goes.
        self._closing = True
        self._jobs.work.set()
        await self._driver
        loaded = self._loaded
        del self._loaded
        return loaded

    async def close(self) -> None:
        """Abort all requests, stop the thread and release the model."""
        self._closing = True
        self._jobs.shell.abort_all()
        self._jobs.work.set()
        if self._driver is not None:
            await self._driver
        await asyncio.to_thread(self._thread.close)

    def submit(self, request: Request, emit: Emit) -> None:
        """Admit a request of `Task.STAGE` that has all its inputs. Raises as `submit_fed`."""
        self.submit_fed(request, emit, InputStream.of(request.inputs))

    def submit_fed(self, request: Request, emit: Emit, inflow: InputStream) -> None:
        """Admit a request of `Task.STAGE`.

        Raises:
            InvalidRequestError: it can never run here.
            EngineError: it could not begin.
            OverloadedError: too much is queued, or the engine is closing or asleep.
        """
        if self._sleep.asleep:
            raise OverloadedError("the engine is asleep", retry_after=1)
        if self._closing:
            raise OverloadedError("the engine is closing")
        self._jobs.check(request)
        params = request.params
        if not isinstance(params, Speech):
            raise InvalidRequestError(
                f"this engine speaks; got parameters of {type(params).__name__}"
            )
        if params.voice not in self._loaded.model.voices:
            raise InvalidRequestError(
                f"voice is {params.voice!r}; allowed: {', '.join(self._loaded.model.voices)}",
                param="voice",
            )
        try:
            progress = self._loaded.model.begin(params)
        except InlayError:
            raise
        except Exception as error:
            log.exception("request %s did not begin", request.id)
            raise model_failed(error) from error
        job = SpeechJob(request, progress, inflow, emit)
        self._jobs.shell.add(job)
        inflow.watch(partial(self._enqueue, job))
        self._enqueue(job)

    def pause(self, request_id: str, paused: bool) -> None:
        job = self._jobs.shell.get(request_id)
        if job is not None:
            job.paused = paused
            if paused:
                self._jobs.dequeue(job)
            self._enqueue(job)

    def abort(self, request_id: str) -> None:
        """End a request; what is being computed for it is dropped. Unknown ids are ignored."""
        self._jobs.shell.abort(request_id)

    def _enqueue(self, job: SpeechJob) -> None:
        """Give a request a turn, if there is something to do for it."""
        if job.can_go_on and job is not self._turn:
            self._jobs.enqueue(job)

    async def probe(self) -> float:
        """Make a little of nothing between two turns; return the seconds it took.

        Raises:
            EngineError: the engine is not running, or failed.
        """
        if self._closing or self._driver is None:
            raise EngineError("the engine is not running")
        started = time.monotonic()
        try:
            await self._thread.run(self._loaded.model.probe)
        except Exception as error:
            raise model_failed(error) from error
        return time.monotonic() - started

    def stats(self) -> Stats:
        """Return the current counters; progress is turns taken."""
        running = int(self._turn is not None)
        return Stats(
            running=running,
            waiting=len(self._jobs.shell) - running,
            generated_tokens=self._made,
            steps=self._steps,
            progress=self._steps,
            busy_seconds=self._busy,
        )

    async def _drive(self) -> None:
        while not self._closing:
            if not self._jobs.queue:
                self._jobs.work.clear()
                await self._jobs.work.wait()
                continue
            job = self._turn = self._jobs.queue.take()
            began = time.monotonic()
            try:
                inputs = job.take()
                advance = partial(job.progress.advance, inputs, ended=job.inflow.ended)
                piece = await self._thread.run(advance)
                self._steps += 1
                if not job.ended:
                    self._made += piece.made
                    if piece.done:
                        self._jobs.leave(job)
                    job.put(piece)
            except InlayError as error:
                self._jobs.shell.end(job, "error", error)
            except Exception as error:
                log.exception("request %s failed", job.request.id)
                self._jobs.shell.end(job, "error", model_failed(error))
            self._busy += time.monotonic() - began
            self._turn = None
            self._enqueue(job)


def _card(
    settings: EngineSettings, loaded: LoadedSpeech, secret: Secret, check: SelfCheck | None
) -> ModelCard:
    """Return the metadata that the worker announces."""
    names = settings.model.names
    return ModelCard(
        name=names[0],
        aliases=tuple(names[1:]),
        path=str(loaded.path),
        weights_id=loaded.weights_id,
        dtype=str(loaded.dtype).removeprefix("torch."),
        vocab_size=0,
        hidden_size=loaded.width,
        limits=Limits(max_model_len=loaded.max_length, max_num_seqs=settings.batch.max_num_seqs),
        engine="speech",
        engine_version=version("transformers"),
        tasks=(Task.STAGE,),
        prompt_embeds="it speaks what another model says",
        secret_fingerprint=secret.fingerprint,
        self_check=check,
        audio=AudioCard(
            voices=loaded.model.voices,
            sample_rate=SAMPLE_RATE,
            samples_per_code=loaded.samples_per_code,
            system=SYSTEM,
        ),
    )
