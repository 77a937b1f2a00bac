"""The engine protocols over SGLang's engine, whose work is done in processes of its own."""

import asyncio
import logging
from uuid import uuid4

from sglang.srt.managers.io_struct import GenerateReqInput

from inlay.base.errors import EngineError, InlayError, InvalidRequestError, OverloadedError
from inlay.engine.probe import probe
from inlay.engine.settings import EngineSettings
from inlay.engine.sglang import rooms
from inlay.engine.sglang.loading import LoadedSglang, load
from inlay.engine.sglang.process import Process
from inlay.engine.sglang.prompts import input_of
from inlay.engine.sglang.request_tracker import SglangRequestTracker
from inlay.engine.sglang.sampling import params_of
from inlay.engine.shell import EngineShell
from inlay.engine.slots import EngineSlot, EngineSlots
from inlay.messages import refusals
from inlay.messages.card import ModelCard, Stats
from inlay.messages.digest import Secret
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import Emit, Request
from inlay.messages.resuming import non_resumable_features

log = logging.getLogger(__name__)

_UNBOUNDED = 1 << 30


class SglangEngine:
    """SGLang, as `GenerateEngine` and `FailingEngine`.

    Each request is a task that reads SGLang's answers. When one of SGLang's processes dies every
    request ends with an error, and `failed` returns: the worker is to end with it.
    """

    def __init__(self, settings: EngineSettings, secret: Secret) -> None:
        self._settings = settings
        self._secret = secret
        self._process = Process()
        self._loaded: LoadedSglang | None = None
        self._shell: EngineShell[SglangRequestTracker] = EngineShell(self._stop)
        self._places = EngineSlots(1)
        self._stats = Stats()

    @property
    def card(self) -> ModelCard:
        """The model card. Raises `EngineError` before the engine is started."""
        return self._ready.card

    @property
    def _ready(self) -> LoadedSglang:
        if self._loaded is None:
            raise EngineError("the engine is not started")
        return self._loaded

    async def start(self) -> None:
        """Start SGLang's processes and load the model.

        Raises:
            InvalidRequestError: a model, a setting or a word after -- that SGLang or inlay refuses.
            EngineError: SGLang did not start.
        """
        self._shell.begin()
        try:
            self._loaded = await load(self._process, self._settings, self._secret)
            self._places = EngineSlots(_places_of(self._loaded.card))
            # SGLang finds some of its limits with the first token only.
            await self.probe()
        except InlayError:
            await self.close()
            raise

    async def close(self) -> None:
        """End every request with "abort", and SGLang's processes."""
        if not await self._shell.close():
            return
        if self._loaded is not None and self._loaded.media is not None:
            self._loaded.media.close()
        await self._process.close()

    async def failed(self) -> EngineError:
        """Return why, once SGLang has died."""
        return await self._process.failed()

    def submit(self, request: Request, emit: Emit) -> None:
        """Admit `request`.

        Raises:
            InvalidRequestError: it can never run here, or is refused.
            EngineError: SGLang has died, or is not started.
            OverloadedError: the engine is closing.
        """
        self._shell.check(request)
        loaded = self._ready
        _ = self._process.client
        rooms.checked(request, loaded.card)
        loaded.admission.check(request)
        refusals.check(
            loaded.card.refusals, request, f"{loaded.card.engine} {loaded.card.engine_version}"
        )
        follower = SglangRequestTracker(request, emit, uuid4().hex, loaded.card.eos_token_ids)
        self._shell.add(follower)
        self._shell.spawn(self._follow(loaded, follower))

    def abort(self, request_id: str) -> None:
        """End a request: its last output is emitted now, and it is aborted in SGLang."""
        self._shell.abort(request_id)

    async def reset_prefix_cache(self) -> int:
        """Clear the prefix cache; the number of all blocks, as SGLang does not report how many."""
        await self._process.forget_cache()
        return self._ready.card.num_blocks

    async def probe(self) -> float:
        """Run one token through the model and time it.

        Raises `EngineError` when SGLang has died or refuses it.
        """
        return await probe(self)

    def stats(self) -> Stats:
        """The counters now. SGLang does not report the use of its cache."""
        stats = self._stats
        return Stats(
            running=self._places.num_running,
            waiting=self._places.num_waiting,
            preemptions=self._places.num_preemptions,
            prompt_tokens=stats.prompt_tokens,
            cached_tokens=stats.cached_tokens,
            rows_served=stats.rows_served,
            generated_tokens=stats.generated_tokens,
            steps=stats.steps,
            progress=stats.progress,
        )

    async def _follow(self, loaded: LoadedSglang, follower: SglangRequestTracker) -> None:
        try:
            if not follower.room:
                follower.end("length")
            if follower.ended:
                return
            place = follower.place = self._enter(loaded, follower)
            while await place.granted and not follower.ended:
                await self._run(loaded, follower, place)
                if not follower.ended:
                    self._places.put_back(place)
                    follower.begin(uuid4().hex)
        except asyncio.CancelledError:
            follower.end("abort")
            raise
        except Exception as error:
            follower.end("error", _error_of(error, follower))
        finally:
            if follower.place is not None:
                self._places.leave(follower.place)
            self._shell.leave(follower)

    def _enter(self, loaded: LoadedSglang, follower: SglangRequestTracker) -> EngineSlot:
        """Have a request wait for a place."""

        def preempt() -> None:
            self._process.abort(follower.request_id)
            follower.stop.set_result(None)

        # Nobody comes to a room a second time.
        in_room = bool(loaded.card.kv_rooms)
        resumable = not in_room and not non_resumable_features(follower.request, loaded.card)
        return self._places.enter(follower, resumable=resumable, preempt=preempt)

    async def _run(
        self, loaded: LoadedSglang, follower: SglangRequestTracker, place: EngineSlot
    ) -> None:
        """Have SGLang run a request until it has ended, or is to stop."""
        engine_request = follower.continuation()
        if loaded.media is not None:
            given = await loaded.media.input_of(engine_request)
        else:
            prompt = engine_request.prompt + Prompt.of(Tokens(engine_request.prior_output))
            given = {"cache_salt": engine_request.salt, **input_of(prompt)}
        request = GenerateReqInput(
            rid=follower.request_id,
            sampling_params=params_of(engine_request, seeded=loaded.seeded),
            stream=True,
            return_logprob=True,
            top_logprobs_num=engine_request.sampling.logprobs or 0,
            priority=engine_request.priority if loaded.by_priority else None,
            **given,
            **rooms.checked(engine_request, loaded.card),
        )
        follower.admitted = True
        answers = self._process.answers(request, follower.stop)
        try:
            async for answer in answers:
                before = follower.num_tokens
                ended = follower.take(answer)
                self._count(follower, before)
                if ended:
                    break
                self._places.note_progress(place)
        finally:
            # Where it has not ended in SGLang, it does now.
            await answers.aclose()  # type: ignore[attr-defined]
            follower.admitted = False
        if not follower.ended and not follower.stop.done():
            raise EngineError("SGLang stopped answering the request")

    def _count(self, follower: SglangRequestTracker, before: int) -> None:
        request, stats, made = follower.request, self._stats, follower.num_tokens - before
        first = before == len(request.prior_output)
        positions = len(request.prompt) if first else 0
        rows = positions - len(request.prompt.token_ids()) if first else 0
        self._stats = Stats(
            prompt_tokens=stats.prompt_tokens + positions,
            cached_tokens=stats.cached_tokens + (follower.cached if first else 0),
            rows_served=stats.rows_served + rows,
            generated_tokens=stats.generated_tokens + made,
            steps=stats.steps + 1,
            progress=stats.progress + positions + made,
        )

    def _stop(self, follower: SglangRequestTracker) -> None:
        self._places.stop_waiting(follower.place)
        if follower.admitted and not self._shell.closing:
            self._process.abort(follower.request_id)


def _places_of(card: ModelCard) -> int:
    """Places for requests in SGLang.

    A prompt that waits for its decode worker holds nothing there. If it held a place here, and
    another's decode worker waited for that, both would wait for ever.
    """
    return _UNBOUNDED if card.bootstrap is not None else card.limits.max_num_seqs


def _error_of(error: Exception, follower: SglangRequestTracker) -> InlayError:
    """The error that a failure of SGLang is to the caller."""
    awaited = follower.request.kv_room is not None and not follower.has_emitted
    if isinstance(error, EngineError) and awaited:
        # Another pair may do it.
        return OverloadedError(error.message, retry_after=1)
    if isinstance(error, InlayError):
        return error
    if isinstance(error, ValueError) and not follower.has_emitted:
        return InvalidRequestError(str(error))
    if awaited:
        return rooms.lost(getattr(error, "detail", error))
    log.error("request %s failed in SGLang", follower.request.id, exc_info=error)
    return EngineError(f"SGLang failed to run the request: {type(error).__name__}")
