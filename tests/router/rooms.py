"""Engines that do one phase of a request alone, and meet over TCP as SGLang's servers do.

The prefill engine listens, and gives a prompt's first token to whoever asks for its room; its
request ends then. The decode engine asks, takes that token as its own, and goes on.
"""

import asyncio
from collections.abc import Awaitable, Callable

from msgspec.structs import replace

from inlay.base.address import KvRoom
from inlay.base.errors import KV_LOST, DeadlineExceededError, InlayError, OverloadedError
from inlay.engine.api import GenerateEngine
from inlay.messages.card import ModelCard, Stats
from inlay.messages.request import Emit, Output, Request, TokenLogprobs

_FORM = "met-over-tcp"


class Half:
    """One phase of an engine.

    Attributes:
        seen: requests, as they came.
        held: while unset, prompts are not computed.
        refuse: an error to answer a request with, or None.
    """

    def __init__(self, inner: GenerateEngine, phase: str, form: str = _FORM) -> None:
        self._inner = inner
        self._phase = phase
        self._form = form
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._rooms: dict[int, asyncio.Future[Output]] = {}
        self._fetched: dict[int, asyncio.Event] = {}
        self._server: asyncio.Server | None = None
        self._bootstrap: tuple[str, int] | None = None
        self.seen: list[Request] = []
        self.held = asyncio.Event()
        self.held.set()
        self.refuse: Callable[[Request], InlayError | None] = lambda request: None

    @property
    def card(self) -> ModelCard:
        return replace(
            self._inner.card, phase=self._phase, kv_rooms=self._form, bootstrap=self._bootstrap
        )

    @property
    def idle(self) -> bool:
        """Whether nothing of any request is left."""
        return not (self._tasks or self._rooms or self._fetched or self._inner.stats().running)

    async def start(self) -> None:
        await self._inner.start()
        if self._phase == "prefill":
            self._server = await asyncio.start_server(self._give, "127.0.0.1", 0)
            host, port = self._server.sockets[0].getsockname()
            self._bootstrap = (host, port)

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await self.stop_listening()
        await self._inner.close()

    async def stop_listening(self) -> None:
        """Answer nobody any more; requests are still taken."""
        if self._server is not None:
            self._server.close()

    def submit(self, request: Request, emit: Emit) -> None:
        self.seen.append(request)
        room = request.kv_room
        assert room is not None, "a half was sent a whole request"
        run = self._prefill if self._phase == "prefill" else self._decode
        task = asyncio.create_task(self._within(request, emit, run))
        self._tasks[request.id] = task

        def done(task: asyncio.Task[None]) -> None:
            # One that is cancelled before it begins runs none of its code.
            if task.cancelled():
                emit(request.end("abort"))
            if self._tasks.get(request.id) is task:
                del self._tasks[request.id]
            self._rooms.pop(room.number, None)
            self._fetched.pop(room.number, None)

        task.add_done_callback(done)

    async def _within(
        self, request: Request, emit: Emit, run: Callable[[Request, Emit], Awaitable[None]]
    ) -> None:
        try:
            async with asyncio.timeout(request.deadline):
                await run(request, emit)
        except TimeoutError:
            emit(request.end("error", DeadlineExceededError("the request's deadline passed")))
        except InlayError as error:
            emit(request.end("error", error))
        finally:
            self._inner.abort(request.id)

    async def _prefill(self, request: Request, emit: Emit) -> None:
        room = request.kv_room
        assert room is not None
        computed = self._rooms.setdefault(room.number, asyncio.get_running_loop().create_future())
        fetched = self._fetched.setdefault(room.number, asyncio.Event())
        await self.held.wait()
        if (error := self.refuse(request)) is not None:
            raise error
        last = await self._run(request, lambda output: None)
        computed.set_result(last)
        await fetched.wait()
        emit(last)

    async def _give(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = int(await reader.readline())
        # Either may come first.
        loop = asyncio.get_running_loop()
        computed = self._rooms.setdefault(number, loop.create_future())
        left = asyncio.create_task(reader.read())
        try:
            await asyncio.wait((computed, left), return_when=asyncio.FIRST_COMPLETED)
            if computed.done() and not computed.cancelled():
                writer.write(_said(computed.result()))
                await writer.drain()
                self._fetched[number].set()
        finally:
            left.cancel()
            writer.close()
            if number not in self._fetched:
                self._rooms.pop(number, None)

    async def _decode(self, request: Request, emit: Emit) -> None:
        room = request.kv_room
        assert room is not None
        if (error := self.refuse(request)) is not None:
            raise error
        line = await _first_token(room)
        if not line:
            raise OverloadedError("nothing came", reason=KV_LOST, retry_after=1)
        id_, at = int(line[0]), len(request.prior_output)
        logprobs: tuple[TokenLogprobs, ...] = ()
        if len(line) > 1:
            pairs = (part.decode().split(":") for part in line[2:])
            top = tuple((int(token), float(value)) for token, value in pairs)
            logprobs = (TokenLogprobs(float(line[1]), top),)
        emit(Output(request.id, request.attempt, at, (id_,), logprobs))
        rest = replace(request, prior_output=(*request.prior_output, id_))
        emit(await self._run(rest, emit))

    async def _run(self, request: Request, emit: Emit) -> Output:
        """Have the engine run a request; its last output, which is not emitted."""
        last: asyncio.Future[Output] = asyncio.get_running_loop().create_future()

        def told(output: Output) -> None:
            if output.finish_reason is None:
                emit(output)
            elif not last.done():
                last.set_result(output)

        self._inner.submit(request, told)
        return await last

    def abort(self, request_id: str) -> None:
        if request_id in self._tasks:
            self._tasks[request_id].cancel()

    async def reset_prefix_cache(self) -> int:
        return await self._inner.reset_prefix_cache()

    async def probe(self) -> float:
        return await self._inner.probe()

    def stats(self) -> Stats:
        return self._inner.stats()


def _said(last: Output) -> bytes:
    """A first token and its logprobs."""
    scored = [str(one.logprob) for one in last.logprobs]
    tops = [f"{id_}:{value}" for one in last.logprobs for id_, value in one.top]
    return f"{' '.join([str(last.token_ids[0]), *scored, *tops])}\n".encode()


async def _first_token(room: KvRoom) -> list[bytes]:
    """Return what a prefill engine gives in a room; nothing where it is gone."""
    try:
        reader, writer = await asyncio.open_connection(room.host, room.port)
    except OSError:
        return []
    try:
        writer.write(f"{room.number}\n".encode())
        return (await reader.readline()).split()
    except OSError:
        return []
    finally:
        writer.close()
