"""A pool of which some workers take embeddings as prompts: works with rows go to those, all others anywhere."""

from collections.abc import AsyncIterator
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from inlay.digest import Secret
from inlay.engine.echo import EchoEngine
from inlay.engine.settings import EngineSettings
from inlay.errors import EmbeddingsError
from inlay.prompt import Buffer, Prompt, Rows, Tokens
from inlay.protocol.capabilities import EMBEDS_OFF
from inlay.protocol.embedding import EmbedWork
from inlay.protocol.work import Delta, Engine, Sampling, Work
from inlay.router import Router
from inlay.worker.host import Host
from tests.plane.direct import DirectPlane
from tests.router.sending import send

SECRET = Secret(bytes(32))
ROWS = Prompt.of(Tokens((1,)), Rows(Buffer(bytes(3 * 8 * 4)), "float32", (3, 8)))
TEXT = Prompt.of(Tokens((1, 2, 3)))
_numbers = count()


@pytest.fixture
def settings(tmp_path: Path) -> EngineSettings:
    (tmp_path / "config.json").write_text(
        '{"vocab_size": 99, "hidden_size": 8, "max_position_embeddings": 20000}'
    )
    return EngineSettings(model=str(tmp_path), engine="echo", served_model_name=["m"])


def hosts(*takes_rows: bool) -> "partial[Host]":
    """Hosts of engines, in this order."""
    kinds = iter(takes_rows)
    return partial(lambda engine: Host(engine, prompt_embeds=next(kinds)))


@pytest.fixture
async def mixed(settings: EngineSettings) -> AsyncIterator[DirectPlane]:
    engines: list[Engine] = [EchoEngine(settings, SECRET) for _ in range(4)]
    plane = await DirectPlane.around(*engines, host=hosts(False, True, False, False))
    yield plane
    await plane.close()


def work(prompt: Prompt) -> Work:
    return Work(id=str(next(_numbers)), prompt=prompt, sampling=Sampling(max_tokens=2))


async def finish(router: Router, prompt: Prompt) -> str | None:
    last: Delta | None = None
    async for deltas in await send(router, work(prompt)):
        last = deltas[-1]
    assert last is not None
    assert last.error is None
    return last.finish_reason


async def test_works_with_rows_go_where_they_are_taken_and_others_everywhere(mixed: DirectPlane) -> None:
    router = Router(mixed, secret=SECRET)
    # Whichever worker was seen last, the model takes them.
    assert router.card("m").prompt_embeds is None
    assert [await finish(router, ROWS) for _ in range(12)] == ["length"] * 12
    streams = [await send(router, work(TEXT)) for _ in range(8)]
    loads = router.loads()
    assert sorted(load.works for load in loads.values()) == [2, 2, 2, 2]
    for stream in streams:
        async for _ in stream:
            pass


async def test_a_worker_refuses_rows_that_are_sent_to_it_all_the_same(settings: EngineSettings) -> None:
    engine = EchoEngine(settings, SECRET)
    await engine.start()
    host = Host(engine, prompt_embeds=False)
    assert host.card.prompt_embeds == EMBEDS_OFF
    assert engine.card.prompt_embeds is None
    deltas: list[Delta] = []
    host.generate(work(ROWS), deltas.append)
    assert [delta.finish_reason for delta in deltas] == ["error"]
    assert deltas[0].error is not None
    error = deltas[0].error.to_error()
    assert isinstance(error, EmbeddingsError)
    assert "You must set --enable-prompt-embeds" in error.message
    answers: list[object] = []
    host.embed(EmbedWork(id="e", prompts=(TEXT, ROWS)), answers.append)
    (vectors,) = answers
    assert isinstance(vectors.error.to_error(), EmbeddingsError)  # type: ignore[attr-defined]
    await engine.close()
