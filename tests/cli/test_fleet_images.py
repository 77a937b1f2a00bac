"""Images in a fleet: answered by any worker, resumed when one dies, apart between tenants."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from inlay import demo
from tests.parts import Part, running
from tests.serving import free_port, serving

pytestmark = pytest.mark.slow

TOKENS = 300
PICTURE = demo.vision_examples().pictures[0]


@pytest.fixture(scope="module")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    store = tmp_path_factory.mktemp("nats")
    with running("nats", "--port", port, "--store-dir", store, until="NATS at nats://"):
        yield f"nats://127.0.0.1:{port}"


def worker(nats: str) -> Part:
    words = (demo.vision_dir(), "--served-model-name", "m", "--dtype", "float32", "--nats", nats)
    return Part("worker", *words, until=" serves ")


def message(question: str) -> list[dict[str, Any]]:
    url = "data:image/png;base64," + base64.b64encode(Path(PICTURE.path).read_bytes()).decode()
    image = {"type": "image_url", "image_url": {"url": url}}
    return [{"role": "user", "content": [image, {"type": "text", "text": question}]}]


def streamed(client: Any, *, kill: "list[Part]") -> list[int]:
    """Ids of a long answer; after the first of them the worker that runs it is killed."""
    ids: list[int] = []
    stream = client.chat.completions.create(
        model="m",
        messages=message("What digit is it?"),
        max_tokens=TOKENS,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    for event in stream:
        for choice in event.choices:
            ids += getattr(choice, "token_ids", None) or ()
        if len(ids) > 20 and kill:
            busiest = max(
                (child for part in kill for child in psutil.Process(part.process.pid).children()),
                key=lambda child: sum(child.cpu_times()[:2]) - _at_rest.get(child.pid, 0.0),
            )
            busiest.kill()
            kill.clear()
    return ids


_at_rest: dict[int, float] = {}


def test_an_answer_about_an_image_goes_on_at_another_worker(nats: str) -> None:
    parts = [worker(nats), worker(nats)]
    try:
        for part in parts:
            part.wait_ready()
        with (
            serving("--nats", nats, command="frontend") as server,
            openai.OpenAI(base_url=server.v1, api_key="unused", max_retries=0) as client,
        ):
            whole = streamed(client, kill=[])
            assert len(whole) == TOKENS
            for part in parts:
                for child in psutil.Process(part.process.pid).children():
                    _at_rest[child.pid] = sum(child.cpu_times()[:2])
            assert streamed(client, kill=parts.copy()) == whole
    finally:
        for part in parts:
            part.end()


def test_a_tenants_image_is_in_nobody_elses_cache() -> None:
    keys = ("key-of-a", "key-of-b")
    with serving(
        demo.vision_dir(), "--served-model-name", "m", "--dtype", "float32",
        *(word for key in keys for word in ("--api-key", key)),
    ) as server:  # fmt: skip

        def ask(key: str) -> tuple[str, int]:
            with openai.OpenAI(base_url=server.v1, api_key=key, max_retries=0) as opened:
                client: Any = opened
                answer: Any = client.chat.completions.create(
                    model="m", messages=message("What digit is it?"), max_tokens=4, temperature=0
                )
            details = answer.usage.prompt_tokens_details
            return answer.choices[0].message.content, details.cached_tokens

        said, cached = ask(keys[0])
        assert (said, cached) == (str(PICTURE.digit), 0)
        assert ask(keys[0])[1] > 0
        assert ask(keys[1]) == (said, 0)
