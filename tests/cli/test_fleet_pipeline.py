"""Pipelines in a fleet: stages are workers of their own, two of each, and some that are lost."""

import base64
import io
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random
from typing import NamedTuple

import httpx
import numpy as np
import openai
import psutil
import pytest
import yaml
from PIL import Image

from inlay.request import Diffusion
from tests.cli.spoken import SEED, SPOKEN, SPOKEN_CHAT
from tests.cli.test_models_in_a_row import documented
from tests.cli.test_pipeline import (
    FIELDS,
    GRAPH,
    in_order,
    painted,
    pixels,
    previews,
    shown_on_the_way,
)
from tests.engine.test_diffusers import alone, model, near
from tests.equality.test_image_prompts import files, inline, upload
from tests.memory import COMPILER, Memory
from tests.omni_models import omni
from tests.parts import Part, running, workers_of
from tests.serving import PYTHON, Served, free_port, serving

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
]
ADMIN_PORT = free_port()
END_SECONDS = 120.0
SPARE_BYTES = 24 << 20
"""More than small images take, less than one of a million pixels."""
TOGETHER = 6
"""Requests at a time: more than one worker of a stage is to have some of them."""
SPEAKER = documented("omni.yaml")
PAINTING, SPEAKING = tuple(GRAPH["stages"]), tuple(SPEAKER["stages"])
STAGES = (*PAINTING, *SPEAKING)


class Fleet(NamedTuple):
    """Two frontends, of which requests wait at the second for what sleeps; workers by stage.

    Two of each, and the memory of the first of them.
    """

    servers: list[Served]
    workers: dict[str, list[Part]]
    memory: Memory | None


def graphs_in(folder: Path) -> dict[str, list[object]]:
    """Write both graphs; return the words of a worker of each stage."""
    (folder / "my-pipeline").symlink_to(model("sd"))
    (folder / "graph.yaml").write_text(yaml.safe_dump(GRAPH, sort_keys=False))
    settings = {stage: {"dtype": "float32"} for stage in GRAPH["stages"]}
    (folder / "deploy.yaml").write_text(yaml.safe_dump({"stages": settings}))
    stages = {name: stage | {"model": str(omni())} for name, stage in SPEAKER["stages"].items()}
    stages["talker"] |= {"max_tokens": 40, "speech": {"temperature": 0}}
    stages["vocoder"]["speech"] = {"chunk": 4}
    (folder / "omni.yaml").write_text(yaml.safe_dump(SPEAKER | {"stages": stages}))
    sleeps = "--enable-sleep-mode"
    painting: list[object] = [folder / "graph.yaml", "--deploy", folder / "deploy.yaml", sleeps]
    speaking: list[object] = [folder / "omni.yaml", "--dtype", "float32", sleeps]
    words = {stage: [*painting, "--stage", stage] for stage in PAINTING}
    # Rows of a prompt are for it alone.
    words["denoiser"].append("--enable-prompt-embeds")
    return words | {stage: [*speaking, "--stage", stage] for stage in SPEAKING}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("pipeline")
    port = free_port()
    url = f"nats://127.0.0.1:{port}"
    with ExitStack() as undo:
        undo.enter_context(
            running("nats", "--port", port, "--store-dir", folder / "nats", until="NATS at nats://")
        )
        workers: dict[str, list[Part]] = {}
        memory = None if COMPILER is None else Memory(folder)
        for stage, words in graphs_in(folder).items():
            for number in range(2):
                variables = memory.variables(stage) if memory and not number else None
                part = Part("worker", *words, "--nats", url, until=" serves ", variables=variables)
                undo.callback(part.end)
                workers.setdefault(stage, []).append(part)
        frontend = ("--nats", url, "--enable-prompt-embeds", "--asleep-requests")
        servers = [
            undo.enter_context(serving(*frontend, *words, command="frontend"))
            for words in (["reject"], ["wait", "--admin-port", ADMIN_PORT])
        ]
        for part in (one for some in workers.values() for one in some):
            part.wait_ready()
        yield Fleet(servers, workers, memory)


@pytest.fixture(scope="module")
def expected() -> list[np.ndarray]:
    asked = Diffusion(width=32, height=32, steps=3, guidance=3.0, seed=7, negative="blurred")
    return alone("sd", "a red fox", asked)


def paint(server: Served) -> list[np.ndarray]:
    # Stages that are not ready yet, or not again, are 503s.
    with openai.OpenAI(base_url=server.v1, api_key="none", max_retries=60) as client:
        found = client.images.generate(model="painter", prompt="a red fox", extra_body=FIELDS)
    files = [base64.b64decode(one.b64_json or "") for one in found.data or []]
    return [np.asarray(Image.open(io.BytesIO(file))) for file in files]


def engine_of(part: Part) -> psutil.Process:
    """The process that has the engine of a worker."""
    (found,) = workers_of(part.process.pid)
    return found


def metric(server: Served, pattern: str) -> list[float]:
    text = httpx.get(f"{server.url}/metrics", timeout=60).text
    return [float(value) for value in re.findall(rf"^{pattern} (\S+)$", text, re.MULTILINE)]


def leave(server: Served, after: float, *, shown: bool = False) -> None:
    """Ask for two images, or for one that is `shown` on the way; leave after so many seconds."""
    more = {"stream": True, "partial_images": 3} if shown else {"n": 2}
    body = {"model": "painter", "prompt": "a red fox", **FIELDS, **more}
    with suppress(httpx.TimeoutException):
        httpx.post(f"{server.v1}/images/generations", json=body, timeout=after)


def wait_for(done: Callable[[], bool]) -> None:
    until = time.monotonic() + END_SECONDS
    while not done():
        assert time.monotonic() < until
        time.sleep(0.1)


def wait_nothing_kept(server: Served) -> None:
    """Return once all workers say that they have no request, and keep nothing."""
    kept = r"inlay:held_(?:payloads|payload_bytes|bytes)\{.*\}"
    running = r"vllm:num_requests_(?:running|waiting)\{.*\}"
    wait_for(lambda: set(metric(server, kept)) == {0.0} == set(metric(server, running)))


def paint_together(server: Served, meanwhile: Callable[[], None]) -> list[list[np.ndarray]]:
    with ThreadPoolExecutor(TOGETHER) as pool:
        painting = [pool.submit(paint, server) for _ in range(TOGETHER)]
        meanwhile()
        return [one.result() for one in painting]


def test_any_frontend_learns_a_pipeline_from_its_workers(
    fleet: Fleet, expected: list[np.ndarray]
) -> None:
    for server in fleet.servers:
        assert near(paint(server), expected)
        found = httpx.get(f"{server.v1}/models", timeout=60).json()["data"]
        assert {one["id"] for one in found} == {"painter", "omni"}


def test_rows_of_a_prompt_make_its_image_at_any_frontend(fleet: Fleet) -> None:
    first, second = (server for server in fleet.servers)
    paint(first)  # all stages are ready
    prompt, negative = {"prompt": "a red fox"}, {"negative_prompt": "blurred"}
    expected = painted(first.v1, prompt | negative)["data"]
    given = files("sd", "blurred")
    assert painted(first.v1, inline(given))["data"] == expected
    stored = {name: upload(first.url, data) for name, data in given.items()}
    assert painted(second.v1, stored)["data"] == expected
    # Beside text, the encoder's worker makes the rest, and keeps all for the denoiser.
    mixed: dict[str, object] = {"prompt_embeds": stored["prompt_embeds"], **negative}
    assert painted(second.v1, mixed)["data"] == expected
    wait_nothing_kept(second)


READ_ALOUD = SPOKEN | {"input": "one", "stream": False, "seed": SEED, "max_new_tokens": 8}
PAINTED = {"model": "painter", "prompt": "a red fox", **FIELDS}


def ask(server: Served, stage: str, within: float = END_SECONDS) -> httpx.Response:
    """Ask once for an image or a sound, which the stage takes part in."""
    route, body = "images/generations", PAINTED
    if stage in SPEAKING:
        route, body = "audio/speech", READ_ALOUD
    return httpx.post(f"{server.v1}/{route}", json=body, timeout=within)


def chat_ends(server: Served) -> list[str]:
    """All that end a chat with sound."""
    body = SPOKEN_CHAT | {"stream": True}
    with httpx.stream(
        "POST", f"{server.v1}/chat/completions", json=body, timeout=END_SECONDS
    ) as answer:
        return [
            line for line in answer.iter_lines() if '"finish_reason":"' in line or '"error"' in line
        ]


def made(answer: httpx.Response) -> np.ndarray:
    """Pixels or samples."""
    assert answer.status_code == 200, answer.text
    if answer.headers["content-type"] == "audio/wav":
        return np.frombuffer(answer.content[44:], np.int16).astype(int)
    (image,) = answer.json()["data"]
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(image["b64_json"])))).astype(int)


def alike(found: np.ndarray, expected: np.ndarray) -> bool:
    """True but for rounding, by batches of other sizes."""
    return found.shape == expected.shape and bool(np.abs(found - expected).max() <= 8)


def made_once_ready(server: Served, stage: str) -> np.ndarray:
    answer = ask(server, stage)
    while answer.status_code == 503:
        time.sleep(0.2)
        answer = ask(server, stage)
    return made(answer)


def ask_together(server: Served, stage: str) -> tuple[list[httpx.Response], list[list[str]]]:
    """Answers of several at once, and the ends of a chat beside them if the stage speaks."""
    with ThreadPoolExecutor() as pool:
        # Each worker of the stage is to have some.
        asked = [pool.submit(ask, server, stage) for _ in range(3)]
        chats = [pool.submit(chat_ends, server)] if stage in SPEAKING else []
        return [one.result() for one in asked], [one.result() for one in chats]


@pytest.mark.parametrize("loss", [signal.SIGSTOP, signal.SIGKILL])
@pytest.mark.parametrize("stage", STAGES)
def test_what_a_lost_worker_of_a_stage_has_goes_on_at_another(
    fleet: Fleet, stage: str, loss: signal.Signals
) -> None:
    """Frozen, or ended as the system ends a process where memory is short."""
    server = fleet.servers[0]
    expected = made_once_ready(server, stage)
    lost = engine_of(fleet.workers[stage][0])
    lost.send_signal(loss)
    try:
        answers, chats = ask_together(server, stage)
    finally:
        with suppress(psutil.NoSuchProcess):
            lost.resume()
    assert all(alike(made(answer), expected) for answer in answers)
    assert all(len(ends) == 1 for ends in chats)
    wait_nothing_kept(server)


@pytest.mark.skipif(COMPILER is None, reason="a library is to be compiled")
@pytest.mark.parametrize("stage", STAGES)
def test_what_a_worker_of_a_stage_has_no_memory_for_goes_on_at_another(
    fleet: Fleet, stage: str
) -> None:
    server = fleet.servers[0]
    expected = made_once_ready(server, stage)
    assert fleet.memory is not None
    poor, other = fleet.workers[stage]
    already = len(poor.said)
    with fleet.memory.none(stage):
        while not any("can't allocate memory" in line for line in poor.said[already:]):
            answers, chats = ask_together(server, stage)
            assert all(alike(made(answer), expected) for answer in answers)
            assert all(len(ends) == 1 for ends in chats)
        wait_nothing_kept(server)
        # While nobody can go on with it, it ends with one error.
        frozen = engine_of(other)
        frozen.suspend()
        try:
            failed = ask(server, stage)
        finally:
            frozen.resume()
    # Without memory, or without an answer of the other: whichever was asked last.
    assert failed.status_code in (500, 503), failed.text
    assert alike(made_once_ready(server, stage), expected)
    wait_nothing_kept(server)


def served_name(stage: str) -> str:
    """Name of a stage's workers, as of `Graph.served_name`."""
    fronts = {"decoder": "painter", "thinker": "omni"}
    return fronts.get(stage, f"{'omni' if stage in SPEAKING else 'painter'}/{stage}")


@pytest.mark.parametrize("stage", STAGES)
def test_a_request_waits_for_a_stage_that_sleeps_before_any_has_worked(
    fleet: Fleet, stage: str
) -> None:
    refusing, waiting = fleet.servers
    expected = made_once_ready(waiting, stage)
    asleep = {"model": served_name(stage)}
    with httpx.Client(base_url=f"http://127.0.0.1:{ADMIN_PORT}", timeout=60) as admin:
        assert admin.post("/sleep", params=asleep | {"level": "1"}).is_success
        with ThreadPoolExecutor() as pool:
            try:
                wait_for(lambda: ask(refusing, stage).status_code == 503)
                asked = [pool.submit(ask, waiting, stage) for _ in range(2)]
                chats = [pool.submit(chat_ends, waiting)] if stage in SPEAKING else []
                with pytest.raises(httpx.TimeoutException):
                    ask(waiting, stage, within=1.0)
                wait_nothing_kept(waiting)
                assert not any(one.done() for one in asked)
                assert not any(one.done() for one in chats)
            finally:
                assert admin.post("/wake_up", params=asleep).is_success
            assert all(alike(made(one.result()), expected) for one in asked)
            assert all(len(one.result()) == 1 for one in chats)
    wait_nothing_kept(waiting)


@pytest.mark.parametrize("stage", STAGES)
def test_a_client_that_leaves_at_a_stage_leaves_nothing_behind(fleet: Fleet, stage: str) -> None:
    server = fleet.servers[1]
    made_once_ready(server, stage)
    engines = [engine_of(part) for part in fleet.workers[stage]]
    for engine in engines:
        engine.suspend()
    try:
        # It comes no further than to the stage.
        with pytest.raises(httpx.TimeoutException):
            ask(server, stage, within=1.0)
    finally:
        for engine in engines:
            engine.resume()
    wait_nothing_kept(server)


def test_a_worker_without_memory_ends_the_large_image_alone_and_keeps_nothing(
    fleet: Fleet, expected: list[np.ndarray]
) -> None:
    server = fleet.servers[1]
    assert near(paint(server), expected)
    engines = [engine_of(part) for part in fleet.workers["denoiser"]]
    for engine in engines:
        bound = engine.memory_info().vms + SPARE_BYTES
        engine.rlimit(psutil.RLIMIT_AS, (bound, psutil.RLIM_INFINITY))
    try:
        with ThreadPoolExecutor(1) as pool:
            body = {"model": "painter", "prompt": "a red fox", "size": "1024x1024", **FIELDS}
            large = pool.submit(
                httpx.post, f"{server.v1}/images/generations", json=body, timeout=120
            )
            found = paint_together(server, lambda: None)
            answer = large.result()
    finally:
        for engine in engines:
            engine.rlimit(psutil.RLIMIT_AS, (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY))
    assert all(near(images, expected) for images in found)
    assert answer.status_code == 500
    assert "memory is too small for 1 images of 1024x1024" in answer.json()["error"]["message"]
    assert [engine.is_running() for engine in engines] == [True, True]
    wait_nothing_kept(server)


def test_clients_that_leave_at_any_time_leave_nothing_behind(
    fleet: Fleet, expected: list[np.ndarray]
) -> None:
    random = Random(1)
    with ThreadPoolExecutor(TOGETHER) as pool:
        for number in range(48):
            server, after = fleet.servers[number % 2], random.uniform(0.01, 0.3)
            pool.submit(leave, server, after, shown=number % 4 > 1)
    server = fleet.servers[0]
    assert near(paint(server), expected)
    # Payloads went from worker to worker, and none is kept.
    wait_for(lambda: sum(metric(server, r"inlay:fetched_payloads_total\{.*\}")) > 0)
    wait_nothing_kept(server)


@pytest.mark.parametrize("stage", ["denoiser", "decoder"])
def test_a_stream_of_previews_whose_worker_is_killed_ends_with_the_image(
    fleet: Fleet, stage: str
) -> None:
    server, expected = fleet.servers[0], previews()
    paint(server)
    workers = [engine_of(part) for part in fleet.workers[stage]]
    before = {engine.pid: sum(engine.cpu_times()[:2]) for engine in workers}

    def kill_the_busier() -> None:
        busier = max(workers, key=lambda one: sum(one.cpu_times()[:2]) - before[one.pid])
        busier.send_signal(signal.SIGKILL)

    *shown, image = shown_on_the_way(server, kill_the_busier)
    assert shown
    assert in_order(shown, expected)
    assert near([pixels(image)], [pixels(expected[-1])])
    wait_nothing_kept(server)


def test_a_frontend_that_is_frozen_leaves_nothing_behind(
    fleet: Fleet, expected: list[np.ndarray]
) -> None:
    server, frozen = fleet.servers
    with ThreadPoolExecutor(TOGETHER) as pool:
        for _ in range(TOGETHER):
            pool.submit(leave, frozen, 2.0)
        time.sleep(0.2)
        frozen.process.send_signal(signal.SIGSTOP)
    try:
        assert near(paint(server), expected)
        wait_nothing_kept(server)
    finally:
        frozen.process.kill()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["GRAPH"], "--stage must be one of reader, denoiser, decoder"),
        (["GRAPH", "--stage", "singer"], "--stage is 'singer'; "),
        (["MODEL", "--stage", "reader"], "--stage is for a graph, GRAPH.yaml, not for a model"),
        (["MODEL", "--deploy", "x.yaml"], "--deploy is for a graph, GRAPH.yaml, not for a model"),
    ],
)
def test_a_stage_that_is_not_there_is_refused_before_anything_starts(
    tmp_path: Path, words: list[str], said: str
) -> None:
    graph = tmp_path / "graph.yaml"
    graph.write_text(yaml.safe_dump(GRAPH, sort_keys=False))
    given = [{"GRAPH": str(graph), "MODEL": str(tmp_path)}.get(word, word) for word in words]
    ran = subprocess.run(
        [PYTHON, "-m", "inlay.cli", "worker", *given], capture_output=True, text=True, check=False
    )
    assert ran.returncode != 0
    assert said in ran.stderr
    assert "Traceback" not in ran.stderr
