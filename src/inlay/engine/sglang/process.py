"""SGLang's processes: each request is an asynchronous iterator of answers."""

import asyncio
import atexit
import gc
import multiprocessing
import signal
import threading
from collections.abc import AsyncIterator
from typing import Any

import zmq
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.utils import kill_process_tree

from inlay.base.errors import EngineError, InlayError, InvalidRequestError

_DIED = "SGLang's engine process died"


class Process:
    """SGLang's engine. When a process of it dies all requests end with errors, `failed` returns.

    Its client would take SIGTERM for itself, and end this process and all below it when a child
    fails. Here it does neither.
    """

    def __init__(self) -> None:
        self._engine: Any = None
        self._failure: asyncio.Future[EngineError] | None = None
        self._reading: asyncio.Task[None] | None = None

    @property
    def client(self) -> Any:
        """SGLang's `TokenizerManager`.

        Raises `EngineError` before it is started, and once it has died.
        """
        if self._engine is None or self._failure is None:
            raise EngineError("the engine is not started")
        if self._failure.done():
            raise self._failure.result()
        return self._engine.tokenizer_manager

    @property
    def facts(self) -> dict[str, Any]:
        """The facts that its scheduler reports."""
        facts: dict[str, Any] = self._engine._scheduler_init_result.scheduler_infos[0]
        return facts

    async def start(self, arguments: Any) -> None:
        """Start SGLang's processes and load the model.

        Raises:
            InvalidRequestError: SGLang refuses the model or its settings.
            EngineError: it did not start.
        """
        loop = asyncio.get_running_loop()
        self._failure = loop.create_future()
        if threading.current_thread() is threading.main_thread():
            # SGLang's processes send it to their parent when they fail.
            loop.add_signal_handler(signal.SIGQUIT, self._die)
        try:
            self._engine = await asyncio.to_thread(_started, arguments)
        except (ValueError, NotImplementedError) as error:
            raise InvalidRequestError(
                f"SGLang refuses the model or its settings: {error}"
            ) from error
        except InlayError:
            raise
        except Exception as error:
            raise EngineError(
                f"SGLang did not start; its own output above says why: {type(error).__name__}: "
                f"{error}"
            ) from error
        client = self._engine.tokenizer_manager
        # As its `auto_create_handle_loop`, without the signals.
        client.event_loop = loop
        self._reading = loop.create_task(client.handle_loop())
        self._reading.add_done_callback(lambda _: self._die())

    def _die(self) -> None:
        if self._failure is not None and not self._failure.done():
            self._failure.set_result(EngineError(_DIED))

    async def max_running_requests(self) -> int:
        """Requests that SGLang runs at a time, as it has settled it by its memory."""
        states = await self.client.get_internal_state()
        return sum(int(state["effective_max_running_requests_per_dp"]) for state in states)

    async def answers(
        self, request: Any, stop: "asyncio.Future[None] | None" = None
    ) -> AsyncIterator[dict[str, Any]]:
        """SGLang's answers to `request`, up to when `stop` is done; closing the iterator aborts it.

        Raises `EngineError` when SGLang dies meanwhile.
        """
        saying = self.client.generate_request(request, None)
        failing = asyncio.ensure_future(self.failed())
        ends = (failing,) if stop is None else (failing, stop)
        step: asyncio.Future[Any] | None = None
        try:
            while True:
                step = asyncio.ensure_future(anext(saying, None))
                await asyncio.wait((step, *ends), return_when=asyncio.FIRST_COMPLETED)
                if not step.done():
                    if failing.done():
                        raise failing.result()
                    return
                answer = step.result()
                if answer is None:
                    return
                yield answer
        finally:
            failing.cancel()
            if step is not None and not step.done():
                step.cancel()
                await asyncio.wait((step,))
            await saying.aclose()

    def abort(self, request_id: str) -> None:
        """Stop a request. SGLang matches prefixes: ids must be of one length."""
        if self._failure is not None and not self._failure.done():
            self._engine.tokenizer_manager.abort_request(rid=request_id)

    @property
    def process_ids(self) -> frozenset[int]:
        """Those of its processes."""
        return frozenset(self._engine.get_all_child_pids())

    async def forget_cache(self) -> None:
        """Clear the radix cache, once no request is under way."""
        answer = await self.client.flush_cache(timeout_s=30.0)
        if not answer.success:
            raise EngineError(f"SGLang did not empty its cache: {answer.message}")

    async def failed(self) -> EngineError:
        """Return why, once SGLang has died."""
        if self._failure is None:
            raise EngineError("the engine is not started")
        return await asyncio.shield(self._failure)

    async def close(self) -> None:
        """End SGLang's processes."""
        if self._engine is None:
            return
        engine, self._engine = self._engine, None
        if self._failure is not None and not self._failure.done():
            self._failure.set_result(EngineError("the engine is closing"))
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        await asyncio.to_thread(_end, engine)
        for socket in (engine.tokenizer_manager.recv_from_detokenizer, engine.send_to_rpc):
            # With all sockets of it, which are left open otherwise.
            socket.context.destroy(linger=0)


def _started(arguments: Any) -> Any:
    """Return a started `Engine`.

    One that fails leaves no process and no socket: SGLang itself leaves some of both.
    """
    before, contexts = set(multiprocessing.active_children()), set(open_contexts())
    try:
        return Engine(server_args=arguments)
    except BaseException:
        for child in set(multiprocessing.active_children()) - before:
            kill_process_tree(child.pid, wait_timeout=60)
            child.join()
        # What is left of its client is garbage in a cycle. If a collection found a context there
        # before its sockets, it would wait for them to be closed, and never return.
        for context in set(open_contexts()) - contexts:
            context.destroy(linger=0)
        raise


def open_contexts() -> list[zmq.Context[Any]]:
    """Return ZeroMQ's contexts of this process that are not closed."""
    found = (each for each in gc.get_objects() if isinstance(each, zmq.Context))
    return [context for context in found if not context.closed]


def _end(engine: Any) -> None:
    """End its processes. Its own `shutdown` ends all below this one, others' too."""
    atexit.unregister(engine.shutdown)
    watchdog = engine.tokenizer_manager._subprocess_watchdog
    if watchdog is not None:
        # Otherwise it takes their end for their death.
        watchdog.stop()
    for pid in engine.get_all_child_pids():
        kill_process_tree(pid, wait_timeout=60)
