"""The adapters of one worker.

One state machine for each, whatever engine runs them and whatever kind they are.

    loading ──> ready ──> draining ──> gone
       └─> gone               └─> failed ──> (unloaded again) draining

An adapter takes requests only while it is ready, and is in the worker's card exactly then; so
nobody can be told of one that is not there. Loading a name twice at once loads it once. To unload,
the name goes first, so that new requests are refused or sent elsewhere; then running requests get
until the deadline, and are aborted; then its memory is freed. What fails on the way in leaves
nothing. What the engine fails to free stays, failed and without a name to be asked by, until it is
unloaded again.

The engine knows an adapter by name and content, so another content may take a name's place while
the first still runs.

One that the namespace has recorded and that cannot be loaded is listed as failed.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from inlay.adapter import LoraFiles, PromptFiles
from inlay.adapter.files import PIPELINE, check_fits, dtype_of, elements, shapes_of
from inlay.adapter.library import Opened
from inlay.base import liveness
from inlay.base.errors import EngineError, InlayError, InvalidRequestError, NotFoundError
from inlay.base.single_flight import SingleFlight
from inlay.engine.api import AdapterEngine, Engine
from inlay.extension import parts
from inlay.messages.card import Adapter
from inlay.messages.commands import AdapterState, AdapterStatus, LoadAdapter
from inlay.messages.digest import Secret, row_digests
from inlay.messages.prompt import Buffer, Prompt, Rows
from inlay.messages.request import Emit, Output, Request, Task
from inlay.tensors.rows import to_rows
from inlay.tensors.tensor import Tensor
from inlay.worker.sleeping import SleepControl

log = logging.getLogger(__name__)

ABORT_SECONDS = 60.0
"""Seconds that an engine may take to end aborted requests; a step may be long."""

MAX_NAME = 256


class Library(Protocol):
    """A source of adapters; `inlay.adapter.library.AdapterLibrary` is one."""

    def open(self, address: str, sha256: str | None = None) -> Opened:
        """The checked files of an adapter; called in a thread."""

    def close(self) -> None:
        """No more is asked of it."""


class AdmittedRequest(NamedTuple):
    """A request as its engine is to see it, and who is told of it.

    `leave` when the engine did not take it.
    """

    request: Request
    emit: Emit
    leave: Callable[[], None]


class _LoadedAdapter:
    """One adapter from the order to its end."""

    def __init__(self, order: LoadAdapter) -> None:
        self.order = order
        self.state: AdapterState = "loading"
        self.adapter: Adapter | None = None
        self.opened: Opened | None = None
        self.rows: Rows | None = None
        self.reason: str | None = None
        self.requests: dict[object, str] = {}
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def key(self) -> str:
        """Its key in the engine."""
        return f"{self.order.name}@{'' if self.adapter is None else self.adapter.content_id}"

    def enter(self, request_id: str) -> Callable[[], None]:
        """Release the adapter when the request has ended; further calls do nothing."""
        stay = object()
        self.requests[stay] = request_id
        self.idle.clear()

        def leave() -> None:
            self.requests.pop(stay, None)
            if not self.requests:
                self.idle.set()

        return leave

    def close(self) -> None:
        if self.opened is not None:
            self.opened.close()

    def status(self) -> AdapterStatus:
        adapter = self.adapter
        if adapter is None:
            return AdapterStatus(name=self.order.name, path=self.order.path, state=self.state)
        return AdapterStatus(
            name=adapter.name,
            path=adapter.path,
            state=self.state,
            kind=adapter.kind,
            content_id=adapter.content_id,
            rank=adapter.rank,
            num_positions=adapter.num_positions,
            running=len(self.requests),
            reason=self.reason,
        )


class AdapterRegistry:
    """Loads, lends and unloads adapters. Everything is called on the engine's event loop.

    Args:
        engine: that runs them.
        library: where they come from.
        secret: of the namespace.
        most: adapters at a time; while one takes another's place there may be one more.
        drain_seconds: what running requests get when their adapter is unloaded.
    """

    def __init__(
        self, engine: Engine, library: Library, secret: Secret, *, most: int, drain_seconds: float
    ) -> None:
        self._engine = engine
        self._library = library
        self._secret = secret
        self._most = most
        self._drain_seconds = drain_seconds
        self._ready: dict[str, _LoadedAdapter] = {}
        self._loading: dict[str, _LoadedAdapter] = {}
        self._loads: SingleFlight[str, Adapter] = SingleFlight(finishes=True)
        self._leaving: dict[_LoadedAdapter, asyncio.Task[None]] = {}
        self._missing: dict[str, AdapterStatus] = {}
        self._changed: Callable[[], None] = lambda: None
        self._sleeping: SleepControl | None = None

    def watch(self, changed: Callable[[], None], sleeping: SleepControl | None = None) -> None:
        """Have `changed` called whenever `ready` has changed; `sleeping` is the engine's."""
        self._changed, self._sleeping = changed, sleeping

    @property
    def ready(self) -> tuple[Adapter, ...]:
        """Those that take requests, for the card."""
        return tuple(held.adapter for held in self._ready.values() if held.adapter is not None)

    def statuses(self) -> list[AdapterStatus]:
        """All of them, whatever their state."""
        every = (*self._ready.values(), *self._loading.values(), *self._leaving)
        return [*(held.status() for held in every), *self._missing.values()]

    async def load(self, order: LoadAdapter) -> Adapter:
        """Load what is ordered. Whoever orders the same again gets the same answer.

        Raises:
            InvalidRequestError: the name is taken, there is no room, or the adapter will not do.
            NotFoundError: no adapter at the address.
            EngineError: the engine failed to load it.
            OverloadedError: the engine sleeps.
        """
        try:
            adapter = await self._load_once(order)
        except InlayError as error:
            if order.recorded:
                self._missing[order.name] = AdapterStatus(
                    name=order.name, path=order.path, state="failed", reason=error.message
                )
            raise
        self._missing.pop(order.name, None)
        return adapter

    async def _load_once(self, order: LoadAdapter) -> Adapter:
        held = self._loading.get(order.name)
        if held is None:
            self._check(order)
            ready = self._ready.get(order.name)
            rereads = order.in_place and not order.recorded
            if ready is not None and ready.order.is_same(order) and not rereads:
                if ready.adapter is None:
                    raise AssertionError("what is ready has been described")
                return ready.adapter
            held = self._loading[order.name] = _LoadedAdapter(order)
        elif not held.order.is_same(order):
            raise InvalidRequestError(
                f"The lora adapter '{order.name}' is being loaded from {held.order.path}",
                param="lora_name",
            )
        return await self._loads.run(order.name, partial(self._load, held))

    async def unload(self, name: str, drain_seconds: float | None = None) -> None:
        """Take an adapter's name away at once, and return when it is gone.

        Args:
            name: of the adapter.
            drain_seconds: what its running requests get; what was set for all unless given.

        Raises:
            NotFoundError: there is none.
            EngineError: it could not be freed.
        """
        if name in self._loading:
            with suppress(InlayError):
                await self.load(self._loading[name].order)
        seconds = self._drain_seconds if drain_seconds is None else drain_seconds
        missing = self._missing.pop(name, None)
        held = self._ready.pop(name, None)
        if held is not None:
            self._changed()
            await asyncio.shield(self._leave(held, seconds))
            return
        leaving = [held for held in self._leaving if held.order.name == name]
        if not leaving and missing is None:
            raise NotFoundError(f"The lora adapter '{name}' cannot be found.", param="lora_name")
        for held in leaving:
            task = self._leave(held, seconds) if held.state == "failed" else self._leaving[held]
            await asyncio.shield(task)

    def enter(self, request: Request, emit: Emit) -> AdmittedRequest:
        """Let a request that names an adapter use it until its last output.

        Raises `NotFoundError`.
        """
        held = self._ready.get(request.adapter or "")
        if held is None:
            raise NotFoundError(
                f"The model `{request.adapter}` does not exist",
                param="model",
                code="model_not_found",
            )
        if held.rows is None:
            seen = msgspec.structs.replace(request, adapter=held.key)
        else:
            prompt = Prompt.of(held.rows, *request.prompt.segments)
            seen = msgspec.structs.replace(request, adapter=None, prompts=(prompt,))

        leave = held.enter(request.id)

        def told(output: Output) -> None:
            if output.finish_reason is not None:
                leave()
            emit(output)

        return AdmittedRequest(seen, told, leave)

    async def close(self) -> None:
        """Stop what is under way; the engine is closed by whoever started it."""
        for task in self._leaving.values():
            task.cancel()
        await asyncio.gather(*self._loads.cancel(), *self._leaving.values(), return_exceptions=True)
        for held in (*self._ready.values(), *self._leaving):
            held.close()
        await asyncio.to_thread(self._library.close)

    def _check(self, order: LoadAdapter) -> None:
        card, name = self._engine.card, order.name
        if not name or len(name) > MAX_NAME or not name.isprintable():
            raise InvalidRequestError(
                f"lora_name has 1 to {MAX_NAME} printable characters, got {name[:80]!r}",
                param="lora_name",
            )
        if not order.path:
            raise InvalidRequestError("lora_path is empty", param="lora_path")
        if name in (card.name, *card.aliases):
            raise InvalidRequestError(
                f"The lora adapter '{name}' conflicts with a served base model.", param="lora_name"
            )
        if order.base_model is not None and order.base_model not in (card.name, *card.aliases):
            raise InvalidRequestError(
                f"The lora adapter '{name}' is for the base model '{order.base_model[:80]}'; this "
                f"worker serves '{card.name}'",
                param="base_model_name",
            )
        ready = self._ready.get(name)
        if ready is not None and ready.order.path != order.path and not order.in_place:
            raise _taken(name)
        count = len(self._ready) + len(self._loading) + len(self._leaving)
        if count >= self._most + (name in self._ready):
            raise InvalidRequestError(
                f"There is room for {self._most} adapters (--max-cpu-loras), and {count} are "
                "loaded or on their way; unload one first",
                param="lora_name",
            )

    async def _load(self, held: _LoadedAdapter) -> Adapter:
        order = held.order
        try:
            opened = held.opened = await asyncio.to_thread(
                self._library.open, order.path, order.sha256
            )
            adapter = _described(order, opened)
            before = self._ready.get(order.name)
            if (
                before is not None
                and before.adapter is not None
                and before.adapter.content_id == adapter.content_id
            ):
                held.close()
                before.order = order
                return before.adapter
            if before is not None and not order.in_place:
                raise _taken(order.name)
            held.adapter = adapter
            if isinstance(opened.files, PromptFiles):
                if Task.GENERATE not in self._engine.card.tasks:
                    raise InvalidRequestError("trained prompts are for language models")
                held.rows = await asyncio.to_thread(self._rows, opened.files)
            else:
                await asyncio.to_thread(self._check_fits, opened)
                # Reading the files may have taken long.
                async with self._turn(awake=True):
                    await self._into_engine(held, adapter, opened)
        except BaseException:
            held.close()
            raise
        finally:
            del self._loading[order.name]
        # Nothing waits from here on: the name goes from one to the other at once.
        before = self._ready.get(order.name)
        held.state = "ready"
        self._ready[order.name] = held
        self._changed()
        log.info("loaded adapter %r from %s", order.name, order.path)
        if before is not None:
            self._leave(before, self._drain_seconds)
        return adapter

    def _check_fits(self, opened: Opened) -> None:
        """Hold a LoRA against the checkpoint; not every engine looks before it copies."""
        if isinstance(opened.files, LoraFiles):
            check_fits(opened.files, shapes_of(Path(self._engine.card.path)))

    @asynccontextmanager
    async def _turn(self, *, awake: bool = False) -> AsyncIterator[None]:
        """Keep the engine from falling asleep and from waking.

        Raises `OverloadedError` if it sleeps and is to be `awake`.
        """
        if self._sleeping is None:
            yield
            return
        async with self._sleeping.turn:
            if awake:
                self._sleeping.check_awake()
            yield

    async def _into_engine(self, held: _LoadedAdapter, adapter: Adapter, opened: Opened) -> None:
        engine = self._engine
        for _, check in parts("adapters"):
            check(engine.card)
        if PIPELINE in opened.files.names and Task.STAGE not in engine.card.tasks:
            raise InvalidRequestError(
                f"the adapter is of an image pipeline ({PIPELINE}); `{engine.card.name}` is none"
            )
        if not isinstance(engine, AdapterEngine):
            raise InvalidRequestError(
                f"the engine {engine.card.engine} takes no LoRA adapters, only trained prompts"
            )
        inner = msgspec.structs.replace(adapter, name=held.key)
        try:
            await engine.load_adapter(inner, str(opened.files.directory))
        except (InvalidRequestError, NotFoundError):
            raise
        except BaseException as error:
            # Whether any of it is there is not known.
            with suppress(NotFoundError, InvalidRequestError):
                await asyncio.shield(engine.unload_adapter(held.key))
            if isinstance(error, Exception) and not isinstance(error, InlayError):
                log.exception("the engine failed to load adapter %r", adapter.name)
                raise EngineError(
                    f"the engine failed to load the adapter: {type(error).__name__}"
                ) from error
            raise

    def _rows(self, files: PromptFiles) -> Rows:
        card = self._engine.card
        if card.prompt_embeds is not None:
            raise InvalidRequestError(f"this model takes no trained prompts: {card.prompt_embeds}")
        data = Buffer(elements(files.rows).tobytes())
        tensor = Tensor(data, dtype_of(files.rows), files.rows.shape, "safetensors")
        rows = to_rows(
            tensor,
            hidden_size=card.hidden_size,
            dtype=card.dtype,
            max_abs=card.limits.max_prompt_embeds_abs,
        )
        room = card.limits.max_model_len
        if len(rows) >= room:
            raise InvalidRequestError(
                f"the adapter's {len(rows)} rows leave no room for a prompt in a maximum context "
                f"length of {room}"
            )
        return msgspec.structs.replace(rows, digests=row_digests(rows, self._secret))

    def _leave(self, held: _LoadedAdapter, seconds: float) -> asyncio.Task[None]:
        held.state, held.reason = "draining", None
        task = self._leaving[held] = asyncio.create_task(self._drain(held, seconds))
        task.add_done_callback(_heard)
        return task

    async def _drain(self, held: _LoadedAdapter, seconds: float) -> None:
        try:
            await self._empty(held, seconds)
            if held.rows is None and isinstance(self._engine, AdapterEngine):
                async with self._turn():
                    await self._engine.unload_adapter(held.key)
        except Exception as error:
            held.state = "failed"
            held.reason = error.message if isinstance(error, InlayError) else type(error).__name__
            log.exception("adapter %r could not be unloaded", held.order.name)
            raise EngineError(
                f"the adapter '{held.order.name}' takes no requests any more, and could not be "
                f"freed: {held.reason}; unload it again"
            ) from error
        del self._leaving[held]
        held.close()
        log.info("unloaded adapter %r", held.order.name)

    async def _empty(self, held: _LoadedAdapter, seconds: float) -> None:
        """Return when no request uses an adapter.

        Those that still do after `seconds` are aborted.
        """
        if not held.requests:
            return
        with suppress(TimeoutError):
            async with liveness.timeout(seconds):
                await held.idle.wait()
            return
        log.warning(
            "adapter %r is unloaded: aborting %d requests", held.order.name, len(held.requests)
        )
        for request_id in tuple(held.requests.values()):
            self._engine.abort(request_id)
        try:
            async with liveness.timeout(ABORT_SECONDS):
                await held.idle.wait()
        except TimeoutError:
            raise EngineError(
                f"{len(held.requests)} aborted requests did not end within {ABORT_SECONDS:g} s"
            ) from None


def _taken(name: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in "
        "place, set 'load_inplace' to True.",
        param="lora_name",
    )


def _described(order: LoadAdapter, opened: Opened) -> Adapter:
    files = opened.files
    if isinstance(files, LoraFiles):
        return Adapter(
            name=order.name,
            content_id=opened.content_id,
            path=order.path,
            kind="lora",
            rank=files.rank,
        )
    return Adapter(
        name=order.name,
        content_id=opened.content_id,
        path=order.path,
        kind="prompt",
        num_positions=files.config.num_positions,
    )


def _heard(task: "asyncio.Task[None]") -> None:
    """An error that nobody waits for any more has been logged where it came from."""
    if not task.cancelled():
        task.exception()
