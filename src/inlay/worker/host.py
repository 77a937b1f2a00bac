"""The host of an engine: checks requests, and runs commands, adapters, sleep and probes."""

import logging
from collections.abc import Callable, Sequence
from typing import NoReturn

import msgspec
from msgspec.structs import replace

from inlay.adapter.library import AdapterLibrary
from inlay.card import EMBEDS_OFF, Address, ModelCard
from inlay.digest import Secret
from inlay.engine.api import EmbeddingEngine, Engine, GenerateEngine
from inlay.engine.kv_events import BlockEventSource
from inlay.engine.settings import EngineSettings
from inlay.errors import (
    EmbeddingsError,
    EngineError,
    ErrorFrame,
    InlayError,
    InvalidRequestError,
    OverloadedError,
)
from inlay.prompt import Buffer, Prompt
from inlay.request import (
    Command,
    EmbedOutput,
    EmbedRequest,
    Emit,
    EmitEmbedOutput,
    Output,
    Reply,
    Request,
)
from inlay.routing import KvEvents, KvSnapshot
from inlay.telemetry import Tracing
from inlay.transport.embeds_cache import EmbedsCache
from inlay.worker.adapters import AdapterRegistry
from inlay.worker.kv_feed import KvFeed
from inlay.worker.load_adapter_request import load_request_of, parse_modules
from inlay.worker.probing import EngineProber
from inlay.worker.sleeping import RunningRequests, SleepControl
from inlay.worker.spans import traced

log = logging.getLogger(__name__)


class EngineHost:
    """`inlay.transport.api.RequestHandler` around an engine.

    Refusals become error outputs, commands become calls.

    Args:
        engine: started.
        adapters: of the engine; without them works and commands that name one are refused.
        sleep_mode: whether the engine may be put to sleep.
        probe_interval: seconds between probes of the engine, 0 for none.
        probe_timeout: seconds after which an engine that does not answer one is stuck.
        tracing: makes spans of requests that belong to one, or None.
        embeds_cache: of stored prompts that came over direct connections.
        prompt_embeds: whether works may have rows; those of adapters do in any case.
    """

    def __init__(
        self,
        engine: Engine,
        adapters: AdapterRegistry | None = None,
        *,
        sleep_mode: bool = False,
        probe_interval: float = 0,
        probe_timeout: float = 60,
        tracing: Tracing | None = None,
        prompt_embeds: bool = True,
        embeds_cache: EmbedsCache | None = None,
    ) -> None:
        self._engine = engine
        self._embeds_cache = embeds_cache or EmbedsCache(0)
        self._prompt_embeds = prompt_embeds
        self._adapters = adapters
        self._draining = False
        self._watchers: dict[object, Callable[[ModelCard], None]] = {}
        self._address: Address | None = None
        self._requests = RunningRequests()
        self._tracing = tracing
        self._feed = KvFeed()
        self._tells = isinstance(engine, BlockEventSource) and engine.watch_blocks(self._feed.take)
        self._sleeping = SleepControl(engine, self._requests, enabled=sleep_mode, tell=self._tell)
        self._probing = EngineProber(
            engine, self._sleeping, interval=probe_interval, timeout=probe_timeout, tell=self._tell
        )
        if adapters is not None:
            adapters.watch(self._tell)

    @property
    def card(self) -> ModelCard:
        """The engine's, with the adapters that take requests, its sleep, how it is, and whether rows are taken."""
        level = self._sleeping.level
        card = replace(self._engine.card, asleep=level, probe=None if level else self._probing.last)
        card = replace(card, kv_events=self._tells, address=self._address)
        if not self._prompt_embeds:
            card = replace(card, prompt_embeds=EMBEDS_OFF)
        return card if self._adapters is None else replace(card, adapters=self._adapters.ready)

    def watch_cache(self, tell: Callable[[KvEvents], None]) -> None:
        """As `inlay.routing.CacheEventSource`."""
        self._feed.watch(tell)

    async def kv_snapshot(self) -> KvSnapshot:
        """As `inlay.routing.CacheEventSource`.

        Raises `InvalidRequestError` for an engine that tells nothing.
        """
        if not self._tells:
            raise InvalidRequestError("the worker tells of no cache")
        return self._feed.snapshot()

    def watch(self, announce: Callable[[ModelCard], None]) -> Callable[[], None]:
        """As `RequestHandler.watch`."""
        key = object()
        self._watchers[key] = announce
        announce(self.card)
        return lambda: self._watchers.pop(key, None) and None

    def _tell(self) -> None:
        card = self.card
        for announce in tuple(self._watchers.values()):
            announce(card)

    def listens(self, address: Address) -> None:
        """Note in the card where frontends of other machines connect."""
        self._address = address
        self._tell()

    def forget_prompt(self, key: str | None) -> None:
        """As `RequestHandler.forget_prompt`."""
        if key is None:
            self._embeds_cache.clear()
        else:
            self._embeds_cache.forget(key)

    def generate(self, request: Request, emit: Emit) -> None:
        """Admit `request`, or emit the one output that says why not."""
        emit = self._requests.track_outputs(request.id, emit)
        if self._tracing is not None and request.trace is not None:
            emit = traced(self._tracing, request, emit, self._engine.card.engine)
        try:
            self._check_open()
            self._check_rows(request.prompt)
            if not isinstance(self._engine, GenerateEngine):
                raise InvalidRequestError(
                    f"the model `{self._engine.card.name}` does not generate text"
                )
            if request.adapter is None:
                self._engine.generate(request, emit)
            else:
                self._generate_adapted(self._engine, self._lending(), request, emit)
        except InlayError as error:
            emit(_refusal(request, error))
        except Exception:
            # The engine must not take the plane down with it: the caller hears of it, the log keeps
            # the trace.
            log.exception("work %s was not admitted", request.id)
            emit(_refusal(request, EngineError("the engine failed to admit the request")))

    def _generate_adapted(
        self, engine: GenerateEngine, adapters: AdapterRegistry, request: Request, emit: Emit
    ) -> None:
        admitted = adapters.enter(request, emit)
        try:
            engine.generate(admitted.request, admitted.emit)
        except BaseException:
            admitted.leave()
            raise

    def _lending(self) -> AdapterRegistry:
        if self._adapters is None:
            raise InvalidRequestError("this worker takes no adapters", param="model")
        return self._adapters

    def embed(self, request: EmbedRequest, emit: EmitEmbedOutput) -> None:
        """Admit `request`, or emit the answer that says why not."""
        emit = self._requests.track_embed_output(request.id, emit)
        try:
            self._check_open()
            for prompt in request.prompts:
                self._check_rows(prompt)
            if not isinstance(self._engine, EmbeddingEngine):
                raise InvalidRequestError(
                    f"the model `{self._engine.card.name}` does not make embeddings"
                )
            self._engine.embed(request, emit)
        except InlayError as error:
            emit(_no_vectors(request, error))
        except Exception:
            log.exception("work %s was not admitted", request.id)
            emit(_no_vectors(request, EngineError("the engine failed to admit the request")))

    def _check_open(self) -> None:
        if self._draining:
            raise OverloadedError("the worker is draining", retry_after=1)
        self._sleeping.check_awake()

    def _check_rows(self, prompt: Prompt) -> None:
        if not self._prompt_embeds and prompt.has_rows:
            raise EmbeddingsError(
                f"The model `{self._engine.card.name}` takes no prompt_embeds: {EMBEDS_OFF}"
            )

    def abort(self, request_id: str) -> None:
        """Stop a request."""
        self._engine.abort(request_id)

    async def call(self, command: Command) -> Reply:
        """Run a command."""
        try:
            return Reply(await self._run(command))
        except InlayError as error:
            return Reply(error=ErrorFrame.of(error))

    async def first_probe(self) -> None:
        """Try the engine before anybody is told of it.

        Raises `EngineError` where it does not answer.
        """
        await self._probing.first()

    async def probe(self) -> NoReturn:
        """Try the engine on a timer until cancelled."""
        await self._probing.run()

    async def close(self) -> None:
        """Let go of the adapters' files. The engine is closed by whoever started it."""
        if self._adapters is not None:
            await self._adapters.close()

    async def restore(self, commands: Sequence[Command]) -> None:
        """Run commands that an earlier worker had followed.

        One that fails now is only logged: the rest can be served.
        """
        for command in commands:
            name, content = command.arguments.get("lora_name"), command.arguments.get("content_id")
            if content is not None and (name, content) in self._adapter_contents():
                continue
            reply = await self.call(command)
            if reply.error is not None:
                log.error("%s %s: %s", command.name, command.arguments, reply.error.message)
            elif content is not None and reply.value.get("content_id") != content:
                log.error("the adapter %s is not what it was, and is not loaded again", name)
                await self.call(Command("unload_adapter", {"lora_name": name}))

    def _adapter_contents(self) -> set[tuple[object, object]]:
        return {(adapter.name, adapter.content_id) for adapter in self.card.adapters}

    async def _run(self, command: Command) -> dict[str, str | int | float | bool | None]:
        match command.name:
            case "reset_prefix_cache":
                blocks = (
                    await self._engine.reset_prefix_cache()
                    if isinstance(self._engine, GenerateEngine)
                    else 0
                )
                return {"blocks": blocks}
            case "probe":
                return {"seconds": await self._engine.probe()}
            case "stats":
                stats: dict[str, str | int | float | bool | None] = msgspec.structs.asdict(
                    self._engine.stats()
                )
                return stats | msgspec.structs.asdict(self._embeds_cache.stats)
            case "load_adapter":
                self._sleeping.check_awake()
                adapter = await self._lending().load(load_request_of(command.arguments))
                return {"content_id": adapter.content_id}
            case "unload_adapter":
                name, seconds = (
                    command.arguments.get("lora_name"),
                    command.arguments.get("drain_timeout"),
                )
                await self._lending().unload(
                    str(name), float(seconds) if isinstance(seconds, int | float) else None
                )
                return {}
            case "list_adapters":
                statuses = [] if self._adapters is None else self._adapters.statuses()
                return {"adapters": msgspec.json.encode(statuses).decode()}
            case "sleep" | "wake_up":
                return await self._sleeping.follow(command)
            case "drain":
                self._draining = True
                return {"requests": len(self._requests.ids)}
            case unknown:
                raise InvalidRequestError(f"a worker knows no command {unknown!r}")


def _refusal(request: Request, error: InlayError) -> Output:
    return Output(
        request.id,
        request.attempt,
        len(request.prior_output),
        finish_reason="error",
        error=ErrorFrame.of(error),
    )


def _no_vectors(request: EmbedRequest, error: InlayError) -> EmbedOutput:
    return EmbedOutput(request.id, request.attempt, Buffer(b""), error=ErrorFrame.of(error))


async def host_of(
    engine: Engine,
    settings: EngineSettings,
    secret: Secret,
    tracing: Tracing | None = None,
    *,
    prompt_embeds: bool = True,
    embeds_cache: EmbedsCache | None = None,
) -> EngineHost:
    """A host for a started engine, with the adapters that its settings name.

    Args:
        engine: started.
        settings: it was made with.
        secret: of the namespace.
        tracing: makes spans, or None.
        prompt_embeds: as of `EngineHost`.
        embeds_cache: as of `EngineHost`.

    Raises:
        InlayError: one of them cannot be loaded.
    """
    library = AdapterLibrary(
        settings.allowed_lora_sources,
        cache_dir=settings.lora_cache_dir,
        cache_bytes=settings.lora_cache_bytes,
        max_bytes=settings.max_lora_bytes,
    )
    adapters = AdapterRegistry(
        engine, library, secret, most=settings.cpu_loras, drain_seconds=settings.lora_drain_timeout
    )
    for order in parse_modules(settings.lora_modules):
        await adapters.load(order)
    return EngineHost(
        engine,
        adapters,
        sleep_mode=settings.enable_sleep_mode,
        probe_interval=settings.health_probe_interval,
        probe_timeout=settings.health_probe_timeout,
        tracing=tracing,
        prompt_embeds=prompt_embeds,
        embeds_cache=embeds_cache,
    )
