"""The host of an engine: checks requests, and runs commands, adapters, sleep and probes."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn, TypeVar, cast

import msgspec
from msgspec.structs import replace

from inlay.adapter.library import AdapterLibrary
from inlay.base.errors import (
    EmbeddingsError,
    EngineError,
    InlayError,
    InvalidRequestError,
    OverloadedError,
)
from inlay.engine.api import Engine, GenerateEngine, PageEngine, PeerWorkers
from inlay.engine.kv_events import BlockEventSource
from inlay.engine.settings import EngineSettings
from inlay.extension import extensions, parts
from inlay.messages.card import EMBEDS_OFF, Address, ModelCard, SelfCheck, Stage
from inlay.messages.commands import (
    AdapterLoaded,
    AdapterStatuses,
    AdapterUnloaded,
    AnyCommand,
    CacheReset,
    Drain,
    Draining,
    ListAdapters,
    LoadAdapter,
    Probed,
    ProbeEngine,
    ReadStats,
    Reply,
    ResetPrefixCache,
    Sleep,
    Slept,
    UnloadAdapter,
    WakeUp,
    Woken,
    WorkerCommand,
    name_of,
)
from inlay.messages.digest import Secret
from inlay.messages.request import Emit, Request, Task
from inlay.messages.routing import KvEvents, KvSnapshot
from inlay.telemetry import Tracing
from inlay.transport.embeds_cache import EmbedsCache
from inlay.worker.adapters import AdapterRegistry
from inlay.worker.canary import Canary
from inlay.worker.kv_feed import KvFeed
from inlay.worker.lora_modules import parse_modules
from inlay.worker.part import Handle, HostAccess, WorkerPart
from inlay.worker.probing import EngineProber
from inlay.worker.sleeping import RunningRequests, SleepControl
from inlay.worker.spans import traced

R = TypeVar("R")

log = logging.getLogger(__name__)

_NOT_SERVED = {
    Task.GENERATE: "does not generate text",
    Task.EMBED: "does not make embeddings",
    Task.SCORE: "does not score pairs of texts",
    Task.ENCODE: "does not encode media",
}


class EngineHost:
    """`inlay.transport.api.RequestHandler` around an engine.

    Refusals become error outputs, commands become calls.

    Args:
        engine: started.
        adapters: of the engine; without them requests and commands that name one are refused.
        sleep_mode: whether the engine may be put to sleep.
        probe_interval: seconds between probes of the engine, 0 for none.
        probe_timeout: seconds after which an engine that does not answer one is stuck.
        canary_interval: seconds between canaries, 0 for none.
        batch_invariant: the engine was told to be so: canaries are compared bit for bit.
        tracing: makes spans of requests that belong to one, or None.
        embeds_cache: of stored prompts that came over direct connections.
        prompt_embeds: whether requests may have rows; those of adapters do in any case.
        stage: of a pipeline that the worker is, for its card.
        peers: asks other workers for inputs that they keep; without them such requests are refused.
        self_check: as the card's, where that is not the engine's own.
    """

    def __init__(
        self,
        engine: Engine,
        adapters: AdapterRegistry | None = None,
        *,
        sleep_mode: bool = False,
        probe_interval: float = 0,
        probe_timeout: float = 60,
        canary_interval: float = 0,
        batch_invariant: bool = False,
        tracing: Tracing | None = None,
        prompt_embeds: bool = True,
        embeds_cache: EmbedsCache | None = None,
        stage: Stage | None = None,
        peers: PeerWorkers | None = None,
        self_check: SelfCheck | None = None,
    ) -> None:
        self._stage = stage
        self._self_check = self_check
        self._engine = engine
        self._embeds_cache = embeds_cache or EmbedsCache(0)
        self._prompt_embeds = prompt_embeds
        self._adapters = adapters
        self._draining = False
        self._watchers: dict[object, Callable[[ModelCard], None]] = {}
        self._address: Address | None = None
        self._dials = False
        self._requests = RunningRequests()
        self._tracing = tracing
        self._kv_events = KvFeed()
        self._reports_kv = isinstance(engine, BlockEventSource) and engine.watch_blocks(
            self._kv_events.take
        )
        self._sleeping = SleepControl(engine, self._requests, enabled=sleep_mode, tell=self._tell)
        self._probing = EngineProber(
            engine, self._sleeping, interval=probe_interval, timeout=probe_timeout, tell=self._tell
        )
        self._canary = Canary(
            engine,
            self.submit,
            self.abort,
            lambda: () if self._adapters is None else self._adapters.ready,
            interval=canary_interval,
            invariant=batch_invariant,
            tell=self._tell,
        )
        access = HostAccess(engine, stage, peers, lambda: self._address, self._admit)
        self.parts: list[WorkerPart] = [make(access) for _, make in parts("worker")]
        self._handlers: dict[Task, Handle] = {Task.PAGES: self._give_pages}
        for part in self.parts:
            self._handlers.update(part.handlers)
        if adapters is not None:
            adapters.watch(self._tell, self._sleeping)

    @property
    def card(self) -> ModelCard:
        """The engine's, with the adapters, its sleep, its state, and whether rows are taken."""
        level = self._sleeping.level
        card = replace(self._engine.card, asleep=level, probe=None if level else self._probing.last)
        card = replace(card, canary=None if level else self._canary.last)
        card = replace(card, kv_events=self._reports_kv, address=self._address, dials=self._dials)
        card = replace(card, stage=self._stage)
        if self._self_check is not None:
            card = replace(card, self_check=self._self_check)
        if not self._prompt_embeds:
            card = replace(card, prompt_embeds=EMBEDS_OFF)
        return card if self._adapters is None else replace(card, adapters=self._adapters.ready)

    def checked(self, check: SelfCheck) -> None:
        """Announce another result of the self-check."""
        self._self_check = check
        self._tell()

    def watch_cache(self, tell: Callable[[KvEvents], None]) -> None:
        self._kv_events.watch(tell)

    async def kv_snapshot(self) -> KvSnapshot:
        """As `inlay.messages.routing.CacheEventSource`.

        Raises `InvalidRequestError` for an engine that tells nothing.
        """
        if not self._reports_kv:
            raise InvalidRequestError("the worker does not report what it caches")
        return self._kv_events.snapshot()

    def watch(self, announce: Callable[[ModelCard], None]) -> Callable[[], None]:
        key = object()
        self._watchers[key] = announce
        announce(self.card)
        return lambda: self._watchers.pop(key, None) and None

    def _tell(self) -> None:
        card = self.card
        for announce in tuple(self._watchers.values()):
            announce(card)

    def connects(self, address: Address | None) -> None:
        """Note in the card where frontends of other machines connect; None: it dials them."""
        self._address, self._dials = address, address is None
        self._tell()

    def forget_prompt(self, key: str | None) -> None:
        if key is None:
            self._embeds_cache.clear()
        else:
            self._embeds_cache.forget(key)

    def submit(self, request: Request, emit: Emit) -> None:
        """Admit `request`, or emit the one output that says why not."""
        handle = self._handlers.get(request.task)
        if handle is not None:
            guarded(handle, request, emit)
        elif request.hold is None and not request.feeds:
            self._admit(request, emit)
        elif self.parts:
            guarded(self.parts[0].begin, request, emit)
        else:
            error = InvalidRequestError("this worker keeps and fetches nothing for others")
            emit(request.end("error", error))

    def _admit(self, request: Request, emit: Emit, submit: Handle | None = None) -> None:
        emit = self._requests.track_outputs(request.id, emit)
        if self._tracing is not None and request.trace is not None:
            emit = traced(self._tracing, request, emit, self._engine.card.engine)
        guarded(partial(self._submit, submit=submit), request, emit)

    def _submit(self, request: Request, emit: Emit, submit: Handle | None) -> None:
        self._check_open()
        self._check_rows(request)
        if request.task not in self._engine.card.tasks:
            specs = (spec for each in extensions() for spec in each.tasks)
            of_parts = {Task(spec.task): spec.does_not for spec in specs}
            said = (_NOT_SERVED | of_parts).get(request.task, f"does not {request.task}")
            raise InvalidRequestError(f"the model `{self._engine.card.name}` {said}")
        if submit is not None:
            submit(request, emit)
        elif request.adapter is None or request.task not in (Task.GENERATE, Task.STAGE):
            self._engine.submit(request, emit)
        else:
            self._submit_adapted(self._lending(), request, emit)

    def _give_pages(self, request: Request, emit: Emit) -> None:
        if not isinstance(self._engine, PageEngine):
            raise InvalidRequestError("this worker's engine gives no pages")
        self._engine.give_pages(request, emit)

    def _submit_adapted(self, adapters: AdapterRegistry, request: Request, emit: Emit) -> None:
        admitted = adapters.enter(request, emit)
        try:
            self._engine.submit(admitted.request, admitted.emit)
        except BaseException:
            admitted.leave()
            raise

    def _lending(self) -> AdapterRegistry:
        if self._adapters is None:
            raise InvalidRequestError("this worker takes no adapters", param="model")
        return self._adapters

    def _check_open(self) -> None:
        if self._draining:
            raise OverloadedError("the worker is draining", retry_after=1)
        self._sleeping.check_awake()

    def _check_rows(self, request: Request) -> None:
        if self._prompt_embeds or not request.has_embeds:
            return
        card = self._engine.card
        media_embeds = card.media is not None and card.media.embeds
        if not media_embeds and not any(part.takes_rows for part in self.parts):
            raise EmbeddingsError(f"The model `{card.name}` takes no prompt_embeds: {EMBEDS_OFF}")

    def abort(self, request_id: str) -> None:
        """Stop a request; what it has made is freed."""
        for stop in (self._engine.abort, *(part.abort for part in self.parts)):
            try:
                stop(request_id)
            except Exception:
                log.exception("request %s could not be stopped", request_id)

    async def call(self, command: WorkerCommand[R]) -> R:
        """Run a command. Raises `InlayError` if it fails."""
        # The reply of each command is of the type that it names.
        return cast("R", await self._run(command))

    async def first_probe(self) -> None:
        """Try the engine, and make the canaries' prompt, before anybody is told of it.

        Raises `EngineError` where it does not answer.
        """
        await self._probing.first()
        await self._canary.prepare()

    async def probe(self) -> NoReturn:
        """Try the engine on a timer until cancelled."""
        await self._probing.run()

    async def watch_numbers(self) -> NoReturn:
        """Send canaries on a timer until cancelled."""
        await self._canary.run()

    async def close(self) -> None:
        """Let go of the adapters' files. The engine is closed by whoever started it."""
        if self._adapters is not None:
            await self._adapters.close()

    async def restore(self, commands: Sequence[AnyCommand]) -> None:
        """Run commands that an earlier worker had followed.

        One that fails now is only logged: the rest can be served.
        """
        for command in commands:
            try:
                await self._restore(command)
            except InlayError as error:
                log.error("%s: %s", command, error.message)

    async def _restore(self, command: AnyCommand) -> None:
        if not isinstance(command, LoadAdapter) or command.content_id is None:
            await self.call(command)
        elif (command.name, command.content_id) not in self._adapter_contents():
            reply = await self.call(command)
            if reply.content_id != command.content_id:
                log.error(
                    "the adapter %s is not what it was, and is not loaded again", command.name
                )
                await self.call(UnloadAdapter(command.name))

    def _adapter_contents(self) -> set[tuple[str, str]]:
        return {(adapter.name, adapter.content_id) for adapter in self.card.adapters}

    async def _run(self, command: WorkerCommand[object]) -> Reply:
        match command:
            case ResetPrefixCache():
                blocks = (
                    await self._engine.reset_prefix_cache()
                    if isinstance(self._engine, GenerateEngine)
                    else 0
                )
                return CacheReset(blocks)
            case ProbeEngine():
                return Probed(await self._engine.probe())
            case ReadStats():
                kept = msgspec.structs.asdict(self._embeds_cache.stats)
                for part in self.parts:
                    kept |= part.stats()
                return replace(self._engine.stats(), **kept)
            case LoadAdapter():
                self._sleeping.check_awake()
                before = self._adapter_contents()
                content_id = (await self._lending().load(command)).content_id
                self._canary.soon()
                return AdapterLoaded(content_id, (command.name, content_id) in before)
            case UnloadAdapter(name, seconds):
                await self._lending().unload(name, seconds)
                self._canary.soon()
                return AdapterUnloaded()
            case ListAdapters():
                statuses = [] if self._adapters is None else self._adapters.statuses()
                return AdapterStatuses(tuple(statuses))
            case Sleep(level, mode, wait):
                return Slept(await self._sleeping.sleep(level, mode, wait))
            case WakeUp(tags):
                awake = await self._sleeping.wake_up(tags)
                self._canary.soon()
                return Woken(awake)
            case Drain(give_up):
                self._draining = True
                for request_id in tuple(self._requests.ids) if give_up else ():
                    self.abort(request_id)
                return Draining(len(self._requests.ids) + sum(part.num_open for part in self.parts))
        raise InvalidRequestError(f"a worker knows no command {name_of(command)!r}")


async def host_of(
    engine: Engine,
    settings: EngineSettings,
    secret: Secret,
    tracing: Tracing | None = None,
    *,
    prompt_embeds: bool = True,
    embeds_cache: EmbedsCache | None = None,
    stage: Stage | None = None,
    peers: PeerWorkers | None = None,
    self_check: SelfCheck | None = None,
) -> EngineHost:
    """A host for a started engine, with the adapters that its settings name; as `EngineHost`.

    Raises:
        InlayError: one of them cannot be loaded.
    """
    library = AdapterLibrary(
        settings.adapters.allowed_lora_sources,
        cache_dir=settings.adapters.lora_cache_dir,
        cache_bytes=settings.adapters.lora_cache_bytes,
        max_bytes=settings.adapters.max_lora_bytes,
        model=Path(engine.card.path),
    )
    adapters = AdapterRegistry(
        engine,
        library,
        secret,
        most=settings.cpu_loras,
        drain_seconds=settings.adapters.lora_drain_timeout,
    )
    for order in parse_modules(settings.adapters.lora_modules):
        await adapters.load(order)
    return EngineHost(
        engine,
        adapters,
        sleep_mode=settings.health.enable_sleep_mode,
        probe_interval=settings.health.health_probe_interval,
        probe_timeout=settings.health.health_probe_timeout,
        canary_interval=0
        if settings.health.self_check == "off"
        else settings.health.self_check_interval,
        batch_invariant=settings.compute.batch_invariant is True,
        tracing=tracing,
        prompt_embeds=prompt_embeds,
        embeds_cache=embeds_cache,
        stage=stage,
        peers=peers,
        self_check=self_check,
    )


def guarded(handle: Handle, request: Request, emit: Emit) -> None:
    """Have a request handled; what is raised is its one output."""
    try:
        handle(request, emit)
    except InlayError as error:
        emit(request.end("error", error))
    except Exception:
        # One request must not take the connection of all down with it: its caller hears of it, the
        # log keeps the trace.
        log.exception("request %s was not admitted", request.id)
        emit(request.end("error", EngineError("the engine failed to admit the request")))
