"""Images in a fleet: answered by any worker, resumed when one dies, apart between tenants."""

import base64
import json
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from inlay import demo
from tests.commands import run
from tests.parts import Part, running, workers_of
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


def worker(nats: str, *words: str) -> Part:
    words = ("--served-model-name", "m", "--dtype", "float32", "--nats", nats, *words)
    return Part("worker", demo.vision_dir(), *words, until=" serves ")


def message(question: str, picture: demo.DigitPicture = PICTURE) -> list[dict[str, Any]]:
    url = "data:image/png;base64," + base64.b64encode(Path(picture.path).read_bytes()).decode()
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
                (child for part in kill for child in workers_of(part.process.pid)),
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
                for child in workers_of(part.process.pid):
                    _at_rest[child.pid] = sum(child.cpu_times()[:2])
            assert streamed(client, kill=parts.copy()) == whole
    finally:
        for part in parts:
            part.end()


def engine_of(part: Part) -> psutil.Process:
    """The process that encodes or generates."""
    (engine,) = workers_of(part.process.pid)
    return engine


def seen(nats: str, namespace: str) -> list[dict[str, Any]]:
    """The workers that `inlay status` shows."""
    words = ("status", "--nats", nats, "--namespace", namespace, "--output-json")
    shown = json.loads(run(sys.executable, "-m", "inlay.cli", *words))
    workers: list[dict[str, Any]] = shown["workers"]
    return workers


def until(done: Callable[[], bool]) -> None:
    """Wait for what must come about, however long a busy machine takes."""
    for _ in range(600):
        if done():
            return
        time.sleep(0.2)
    raise AssertionError("it has not come about")


def test_an_image_is_encoded_by_whichever_encode_worker_is_left(nats: str) -> None:
    namespace = "apart"
    parts = [worker(nats, "--namespace", namespace, "--language-model-only")]
    pictures = demo.vision_examples().pictures[:4]
    digits = [str(picture.digit) for picture in pictures]
    try:
        parts[0].wait_ready()
        with (
            serving("--nats", nats, "--namespace", namespace, command="frontend") as server,
            openai.OpenAI(base_url=server.v1, api_key="unused", max_retries=0) as opened,
            ThreadPoolExecutor(len(pictures)) as threads,
        ):
            client: Any = opened

            def ask(salt: str, picture: demo.DigitPicture) -> str:
                # Another salt is another tenant: nothing of it is cached anywhere.
                answer = client.chat.completions.create(
                    model="m",
                    messages=message("What digit is it?", picture),
                    max_tokens=4,
                    temperature=0,
                    extra_body={"cache_salt": salt},
                )
                said: str = answer.choices[0].message.content
                return said

            def asked(salt: str) -> list[Future[str]]:
                return [threads.submit(ask, salt, picture) for picture in pictures]

            def answers(salt: str) -> list[str]:
                return [each.result() for each in asked(salt)]

            def healthy() -> bool:
                found: Any = httpx.get(server.url + "/health", timeout=60, trust_env=False).json()
                return found["status"] == "ok" and len(found["workers"]) == len(parts)

            with pytest.raises(openai.InternalServerError, match="no worker with --task encode"):
                ask("nobody", PICTURE)
            words = ("--namespace", namespace, "--task", "encode", "--health-probe-interval", "0")
            parts += [worker(nats, *words) for _ in "ab"]
            for part in parts:
                part.wait_ready()
            until(healthy)
            assert answers("whole") == digits
            tasks = sorted(each["task"] for each in seen(nats, namespace))
            assert tasks == ["encode", "encode", "generate"]
            (model,) = client.models.list().data
            assert {"chat", "completions"} <= set(model.capabilities)

            # Killed while it encodes: both are held, and have something to do.
            first, second = (engine_of(part) for part in parts[1:])
            first.suspend()
            second.suspend()
            waiting = asked("killed")
            time.sleep(1)
            first.kill()
            second.resume()
            assert [each.result() for each in waiting] == digits

            # Frozen: nobody ends it, and it says nothing.
            until(healthy)
            second.suspend()
            assert answers("frozen") == digits
            second.resume()

            # Gone for good.
            until(healthy)
            parts.pop().end()
            assert answers("gone") == digits
            until(lambda: all(not each["running"] for each in seen(nats, namespace)))
    finally:
        for part in parts:
            part.end()


def test_a_tenants_image_is_in_nobody_elses_cache() -> None:
    keys = ("key-of-a", "key-of-b")
    with serving(
        demo.vision_dir(), "--served-model-name", "m", "--dtype", "float32", "--block-size", 16,
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
