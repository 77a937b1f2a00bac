"""`TorchEngine`: the engine protocols over `Core`, which runs in a thread of its own."""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from inlay.base.errors import EngineError, InlayError, InvalidRequestError, OverloadedError
from inlay.engine.admission import Admission
from inlay.engine.api import PeerWorkers
from inlay.engine.probe import probe
from inlay.engine.settings import EngineSettings
from inlay.engine.torch.adapters import bank_of, read_lows
from inlay.engine.torch.cache_events import CacheEventQueue
from inlay.engine.torch.failures import engine_failed
from inlay.engine.torch.grammar.grammars import Grammars
from inlay.engine.torch.grammar.provider import GrammarProvider
from inlay.engine.torch.loading import admission_of, card_of, core_of, exchange_of
from inlay.engine.torch.media.encode_requests import EncodeRequests
from inlay.engine.torch.media.encoder import TowerEncoder
from inlay.engine.torch.media.loading import encoder_of
from inlay.engine.torch.media.provider import MediaProvider
from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.needs import GRAMMAR, PAGES, Need, Needs, Result
from inlay.engine.torch.pages.exchange import PageExchange
from inlay.engine.torch.receiver import Receivers, admit, reject, reply_to, resolve
from inlay.engine.torch.sleep import TAGS, SleepState, add_stats, give_back
from inlay.engine.torch.step import Core
from inlay.engine.torch.tensor_parallel.launch import load
from inlay.messages.card import Adapter, ModelCard, Stats
from inlay.messages.digest import Secret
from inlay.messages.request import Emit, Output, Request, Task
from inlay.messages.routing import KvEvent

log = logging.getLogger(__name__)

_T = TypeVar("_T")


class TorchEngine:
    """A transformers model with paged attention and continuous batching, in this process.

    Calls on the event loop queue commands, which the engine's thread executes between steps. The
    outputs of a step return to the loop in one call. If a whole step fails, every request ends with
    an error and the engine refuses all later ones: its worker must be restarted.
    """

    def __init__(self, settings: EngineSettings, secret: Secret) -> None:
        self._settings = settings
        self._secret = secret
        self._commands: deque[Callable[[Core], Iterable[Output]]] = deque()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing = False
        self._failure: InlayError | None = None
        self._failing = asyncio.Event()
        self._card: ModelCard | None = None
        self._admission: Admission | None = None
        self._receivers = Receivers(self._ended, self.abort)
        self._needs = Needs(self._met)
        self._grammars: GrammarProvider | None = None
        self._media: MediaProvider | None = None
        self._encodes: EncodeRequests | None = None
        self._peers: PeerWorkers | None = None
        self._exchange: PageExchange | None = None
        self._host_memory: int | None = None
        self._asked: set[asyncio.Future[Any]] = set()
        self._model: CausalModel | None = None
        self._sleep_state: SleepState[CausalModel] | None = None
        self._held: dict[str, tuple[Adapter, str]] = {}
        self._before = Stats()
        self._stats = Stats()
        self._events = CacheEventQueue(settings, secret)

    # On the event loop

    @property
    def card(self) -> ModelCard:
        """Metadata of the served model. Raises `EngineError` before the start."""
        if self._card is None:
            raise EngineError("the engine is not started")
        return self._card

    async def start(self) -> None:
        """Load the model and allocate the pages.

        Raises:
            InvalidRequestError: an unsupported model or setting.
            EngineError: the model could not be loaded, or does not fit.
        """
        if self._thread is not None:
            raise EngineError("the engine was started before")
        self._loop = asyncio.get_running_loop()
        self._events.open()
        await self._begin(self._loop)

    async def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        ready: asyncio.Future[None] = loop.create_future()
        self._thread = threading.Thread(
            target=self._run, args=(ready,), name="inlay-engine", daemon=True
        )
        self._thread.start()
        await ready

    def watch_blocks(self, tell: Callable[[tuple[KvEvent, ...]], None]) -> bool:
        """Call `tell` with every change of the prefix cache, in order, on the event loop."""
        self._events.watch(lambda events: self._call(partial(tell, events)))
        return True

    async def close(self) -> None:
        """End every request with "abort", stop the thread and release the model."""
        self._closing = True
        self._needs.stop_all()
        if self._grammars is not None:
            self._grammars.close()
        self._receivers.deliver(self._receivers.aborted_prefetches())
        await self._end()
        # The thread may have asked for more before it ended.
        self._needs.stop_all()
        if self._exchange is not None:
            await self._exchange.close()
        self._events.close()

    async def _end(self) -> None:
        """Stop the thread, which ends every request."""
        self._closing = True
        self._wake.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        if self._encodes is not None:
            self._encodes.shell.abort_all()
        if self._media is not None:
            self._stats = self._now()
            self._needs.stop_all()
            await self._media.encoder.close()
            self._media = None

    def check_sleep(self, level: int) -> None:
        """Accept every level."""

    async def sleep(self, level: int) -> None:
        """Release all memory of model and cache.

        Level 1 keeps the weights of a GPU in host memory.

        Raises:
            EngineError: the engine is not running, or it has requests.
        """
        if self._sleep_state is None:
            if running := len(self._receivers) + (len(self._encodes.shell) if self._encodes else 0):
                raise EngineError(f"{running} requests are under way")
            for name in self._held:
                await self._ask(partial(Core.remove_adapter, name=name))
            await self._end()
            self._before, self._stats = add_stats(self._before, self._stats), Stats()
            self._sleep_state = SleepState(
                partial(CausalModel.load, self._settings), self.card.weights_id
            )
        elif level == 1:
            return
        if self._exchange is not None:
            await self._exchange.rest()
        model, self._model, self._admission = self._model, None, None
        if model is not None:
            model.forget_workspace()
        await asyncio.to_thread(self._sleep_state.offload, [model], level)

    async def wake_up(self, tags: Sequence[str]) -> bool:
        """Restore the parts in `tags`, all if none.

        The cache is allocated once the weights are restored too. Returns True if fully awake.

        Raises:
            InvalidRequestError: the checkpoint cannot be loaded any more, or has changed; the
                engine stays asleep.
            EngineError: there is not enough memory any more; the engine stays asleep.
        """
        if self._sleep_state is None:
            return True
        if self._loop is None or not await asyncio.to_thread(
            self._sleep_state.restore, tags or TAGS
        ):
            return False
        self._closing = False
        try:
            await self._begin(self._loop)
        except InlayError:
            self._closing = True
            raise
        self._sleep_state = None
        for adapter, directory in tuple(self._held.values()):
            await self.load_adapter(adapter, directory)
        return True

    def submit(self, request: Request, emit: Emit) -> None:
        """Admit `request`.

        Raises:
            InvalidRequestError: it can never run here.
            EngineError: the engine has failed, or is not started.
            OverloadedError: the engine is closing.
        """
        if self._admission is None:
            raise self._absent()
        if self._failure is not None:
            raise self._failure
        if self._closing:
            raise OverloadedError("the engine is closing")
        if request.id in self._receivers:
            raise InvalidRequestError(f"a request with id {request.id!r} is under way")
        if request.task is Task.ENCODE and self._encodes is not None:
            self._encodes.submit(request, emit)
            return
        self._admission.check(request)
        expires = None if request.deadline is None else time.monotonic() + request.deadline
        receiver = self._receivers.add(request, emit, expires)
        needs = []
        if self._exchange is not None and self._exchange.may_bring(request):
            needs.append(PAGES)
        if request.prefetch:
            if not needs:
                self._receivers.deliver([request.end("stop")])
        else:
            if request.sampling.grammar is not None:
                needs.append(GRAMMAR)
            self._send(partial(admit, receiver, tuple(needs)))
        for need in needs:
            self._needs.ask(request, need)

    def _met(self, request_id: str, need: Need, result: Result) -> None:
        """Tell the core what was brought. Of a prefetch, that is all there is to it."""
        request = self._receivers[request_id].request
        if request.prefetch:
            self._receivers.deliver([request.end("stop")])
        else:
            self._send(lambda core: core.fulfil(request_id, need, result))

    def _asked_for(self, request_id: str, need: Need) -> None:
        """Have brought what the core found missing."""
        if request_id in self._receivers:
            self._needs.ask(self._receivers[request_id].request, need)

    def give_pages(self, request: Request, emit: Emit) -> None:
        if self._exchange is None:
            raise InvalidRequestError("this worker gives no pages: see --enable-kv-fetch")
        self._exchange.give(request, emit)

    def use_peers(self, peers: PeerWorkers) -> None:
        self._peers = peers
        for provider in (self._exchange, self._media):
            if provider is not None:
                provider.peers = peers

    def use_host_memory(self, fd: int) -> None:
        self._host_memory = fd

    def abort(self, request_id: str) -> None:
        """End a request before the next step."""
        if request_id in self._receivers:
            receiver = self._receivers[request_id]
            if receiver.request.prefetch:
                self._receivers.deliver([receiver.aborted()])
            else:
                self._needs.stop(request_id)
                self._send(lambda core: core.abort(request_id))
        else:
            if self._exchange is not None:
                self._exchange.stop_giving(request_id)
            if self._encodes is not None:
                self._encodes.shell.abort(request_id)

    def pause(self, request_id: str, paused: bool) -> None:
        self._send(lambda core: core.pause(request_id, paused))

    async def failed(self) -> InlayError:
        """Wait until a step fails as a whole; return the error."""
        while self._failure is None:
            await self._failing.wait()
        return self._failure

    async def reset_prefix_cache(self) -> int:
        """Evict every cached page that no request uses; return their number.

        What was kept of evicted ones is forgotten too. Raises `EngineError` if the engine is not
        running.
        """
        count = await self._ask(Core.reset_prefix_cache)
        if self._exchange is not None:
            await self._exchange.forget()
        return count

    async def load_adapter(self, adapter: Adapter, directory: str) -> None:
        """Make a LoRA usable by requests that name it; all or nothing.

        Raises:
            InvalidRequestError: adapters are disabled, there is no room, or this one does not fit
                the model.
            EngineError: the engine is not running.
        """
        if self._model is None:
            raise self._absent()
        model = self._model
        pinned = model.device.type == "cuda"
        lows = await asyncio.to_thread(
            read_lows, directory, bank_of(model.lora), model.dtype, pinned=pinned
        )
        await self._ask(lambda core: core.adapters.put(adapter.name, adapter.content_id, lows))
        self._held[adapter.name] = adapter, directory

    async def unload_adapter(self, name: str) -> None:
        """Free an adapter.

        Raises `NotFoundError` if it is not loaded, `EngineError` if a request uses it.
        """
        if self._sleep_state is None:
            await self._ask(lambda core: core.remove_adapter(name))
        self._held.pop(name, None)

    def _absent(self) -> InlayError:
        if self._sleep_state is None:
            return EngineError("the engine is not started")
        return OverloadedError("the engine is asleep", retry_after=1)

    async def _ask(self, question: Callable[[Core], _T]) -> _T:
        """Call `question` between two steps and return its result.

        Raises its error, or `EngineError` if the engine is not running.
        """
        if self._loop is None or self._failure is not None or self._closing:
            raise self._failure or EngineError("the engine is not running")
        done: asyncio.Future[_T] = self._loop.create_future()
        self._asked.add(done)
        self._send(reply_to(question, done, self._call))
        try:
            return await done
        finally:
            self._asked.discard(done)

    @property
    def encoder(self) -> TowerEncoder | None:
        """The encoder of images; None while asleep, or if the model takes none."""
        return None if self._media is None else self._media.encoder

    async def probe(self) -> float:
        """Run one token through the model before all waiting requests; return the seconds it took.

        Raises:
            EngineError: the engine has failed.
        """
        return await probe(self)

    def stats(self) -> Stats:
        """Return the counters after the last step."""
        stats = add_stats(self._before, self._now())
        return stats if self._exchange is None else self._exchange.counted(stats)

    def _now(self) -> Stats:
        """Return the counters since the engine last woke."""
        return self._stats if self.encoder is None else self.encoder.counted(self._stats)

    def _send(self, command: Callable[[Core], Iterable[Output]]) -> None:
        self._commands.append(command)
        self._wake.set()

    def _ended(self, request_id: str) -> None:
        if request_id in self._needs.unmet:
            self._needs.stop(request_id)

    # In the engine's thread

    def _run(self, ready: "asyncio.Future[None]") -> None:
        with ExitStack() as undo:
            self._serve(ready, undo)

    def _serve(self, ready: "asyncio.Future[None]", undo: ExitStack) -> None:
        try:
            core = self._load(undo)
        except InlayError as error:
            self._call(partial(reject, ready, error))
            return
        except Exception as error:
            log.exception("the engine did not start")
            cause = EngineError(f"the model could not be loaded: {type(error).__name__}: {error}")
            self._call(partial(reject, ready, cause))
            return
        self._stats = core.stats()
        self._call(partial(resolve, ready, None))
        try:
            while not self._closing:
                self._turn(core)
            self._post([*self._read(core), *core.abort_all()])
        except Exception as error:
            log.exception("the engine failed")
            self._fail(core, engine_failed(error))
        finally:
            core.close()
            self._events.end()

    def _turn(self, core: Core) -> None:
        self._wake.clear()
        # Posted before the step: if the step fails, they must not be lost.
        self._post([*self._read(core), *core.expire(time.monotonic())])
        began, before = time.monotonic(), self._stats.progress
        outputs = core.step()
        self._stats = core.stats()
        if self._exchange is not None:
            computed = self._stats.progress - before
            self._exchange.stepped(computed, time.monotonic() - began, self._call)
        self._post(outputs)
        if self._events.changes:
            self._events.flush()
        rest = core.rest(time.monotonic())
        if rest != 0 and not self._commands:
            self._wake.wait(rest)

    def _read(self, core: Core) -> list[Output]:
        outputs: list[Output] = []
        while self._commands:
            outputs.extend(self._commands.popleft()(core))
        return outputs

    def _fail(self, core: Core, error: InlayError) -> None:
        """End all requests with `error`, those with queued commands too."""
        self._post(core.fail_all(error))
        self._call(partial(self._refuse, error))

    def _refuse(self, error: InlayError) -> None:
        """On the event loop, after the last outputs: end requests the thread never saw."""
        self._failure = error
        self._failing.set()
        self._needs.stop_all()
        if self._exchange is not None:
            self._exchange.stop_all_giving()
        self._receivers.fail_all(error)
        for done in self._asked:
            reject(done, error)

    def _post(self, outputs: list[Output]) -> None:
        if outputs:
            self._call(partial(self._receivers.deliver, outputs))

    def _call(self, function: Callable[[], object]) -> None:
        if self._loop is None:
            raise EngineError("the engine has no event loop")
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:
            # The loop was closed without `close`: there is no receiver left.
            log.warning("the event loop closed while the engine was running")
            self._closing = True

    def _load(self, undo: ExitStack) -> Core:
        settings = self._settings
        asleep = self._sleep_state
        model = load(settings, undo) if asleep is None else asleep.model()
        # What loading and its check have freed, before pages are made of what is left.
        give_back()
        blocks = None if self._card is None else self._card.num_blocks
        core = core_of(
            settings,
            model,
            self._secret,
            self._events,
            num_blocks=blocks,
            ask=lambda request_id, need: self._call(partial(self._asked_for, request_id, need)),
        )
        self._model = model
        encoder = encoder_of(settings, model)
        if encoder is not None:
            self._media = self._needs.providers["rows"] = MediaProvider(encoder, self._peers)
        if self._card is None:
            grammars = Grammars(Path(model.path), model.vocab_size, model.eos_token_ids)
            self._grammars = self._needs.providers["grammar"] = GrammarProvider(grammars)
            self._card = card_of(settings, core, self._secret, encoder)
        if settings.moves_kv:
            self._exchange = self._exchange or exchange_of(
                settings, core, self._secret, self._ask, self._host_memory
            )
            self._exchange.peers = self._peers
            self._needs.providers["pages"] = self._exchange
            if self._exchange.tiers is not None:
                core.cached.offload_to(self._exchange.tiers)
        self._admission = admission_of(settings.limits, core, encoder)
        encodes = encoder is not None and encoder.is_local
        self._encodes = EncodeRequests(encoder, self._admission) if encoder and encodes else None
        return core
