"""An engine of others is held to the reference that the torch engine made, on real models."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from transformers import AutoModelForCausalLM

from inlay.base.errors import EngineError
from inlay.engine import references
from inlay.engine.api import Engine, GenerateEngine
from inlay.engine.embed.encoder import Encoder
from inlay.engine.pool_reference import BOUND, PoolReference, PoolVectors, key_of
from inlay.engine.references import LocalReferences
from inlay.engine.settings import EngineSettings
from inlay.engine.torch.self_check.reference import Reference
from inlay.engine.weights import weights_id
from inlay.messages.card import ModelCard, SelfCheck
from inlay.messages.request import Task
from inlay.worker.host import EngineHost
from inlay.worker.pool_check import check_later, check_pool


@contextmanager
def own_cache(directory: Path) -> Iterator[None]:
    """Keep references in `directory`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(references, "_path", lambda key: directory / f"{key}.msgpack")
        yield


def keep_reference(model: Path, dtype: str) -> PoolReference:
    """Keep the reference of `model`, as the torch engine does."""
    own = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    made = Reference.of(own, model, 64, axes=1, rows=False).pooled
    LocalReferences().keep(key_of(weights_id(model), dtype), made)
    return PoolReference.decode(made, own.config.vocab_size)


async def nothing_kept_is_said(engine: GenerateEngine, caplog: pytest.LogCaptureFixture) -> None:
    """It serves, and says that it was not compared; strict refuses."""
    with caplog.at_level(logging.WARNING):
        found = await check_pool(engine, "start", shared=False)
    assert found is not None
    assert found.result == "unchecked"
    assert "no reference of" in caplog.text
    assert "inlay doctor" in caplog.text
    with pytest.raises(EngineError, match=r"strict: .* was not compared: no reference of"):
        await check_pool(engine, "strict", shared=False)
    assert await check_pool(engine, "off", shared=False) is None


async def it_is_held_to_what_is_kept(
    engine: GenerateEngine, model: Path, caplog: pytest.LogCaptureFixture
) -> float:
    """Return the distance; one that is kept later is found, and with other logprobs it differs."""
    host = EngineHost(engine, self_check=SelfCheck(result="unchecked", reference=""))
    found_later = asyncio.Event()

    def announce(card: ModelCard) -> None:
        if card.self_check is not None and card.self_check.result == "passed":
            found_later.set()

    host.watch(announce)
    later = asyncio.create_task(check_later(engine, host, host.card.self_check, 0.05))
    reference = keep_reference(model, engine.card.dtype)
    async with asyncio.timeout(60):
        await found_later.wait()
    later.cancel()
    await asyncio.gather(later, return_exceptions=True)
    found = await check_pool(engine, "strict", shared=False)
    assert found is not None
    assert found.result == "passed"
    assert set(found.distances) == {"random", "text"}
    assert 0 < found.distance <= BOUND
    assert found.reference == f"{reference.by}, kept"
    ids = np.frombuffer(reference.ids, "<i4")[::-1].tobytes()
    card = engine.card
    key = key_of(card.weights_id, card.dtype)
    LocalReferences().keep(key, replace(reference, ids=ids).encode())
    with caplog.at_level(logging.ERROR):
        other = await check_pool(engine, "start", shared=False)
    assert other is not None
    assert other.result == "differs"
    assert other.distance > 3 * BOUND
    assert other.reason in caplog.text
    with pytest.raises(EngineError, match="strict: its logprobs are not those of"):
        await check_pool(engine, "strict", shared=False)
    return found.distance


class HeldVectors:
    """For a suite of an engine that makes vectors or scores."""

    async def test_it_is_held_to_vectors_of_the_models_own_code(
        self, engine: Engine, directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with own_cache(tmp_path):
            print(await vectors_are_held_to_what_is_kept(engine, directory, caplog))


async def vectors_are_held_to_what_is_kept(
    engine: Engine, directory: Path, caplog: pytest.LogCaptureFixture
) -> float:
    """Return the distance to what the torch engine keeps; with other vectors it differs."""
    card = engine.card
    (task,) = {Task.EMBED, Task.SCORE} & {*card.tasks}
    asked = {"task": task.value, "dtype": card.dtype, "device": "cpu", "self_check": "full"}
    settings = EngineSettings.of(**{"model": str(directory), **asked})
    made = Encoder.load(settings).self_check
    assert made is not None
    assert made.result == "passed"
    key = key_of(card.weights_id, card.dtype)
    data = LocalReferences().find(key)
    assert data is not None
    reference = PoolVectors.decode(data, card.vocab_size)
    found = await check_pool(engine, "strict", shared=True)
    if card.engine == "torch":
        assert found is None
        assert "of the rounding of" in caplog.text
    else:
        assert found is not None
        assert found.result == "passed"
        assert 0 < found.distance <= BOUND
    values = np.frombuffer(reference.vectors, "<f4").reshape(len(reference.prompts), -1)
    for other in (values[::-1], values * 1.2, -values):
        wrong = replace(reference, vectors=np.ascontiguousarray(other).tobytes())
        LocalReferences().keep(key, wrong.encode())
        unit = card.embedding is not None and card.embedding.unit
        if unit and np.array_equal(other, values * 1.2):
            # Of length 1 they are the same.
            continue
        with caplog.at_level(logging.ERROR):
            differs = await check_pool(engine, "start", shared=True)
        assert differs is not None
        assert differs.result == "differs"
        assert "its vectors or scores are not those of" in differs.reason
        with pytest.raises(EngineError, match="strict: its vectors or scores"):
            await check_pool(engine, "strict", shared=True)
    return 0.0 if found is None else found.distance
