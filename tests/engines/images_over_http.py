"""Images over HTTP, asked of `inlay serve` with an engine that has a tower of its own.

The same checks for all such engines: answers are those of transformers, and what would harm the
engine is a 4xx or what it seems to be, and others notice nothing.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import openai
import torch
from transformers import AutoTokenizer

from inlay.media.spec import MediaSpec
from tests.engine.torch.vision_reference import Picture
from tests.engines import images
from tests.equality.test_images_over_http import TOKENS, chat, data_url, ids_of, image, saved, text
from tests.security.test_hostile_images import bomb, by_embeds
from tests.serving import Served, peak_growth

ONE, TWO = Picture(3, 50, 60), Picture(4, 33, 70)
MIB = 1 << 20
HIDDEN = 128

GRID = 8, 12
"""Patches of a picture that fills what the model sees of one; 24 rows."""


class Expected:
    """What transformers answers to one user's message."""

    def __init__(self, path: Path, spec: MediaSpec) -> None:
        self.path = path
        self._spec = spec

    def __call__(self, *content: str | Picture) -> list[int]:
        parts = images.chat_parts(self.path, *content)
        return images.greedy(self.path, self._spec, parts, TOKENS)


def own(path: Path, picture: Picture) -> dict[str, Any]:
    """An image as the client's own encoder makes it."""
    rows, grid = images.rows_of(path, picture)
    assert grid is not None
    return by_embeds({"image_embeds": saved(rows), "image_grid_thw": list(grid)})


def embeds(path: Path, words: str) -> dict[str, Any]:
    ids = AutoTokenizer.from_pretrained(path)(words).input_ids
    return {"type": "prompt_embeds", "data": saved(images.looked_up(path, ids))}


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


WORDS = text("the town on the hill counts its lanterns")


def images_are_answered_as_by_transformers(client: openai.OpenAI, expected: Expected) -> None:
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


def files_mix_with_embeddings_of_both_kinds(client: openai.OpenAI, expected: Expected) -> None:
    path = expected.path
    before, after = "counts its lanterns", " every night"
    answer = chat(
        client, embeds(path, before), image(ONE), text("and"), own(path, TWO), embeds(path, after)
    )
    assert ids_of(answer) == expected(before, ONE, "and", TWO, after)


def harm_is_a_400_and_nobody_else_notices(
    server: Served, client: openai.OpenAI, expected: Expected, name: str
) -> None:
    part, reason = REFUSED[name]
    wanted = expected("is it?", ONE)
    with peak_growth(server.process.pid) as grown:
        answer = answered(server.url, part, WORDS)
    assert answer.status_code == 400, answer.text
    assert reason in answer.json()["error"]["message"]
    assert grown[0] < 100 * MIB
    assert ids_of(chat(client, text("is it?"), image(ONE))) == wanted


def a_name_that_a_client_gives_is_no_key(server: Served) -> None:
    first = said(server.url, named(ONE, "mine"), WORDS)
    other = said(server.url, named(TWO, "mine"), WORDS)
    assert other == said(server.url, image(TWO), WORDS) != first
    alone = answered(server.url, named(None, "mine"), WORDS)
    assert alone.status_code == 400
    assert "not kept by their uuid" in alone.json()["error"]["message"]


def a_url_of_this_machine_is_not_fetched(server: Served) -> None:
    with inside() as private:
        secure = private.url.replace("http:", "https:")
        for url in (private.url, secure):
            by_url = {"type": "image_url", "image_url": {"url": url}}
            assert answered(server.url, by_url, WORDS).status_code == 400
        assert private.asked == 0
