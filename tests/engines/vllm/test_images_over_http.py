"""Images over HTTP: `inlay serve --engine vllm`, and vLLM's own server, asked the same.

The harm that one request with an image can do is shown on vLLM alone; through inlay each of them is
a 4xx, or what it seems to be, and others notice nothing.
"""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import torch
from transformers import AutoTokenizer

from inlay.media.families import spec_of
from inlay.media.spec import MediaSpec
from tests.engine.torch.vision_reference import Picture
from tests.engines.vllm import images
from tests.engines.vllm.serving import vllm_server
from tests.engines.vllm.test_over_http import serve
from tests.equality.test_images_over_http import TOKENS, chat, data_url, ids_of, image, saved, text
from tests.security.test_hostile_images import bomb, by_embeds
from tests.serving import Served

ONE, TWO = Picture(3, 50, 60), Picture(4, 33, 70)
MIB = 1 << 20
HIDDEN = 128

GRID = 8, 12
"""Patches of a picture that fills what the model sees of one; 24 rows."""


@pytest.fixture(scope="module")
def path() -> Path:
    return images.directory_of("qwen2_5_vl")


@pytest.fixture(scope="module")
def spec(path: Path) -> MediaSpec:
    found = spec_of(path)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def server(path: Path) -> Iterator[Served]:
    with serve(path, media=True) as served:
        yield served


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.v1, api_key="unused", max_retries=0) as client:
        yield client


class Expected:
    """What transformers answers to one user's message."""

    def __init__(self, path: Path, spec: MediaSpec) -> None:
        self._path = path
        self._spec = spec

    def __call__(self, *content: str | Picture) -> list[int]:
        parts = images.chat_parts(self._path, *content)
        return images.greedy(self._path, self._spec, parts, TOKENS)


@pytest.fixture(scope="module")
def expected(path: Path, spec: MediaSpec) -> Expected:
    return Expected(path, spec)


def own(path: Path, picture: Picture) -> dict[str, Any]:
    """An image as the client's own encoder makes it."""
    rows, grid = images.rows_of(path, picture)
    assert grid is not None
    return by_embeds({"image_embeds": saved(rows), "image_grid_thw": list(grid)})


def embeds(path: Path, words: str) -> dict[str, Any]:
    ids = AutoTokenizer.from_pretrained(path)(words).input_ids
    return {"type": "prompt_embeds", "data": saved(images.looked_up(path, ids))}


def test_images_are_answered_as_by_transformers_alone_and_together(
    client: openai.OpenAI, expected: Expected
) -> None:
    words = "the harbour town"
    asked: dict[tuple[str | Picture, ...], tuple[Any, ...]] = {
        ("What is on the hill?", ONE, "It is"): (
            text("What is on the hill?"),
            image(ONE, detail="high"),
            text("It is"),
        ),
        (ONE, words, TWO): (image(ONE), text(words), image(TWO)),
        (TWO, words, ONE): (image(TWO), text(words), image(ONE, detail="low")),
        ("a lantern",): (text("a lantern"),),
    }
    wanted = {content: expected(*content) for content in asked}
    assert len({tuple(ids) for ids in wanted.values()}) == len(wanted)
    for content, parts in asked.items():
        assert ids_of(chat(client, *parts)) == wanted[content]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda parts: ids_of(chat(client, *parts)), asked.values()))
    assert together == list(wanted.values())


def test_files_mix_with_embeddings_of_both_kinds(
    client: openai.OpenAI, expected: Expected, path: Path
) -> None:
    before, after = "counts its lanterns", " every night"
    answer = chat(
        client, embeds(path, before), image(ONE), text("and"), own(path, TWO), embeds(path, after)
    )
    assert ids_of(answer) == expected(before, ONE, "and", TWO, after)


def test_an_image_that_was_asked_about_is_cached_with_what_is_before_it(
    client: openai.OpenAI, server: Served
) -> None:
    content = text("the town on the hill " * 6), image(Picture(11, 64, 64)), text("is it?" * 9)
    first, second = chat(client, *content), chat(client, *content)
    assert ids_of(first) == ids_of(second)
    positions = second.usage.prompt_tokens
    assert second.usage.prompt_tokens_details.cached_tokens == (positions - 1) // 32 * 32
    card = httpx.get(server.v1 + "/models/m").json()
    assert card["engine"].startswith("vllm")


def test_completions_and_responses_take_images(
    client: openai.OpenAI, path: Path, spec: MediaSpec, expected: Expected
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = tokenizer("the harbour").input_ids
    given = {"type": "token_ids", "token_ids": ids}
    prompt: Any = [given, image(ONE), given]
    extra = {"return_token_ids": True, "ignore_eos": True}
    made: Any = client.completions.create(
        model="m", prompt=prompt, max_tokens=TOKENS, temperature=0, extra_body=extra
    )
    assert ids_of(made) == images.greedy(path, spec, [ids, ONE, ids], TOKENS)
    asked: Any = {"type": "input_image", "image_url": data_url(ONE.data), "detail": "auto"}
    response = client.responses.create(
        model="m",
        input=[{"role": "user", "content": [{"type": "input_text", "text": "It is"}, asked]}],
        max_output_tokens=TOKENS,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    wanted = tokenizer.decode(expected("It is", ONE), skip_special_tokens=True)
    assert response.output_text == wanted


class Inside:
    """A server of this machine that counts who asks it."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}/secret"
        self.asked = 0


@contextmanager
def inside() -> Iterator[Inside]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found.asked += 1
            self.send_response(200)
            self.end_headers()
            self.wfile.write(ONE.data)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        found = Inside(http.server_port)
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield found
        http.shutdown()


def grid_of(rows: torch.Tensor, *grid: int) -> dict[str, Any]:
    return by_embeds({"image_embeds": saved(rows), "image_grid_thw": [1, *grid]})


def large(value: float) -> dict[str, Any]:
    """An image of as many rows as fit a cache of 512 positions."""
    return grid_of(torch.full((400, HIDDEN), value), 40, 40)


FILE = {"type": "image_url", "image_url": {"url": "file:///etc/hostname"}}
LARGE_BOMB = {"type": "image_url", "image_url": {"url": data_url(bomb(20_000))}}
BOMB = {"type": "image_url", "image_url": {"url": data_url(bomb(9000))}}
HUGE_GRID = grid_of(torch.zeros(4, HIDDEN), 16_000, 16_000)
NAN = large(float("nan"))
FEWER_ROWS = grid_of(torch.full((20, HIDDEN), 0.1), *GRID)
HALF_AS_WIDE = grid_of(torch.full((24, HIDDEN // 2), 0.1), *GRID)

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a bomb of 10 KB": (BOMB, "9000 x 9000 pixels; allowed: 40000000"),
    "a bomb of 48 KB": (LARGE_BOMB, "20000 x 20000 pixels; allowed: 40000000"),
    "a file of the server's own": (FILE, "file:"),
    "a grid of 64 million rows": (
        HUGE_GRID,
        "image_embeds have 4 rows; this model's have 64000000",
    ),
    "rows of NaN": (NAN, "must be finite"),
    "rows that do not fill their grid": (FEWER_ROWS, "20 rows; this model's have 24"),
    "rows of half the width": (HALF_AS_WIDE, "must be 128 wide"),
}


def answered(url: str, *content: Any, tokens: int = TOKENS) -> httpx.Response:
    messages = [{"role": "user", "content": list(content)}]
    body = {"model": "m", "messages": messages, "max_tokens": tokens, "temperature": 0}
    return httpx.post(url + "/v1/chat/completions", json={**body, "ignore_eos": True}, timeout=600)


def said(url: str, *content: Any) -> str:
    answer = answered(url, *content)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def named(picture: Picture | None, name: str) -> dict[str, Any]:
    url = None if picture is None else {"url": data_url(picture.data)}
    return {"type": "image_url", "image_url": url, "uuid": name}


@contextmanager
def growth(server: Served) -> Iterator[list[int]]:
    """The most memory that the process that speaks HTTP takes meanwhile, in bytes, at the end."""
    folder = Path(f"/proc/{server.process.pid}")
    (folder / "clear_refs").write_text("5", encoding="utf-8")  # forgets the peak so far
    before = psutil.Process(server.process.pid).memory_info().rss
    found: list[int] = []
    yield found
    lines = (folder / "status").read_text(encoding="utf-8").splitlines()
    (peak,) = [line.split()[1] for line in lines if line.startswith("VmHWM")]
    found.append(int(peak) * 1024 - before)


WORDS = text("the town on the hill counts its lanterns")
BARE = (
    *("--enable-mm-embeds", "--no-enable-prefix-caching"),
    *("--max-model-len", 512, "--kv-cache-memory-bytes", MIB),
)


def test_vllm_alone_is_harmed_by_images_and_in_the_end_dead(path: Path) -> None:
    with vllm_server(path, *BARE) as server, inside() as private:
        url = server.url
        before = said(url, WORDS)
        # A name that one client gave is what another gets, whatever it sends with it.
        first = said(url, named(ONE, "mine"), WORDS)
        assert said(url, named(TWO, "mine"), WORDS) == first != said(url, image(TWO), WORDS)
        assert said(url, named(None, "mine"), WORDS) == first
        # A URL of the server's own machine is fetched.
        by_url = {"type": "image_url", "image_url": {"url": private.url}}
        assert said(url, by_url, WORDS) == said(url, image(ONE), WORDS)
        assert private.asked
        # What it refuses itself, it takes for its own faults.
        for refused in (FILE, LARGE_BOMB):
            assert answered(url, refused, WORDS).status_code == 500
        assert said(url, WORDS) == before
        # 10 KB of a bomb, and 13 KB of a grid, become hundreds of megabytes.
        for part in (BOMB, HUGE_GRID):
            with growth(server) as grown:
                answered(url, part, WORDS)
            assert grown[0] > 300 * MIB
        # What is not a number stays in the cache, where other prompts come to stand.
        assert said(url, WORDS) == before
        for _ in range(2):
            answered(url, NAN, tokens=1)
        assert [said(url, WORDS) for _ in range(3)] != [before] * 3
        # Rows that do not fill their grid end the engine for good.
        assert answered(url, FEWER_ROWS, WORDS).status_code >= 500
        assert _is_dead(url)


def test_vllm_alone_dies_of_rows_of_half_the_width(path: Path) -> None:
    with vllm_server(path, *BARE) as server:
        assert answered(server.url, WORDS).status_code == 200
        assert answered(server.url, HALF_AS_WIDE, WORDS).status_code >= 500
        assert _is_dead(server.url)


def test_vllm_alone_leaves_its_engine_running_when_its_server_is_killed(path: Path) -> None:
    """As the kernel kills the one for want of memory. Nothing tells the other."""
    with vllm_server(path, *BARE) as server:
        started = psutil.Process(server.process.pid).children(recursive=True)
        try:
            (core,) = [process for process in started if "EngineCore" in process.name()]
            server.process.kill()
            server.process.wait()
            assert _runs(core)
        finally:
            for process in filter(_runs, started):
                process.kill()


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _is_dead(url: str) -> bool:
    try:
        return answered(url, WORDS).status_code >= 500
    except httpx.TransportError:
        return True


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_harms_vllm_is_a_400_and_nobody_else_notices(
    server: Served, client: openai.OpenAI, expected: Expected, name: str
) -> None:
    part, reason = REFUSED[name]
    wanted = expected("is it?", ONE)
    with growth(server) as grown:
        answer = answered(server.url, part, WORDS)
    assert answer.status_code == 400, answer.text
    assert reason in answer.json()["error"]["message"]
    assert grown[0] < 100 * MIB
    assert ids_of(chat(client, text("is it?"), image(ONE))) == wanted


def test_a_name_that_a_client_gives_is_no_key(server: Served) -> None:
    first = said(server.url, named(ONE, "mine"), WORDS)
    other = said(server.url, named(TWO, "mine"), WORDS)
    assert other == said(server.url, image(TWO), WORDS) != first
    alone = answered(server.url, named(None, "mine"), WORDS)
    assert alone.status_code == 400
    assert "not kept by their uuid" in alone.json()["error"]["message"]


def test_a_url_of_this_machine_is_not_fetched(server: Served) -> None:
    with inside() as private:
        secure = private.url.replace("http:", "https:")
        for url in (private.url, secure):
            by_url = {"type": "image_url", "image_url": {"url": url}}
            assert answered(server.url, by_url, WORDS).status_code == 400
        assert private.asked == 0


# Last: it ends the server.
def test_a_server_that_is_killed_leaves_nothing_of_vllm_running(server: Served) -> None:
    started = psutil.Process(server.process.pid).children(recursive=True)
    assert any("EngineCore" in process.name() for process in started)
    server.process.kill()
    server.process.wait()
    while any(map(_runs, started)):
        time.sleep(0.1)
