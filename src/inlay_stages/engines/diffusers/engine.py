"""`DiffusersEngine`: pipelines of diffusers, or their parts, batched by step."""

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count

import torch

from inlay.base.errors import EngineError, InlayError, InvalidRequestError, OverloadedError
from inlay.engine.compute_thread import ComputeThread
from inlay.engine.probe import last_output, probe_failed
from inlay.engine.settings import EngineSettings
from inlay.engine.torch.failures import model_failed
from inlay.engine.torch.self_check.parts import checked_parts
from inlay.messages.card import Adapter, ModelCard, SelfCheck, Stats
from inlay.messages.digest import Secret
from inlay.messages.prompt import Buffer
from inlay.messages.request import Emit, Payload, Request
from inlay_stages.engines.diffusers.checks import ImageBounds, inputs_of
from inlay_stages.engines.diffusers.families.base import DenoiseState
from inlay_stages.engines.diffusers.image_pipeline import EMBEDS, ImagePipeline, image_file, payload
from inlay_stages.engines.diffusers.job import IMAGE, LATENTS, PREVIEW, ImageJob, PreviewLatents
from inlay_stages.engines.diffusers.loading import LoadedPipeline, load
from inlay_stages.engines.diffusers.model_card import DescribedPipeline, bounds_of, card_of
from inlay_stages.engines.diffusers.part_check import pipeline_parts
from inlay_stages.engines.diffusers.probing import probe_request
from inlay_stages.engines.diffusers.turns import put_back, take
from inlay_stages.engines.jobs import EngineJobs
from inlay_stages.engines.sleep import StageSleep
from inlay_stages.params import Diffusion
from inlay_stages.worker.input_stream import InputStream

log = logging.getLogger(__name__)


class DiffusersEngine:
    """A pipeline, or its text encoder, denoiser or VAE alone.

    The event loop owns the jobs and chooses what is done next; a thread computes it: one prompt,
    one image to decode, or a step of many jobs. Files are written on another thread.
    """

    def __init__(self, settings: EngineSettings, secret: Secret) -> None:
        self._settings = settings
        self._secret = secret
        self._thread = ComputeThread()
        self._files = ThreadPoolExecutor(1, "inlay-image-files")
        self._card: ModelCard | None = None
        self._adapters: dict[str, str] = {}
        self._jobs: EngineJobs[ImageJob] = EngineJobs(
            settings.batch.max_num_seqs, "the images were done", self._adapters
        )
        self._driver: asyncio.Task[None] | None = None
        self._closing = False
        self._sleep = StageSleep(
            self._thread, partial(load, settings), self._rest, self._begin_with
        )
        self._probes = count()
        self._turn: list[ImageJob] = []
        self._tokens = self._steps = self._positions = 0
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
            EngineError: it was started before, files do not fit the models, or what these make is
                not finite.
        """
        if self._driver is not None:
            raise EngineError("the engine was started before")
        loaded = await self._thread.run(partial(load, self._settings))
        parts = pipeline_parts(loaded)
        check = partial(checked_parts, self._settings.health.self_check, loaded.dtype, parts)
        described = _described(loaded, await self._thread.run(check))
        self._bounds: ImageBounds = bounds_of(self._settings, loaded.facts, loaded.part)
        self._card = card_of(self._settings, self._bounds, self._secret, described)
        self._begin_with(loaded)

    def _begin_with(self, loaded: LoadedPipeline) -> None:
        self._closing = False
        self._loaded: LoadedPipeline = loaded
        settings = self._settings
        rank = settings.adapters.max_lora_rank if settings.adapters.enable_lora else None
        self._painter: ImagePipeline = ImagePipeline(loaded, rank)
        self._driver = asyncio.create_task(self._drive())

    def check_sleep(self, level: int) -> None:
        """Accept every level."""

    async def sleep(self, level: int) -> None:
        await self._sleep.sleep(level, self.card.weights_id)

    async def wake_up(self, tags: Sequence[str]) -> bool:
        """As `StageSleep.wake_up`; adapters come back too, those that could not before as well."""
        if not await self._sleep.wake_up(tags):
            return False
        for name, directory in tuple(self._adapters.items()):
            # It may be unloaded meanwhile.
            if name in self._adapters and name not in self._painter.loras:
                await self._thread.run(partial(self._painter.loras.put, name, directory))
        return True

    async def load_adapter(self, adapter: Adapter, directory: str) -> None:
        """Make a LoRA of the denoiser or of text encoders usable by requests that name it.

        Raises `InvalidRequestError` as `PipelineLoras.put`.
        """
        await self._thread.run(partial(self._painter.loras.put, adapter.name, directory))
        self._adapters[adapter.name] = directory

    async def unload_adapter(self, name: str) -> None:
        """Free an adapter."""
        if not self._sleep.asleep:
            await self._thread.run(partial(self._painter.loras.remove, name))
        self._adapters.pop(name, None)

    async def _rest(self) -> LoadedPipeline:
        if self._driver is None or self._closing:
            raise EngineError("the engine is not running")
        if self._jobs.shell:
            raise EngineError(f"{len(self._jobs.shell)} requests are under way")
        # What is still computed for a request that has left ends before its models go.
        self._closing = True
        self._jobs.work.set()
        await self._driver
        loaded = self._loaded
        self._painter.loras.close()
        del self._loaded, self._painter
        return loaded

    async def close(self) -> None:
        """Abort all requests, stop the threads and release the models."""
        self._closing = True
        self._jobs.shell.abort_all()
        self._jobs.work.set()
        if self._driver is not None:
            await self._driver
        await asyncio.to_thread(self._thread.close)
        self._files.shutdown(wait=False)

    def submit(self, request: Request, emit: Emit) -> None:
        """Admit a request of `Task.STAGE`.

        Raises:
            InvalidRequestError: it can never run here.
            OverloadedError: too much is queued, or the engine is closing or asleep.
        """
        params = self._params_of(request)
        inputs = inputs_of(request)
        self._bounds.check(params, inputs)
        self._admit(request, params, inputs, emit)

    def _params_of(self, request: Request) -> Diffusion:
        """Return the parameters of a request that there is a place for. Raises as `submit`."""
        if self._sleep.asleep:
            raise OverloadedError("the engine is asleep", retry_after=1)
        if self._closing:
            raise OverloadedError("the engine is closing")
        self._jobs.check(request)
        if not isinstance(request.params, Diffusion):
            raise InvalidRequestError(
                f"this engine makes images; got parameters of {type(request.params).__name__}"
            )
        return request.params

    def _admit(
        self, request: Request, params: Diffusion, inputs: dict[str, Payload], emit: Emit
    ) -> None:
        job = ImageJob(request, params, inputs, emit)
        self._jobs.shell.add(job)
        self._jobs.enqueue(job)

    def submit_fed(self, request: Request, emit: Emit, inflow: InputStream) -> None:
        """Admit a request of a VAE whose latents come while they are denoised.

        The newest count: those that are not decoded when others come are passed over. Raises as
        `submit`; what is wrong with latents is the request's last output.
        """
        params = self._params_of(request)
        if self._loaded.part != "vae":
            raise InvalidRequestError(f"the inputs of a {self._loaded.part} are whole")
        job = ImageJob(request, params, {}, emit)
        job.makes = PREVIEW
        self._jobs.shell.add(job)
        inflow.watch(partial(self._fed, job, inflow))
        self._fed(job, inflow)

    def _fed(self, job: ImageJob, inflow: InputStream) -> None:
        """Note the newest latents of a request, and give it a turn."""
        try:
            for given in inflow.take():
                port, _, step = given.port.partition(".")
                inputs = {port: given.value}
                self._bounds.check(job.params, inputs)
                job.inputs, job.makes = inputs, f"{PREVIEW}.{step}" if step else IMAGE
            if inflow.has_news and job.makes != IMAGE:
                raise inflow.error or EngineError("the denoiser has ended without latents")
        except InlayError as error:
            self._jobs.shell.end(job, "error", error)
        if job.inputs and not (job.ended or job in self._turn):
            self._jobs.enqueue(job)

    def abort(self, request_id: str) -> None:
        """End a request; what is being computed for it is dropped. Unknown ids are ignored."""
        self._jobs.shell.abort(request_id)

    async def probe(self) -> float:
        """Make the smallest image, or its part, before all that wait; return the seconds it took.

        Raises:
            EngineError: the engine is not running, or failed.
        """
        if self._closing or self._driver is None:
            raise EngineError("the engine is not running")
        started = time.monotonic()
        request, params = probe_request(
            f"probe-{next(self._probes)}", self._loaded.facts, self._loaded.part
        )
        inputs = inputs_of(request)
        last = await last_output(
            request.id, lambda emit: self._admit(request, params, inputs, emit), self.abort
        )
        if last.finish_reason != "stop":
            raise probe_failed(last)
        return time.monotonic() - started

    def stats(self) -> Stats:
        """Return the current counters; progress is positions computed."""
        return Stats(
            running=len(self._turn),
            waiting=len(self._jobs.shell) - len(self._turn),
            prompt_tokens=self._tokens,
            steps=self._steps,
            progress=self._positions + self._tokens,
            busy_seconds=self._busy,
        )

    async def _drive(self) -> None:
        while not self._closing:
            queue = self._jobs.queue
            budget, most = (
                self._settings.batch.max_num_batched_tokens,
                self._settings.batch.max_num_seqs,
            )
            jobs = take(queue, budget, most, equal=self._loaded.device.type == "cpu")
            if not jobs:
                self._jobs.work.clear()
                await self._jobs.work.wait()
                continue
            self._turn = jobs
            began = time.monotonic()
            for job in jobs:
                job.begins()
            try:
                await self._do(jobs)
            except InlayError as error:
                self._fail_all(jobs, error)
            except Exception as error:
                log.exception("%d requests failed", len(jobs))
                self._fail_all(jobs, model_failed(error))
            self._busy += time.monotonic() - began
            self._turn = []
            put_back(queue, [job for job in jobs if self._goes_on(job)])

    def _goes_on(self, job: ImageJob) -> bool:
        """Return True if more is to be computed for a job."""
        if job.ended:
            return False
        if job.painting is None:
            # Inputs that are read are dropped; then only files are still to be written.
            return bool(job.sketches or job.inputs)
        return bool(job.sketches) or not job.painting.done

    def _fail_all(self, jobs: Sequence[ImageJob], error: InlayError) -> None:
        for job in jobs:
            self._jobs.shell.end(job, "error", error)

    async def _do(self, jobs: Sequence[ImageJob]) -> None:
        job = jobs[0]
        if job.cost:
            await self._step(jobs)
        elif self._loaded.part == "vae" and job.inputs:
            await self._sketch(job)
        elif job.sketches:
            await self._decode(job)
        elif self._loaded.part == "text_encoder":
            await self._encode(job)
        else:
            await self._begin(job)

    async def _encode(self, job: ImageJob) -> None:
        work = partial(_encode, self._painter, self._bounds, job)
        embeds, job.prompt_tokens = await self._thread.run(work)
        self._tokens += job.prompt_tokens
        # What was given goes on as it came, whatever the dtype of the models here.
        payloads = [
            job.inputs.get(EMBEDS + name) or payload(EMBEDS + name, tensor)
            for name, tensor in embeds.items()
        ]
        self._end(job, *payloads)

    async def _sketch(self, job: ImageJob) -> None:
        """Have the latents of each image decoded, in place of older ones."""
        inputs, port, job.inputs = job.inputs, job.makes, {}
        found = await self._thread.run(partial(_read, self._painter, self._bounds, inputs))
        if not job.ended:
            job.sketches.clear()
            self._add_sketches(job, port, found[LATENTS])

    async def _begin(self, job: ImageJob) -> None:
        work = partial(_begin, self._painter, self._bounds, job)
        painting, tokens = await self._thread.run(work)
        job.prompt_tokens = tokens
        self._tokens += tokens
        if not job.ended:
            job.painting, job.inputs = painting, {}

    async def _step(self, jobs: Sequence[ImageJob]) -> None:
        paintings = [job.painting for job in jobs if job.painting is not None]
        budget = self._settings.batch.max_num_batched_tokens
        self._positions += sum(job.cost for job in jobs)
        errors = await self._thread.run(partial(self._painter.step, paintings, budget))
        self._steps += 1
        for job, painting, error in zip(jobs, paintings, errors, strict=True):
            if job.ended:
                continue
            if error is not None:
                self._jobs.shell.end(job, "error", error)
            elif painting.shows:
                await self._show(job, painting)

    async def _show(self, job: ImageJob, painting: DenoiseState) -> None:
        """Have the latents decoded, here or by another stage: the final ones, or those so far."""
        if self._loaded.has("vae"):
            port = IMAGE if painting.done else f"{PREVIEW}.{painting.step}"
            self._add_sketches(job, port, painting.shown)
            return
        port = LATENTS if painting.done else f"{LATENTS}.{painting.step}"
        # On the thread: what is on a device is waited for.
        work = partial(payload, port, painting.shown, last=painting.done)
        found = await self._thread.run(work)
        if painting.done:
            self._end(job, found)
        else:
            self._put(job, found)

    def _add_sketches(self, job: ImageJob, port: str, latents: torch.Tensor) -> None:
        images = len(latents)
        for index in range(images):
            last = port == IMAGE and index == images - 1
            job.sketches.append(PreviewLatents(port, latents[index : index + 1], last, last))

    async def _decode(self, job: ImageJob) -> None:
        sketch = job.sketches.popleft()
        image = await self._thread.run(partial(self._painter.pixels, sketch.latents, job.params))
        if not job.ended:
            loop = asyncio.get_running_loop()
            written = loop.run_in_executor(self._files, image_file, image, job.params.image_format)
            written.add_done_callback(partial(self._written, job, sketch))

    def _written(
        self, job: ImageJob, sketch: PreviewLatents, file: "asyncio.Future[bytes]"
    ) -> None:
        if file.cancelled() or job.ended:
            return
        error = file.exception()
        if error is not None:
            log.error("an image was not written", exc_info=error)
            self._jobs.shell.end(job, "error", EngineError(f"the image was not written: {error}"))
            return
        data = file.result()
        found = Payload(sketch.port, "uint8", (len(data),), Buffer(data), sketch.last)
        if sketch.ends:
            self._end(job, found)
        else:
            self._put(job, found)

    def _put(self, job: ImageJob, found: Payload) -> None:
        job.put(found)
        if job.ended:
            self._jobs.leave(job)  # its receiver has failed

    def _end(self, job: ImageJob, *payloads: Payload) -> None:
        params = job.params
        made = self._loaded.facts.positions(params.width, params.height) * params.count
        self._jobs.leave(job)
        job.end("stop", *payloads, positions=0 if self._loaded.part == "text_encoder" else made)


def _described(loaded: LoadedPipeline, check: SelfCheck | None) -> DescribedPipeline:
    dtype = str(loaded.dtype).removeprefix("torch.")
    path = str(loaded.path)
    return DescribedPipeline("diffusers", path, loaded.weights_id, dtype, self_check=check)


def _encode(
    painter: ImagePipeline, bounds: ImageBounds, job: ImageJob
) -> tuple[dict[str, torch.Tensor], int]:
    inputs = {port: found for port, found in job.inputs.items() if port != "prompt"}
    given = _read(painter, bounds, inputs)
    prompt = job.inputs.get("prompt")
    text = None if prompt is None else bytes(prompt.data.view).decode()
    return painter.encode(
        text,
        {port.removeprefix(EMBEDS): tensor for port, tensor in given.items()},
        job.params,
        job.request.adapter,
    )


def _read(
    painter: ImagePipeline, bounds: ImageBounds, inputs: dict[str, Payload]
) -> dict[str, torch.Tensor]:
    bounds.check_values(inputs)
    return painter.tensors(inputs)


def _begin(painter: ImagePipeline, bounds: ImageBounds, job: ImageJob) -> tuple[DenoiseState, int]:
    embeds, tokens = _encode(painter, bounds, job)
    return painter.begin(embeds, job.params, job.request.adapter), tokens
