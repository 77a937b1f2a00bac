"""Images over HTTP: `inlay serve --engine vllm`, and vLLM's own server, asked the same.

The harm that one request with an image can do is shown on vLLM alone; through inlay each of them is
a 4xx, or what it seems to be, and others notice nothing.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from transformers import AutoTokenizer

from inlay.media.families import spec_of
from inlay.media.spec import MediaSpec
from tests.engine.torch.vision_reference import Picture
from tests.engines import images
from tests.engines.images_over_http import (
    BOMB,
    FEWER_ROWS,
    FILE,
    HALF_AS_WIDE,
    HUGE_GRID,
    LARGE_BOMB,
    MIB,
    NAN,
    ONE,
    REFUSED,
    TWO,
    WORDS,
    Expected,
    a_name_that_a_client_gives_is_no_key,
    a_url_of_this_machine_is_not_fetched,
    answered,
    files_mix_with_embeddings_of_both_kinds,
    harm_is_a_400_and_nobody_else_notices,
    images_are_answered_as_by_transformers,
    inside,
    named,
    said,
)
from tests.engines.vllm.serving import vllm_server
from tests.engines.vllm.test_over_http import serve
from tests.equality.test_images_over_http import TOKENS, chat, data_url, ids_of, image, text
from tests.serving import Served, peak_growth


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


@pytest.fixture(scope="module")
def expected(path: Path, spec: MediaSpec) -> Expected:
    return Expected(path, spec)


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
            with peak_growth(server.process.pid) as grown:
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


def test_images_are_answered_as_by_transformers_alone_and_together(
    client: openai.OpenAI, expected: Expected
) -> None:
    images_are_answered_as_by_transformers(client, expected)


def test_files_mix_with_embeddings_of_both_kinds(client: openai.OpenAI, expected: Expected) -> None:
    files_mix_with_embeddings_of_both_kinds(client, expected)


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_harms_vllm_is_a_400_and_nobody_else_notices(
    server: Served, client: openai.OpenAI, expected: Expected, name: str
) -> None:
    harm_is_a_400_and_nobody_else_notices(server, client, expected, name)


def test_a_name_that_a_client_gives_is_no_key(server: Served) -> None:
    a_name_that_a_client_gives_is_no_key(server)


def test_a_url_of_this_machine_is_not_fetched(server: Served) -> None:
    a_url_of_this_machine_is_not_fetched(server)


# Last: it ends the server.
def test_a_server_that_is_killed_leaves_nothing_of_vllm_running(server: Served) -> None:
    started = psutil.Process(server.process.pid).children(recursive=True)
    assert any("EngineCore" in process.name() for process in started)
    server.process.kill()
    server.process.wait()
    while any(map(_runs, started)):
        time.sleep(0.1)
