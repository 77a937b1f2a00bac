"""The engine protocols over vLLM's asynchronous engine.

Its core runs in processes of its own; this one only talks to it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from typing import TypeVar

from inlay.base.errors import EngineError, InlayError, InvalidRequestError
from inlay.engine.probe import probe
from inlay.engine.settings import EngineSettings
from inlay.engine.shell import EngineShell
from inlay.engine.slots import EngineSlot, EngineSlots
from inlay.engine.vllm import capabilities, reasoning
from inlay.engine.vllm.adapters import VllmAdapters
from inlay.engine.vllm.cache_events import VllmCacheEvents
from inlay.engine.vllm.handovers import Handovers
from inlay.engine.vllm.launching import shut_down
from inlay.engine.vllm.loading import LoadedVllm, load
from inlay.engine.vllm.request_tracker import VllmRequestTracker
from inlay.engine.vllm.sampling import params_of
from inlay.messages import refusals
from inlay.messages.card import Adapter, ModelCard, Stats
from inlay.messages.digest import Secret
from inlay.messages.prompt import Tokens
from inlay.messages.request import Emit, Request
from inlay.messages.resuming import non_resumable_features
from inlay.messages.routing import KvEvent

log = logging.getLogger(__name__)

EVENTS_SECONDS = 60.0
"""Time limit of the step with which vLLM reports that its cache is empty.

A step of other requests may come before it.
"""

_T = TypeVar("_T")


class VllmEngine:
    """vLLM, as `GenerateEngine`, `AdapterEngine`, `SleepingEngine` and `FailingEngine`.

    Each request is a task that reads vLLM's outputs. When vLLM's core dies every request ends with
    an error, and `failed` returns: the worker is to end with it.
    """

    def __init__(self, settings: EngineSettings, secret: Secret) -> None:
        self._settings = settings
        self._secret = secret
        self._loaded: LoadedVllm | None = None
        self._shell: EngineShell[VllmRequestTracker] = EngineShell(self._stop)
        self._places = EngineSlots(1)
        self._numbers = count()
        self._adapters = VllmAdapters()
        self._events = VllmCacheEvents(secret)
        self._handovers: Handovers

    @property
    def card(self) -> ModelCard:
        """The model card. Raises `EngineError` before the engine is started."""
        return self._running.card

    @property
    def _running(self) -> LoadedVllm:
        if self._loaded is None:
            raise EngineError("the engine is not started")
        return self._loaded

    async def start(self) -> None:
        """Start vLLM's processes and load the model.

        Raises:
            InvalidRequestError: a model, a setting or a word after -- that vLLM or inlay refuses.
            EngineError: vLLM did not start.
        """
        self._shell.begin()
        # It blocks for as long as the model takes to load.
        try:
            loaded = await asyncio.to_thread(
                load, self._settings, self._secret, self._adapters, self._events
            )
        except BaseException:
            await self._events.close()
            raise
        loaded.watch_logits(self._corrupted)
        self._places = EngineSlots(loaded.card.limits.max_num_seqs)
        self._loaded = loaded
        self._handovers = Handovers(loaded.llm, loaded.tickets, self._adapters, self._shell.spawn)
        try:
            await loaded.guard_against_nan()
            # vLLM finds some of its limits with the first token only, and begins to read outputs
            # with it.
            await self.probe()
        except InlayError as error:
            await self.close()
            raise EngineError(
                "vLLM started and could not make a token; its own output above says why: "
                f"{error.message}"
            ) from error
        self._shell.spawn(self._watch(loaded))

    async def close(self) -> None:
        """End every request with "abort", and vLLM's processes."""
        if not await self._shell.close():
            return
        await self._events.close()
        if self._loaded is not None:
            self._loaded.close()
            await shut_down(self._loaded.llm)

    def watch_blocks(self, tell: Callable[[tuple[KvEvent, ...]], None]) -> bool:
        """From now on call `tell` with the events of vLLM's cache.

        False where it publishes none that can be read.
        """
        loaded = self._running
        return self._events.follow(loaded.llm, loaded.card, tell)

    async def failed(self) -> EngineError:
        """Return why, once vLLM's core has died."""
        return await self._shell.failed()

    def submit(self, request: Request, emit: Emit) -> None:
        """Admit `request`.

        Raises:
            InvalidRequestError: it can never run here, or is refused.
            EngineError: vLLM has died, or is not started.
            OverloadedError: the engine is closing.
        """
        self._shell.check(request)
        loaded, handovers = self._running, self._handovers
        ticket = handovers.opened(request)
        try:
            loaded.admission.check(request)
            card = loaded.card
            refusals.check(card.refusals, request, f"{card.engine} {card.engine_version}")
            loaded.check_thinking(request)
        except InlayError:
            handovers.refuse(ticket, request)
            raise
        follower = VllmRequestTracker(request, emit, self._id_for(request), ticket)
        self._shell.add(follower)
        self._shell.spawn(self._follow(loaded, follower))

    def _id_for(self, request: Request) -> str:
        return f"{request.id}.{next(self._numbers)}"

    def abort(self, request_id: str) -> None:
        """End a request: its last output is emitted now, and it is aborted in vLLM."""
        self._shell.abort(request_id)

    async def reset_prefix_cache(self) -> int:
        """Clear the prefix cache; return the number of all blocks: vLLM reports none freed.

        Running requests go on: where they hold blocks vLLM computes them anew.
        """
        loaded = self._alive()
        if not await self._answer(loaded.llm.reset_prefix_cache()):
            await self._answer(loaded.llm.reset_prefix_cache(reset_running_requests=True))
        self._shell.spawn(self._say_events(loaded))
        return loaded.card.num_blocks

    async def _say_events(self, loaded: LoadedVllm) -> None:
        """Have vLLM publish the events of its cache, by a probe.

        It publishes them with the next step, and there may be none for long. Nothing is published
        in its sleep: a step would wait until it is wholly awake.
        """
        if not self._events.followed or await self._asleep(loaded):
            return
        try:
            async with asyncio.timeout(EVENTS_SECONDS):
                await self.probe()
        except TimeoutError:
            log.warning(
                "routers do not learn of the cleared cache: no step ended within %g s",
                EVENTS_SECONDS,
            )
        except InlayError as error:
            log.warning("routers do not learn of the cleared cache: %s", error.message)

    async def _asleep(self, loaded: LoadedVllm) -> bool:
        """Return True if any part of vLLM sleeps."""
        return bool(await self._answer(loaded.llm.is_sleeping()))

    async def probe(self) -> float:
        """Run one token through the model and time it.

        Raises `EngineError` when vLLM has died or refuses it.
        """
        return await probe(self)

    def stats(self) -> Stats:
        """The counters after the last step that vLLM reported."""
        loaded = self._running
        idle, num_blocks = not self._shell, loaded.card.num_blocks
        return loaded.counters.stats(self._places, idle=idle, num_blocks=num_blocks)

    async def load_adapter(self, adapter: Adapter, directory: str) -> None:
        """Have vLLM load a LoRA adapter.

        Raises:
            InvalidRequestError: the engine has no room for adapters, or vLLM does not take this
                one.
        """
        loaded = self._alive()
        request = self._adapters.request(adapter, directory, loaded.lora)
        try:
            await self._answer(loaded.llm.add_lora(request))
        except EngineError:
            raise
        except Exception as error:
            raise InvalidRequestError(
                f"vLLM does not take the adapter: {error}", param="lora_path"
            ) from error
        self._adapters.add(adapter.name, request)

    async def unload_adapter(self, name: str) -> None:
        """Free an adapter no request uses any more."""
        number = self._adapters.remove(name)
        if number is not None:
            await self._answer(self._alive().llm.remove_lora(number))

    def check_sleep(self, level: int) -> None:
        """Raise `InvalidRequestError` without --enable-sleep-mode, and for level 2."""
        loaded = self._alive()
        if not loaded.sleeps:
            raise InvalidRequestError(
                "vLLM was not started with --enable-sleep-mode, which it takes on a GPU alone"
            )
        if level > 1:
            version = loaded.card.engine_version
            raise InvalidRequestError(
                f"vllm {version} does not sleep at level {level}: {capabilities.NO_LEVEL_2}",
                param="level",
            )

    async def sleep(self, level: int) -> None:
        """Give memory back. Raises as `check_sleep`."""
        self.check_sleep(level)
        loaded = self._alive()
        if self._events.followed and not await self._asleep(loaded):
            await self._answer(loaded.llm.reset_prefix_cache())
            await self._say_events(loaded)
        await self._answer(loaded.llm.sleep(level))

    async def wake_up(self, tags: Sequence[str]) -> bool:
        """Take back the memory that `tags` name; True when all is back."""
        return bool(await self._answer(self._alive().llm.wake_up(list(tags) or None)))

    def _alive(self) -> LoadedVllm:
        self._shell.check_running()
        return self._running

    async def _follow(self, loaded: LoadedVllm, follower: VllmRequestTracker) -> None:
        request = follower.request
        try:
            if (
                request.sampling.max_tokens <= len(request.prior_output)
                and request.sampling.prompt_logprobs is None
            ):
                follower.end("length")
            if follower.ended:
                return
            follower.request = await loaded.check_grammar(request)
            if self._shell.get(request.id) is not follower:
                return  # it was stopped meanwhile
            place = self._enter(loaded, follower)
            while await place.granted and not follower.ended:
                await self._run(loaded, follower, place)
                if not follower.ended:
                    self._places.put_back(place)
        except asyncio.CancelledError:
            follower.end("abort")
            raise
        except Exception as error:
            self._shell.end(follower, "error", self._error_of(error, follower))
        finally:
            if follower.place is not None:
                self._places.leave(follower.place)
            self._shell.leave(follower)
            if not self._shell.closing:
                self._handovers.ended(follower)

    def _enter(self, loaded: LoadedVllm, follower: VllmRequestTracker) -> EngineSlot:
        """Have a request wait for a place."""

        def preempt() -> None:
            follower.yielding = True
            self._take_out(loaded, follower)

        resumable = not non_resumable_features(follower.request, loaded.card)
        place = self._places.enter(follower, resumable=resumable, preempt=preempt)
        follower.place = place
        return place

    async def _run(
        self, loaded: LoadedVllm, follower: VllmRequestTracker, place: EngineSlot
    ) -> None:
        """Have vLLM run a request until it has ended, or was preempted."""
        if place.num_preemptions:
            follower.request_id = self._id_for(follower.request)
        request = follower.continuation()
        given, noted = await loaded.input_of(request)
        if follower.leaves():
            follower.yielding = False
            return
        self._events.note(request, given, noted)
        queue = await loaded.llm.add_request(
            follower.request_id,
            given,
            params_of(
                request, loaded.card.eos_token_ids, extra=self._handovers.extra_args(follower)
            ),
            lora_request=self._adapters.of(request),
            priority=request.priority if loaded.by_priority else 0,
            **reasoning.bind(request),
        )
        follower.admitted = True
        follower.ticket = None  # what becomes of the blocks is vLLM's affair now
        loaded.counters.rows_served += sum(
            len(part) for part in request.prompt.segments if not isinstance(part, Tokens)
        )
        if follower.leaves():
            # It was stopped, or preempted, before vLLM knew of it.
            await loaded.llm.abort(follower.request_id)
        finished = False
        while not finished and not follower.ended:
            output = queue.get_nowait() or await queue.get()
            finished = output.finished
            follower.admitted = not finished
            if finished:
                self._handovers.finished(follower, output)
            if not follower.take(output):
                self._spoiled(loaded, follower)
            elif not finished and follower.leaves():
                # Where its receiver has failed, vLLM would go on with it for nobody.
                await loaded.llm.abort(follower.request_id)
            self._places.note_progress(place)
        follower.yielding = False

    def _error_of(self, error: Exception, follower: VllmRequestTracker) -> InlayError:
        """The error that a failure of vLLM is to the caller."""
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError

        if isinstance(error, InlayError):
            return error
        if isinstance(error, EngineDeadError):
            return EngineError("vLLM's engine process died")
        if isinstance(error, VLLMClientError | ValueError) and not follower.admitted:
            return InvalidRequestError(str(error), param=getattr(error, "parameter", None))
        log.error("request %s failed in vLLM", follower.request.id, exc_info=error)
        return EngineError(f"vLLM failed to run the request: {type(error).__name__}")

    def _stop(self, follower: VllmRequestTracker) -> None:
        """Take a request out of vLLM, or out of the wait for a place."""
        loaded = self._loaded
        if loaded is not None and not (self._shell.closing or loaded.llm.errored):
            self._take_out(loaded, follower)
        self._places.stop_waiting(follower.place)

    def _take_out(self, loaded: LoadedVllm, follower: VllmRequestTracker) -> None:
        """Abort a request in vLLM, if vLLM has it."""
        if not follower.admitted:
            return
        self._shell.spawn(loaded.llm.abort(follower.request_id))
        if (
            follower.request.prompt.has_rows
            and not follower.has_emitted
            and loaded.card.dtype == "float16"
        ):
            # No logits of its rows were read: they may have overflowed.
            self._shell.spawn(self._overwrite(loaded))

    def _corrupted(self, request_id: str) -> None:
        """A request of vLLM's has NaN among its logits.

        It ends, and the memory it wrote is cleaned before others get it.
        """
        name = request_id.rpartition("-")[0]
        follower = next((each for each in self._shell if each.request_id == name), None)
        if follower is not None and self._loaded is not None:
            self._spoiled(self._loaded, follower)

    def _spoiled(self, loaded: LoadedVllm, follower: VllmRequestTracker) -> None:
        """End a request with NaN in its output."""
        follower.corrupted()
        self._shell.leave(follower)
        self._shell.spawn(self._clean(loaded, follower))

    async def _clean(self, loaded: LoadedVllm, follower: VllmRequestTracker) -> None:
        log.warning("NaN came out of a prompt: keys and values that are not finite are overwritten")
        # Before its blocks are free, and again what it wrote until it was stopped.
        await self._overwrite(loaded)
        await loaded.llm.abort(follower.request_id)
        await self._overwrite(loaded)
        await self.reset_prefix_cache()

    async def _overwrite(self, loaded: LoadedVllm) -> None:
        await self._answer(loaded.llm.collective_rpc("overwrite_not_finite"))

    async def _watch(self, loaded: LoadedVllm) -> None:
        """Return when vLLM's core is gone and every request has ended."""
        handler = loaded.llm.output_handler
        if handler is None:
            raise EngineError("vLLM reads no output")
        await asyncio.wait({handler})
        if not self._shell.closing:
            self._shell.fail(EngineError("vLLM's engine process died"))

    async def _answer(self, call: Awaitable[_T]) -> _T:
        """Return the answer of vLLM's core.

        Raises `EngineError` when it dies meanwhile: nothing would ever come.
        """
        task = asyncio.ensure_future(call)
        failing = asyncio.ensure_future(self.failed())
        try:
            await asyncio.wait((task, failing), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise failing.result()
            return task.result()
        finally:
            task.cancel()
            failing.cancel()
