"""What an engine of vectors owes its works."""

import asyncio
import random
from collections.abc import AsyncIterator

import numpy as np
import numpy.typing as npt
import pytest

from inlay import engine as engines
from inlay.digest import Secret
from inlay.engine.embed.engine import EmbedEngine
from inlay.engine.settings import EngineSettings
from inlay.errors import (
    ContextLengthError,
    DeadlineExceededError,
    EmbeddingsError,
    EngineError,
    InvalidRequestError,
    OverloadedError,
)
from inlay.prompt import Buffer, Prompt, Rows, Tokens
from inlay.protocol.embedding import Embeds, EmbedWork, Vectors
from inlay.protocol.work import Task
from tests import embedding_reference as reference
from tests.embedding_models import MAX_LENGTH, VOCAB_SIZE, tiny_embedding, tiny_scoring

SECRET = Secret(bytes(range(32)))


def settings(name: str = "bert", **fields: object) -> EngineSettings:
    return EngineSettings(model=str(tiny_embedding(name)), task="embed", max_num_batched_tokens=256, **fields)  # type: ignore[arg-type]


async def started(chosen: EngineSettings) -> EmbedEngine:
    engine = engines.create(chosen, SECRET)
    assert isinstance(engine, EmbedEngine)
    assert isinstance(engine, Embeds)
    await engine.start()
    return engine


@pytest.fixture
async def engine() -> AsyncIterator[EmbedEngine]:
    running = await started(settings())
    yield running
    await running.close()


def ids(length: int, seed: int = 0) -> list[int]:
    generator = random.Random(f"{length} {seed}")
    return [generator.randrange(5, VOCAB_SIZE) for _ in range(length)]


def work(name: str, *lengths: int, **fields: object) -> EmbedWork:
    prompts = tuple(Prompt.of(Tokens(ids(length, seed))) for seed, length in enumerate(lengths))
    return EmbedWork(id=name, prompts=prompts, **fields)  # type: ignore[arg-type]


class Waiting:
    """One work and its answer."""

    def __init__(self, engine: EmbedEngine, given: EmbedWork) -> None:
        self.answers: list[Vectors] = []
        self._came = asyncio.Event()
        engine.embed(given, self._take)

    def _take(self, vectors: Vectors) -> None:
        self.answers.append(vectors)
        self._came.set()

    async def answer(self) -> Vectors:
        await asyncio.wait_for(self._came.wait(), 60)
        (found,) = self.answers
        return found


def rows_of(vectors: Vectors) -> npt.NDArray[np.float32]:
    assert vectors.error is None
    return np.frombuffer(vectors.data.view, np.float32).reshape(-1, vectors.size)


async def test_vectors_come_in_the_order_of_their_prompts_however_they_are_batched(
    engine: EmbedEngine,
) -> None:
    lengths = [random.Random(7).randrange(1, MAX_LENGTH + 1) for _ in range(60)]
    answer = await Waiting(engine, work("many", *lengths)).answer()
    assert (answer.work_id, answer.prompt_tokens) == ("many", sum(lengths))
    found = rows_of(answer)
    assert found.shape == (60, 48)
    for seed in (0, 17, 42, 59):
        expected = reference.vector(tiny_embedding("bert"), ids(lengths[seed], seed))
        assert reference.cosine(found[seed], expected) > 0.99999
    assert engine.stats().steps >= sum(lengths) // 256


async def test_a_small_work_is_done_before_a_large_one_that_came_first(engine: EmbedEngine) -> None:
    order: list[str] = []
    done = asyncio.Event()

    def note(vectors: Vectors) -> None:
        order.append(vectors.work_id)
        if len(order) == 2:
            done.set()

    engine.embed(work("large", *[40] * 200), note)
    engine.embed(work("small", 10, 30), note)
    await asyncio.wait_for(done.wait(), 60)
    assert order == ["small", "large"]


async def test_an_aborted_work_is_answered_at_once_and_harms_nobody(engine: EmbedEngine) -> None:
    leaving = Waiting(engine, work("leaving", *[60] * 100))
    staying = Waiting(engine, work("staying", 20))
    engine.abort("leaving")
    engine.abort("never seen")
    (answer,) = leaving.answers
    assert answer.error is not None
    rows_of(await staying.answer())
    assert engine.stats().waiting == 0
    again = await Waiting(engine, work("leaving", 20)).answer()
    assert len(rows_of(again)) == 1
    assert len(leaving.answers) == 1


async def test_a_passed_deadline_is_an_error(engine: EmbedEngine) -> None:
    answer = await Waiting(engine, work("late", 10, deadline=-1.0)).answer()
    assert answer.error is not None
    assert isinstance(answer.error.to_error(), DeadlineExceededError)


async def test_what_would_wait_too_long_is_refused_and_taken_later() -> None:
    engine = await started(settings(max_num_queued_tokens=1000))
    first = Waiting(engine, work("first", *[60] * 100))
    with pytest.raises(OverloadedError, match="would pass the limit of 1000"):
        engine.embed(work("second", 10), lambda _: None)
    await first.answer()
    await Waiting(engine, work("second", 10)).answer()
    await engine.close()


async def test_what_can_never_run_is_refused_before_it_waits(engine: EmbedEngine) -> None:
    noise = Rows(Buffer(bytes(48 * 4)), "float32", (1, 48))
    cases = [
        (ContextLengthError, "maximum context length is 64", work("x", MAX_LENGTH + 1)),
        (ContextLengthError, "one at least", work("x", 0)),
        (InvalidRequestError, "one prompt at least", work("x")),
        (
            InvalidRequestError,
            "not in the vocabulary",
            EmbedWork(id="x", prompts=(Prompt.of(Tokens([10**6])),)),
        ),
        (EmbeddingsError, "takes no embeddings", EmbedWork(id="x", prompts=(Prompt.of(noise),))),
        (InvalidRequestError, "does not exist", work("x", 5, adapter="missing")),
        (InvalidRequestError, "pairs", work("x", 5, 5, second_from=(2,))),
    ]
    for kind, message, given in cases:
        with pytest.raises(kind, match=message):
            engine.embed(given, lambda _: None)
    assert engine.stats().waiting == 0


async def test_an_id_under_way_is_refused_and_free_again_afterwards(engine: EmbedEngine) -> None:
    one = Waiting(engine, work("one", 20))
    with pytest.raises(InvalidRequestError, match="under way"):
        engine.embed(work("one", 20), lambda _: None)
    await one.answer()
    await Waiting(engine, work("one", 20)).answer()


async def test_a_vector_that_is_not_finite_is_an_error_and_its_neighbours_are_not() -> None:
    engine = await started(settings("qwen3"))
    poison = np.full((9, 48), np.nan, np.float32)
    rows = Rows(Buffer(poison.tobytes()), "float32", poison.shape)
    bad = Waiting(engine, EmbedWork(id="bad", prompts=(Prompt.of(Tokens([5])), Prompt.of(rows))))
    good = Waiting(engine, work("good", 8, 9, 10))
    answer = await bad.answer()
    assert answer.error is not None
    assert isinstance(answer.error.to_error(), EngineError)
    assert "input 1" in answer.error.message
    assert np.isfinite(rows_of(await good.answer())).all()
    await engine.close()


async def test_a_cross_encoder_answers_logits_and_can_be_probed() -> None:
    path = tiny_scoring("bert")
    engine = await started(EngineSettings(model=str(path), task="score"))
    assert engine.card.tasks == (Task.SCORE,)
    assert await engine.probe() > 0
    encoding = reference.tokenizer_of(path)("how many ships", "the harbour")
    given = EmbedWork(id="pair", prompts=(Prompt.of(Tokens(encoding["input_ids"])),), second_from=(5,))
    found = rows_of(await Waiting(engine, given).answer())
    assert np.allclose(found[0], reference.logits(path, "how many ships", "the harbour"), atol=1e-4)
    await engine.close()


async def test_the_card_and_the_counters_say_what_is_served(engine: EmbedEngine) -> None:
    card = engine.card
    assert card.tasks == (Task.EMBED,)
    assert (card.vocab_size, card.hidden_size, card.limits.max_model_len) == (VOCAB_SIZE, 48, MAX_LENGTH)
    assert card.embedding is not None
    assert (card.embedding.size, len(card.weights_id)) == (48, 32)
    before = engine.stats().progress
    assert await engine.probe() > 0
    assert engine.stats().progress == before + 1


async def test_closing_answers_what_is_under_way() -> None:
    engine = await started(settings())
    waiting = Waiting(engine, work("one", *[60] * 50))
    await asyncio.sleep(0)
    await engine.close()
    assert (await waiting.answer()).error is not None
    with pytest.raises(OverloadedError, match="closing"):
        engine.embed(work("two", 5), lambda _: None)
    await engine.close()
