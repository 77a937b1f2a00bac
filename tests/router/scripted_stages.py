"""Workers of a pipeline that follow a script, behind real hosts; for tests of the walk."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from hashlib import blake2b

from msgspec.structs import replace

from inlay.base.address import Address
from inlay.base.errors import EngineError, InlayError, OverloadedError
from inlay.engine.api import Engine
from inlay.messages.card import ModelCard, Stats
from inlay.messages.outputs import payloads_of
from inlay.messages.prompt import Buffer
from inlay.messages.request import Emit, Input, Output, Payload, Request, Task
from inlay.router import Router
from inlay.router.settings import RouterSettings
from inlay.transport.output_queue import OutputQueue
from inlay.worker.host import EngineHost
from inlay_stages.cards import StageCard
from inlay_stages.graph import Graph, Stage
from inlay_stages.params import Diffusion
from inlay_stages.worker.input_fetcher import InputFetcher
from inlay_stages.worker.input_stream import InputStream
from inlay_stages.worker.part import StagePart
from inlay_stages.worker.payload_store import PayloadStore
from tests.router.standing import CARD
from tests.transport.direct import DirectPlane


def kept_by(host: EngineHost) -> PayloadStore:
    (part,) = host.parts
    assert isinstance(part, StagePart)
    return part.held


def fetched_by(host: EngineHost) -> InputFetcher | None:
    (part,) = host.parts
    assert isinstance(part, StagePart)
    return part.leased


GRAPH = Graph(
    name="painter",
    stages={
        name: Stage(kind=kind, model="m")
        for name, kind in (("reader", "encode"), ("denoiser", "denoise"), ("decoder", "decode"))
    },
    edges=["reader.embeds -> denoiser.embeds", "denoiser.latents -> decoder.latents"],
    inputs={"prompt": "reader.prompt"},
    outputs={"image": "decoder.image", "preview": "decoder.preview"},
)
SPEAKER = Graph(
    name="speaker",
    stages={
        name: Stage(kind=kind, model="m")
        for name, kind in (("thinker", "generate"), ("talker", "talk"), ("vocoder", "vocode"))
    },
    edges=["thinker.states -> talker.states", "talker.codes -> vocoder.codes"],
    inputs={"prompt": "thinker.prompt"},
    outputs={"text": "thinker.text", "audio": "vocoder.audio"},
)
FILED = replace(SPEAKER, outputs=SPEAKER.outputs | {"audio": "vocoder.file"})
"""The same, whose sound is a file that the last stage makes."""
STREAMED = {"thinker": "hidden_states", "talker": "codes", "vocoder": "audio"}
"""Ports of the stages that give streams: a payload for each that they take, and one at the end."""
ITEMS = 24
"""Payloads of the first of them."""
PORTS = {
    "reader": ("embeds.a", "embeds.b"),
    "denoiser": ("latents",),
    "decoder": ("preview", "preview", "image"),
}
"""Ports of the payloads of each stage, in the order they are made."""
SHOWN = 5
"""Previews of a request that asks for some; what a decoder passes over is not shown."""
SEQS = 2
_SETTINGS = RouterSettings()


def made(stage: str, inputs: dict[str, bytes], index: int) -> bytes:
    """The payload of that index: a digest of all that it is made of."""
    digest = blake2b(f"{stage}/{index}".encode())
    for port in sorted(inputs):
        digest.update(port.encode() + b"\0" + inputs[port])
    return digest.digest()


def expected(prompt: bytes) -> list[tuple[str, bytes]]:
    """Ports and payloads of the answer to a prompt."""
    inputs = {"prompt": prompt}
    for stage, into in (("reader", "embeds"), ("denoiser", "latents")):
        inputs = {port: made(stage, inputs, at) for at, port in enumerate(PORTS[stage])}
        assert all(port.startswith(into) for port in inputs)
    return [(port, made("decoder", inputs, at)) for at, port in enumerate(PORTS["decoder"])]


def expected_previews(prompt: bytes) -> dict[str, bytes]:
    """The previews that a prompt may have, by port."""
    reader = {
        port: made("reader", {"prompt": prompt}, at) for at, port in enumerate(PORTS["reader"])
    }
    return {
        f"preview.{at}": made("decoder", {"latents": made("denoiser", reader, at)}, at)
        for at in range(1, SHOWN + 1)
    }


def expected_sound(prompt: bytes) -> list[tuple[str, bytes]]:
    """Ports and payloads of the answer of `SPEAKER` to a prompt."""
    found = [made("thinker", {"prompt": prompt}, at) for at in range(ITEMS)]
    for stage in ("talker", "vocoder"):
        before, found = found, [b""]
        for at, item in enumerate([*before, b""]):
            found.append(made(stage, {"before": found[-1], "item": item}, at))
        del found[0]
    return [("audio", item) for item in found]


def expected_file(prompt: bytes) -> list[tuple[str, bytes]]:
    """The same of `FILED`."""
    sound = b"".join(data for _, data in expected_sound(prompt))
    return [("file.type", b"a/b"), ("file", sound)]


class ScriptedStage:
    """`inlay.engine.api.Engine` of a stage, one payload of each request after some turns.

    Args:
        stage: name of it, in `GRAPH` or `SPEAKER`.
        script: turns of the event loop before each payload, over and over; -1 fails the request.
        graph: that it is of, unless it is `GRAPH` or `SPEAKER`.

    Attributes:
        running: by id, what ends them.
        most: that ran at a time.
    """

    def __init__(
        self, stage: str, script: Sequence[int] = (1,), graph: Graph | None = None
    ) -> None:
        self.stage = stage
        self._script = list(script) or [1]
        self._at = 0
        self.running: dict[str, Callable[[], None]] = {}
        self.most = 0
        self.held = asyncio.Event()
        self.held.set()
        self.paused: set[str] = set()
        self.graph = graph or (SPEAKER if stage in STREAMED else GRAPH)

    @property
    def card(self) -> ModelCard:
        return card_of(self.graph.served_name(self.stage))

    async def start(self) -> None:
        """Nothing is loaded."""

    async def close(self) -> None:
        for request_id in tuple(self.running):
            self.abort(request_id)

    def submit(self, request: Request, emit: Emit) -> None:
        self.submit_fed(request, emit, InputStream.of(request.inputs))

    def submit_fed(self, request: Request, emit: Emit, inflow: InputStream) -> None:
        assert request.id not in self.running
        assert not request.feeds
        task = asyncio.create_task(self._run(request, inflow, emit))

        def abort() -> None:
            task.cancel()
            emit(request.end("abort"))

        self.running[request.id] = abort
        self.most = max(self.most, len(self.running))

    def pause(self, request_id: str, paused: bool) -> None:
        (self.paused.add if paused else self.paused.discard)(request_id)

    async def _run(self, request: Request, inflow: InputStream, emit: Emit) -> None:
        try:
            shows = isinstance(request.params, Diffusion) and request.params.preview_every > 0
            async for port, data, last in self._items(inflow, shows):
                turns = self._script[self._at % len(self._script)]
                self._at += 1
                await self.held.wait()
                while request.id in self.paused:  # noqa: ASYNC110  # nobody tells
                    await asyncio.sleep(0)
                for _ in range(turns):
                    await asyncio.sleep(0)
                if turns < 0:
                    raise EngineError("as the script says")
                payload = Payload(port, "uint8", (len(data),), Buffer(data), last)
                if last:
                    self._leave(request)
                emit(
                    Output(
                        request.id,
                        request.attempt,
                        0,
                        finish_reason="stop" if last else None,
                        payloads=(payload,),
                    )
                )
        except InlayError as error:
            self._leave(request)
            emit(request.end("error", error))

    def _leave(self, request: Request) -> None:
        del self.running[request.id]
        self.paused.discard(request.id)

    async def _items(
        self, inflow: InputStream, shows: bool
    ) -> AsyncIterator[tuple[str, bytes, bool]]:
        """Yield port, payload, and whether it is the last."""
        if self.stage == "decoder" and shows:
            async for item in self._newest(inflow):
                yield item
            return
        if self.graph == FILED and self.stage == "vocoder":
            yield "file.type", b"a/b", False
            sound = [data async for _, data, _ in self._streamed(inflow)]
            yield "file", b"".join(sound), True
            return
        if self.stage in STREAMED and self.stage != "thinker":
            async for item in self._streamed(inflow):
                yield item
            return
        ports = ("hidden_states",) * ITEMS if self.stage == "thinker" else PORTS[self.stage]
        inputs = {given.port: bytes(given.value.data.view) for given in inflow.take()}
        for at in range(1, SHOWN + 1) if self.stage == "denoiser" and shows else ():
            yield f"latents.{at}", made("denoiser", inputs, at), False
        for at, port in enumerate(ports):
            yield port, made(self.stage, inputs, at), at == len(ports) - 1

    async def _streamed(self, inflow: InputStream) -> AsyncIterator[tuple[str, bytes, bool]]:
        """As `_items`: of a stream, and one more at its end."""
        port, at, before = STREAMED[self.stage], 0, b""
        changed = asyncio.Event()
        inflow.watch(changed.set)
        while True:
            changed.clear()
            for given in inflow.take():
                before = made(
                    self.stage, {"before": before, "item": bytes(given.value.data.view)}, at
                )
                yield port, before, False
                at += 1
            if inflow.error is not None:
                raise inflow.error
            if inflow.ended:
                yield port, made(self.stage, {"before": before, "item": b""}, at), True
                return
            await changed.wait()

    async def _newest(self, inflow: InputStream) -> AsyncIterator[tuple[str, bytes, bool]]:
        """As `_items`: of the newest latents."""
        changed = asyncio.Event()
        inflow.watch(changed.set)
        while True:
            changed.clear()
            for given in inflow.take()[-1:]:
                _, _, step = given.port.partition(".")
                inputs = {"latents": bytes(given.value.data.view)}
                port, at = (f"preview.{step}", int(step)) if step else ("image", 2)
                yield port, made("decoder", inputs, at), not step
                if not step:
                    return
            if inflow.error is not None:
                raise inflow.error
            await changed.wait()

    def abort(self, request_id: str) -> None:
        self.paused.discard(request_id)
        abort = self.running.pop(request_id, None)
        if abort is not None:
            abort()

    async def probe(self) -> float:
        return 0.0

    def stats(self) -> Stats:
        return Stats(running=len(self.running))


def card_of(name: str) -> ModelCard:
    """The card of a stage's worker."""
    limits = replace(CARD.limits, max_num_seqs=SEQS)
    return replace(CARD, name=name, tasks=(Task.STAGE,), limits=limits)


class World:
    """Workers of every stage, a router to them, and the ways between them.

    Attributes:
        engines: of the workers, by number.
        hosts: of these.
        dead: numbers of workers that are gone.
        fetched: payloads that went from worker to worker.
    """

    def __init__(self) -> None:
        self.engines: list[ScriptedStage] = []
        self.dead: set[int] = set()
        self.fetched = 0
        self._asking: dict[int, set[OutputQueue]] = {}

    @classmethod
    @asynccontextmanager
    async def around(
        cls,
        *engines: ScriptedStage,
        settings: RouterSettings = _SETTINGS,
        reachable: bool = True,
    ) -> AsyncIterator["World"]:
        world = cls()
        world.engines = list(engines)

        def host(engine: Engine) -> EngineHost:
            assert isinstance(engine, ScriptedStage)
            return EngineHost(engine, stage=StageCard(engine.graph, engine.stage), peers=world)

        world.plane = await DirectPlane.around(*engines, host=host)
        world.hosts = world.plane.hosts
        for number, one in enumerate(world.hosts if reachable else ()):
            one.connects(Address("sim", number, b""))
        world.router = Router(world.plane, settings)
        await world.router.start()
        try:
            yield world
        finally:
            await world.router.close()
            await world.plane.close()

    plane: DirectPlane
    hosts: list[EngineHost]
    router: Router

    async def payloads(
        self, address: Address, request: Request, within: float | None = None
    ) -> Sequence[Payload]:
        """As `inlay.engine.api.PeerWorkers`: from host to host."""
        number = address.port
        await asyncio.sleep(0)
        if number in self.dead:
            raise OverloadedError("not reached", retry_after=1)
        queue = OutputQueue()

        def emit(output: Output) -> None:
            queue.put(output)

        self._asking.setdefault(number, set()).add(queue)
        try:
            self.hosts[number].submit(request, emit)
            found = await payloads_of(queue)
        except asyncio.CancelledError:
            self.hosts[number].abort(request.id)
            raise
        finally:
            self._asking[number].discard(queue)
        self.fetched += len(found)
        return found

    def kill(self, number: int) -> None:
        """End a worker; what it was asked ends with it."""
        if number not in self.dead:
            self.dead.add(number)
            self.plane.worker_ends[number].close()
            for queue in self._asking.get(number, set()):
                queue.fail(OverloadedError("gone", retry_after=1))

    def alive(self) -> list[EngineHost]:
        return [host for number, host in enumerate(self.hosts) if number not in self.dead]

    @property
    def most_kept(self) -> int:
        """Payloads that are kept of one request."""
        holdings = [one for host in self.hosts for one in kept_by(host)._by_key.values()]
        return max((len(one.payloads) for one in holdings), default=0)

    @property
    def left(self) -> dict[str, int]:
        """Numbers of what must be zero once no request is under way."""
        loads = self.router.loads().values()
        return {
            "payloads": sum(len(kept_by(host)) for host in self.hosts),
            "bytes": sum(kept_by(host).num_bytes for host in self.hosts),
            "running": sum(len(engine.running) for engine in self.engines),
            "fetching": sum(one.num_requests for one in map(fetched_by, self.hosts) if one),
            "tracked": sum(len(host._requests.ids) for host in self.hosts),
            "loads": sum(load.requests + load.prefill for load in loads),
            "streams": sum(len(link._streams) for link in self.plane._links),
            "waiting": self.router.num_waiting,
            "asking": sum(len(kept_by(host)._asking) for host in self.hosts),
            "paused": sum(len(engine.paused) for engine in self.engines),
        }


def stage_request(name: str, inputs: tuple[Input, ...]) -> Request:
    """A request of a stage."""
    params = Diffusion(width=8, height=8, steps=2)
    return Request(id="r", task=Task.STAGE, prompts=(), params=params, inputs=inputs)
