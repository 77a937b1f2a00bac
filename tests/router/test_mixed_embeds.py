"""A pool of which some workers take embeddings as prompts.

Works with rows go to those, all others anywhere.
"""

from collections.abc import AsyncIterator
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from inlay.base.errors import EmbeddingsError
from inlay.engine.api import Engine
from inlay.engine.echo import EchoEngine
from inlay.engine.settings import EngineSettings
from inlay.messages.card import EMBEDS_OFF
from inlay.messages.digest import Secret
from inlay.messages.prompt import Buffer, Prompt, Rows, Tokens
from inlay.messages.request import Output, Pooling, Request, Sampling, Task
from inlay.router import Router
from inlay.worker.host import EngineHost
from inlay_stages.cards import StageCard
from inlay_stages.graph import Graph, Stage
from tests.router.sending import send
from tests.transport.direct import DirectPlane

SECRET = Secret(bytes(32))
ROWS = Prompt.of(Tokens((1,)), Rows(Buffer(bytes(3 * 8 * 4)), "float32", (3, 8)))
TEXT = Prompt.of(Tokens((1, 2, 3)))
_numbers = count()


@pytest.fixture
def settings(tmp_path: Path) -> EngineSettings:
    (tmp_path / "config.json").write_text(
        '{"vocab_size": 99, "hidden_size": 8, "max_position_embeddings": 20000}'
    )
    return EngineSettings.of(model=str(tmp_path), engine="echo", served_model_name=["m"])


def hosts(*takes_rows: bool) -> "partial[EngineHost]":
    """Hosts of engines, in this order."""
    kinds = iter(takes_rows)
    return partial(lambda engine: EngineHost(engine, prompt_embeds=next(kinds)))


@pytest.fixture
async def mixed(settings: EngineSettings) -> AsyncIterator[DirectPlane]:
    engines: list[Engine] = [EchoEngine(settings, SECRET) for _ in range(4)]
    plane = await DirectPlane.around(*engines, host=hosts(False, True, False, False))
    yield plane
    await plane.close()


def make_request(prompt: Prompt) -> Request:
    return Request(id=str(next(_numbers)), prompts=(prompt,), params=Sampling(max_tokens=2))


async def finish(router: Router, prompt: Prompt) -> str | None:
    last: Output | None = None
    async for outputs in await send(router, make_request(prompt)):
        last = outputs[-1]
    assert last is not None
    assert last.error is None
    return last.finish_reason


async def test_requests_with_rows_go_where_they_are_taken_and_others_everywhere(
    mixed: DirectPlane,
) -> None:
    router = Router(mixed, secret=SECRET)
    # Whichever worker was seen last, the model takes them.
    assert router.card("m").prompt_embeds is None
    assert [await finish(router, ROWS) for _ in range(12)] == ["length"] * 12
    streams = [await send(router, make_request(TEXT)) for _ in range(8)]
    loads = router.loads()
    assert sorted(load.requests for load in loads.values()) == [2, 2, 2, 2]
    for stream in streams:
        async for _ in stream:
            pass


async def test_rows_of_a_stage_go_on_at_another_worker_that_takes_none_of_clients(
    settings: EngineSettings,
) -> None:
    stages = {name: Stage(kind="generate", model="m") for name in ("reader", "writer")}
    graph = Graph(
        name="m",
        stages=stages,
        edges=["reader.hidden -> writer.hidden"],
        inputs={"prompt": "reader.prompt"},
        outputs={"text": "writer.text"},
    )
    stage = StageCard(graph, "writer")
    host = partial(EngineHost, prompt_embeds=False, stage=stage)
    engines: list[Engine] = [EchoEngine(settings, SECRET) for _ in range(2)]
    plane = await DirectPlane.around(*engines, host=host)
    router = Router(plane, secret=SECRET)
    (stream,) = await router.send("m", [make_request(ROWS)])
    (number,) = [at for at, one in enumerate(plane.workers()) if one.id == stream.worker]
    plane.worker_ends[number].close()
    outputs = [output async for batch in stream for output in batch]
    assert outputs[-1].finish_reason == "length"
    assert stream.worker == plane.workers()[0].id
    await plane.close()


async def test_a_worker_refuses_rows_that_are_sent_to_it_all_the_same(
    settings: EngineSettings,
) -> None:
    engine = EchoEngine(settings, SECRET)
    await engine.start()
    host = EngineHost(engine, prompt_embeds=False)
    assert host.card.prompt_embeds == EMBEDS_OFF
    assert engine.card.prompt_embeds is None
    outputs: list[Output] = []
    host.submit(make_request(ROWS), outputs.append)
    assert [output.finish_reason for output in outputs] == ["error"]
    assert outputs[0].error is not None
    error = outputs[0].error.to_error()
    assert isinstance(error, EmbeddingsError)
    assert "You must set --enable-prompt-embeds" in error.message
    host.submit(
        Request(id="e", task=Task.EMBED, prompts=(TEXT, ROWS), params=Pooling()), outputs.append
    )
    assert outputs[1].error is not None
    assert isinstance(outputs[1].error.to_error(), EmbeddingsError)
    await engine.close()
