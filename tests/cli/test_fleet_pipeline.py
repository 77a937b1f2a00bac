"""Pipelines in a fleet: stages are workers of their own, two of each, and some that are lost."""

import base64
import io
import signal
import subprocess
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from itertools import combinations
from pathlib import Path
from random import Random

import httpx
import numpy as np
import openai
import psutil
import pytest
import yaml
from PIL import Image

from inlay_stages.params import Diffusion
from tests.cli.stage_fleet import (
    ADMIN_PORT,
    ASKERS,
    ROUNDS,
    THINGS,
    WAYS,
    Answer,
    Asked,
    Fleet,
    Way,
    asking,
    chat_with_sound,
    metric,
    served_name,
    started,
    wait_for,
    wait_nothing_kept,
)
from tests.cli.test_pipeline import (
    FIELDS,
    GRAPH,
    in_order,
    painted,
    pixels,
    previews,
    shown_on_the_way,
)
from tests.engine.test_diffusers import alone, near
from tests.equality.test_image_prompts import files, inline, upload
from tests.memory import COMPILER
from tests.serving import PYTHON, Served

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
]
SPARE_BYTES = 24 << 20
"""More than small images take, less than one of a million pixels."""
TOGETHER = 6
"""Requests at a time: more than one worker of a stage is to have some of them."""

each_round = pytest.mark.parametrize("stages", ROUNDS, ids="-".join)
Made = dict[tuple[Way, int], Answer]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with started(tmp_path_factory.mktemp("pipeline")) as found:
        yield found


@pytest.fixture(scope="module")
def made(fleet: Fleet) -> Made:
    """What is answered to each request alone; no two are alike."""
    server = fleet.servers[0]
    fleet.wait_whole(server)
    found = {
        (way, number): way(server, number, 120.0)
        for ways in WAYS.values()
        for way in ways
        for number in range(ASKERS)
    }
    assert [answer.error for answer in found.values() if answer.status != 200] == []
    assert not any(one.like(other) for one, other in combinations(found.values(), 2))
    wait_nothing_kept(fleet, server)
    return found


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


def check(asked: Sequence[Asked], made: Made, stages: Collection[str]) -> None:
    """All have what they have alone; but a chat may lose its sound once its text is heard."""
    speaks = not {"talker", "vocoder"}.isdisjoint(stages)
    for one in asked:
        way, number, found = one.way, one.number, one.result()
        if speaks and way is chat_with_sound and found.status == 503:
            assert "lost" in found.error, found
        else:
            assert found.like(made[way, number]), (way.__name__, number, found)


@contextmanager
def suspended(processes: Collection[psutil.Process]) -> Iterator[None]:
    """Freeze processes until the block ends, or they do."""
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.resume()


def test_any_frontend_learns_a_pipeline_from_its_workers(
    fleet: Fleet, made: Made, expected: list[np.ndarray]
) -> None:
    for server in fleet.servers:
        assert near(paint(server), expected)
        found = httpx.get(f"{server.v1}/models", timeout=60).json()["data"]
        assert {one["id"] for one in found} == set(WAYS)


def test_rows_of_a_prompt_make_its_image_at_any_frontend(fleet: Fleet, made: Made) -> None:
    first, second = fleet.servers
    prompt, negative = {"prompt": "a red fox"}, {"negative_prompt": "blurred"}
    expected = painted(first.v1, prompt | negative)["data"]
    given = files("sd", "blurred")
    assert painted(first.v1, inline(given))["data"] == expected
    stored = {name: upload(first.url, data) for name, data in given.items()}
    assert painted(second.v1, stored)["data"] == expected
    # Beside text, the encoder's worker makes the rest, and keeps all for the denoiser.
    mixed: dict[str, object] = {"prompt_embeds": stored["prompt_embeds"], **negative}
    assert painted(second.v1, mixed)["data"] == expected
    wait_nothing_kept(fleet, second)


def test_the_picture_of_a_model_that_thinks_is_of_what_it_says(fleet: Fleet, made: Made) -> None:
    body = {"model": "row", "messages": [{"role": "user", "content": THINGS[0]}], "seed": 7}
    body |= {"modalities": ["text", "image"], "temperature": 0, "max_tokens": 14}
    body |= {"num_inference_steps": 3, "guidance_scale": 3.0, "negative_prompt": "blurred"}
    body |= {"chat_template_kwargs": {"thinks": True}, "thinking_token_budget": 9}
    body |= {"ignore_eos": True}
    answer = httpx.post(f"{fleet.servers[0].v1}/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    message = answer.json()["choices"][0]["message"]
    text, shown = message["content"]
    assert message["reasoning"]
    assert "think>" not in text["text"]
    asked = Diffusion(width=32, height=32, steps=3, guidance=3.0, seed=7, negative="blurred")
    found = pixels(base64.b64decode(shown["image_url"]["url"].split(",")[1]))
    assert near([found], alone("sd", text["text"], asked))


@pytest.mark.parametrize("loss", ["frozen", "killed"])
@each_round
def test_what_a_lost_worker_of_a_stage_has_goes_on_at_another(
    fleet: Fleet, made: Made, stages: Collection[str], loss: str
) -> None:
    """Frozen, or ended as the system ends a process where memory is short."""
    server = fleet.servers[0]
    fleet.wait_whole(server)
    lost = [fleet.engine(stage, 1) for stage in stages]
    with suspended(lost), asking(server, stages) as asked:
        if loss == "killed":
            time.sleep(0.5)  # it has some of them by now, and nobody knows that it is frozen
            for engine in lost:
                engine.kill()
        check(asked, made, stages)
    wait_nothing_kept(fleet, server)


@pytest.mark.skipif(COMPILER is None, reason="a library is to be compiled")
@each_round
def test_what_a_worker_of_a_stage_has_no_memory_for_goes_on_at_another(
    fleet: Fleet, made: Made, stages: Collection[str]
) -> None:
    server = fleet.servers[0]
    fleet.wait_whole(server)
    assert fleet.memory is not None
    said = [(fleet.workers[stage][0].said, len(fleet.workers[stage][0].said)) for stage in stages]
    with ExitStack() as short:
        for stage in stages:
            short.enter_context(fleet.memory.none(stage))
        while not all(
            any("can't allocate memory" in line for line in lines[already:])
            for lines, already in said
        ):
            with asking(server, stages) as asked:
                check(asked, made, stages)
        wait_nothing_kept(fleet, server)
        # While nobody can go on with it, it ends with one error. Others are waited for first, where
        # a language model starts again: not for each of them.
        alone = [stage for stage in stages if stage not in ("scout", "writer")]
        with (
            suspended([fleet.engine(stage, 1) for stage in alone]),
            asking(server, alone, [0]) as asked,
        ):
            # Without memory, or without an answer of the other: whichever was asked last.
            ends = [one.answer.result().status for one in asked]
        assert set(ends) <= {500, 503}, ends
    fleet.wait_whole(server)
    with asking(server, stages, [0]) as asked:
        check(asked, made, ())


@each_round
def test_a_request_waits_for_a_stage_that_sleeps_before_any_has_worked(
    fleet: Fleet, made: Made, stages: Collection[str]
) -> None:
    refusing, waiting = fleet.servers
    fleet.wait_whole(waiting)
    asleep = [{"model": served_name(stage)} for stage in stages]

    def refused() -> bool:
        with asking(refusing, stages, [0]) as asked:
            return all(one.answer.result().status == 503 for one in asked)

    with httpx.Client(base_url=f"http://127.0.0.1:{ADMIN_PORT}", timeout=60) as admin:
        try:
            for one in asleep:
                assert admin.post("/sleep", params=one | {"level": "1"}).is_success
            wait_for(refused)
            with asking(waiting, stages) as asked:
                try:
                    with asking(waiting, stages, [0], within=1.0) as leaving:
                        pass
                    wait_nothing_kept(fleet, waiting)
                    assert not any(one.answer.done() for one in asked)
                finally:
                    for one in asleep:
                        assert admin.post("/wake_up", params=one).is_success
                check(asked, made, ())
        finally:
            for one in asleep:
                admin.post("/wake_up", params=one)
    assert all(isinstance(one.answer.exception(), httpx.TimeoutException) for one in leaving)
    wait_nothing_kept(fleet, waiting)


@each_round
def test_a_client_that_leaves_at_a_stage_leaves_nothing_behind(
    fleet: Fleet, made: Made, stages: Collection[str]
) -> None:
    server = fleet.servers[1]
    fleet.wait_whole(server)
    engines = [fleet.engine(stage, number) for stage in stages for number in range(2)]
    # It comes no further than to the stage.
    with suspended(engines), asking(server, stages, [0], within=1.0) as asked:
        ends = [one.answer.exception() for one in asked]
    assert all(isinstance(end, httpx.TimeoutException) for end in ends), ends
    wait_nothing_kept(fleet, server)


def test_a_worker_without_memory_ends_the_large_image_alone_and_keeps_nothing(
    fleet: Fleet, made: Made
) -> None:
    server = fleet.servers[1]
    fleet.wait_whole(server)
    engines = [fleet.engine("denoiser", number) for number in range(2)]
    for engine in engines:
        bound = engine.memory_info().vms + SPARE_BYTES
        engine.rlimit(psutil.RLIMIT_AS, (bound, psutil.RLIM_INFINITY))
    try:
        with asking(server, ["denoiser"]) as asked:
            body = {"model": "painter", "prompt": "a red fox", "size": "1024x1024", **FIELDS}
            answer = httpx.post(f"{server.v1}/images/generations", json=body, timeout=120)
            check(asked, made, ())
    finally:
        for engine in engines:
            engine.rlimit(psutil.RLIMIT_AS, (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY))
    assert answer.status_code == 500
    assert "memory is too small for 1 images of 1024x1024" in answer.json()["error"]["message"]
    assert [engine.is_running() for engine in engines] == [True, True]
    wait_nothing_kept(fleet, server)


def leave(server: Served, after: float, *, shown: bool = False) -> None:
    """Ask for two images, or for one that is `shown` on the way; leave after so many seconds."""
    more = {"stream": True, "partial_images": 3} if shown else {"n": 2}
    body = {"model": "painter", "prompt": "a red fox", **FIELDS, **more}
    with suppress(httpx.TimeoutException):
        httpx.post(f"{server.v1}/images/generations", json=body, timeout=after)


def test_clients_that_leave_at_any_time_leave_nothing_behind(fleet: Fleet, made: Made) -> None:
    random = Random(1)
    with ThreadPoolExecutor(TOGETHER) as pool:
        for number in range(12):
            server, after = fleet.servers[number % 2], random.uniform(0.01, 0.3)
            pool.submit(leave, server, after, shown=number % 4 > 1)
            way = random.choice([way for ways in WAYS.values() for way in ways])
            pool.submit(way, server, number % ASKERS, random.uniform(0.01, 0.3))
    server = fleet.servers[0]
    with asking(server, ROUNDS[0]) as asked:
        check(asked, made, ())
    # Payloads went from worker to worker, and none is kept.
    wait_for(lambda: sum(metric(server, r"inlay:fetched_payloads_total\{.*\}")) > 0)
    wait_nothing_kept(fleet, server)


@pytest.mark.parametrize("stage", ["denoiser", "decoder"])
def test_a_stream_of_previews_whose_worker_is_killed_ends_with_the_image(
    fleet: Fleet, made: Made, stage: str
) -> None:
    server, expected = fleet.servers[0], previews()
    fleet.wait_whole(server)
    workers = [fleet.engine(stage, number) for number in range(2)]
    before = {engine.pid: sum(engine.cpu_times()[:2]) for engine in workers}

    def kill_the_busier() -> None:
        busier = max(workers, key=lambda one: sum(one.cpu_times()[:2]) - before[one.pid])
        busier.send_signal(signal.SIGKILL)

    *shown, image = shown_on_the_way(server, kill_the_busier)
    assert shown
    assert in_order(shown, expected)
    assert near([pixels(image)], [pixels(expected[-1])])
    wait_nothing_kept(fleet, server)


def test_a_frontend_that_is_frozen_leaves_nothing_behind(fleet: Fleet, made: Made) -> None:
    server, frozen = fleet.servers
    fleet.wait_whole(server)
    with asking(frozen, ROUNDS[0], within=2.0):
        time.sleep(0.2)
        frozen.process.send_signal(signal.SIGSTOP)
    try:
        with asking(server, ROUNDS[0]) as asked:
            check(asked, made, ())
        wait_nothing_kept(fleet, server)
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
        [PYTHON, "-m", "inlay.cli", "worker", *given],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ran.returncode != 0
    assert said in ran.stderr
    assert "Traceback" not in ran.stderr
