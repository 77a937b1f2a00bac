"""`VllmOmniEngine`: a pipeline that vLLM-Omni runs, in processes or a thread of its own."""

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from typing import Any

from vllm.v1.engine.exceptions import EngineDeadError
from vllm_omni.errors import OmniClientError

from inlay.base.errors import EngineError, InlayError, InvalidRequestError, OverloadedError
from inlay.engine.probe import last_output, probe_failed
from inlay.engine.settings import EngineSettings
from inlay.messages.card import ModelCard, Stats
from inlay.messages.digest import Secret
from inlay.messages.prompt import Buffer
from inlay.messages.request import Emit, Output, Payload, Request
from inlay_stages.engines.diffusers.checks import inputs_of
from inlay_stages.engines.diffusers.image_pipeline import image_file
from inlay_stages.engines.diffusers.job import ImageJob
from inlay_stages.engines.diffusers.probing import probe_request
from inlay_stages.engines.jobs import EngineJobs
from inlay_stages.engines.vllm_omni.loading import LoadedOmni, load
from inlay_stages.engines.vllm_omni.prompts import check_lengths, prompt_of, sampling_of
from inlay_stages.params import Diffusion

log = logging.getLogger(__name__)

_LOOK = 0.5
"""Seconds between looks at its processes."""


class VllmOmniEngine:
    """vLLM-Omni, as `Engine`, `SleepingEngine` and `FailingEngine`.

    Each request that has its turn is a task that reads vLLM-Omni's outputs. When one of its
    processes dies every request ends with an error, and `failed` returns: the worker is to end.
    """

    def __init__(self, settings: EngineSettings, secret: Secret) -> None:
        self._settings = settings
        self._secret = secret
        self._loaded: LoadedOmni | None = None
        self._jobs: EngineJobs[ImageJob] = EngineJobs(
            settings.batch.max_num_seqs, "the images were done"
        )
        self._files = ThreadPoolExecutor(1, "inlay-image-files")
        self._tasks: dict[ImageJob, asyncio.Task[None]] = {}
        self._asleep = False
        self._numbers = count()
        self._made = self._images = 0
        self._busy = 0.0

    @property
    def card(self) -> ModelCard:
        """Metadata of the served model. Raises `EngineError` before the start."""
        return self._running.card

    @property
    def _running(self) -> LoadedOmni:
        if self._loaded is None:
            raise EngineError("the engine is not started")
        return self._loaded

    async def start(self) -> None:
        """Start vLLM-Omni, load the models, and make a first image.

        Raises:
            InvalidRequestError: a model, a setting or a word after -- that is refused.
            EngineError: vLLM-Omni did not start, or makes no image.
        """
        self._jobs.shell.begin()
        # It blocks for as long as the models take to load.
        self._loaded = loaded = await asyncio.to_thread(load, self._settings, self._secret)
        self._jobs.max_num_seqs = loaded.places
        for helper in (self._drive(), self._watch()):
            self._jobs.shell.spawn(helper)
        try:
            await self.probe()
        except InlayError as error:
            await self.close()
            raise EngineError(
                f"vLLM-Omni started and could not make an image of a {loaded.pipeline}: "
                f"{error.message}"
            ) from error

    async def close(self) -> None:
        """Abort all requests, and end vLLM-Omni."""
        if not await self._jobs.shell.close():
            return
        if self._loaded is not None:
            omni = self._loaded.omni
            if omni.final_output_task is not None:
                # It is of this loop, and takes the end for a death.
                omni.final_output_task.cancel()
                omni.final_output_task = None
            await asyncio.to_thread(omni.shutdown)
        self._files.shutdown(wait=False)

    async def failed(self) -> EngineError:
        """Return why, once vLLM-Omni has died, or has failed to sleep or to wake."""
        return await self._jobs.shell.failed()

    def submit(self, request: Request, emit: Emit) -> None:
        """Admit a request of `Task.STAGE`.

        Raises:
            InvalidRequestError: it can never run here.
            EngineError: vLLM-Omni has died, or is not started.
            OverloadedError: too much is queued, or the engine is closing or asleep.
        """
        loaded = self._alive()
        self._jobs.check(request)
        params = request.params
        if not isinstance(params, Diffusion):
            raise InvalidRequestError(
                f"this engine makes images; got parameters of {type(params).__name__}"
            )
        if params.preview_every:
            raise InvalidRequestError(
                "vLLM-Omni gives whole images alone, and none on the way", param="partial_images"
            )
        inputs = inputs_of(request)
        loaded.bounds.check(params, inputs)
        self._admit(request, params, inputs, emit)

    def _admit(
        self, request: Request, params: Diffusion, inputs: dict[str, Payload], emit: Emit
    ) -> None:
        job = ImageJob(request, params, inputs, lambda output: self._emit(emit, job, output))
        self._jobs.shell.add(job)
        self._jobs.enqueue(job)

    def _emit(self, emit: Emit, job: ImageJob, output: Output) -> None:
        """Emit an output; with the last one vLLM-Omni is to know that the request has ended."""
        task = self._tasks.get(job)
        if task not in (None, asyncio.current_task()) and output.finish_reason is not None:
            task.cancel()
        emit(output)

    def abort(self, request_id: str) -> None:
        """End a request, and abort it in vLLM-Omni. Unknown ids are ignored."""
        self._jobs.shell.abort(request_id)

    async def probe(self) -> float:
        """Make the smallest image, before all that wait; return the seconds it took.

        While images are made, each takes as long as it takes: then it is only looked whether all
        processes live.

        Raises:
            EngineError: vLLM-Omni has died, or made no image.
        """
        loaded = self._alive()
        started = time.monotonic()
        if self._tasks:
            return time.monotonic() - started
        facts = loaded.bounds.facts
        request, params = probe_request(f"probe-{next(self._numbers)}", facts, "pipeline")
        inputs = inputs_of(request)
        last = await last_output(
            request.id, lambda emit: self._admit(request, params, inputs, emit), self.abort
        )
        if last.finish_reason != "stop":
            raise probe_failed(last)
        return time.monotonic() - started

    def stats(self) -> Stats:
        """Return the current counters; progress is positions of images made."""
        running = len(self._tasks)
        return Stats(
            running=running,
            waiting=len(self._jobs.queue),
            steps=self._images,
            progress=self._made,
            busy_seconds=self._busy,
        )

    def check_sleep(self, level: int) -> None:
        """Raise `InvalidRequestError` without --enable-sleep-mode, and for level 2."""
        if not self._running.sleeps:
            raise InvalidRequestError(
                "vLLM-Omni was not started with --enable-sleep-mode, which it takes on a GPU alone"
            )
        if level > 1:
            raise InvalidRequestError(
                "vLLM-Omni does not wake from level 2: it does not load weights again",
                param="level",
            )

    async def sleep(self, level: int) -> None:
        """Give memory back. Raises as `check_sleep`, and `EngineError` where it fails.

        Then the engine fails: vLLM-Omni takes no requests, and wakes only from a whole sleep.
        """
        self.check_sleep(level)
        self._asleep = True
        try:
            _check_done(await self._running.omni.sleep(level=level))
        except BaseException:
            self._jobs.shell.fail(EngineError("vLLM-Omni did not fall asleep"))
            raise

    async def wake_up(self, tags: Sequence[str]) -> bool:
        """Take back the memory that `tags` name; True when all is back.

        Raises:
            EngineError: it fails. The engine stays asleep; it fails itself where a stage has not
                woken, which vLLM-Omni takes for awake.
        """
        omni = self._running.omni
        acks = await omni.wake_up(tags=list(tags) or None)
        try:
            _check_done(acks)
        except EngineError as error:
            self._jobs.shell.fail(error)
            raise
        self._asleep = bool(await omni.is_sleeping())
        return not self._asleep

    def _alive(self) -> LoadedOmni:
        self._jobs.shell.check_running()
        if self._asleep:
            raise OverloadedError("the engine is asleep", retry_after=1)
        return self._running

    async def _drive(self) -> None:
        """Start those whose turn it is, as there are places."""
        loaded, jobs = self._running, self._jobs
        while True:
            while jobs.queue and len(self._tasks) < loaded.places:
                job = jobs.queue.take()
                job.begins()
                self._tasks[job] = task = jobs.shell.spawn(self._run(loaded, job))
                # One that is cancelled before it begins runs nothing, not even its end.
                task.add_done_callback(partial(self._leave, job))
            jobs.work.clear()
            await jobs.work.wait()

    async def _run(self, loaded: LoadedOmni, job: ImageJob) -> None:
        began = time.monotonic()
        try:
            payloads = await self._paint(loaded, job)
            job.end("stop", *payloads, positions=self._count(loaded, job.params))
        except Exception as error:
            job.end("error", error=self._error_of(error, job))
        finally:
            self._busy += time.monotonic() - began

    def _leave(self, job: ImageJob, _: object) -> None:
        """Give the place of a request back."""
        self._jobs.leave(job)
        del self._tasks[job]
        self._jobs.work.set()

    def _count(self, loaded: LoadedOmni, params: Diffusion) -> int:
        self._images += params.count
        made = loaded.bounds.facts.positions(params.width, params.height) * params.count
        self._made += made
        return made

    async def _paint(self, loaded: LoadedOmni, job: ImageJob) -> list[Payload]:
        """Return the files of a request's images.

        Raises:
            InvalidRequestError: a prompt too long, or embeddings that are not finite.
            EngineError: vLLM-Omni made something else.
        """
        params, inputs = job.params, job.inputs
        if loaded.family is not None:
            job.prompt_tokens = await self._off_loop(check_lengths, loaded.family, params, inputs)
        await self._off_loop(loaded.bounds.check_values, inputs)
        prompt = await self._off_loop(prompt_of, params, inputs, loaded.dtype)
        # It never sees an id twice, so that an abort is of this request alone.
        outputs = loaded.omni.generate(
            prompt,
            request_id=f"{job.request.id}.{next(self._numbers)}",
            sampling_params_list=[sampling_of(params, loaded.default, loaded.pipeline)],
            output_modalities=["image"],
        )
        images: list[Any] = []
        async for output in outputs:
            images += output.images
        sizes = [image.size for image in images]
        if sizes != [(params.width, params.height)] * params.count:
            raise EngineError(
                f"vLLM-Omni made images of {sizes}, not {params.count} of "
                f"{params.width}x{params.height}"
            )
        files = [await self._off_loop(image_file, image, params.image_format) for image in images]
        return [
            Payload("image", "uint8", (len(file),), Buffer(file), file is files[-1])
            for file in files
        ]

    async def _off_loop(self, call: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._files, call, *arguments)

    def _error_of(self, error: Exception, job: ImageJob) -> InlayError:
        """Return the error that a failure of vLLM-Omni is to the caller."""
        if isinstance(error, InlayError):
            return error
        if isinstance(error, EngineDeadError):
            return EngineError("vLLM-Omni died")
        if isinstance(error, OmniClientError):
            return InvalidRequestError(f"vLLM-Omni refuses the request: {error}")
        log.error("request %s failed in vLLM-Omni", job.request.id, exc_info=error)
        return EngineError(f"vLLM-Omni failed to make the image: {type(error).__name__}")

    async def _watch(self) -> None:
        """Return when vLLM-Omni has died and every request has ended."""
        omni = self._running.omni
        while True:
            try:
                await omni.check_health()
            except EngineDeadError:
                failure = EngineError("vLLM-Omni died")
                break
            except Exception as error:
                log.exception("vLLM-Omni does not say whether it lives")
                failure = EngineError(f"vLLM-Omni failed: {type(error).__name__}: {error}")
                break
            await asyncio.sleep(_LOOK)
        self._jobs.shell.fail(failure)


def _check_done(acks: Sequence[Any]) -> None:
    """Raise `EngineError` unless every stage has done what it was told."""
    failed = [ack for ack in acks if getattr(ack, "status", None) != "SUCCESS"]
    if failed:
        raise EngineError(f"vLLM-Omni did not do it: {failed[0]}")
