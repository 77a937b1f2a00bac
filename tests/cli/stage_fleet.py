"""A fleet of three pipelines with two workers of each stage, and requests that each tell apart.

painter   text encoder, denoiser and VAE: images
omni      thinker, talker and vocoder: texts read aloud, chats with sound
row       three language models, by text and by hidden states, and one of images: chats with both
"""

import base64
import io
import json
import re
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import psutil
import yaml
from PIL import Image
from safetensors.torch import save_file

from inlay.transport.local.same_host import ARENA_BYTES
from tests import preloaded
from tests.cli.spoken import SEED, SPOKEN, SPOKEN_CHAT
from tests.cli.test_models_in_a_row import FIRST, SECOND, documented, editor, projector
from tests.cli.test_pipeline import FIELDS, GRAPH
from tests.engine.test_diffusers import model
from tests.memory import COMPILER, Memory
from tests.models import tiny
from tests.omni_models import omni
from tests.parts import Part, running, workers_of
from tests.serving import Served, free_port, serving

ADMIN_PORT = free_port()
END_SECONDS = 120.0
ASKERS = 3
"""Requests of a kind at a time, of which each worker of a stage is to have some."""
SPEAKER = documented("omni.yaml")
ROW = {
    "name": "row",
    "stages": {
        "drafter": {"kind": "generate", "model": FIRST, "max_tokens": 6},
        "scout": {
            "kind": "generate",
            "model": FIRST,
            "hidden": {"layer": 1, "projector": "projector.safetensors"},
        },
        "writer": {"kind": "generate", "model": SECOND},
        "artist": {"kind": "image", "model": "my-pipeline"},
    },
    "edges": [
        "drafter.text -> scout.prompt",
        "scout.hidden -> writer.hidden",
        "writer.text -> artist.prompt",
    ],
    "inputs": {"prompt": "drafter.prompt"},
    "outputs": {"text": "writer.text", "image": "artist.image"},
}
GRAPHS: tuple[Any, ...] = (GRAPH, SPEAKER, ROW)
FRONTS = {"decoder": "painter", "thinker": "omni", "writer": "row"}
ROUNDS = [
    tuple(filter(None, stages)) for stages in zip_longest(*(graph["stages"] for graph in GRAPHS))
]
"""Stages of each pipeline, one of each at a time."""
THINGS = "a red fox", "two lamps", "an island"


def pipeline_of(stage: str) -> str:
    return next(str(graph["name"]) for graph in GRAPHS if stage in graph["stages"])


def served_name(stage: str) -> str:
    """Name of a stage's workers, as of `Graph.served_name`."""
    return FRONTS.get(stage, f"{pipeline_of(stage)}/{stage}")


class Fleet(NamedTuple):
    """Two frontends, of which requests wait at the second for what sleeps; workers by stage.

    Attributes:
        memory: of the first worker of each stage, or None without a compiler.
        temporary: directory for temporary files of all.
    """

    servers: list[Served]
    workers: dict[str, list[Part]]
    memory: Memory | None
    temporary: Path

    def engine(self, stage: str, number: int) -> psutil.Process:
        """The process that has the engine of a worker."""
        (found,) = workers_of(self.workers[stage][number].process.pid)
        return found

    def wait_whole(self, server: Served) -> None:
        """Return once all workers are ready and have no request."""
        count = sum(map(len, self.workers.values()))
        wait_for(lambda: answers(server) == [1.0] * count and not keeps(server))


def graphs_in(folder: Path) -> dict[str, list[object]]:
    """Write the graphs; return the words of a worker of each stage."""
    (folder / "my-pipeline").symlink_to(model("sd"))
    (folder / FIRST).symlink_to(tiny(FIRST))
    (folder / SECOND).symlink_to(editor())
    save_file(projector().state_dict(), folder / "projector.safetensors")
    (folder / "graph.yaml").write_text(yaml.safe_dump(GRAPH, sort_keys=False))
    # So large that memory can be too small for one.
    large = {"max_generated_image_size": 1024 * 1024, "max_image_cost": 1e5}
    settings = {stage: {"dtype": "float32", **large} for stage in GRAPH["stages"]}
    (folder / "deploy.yaml").write_text(yaml.safe_dump({"stages": settings}))
    stages = {name: stage | {"model": str(omni())} for name, stage in SPEAKER["stages"].items()}
    stages["talker"] |= {"max_tokens": 9, "speech": {"temperature": 0}}
    stages["vocoder"]["speech"] = {"chunk": 5}
    (folder / "omni.yaml").write_text(yaml.safe_dump(SPEAKER | {"stages": stages}))
    (folder / "row.yaml").write_text(yaml.safe_dump(ROW, sort_keys=False))
    more: dict[str, list[object]] = {
        "graph.yaml": ["--deploy", folder / "deploy.yaml"],
        "omni.yaml": ["--dtype", "float32"],
        "row.yaml": ["--dtype", "float32"],
    }
    words = {
        stage: [folder / name, *more[name], "--enable-sleep-mode", "--stage", stage]
        for name, graph in zip(more, GRAPHS, strict=True)
        for stage in graph["stages"]
    }
    # Rows of a prompt are for it alone.
    words["denoiser"].append("--enable-prompt-embeds")
    return words


@contextmanager
def started(folder: Path) -> Iterator[Fleet]:
    """A fleet until the block ends."""
    temporary = folder / "temporary"
    temporary.mkdir()
    where = {"TMPDIR": str(temporary)}
    port = free_port()
    url = f"nats://127.0.0.1:{port}"
    with ExitStack() as undo:
        undo.enter_context(
            running("nats", "--port", port, "--store-dir", folder / "nats", until="NATS at nats://")
        )
        memory = None if COMPILER is None else Memory(folder)
        if memory is not None:
            undo.enter_context(preloaded.having(memory.preloaded))
        workers: dict[str, list[Part]] = {}
        for stage, words in graphs_in(folder).items():
            for number in range(2):
                poor = {} if memory is None or number else memory.variables(stage)
                part = Part(
                    "worker", *words, "--nats", url, until=" serves ", variables={**where, **poor}
                )
                undo.callback(part.end)
                workers.setdefault(stage, []).append(part)
        frontend = ("--nats", url, "--enable-prompt-embeds", "--asleep-requests")
        servers = [
            undo.enter_context(serving(*frontend, *words, command="frontend", environment=where))
            for words in (["reject"], ["wait", "--admin-port", ADMIN_PORT])
        ]
        for part in (one for some in workers.values() for one in some):
            part.wait_ready()
        yield Fleet(servers, workers, memory, temporary)


class Answer(NamedTuple):
    """The end of a request: status 200 with what was made, or of an error, in a stream too."""

    status: int
    text: str = ""
    made: np.ndarray = np.zeros(0)
    error: str = ""

    def like(self, other: "Answer") -> bool:
        """True for the same, but for rounding by batches of other sizes."""
        # Of 255, and of 32,767.
        off = 1 if self.made.ndim == 3 else 8
        return (
            self.status == other.status == 200
            and self.text == other.text
            and self.made.shape == other.made.shape
            and bool(np.abs(self.made - other.made).max() <= off)
        )


def pixels(file: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(file))).astype(int)


def samples(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.int16).astype(int)


def _whole(answer: httpx.Response, read: Callable[[httpx.Response], np.ndarray]) -> Answer:
    if answer.status_code != 200:
        return Answer(answer.status_code, error=answer.json()["error"]["message"])
    return Answer(200, made=read(answer))


def image(server: Served, number: int, within: float) -> Answer:
    body = {"model": "painter", "prompt": THINGS[number], **FIELDS, "seed": number}
    answer = httpx.post(f"{server.v1}/images/generations", json=body, timeout=within)
    return _whole(answer, lambda one: pixels(base64.b64decode(one.json()["data"][0]["b64_json"])))


def sound(server: Served, number: int, within: float) -> Answer:
    body = SPOKEN | {"input": THINGS[number], "stream": False, "seed": SEED + number}
    body["max_new_tokens"] = 9
    answer = httpx.post(f"{server.v1}/audio/speech", json=body, timeout=within)
    return _whole(answer, lambda one: samples(one.content[44:]))


def chat_with_sound(server: Served, number: int, within: float) -> Answer:
    return _chat(server, SPOKEN_CHAT | {"max_tokens": 10, "seed": SEED + number}, number, within)


def chat_with_image(server: Served, number: int, within: float) -> Answer:
    fields = {"modalities": ["text", "image"], "temperature": 0, "max_tokens": 6}
    fields |= {"num_inference_steps": 2, "seed": number, "ignore_eos": True}
    return _chat(server, {"model": "row"} | fields, number, within)


def _chat(server: Served, body: dict[str, Any], number: int, within: float) -> Answer:
    """The answer of a stream, which ends exactly once."""
    body = body | {"stream": True, "messages": [{"role": "user", "content": THINGS[number]}]}
    text, made = "", b""
    ends: list[Any] = []
    url = f"{server.v1}/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=within) as answer:
        if answer.status_code != 200:
            answer.read()
            return _whole(answer, lambda _: np.zeros(0))
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            assert not ends, line
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                ends.append(event["error"])
            for choice in event.get("choices", ()):
                delta = choice["delta"]
                said = delta.get("audio", {})
                made += base64.b64decode(said.get("data", ""))
                text += said.get("transcript", "")
                if isinstance(shown := delta.get("content", ""), str):
                    text += shown
                else:
                    (part,) = shown
                    made += base64.b64decode(part["image_url"]["url"].split(",")[1])
                if choice["finish_reason"]:
                    ends.append(choice["finish_reason"])
    (end,) = ends
    if isinstance(end, dict):
        return Answer(503 if end["type"] == "overloaded_error" else 500, error=end["message"])
    return Answer(200, text, pixels(made) if made.startswith(b"\x89PNG") else samples(made))


Way = Callable[[Served, int, float], Answer]
WAYS: dict[str, tuple[Way, ...]] = {
    "painter": (image,),
    "omni": (sound, chat_with_sound),
    "row": (chat_with_image,),
}


class Asked(NamedTuple):
    """A request under way."""

    server: Served
    way: Way
    number: int
    answer: "Future[Answer]"

    def result(self) -> Answer:
        """The answer; of one that was refused before any stage had worked, that to another."""
        found = self.answer.result()
        while found.status == 503 and "is ready" in found.error:
            time.sleep(0.5)
            found = self.way(self.server, self.number, END_SECONDS)
        return found


@contextmanager
def asking(
    server: Served,
    stages: Collection[str],
    numbers: Sequence[int] = range(ASKERS),
    within: float = END_SECONDS,
) -> Iterator[list[Asked]]:
    """Ask for all that the stages take part in, each request with words and a seed of its own."""
    ways = [way for stage in stages for way in WAYS[pipeline_of(stage)]]
    with ThreadPoolExecutor(len(ways) * len(numbers)) as pool:
        yield [
            Asked(server, way, number, pool.submit(way, server, number, within))
            for number in numbers
            for way in ways
        ]


def metric(server: Served, pattern: str) -> list[float]:
    text = httpx.get(f"{server.url}/metrics", timeout=60).text
    return [float(value) for value in re.findall(rf"^{pattern} (\S+)$", text, re.MULTILINE)]


def answers(server: Served) -> list[float]:
    """1 for each ready worker that answers, 0 for others."""
    return metric(server, r"inlay:worker_answers\{.*\}")


def keeps(server: Served) -> bool:
    """True while a worker has a request, or keeps something."""
    kept = r"inlay:held_(?:payloads|payload_bytes|bytes)|vllm:num_requests_(?:running|waiting)"
    return set(metric(server, rf"(?:{kept})\{{.*\}}")) != {0.0}


def wait_for(done: Callable[[], bool]) -> None:
    until = time.monotonic() + END_SECONDS
    while not done():
        assert time.monotonic() < until
        time.sleep(0.1)


def wait_nothing_kept(fleet: Fleet, server: Served) -> None:
    """Return once no worker has a request or keeps anything, and nobody shares memory with the dead.

    That it is within `FREED_SECONDS`, tests/worker/test_held_payloads.py shows, by a clock that a
    busy machine does not hold up.
    """
    wait_for(lambda: not keeps(server) and 0.0 not in answers(server))
    until = time.monotonic() + END_SECONDS
    while found := left(fleet):
        assert time.monotonic() < until, found
        time.sleep(0.1)


def left(fleet: Fleet) -> list[str]:
    """Temporary files, memory that has a name, and memory that was shared with a lost process.

    Memory of a connection belongs to the two processes at its ends.
    """
    found = [str(path) for path in fleet.temporary.iterdir()]
    owners: dict[str, set[int]] = {}
    parts = [part.process.pid for some in fleet.workers.values() for part in some]
    for pid in [*parts, *(server.process.pid for server in fleet.servers)]:
        with suppress(psutil.NoSuchProcess):
            for process in (psutil.Process(pid), *workers_of(pid)):
                # What one that is frozen has is for those that run to let go of.
                if process.status() == psutil.STATUS_STOPPED:
                    continue
                with suppress(FileNotFoundError, ProcessLookupError):
                    maps = Path(f"/proc/{process.pid}/maps").read_text()
                    for memory in map(_shared, maps.splitlines()):
                        owners.setdefault(memory, set()).add(process.pid)
    owners.pop("", None)
    return found + [f"{memory} of {pids}" for memory, pids in owners.items() if len(pids) < 2]


def _shared(line: str) -> str:
    """Name of the memory of a connection, or with a name in the file system; empty for others."""
    first, *_, inode, name = (*line.split(maxsplit=5), "")[:6]
    start, end = (int(one, 16) for one in first.split("-"))
    # That of a worker and its engine is the supervisor's alone for a while.
    if name.startswith("/memfd:inlay") and end - start == ARENA_BYTES:
        return inode
    # A pool of processes has semaphores, which have no name any more.
    return name if name.startswith("/dev/shm/") and "/sem." not in name else ""
