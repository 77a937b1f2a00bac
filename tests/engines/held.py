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
from inlay.engine.api import GenerateEngine
from inlay.engine.pool_reference import BOUND, PoolReference, key_of
from inlay.engine.references import LocalReferences
from inlay.engine.torch.self_check.reference import Reference
from inlay.engine.weights import weights_id
from inlay.messages.card import ModelCard, SelfCheck
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
