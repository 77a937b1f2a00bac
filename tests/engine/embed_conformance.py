"""Conformance tests of embedding engines, whatever runs the model.

An engine's own test module subclasses `EmbedConformance` and gives it the fixtures `directory` (of
`tests.embedding_models`, float32), `settings` (with `LIMITS`) and, where starting takes long,
`engine`; `ScoreConformance` likewise with a cross-encoder.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio

from inlay import engine as engines
from inlay.base.errors import (
    ContextLengthError,
    DeadlineExceededError,
    EmbeddingsError,
    EngineError,
    InvalidRequestError,
    OverloadedError,
)
from inlay.engine.api import Engine
from inlay.engine.settings import EngineSettings
from inlay.messages.digest import Secret
from inlay.messages.prompt import Buffer, Prompt, Rows, Tokens
from inlay.messages.request import PORTS, Output, Pooling, Request, Task
from tests import embedding_reference as reference
from tests.embedding_models import MAX_LENGTH, VOCAB_SIZE

SECRET = Secret(bytes(range(32)))

BUDGET = 256
LIMITS: dict[str, Any] = {"max_num_batched_tokens": BUDGET, "max_num_queued_tokens": 2000}


def ids(length: int, seed: int = 0) -> list[int]:
    generator = random.Random(f"{length} {seed}")
    return [generator.randrange(5, VOCAB_SIZE) for _ in range(length)]


def to_embed(
    name: str, *prompts: Prompt, task: Task = Task.EMBED, seconds: Sequence[int] = (), **fields: Any
) -> Request:
    params = Pooling(second_from=tuple(seconds))
    return Request(id=name, task=task, prompts=prompts, params=params, **fields)


def make_request(name: str, *lengths: int, **fields: Any) -> Request:
    prompts = (Prompt.of(Tokens(ids(length, seed))) for seed, length in enumerate(lengths))
    return to_embed(name, *prompts, **fields)


def rows_from(values: npt.NDArray[np.float32]) -> Rows:
    return Rows(Buffer(values.tobytes()), "float32", (values.shape[0], values.shape[1]))


class Waiting:
    """One request and its answer."""

    def __init__(self, engine: Engine, given: Request) -> None:
        self.answers: list[Output] = []
        self._came = asyncio.Event()
        engine.submit(given, self._take)

    def _take(self, vectors: Output) -> None:
        self.answers.append(vectors)
        self._came.set()

    async def answer(self) -> Output:
        await asyncio.wait_for(self._came.wait(), 120)
        (found,) = self.answers
        return found


def vectors_of(vectors: Output) -> npt.NDArray[np.float32]:
    assert vectors.error is None
    assert vectors.finish_reason == "stop"
    (payload,) = vectors.payloads
    assert payload.port in PORTS.values()
    assert payload.dtype == "float32"
    return np.frombuffer(payload.data.view, np.float32).reshape(payload.shape)


async def started(settings: EngineSettings) -> Engine:
    engine = engines.create(settings, SECRET)
    await engine.start()
    return engine


def asks_rows(engine: Engine) -> None:
    if engine.card.prompt_embeds is not None:
        pytest.skip(f"refused: {engine.card.prompt_embeds}")


class EmbedConformance:
    """Engine-independent tests of an engine of `Task.EMBED`."""

    @pytest_asyncio.fixture
    async def engine(self, settings: EngineSettings) -> AsyncIterator[Engine]:
        running = await started(settings)
        yield running
        await running.close()

    async def test_the_card_and_the_counters_say_what_is_served(
        self, engine: Engine, directory: Path
    ) -> None:
        card, config = engine.card, reference.model_of(directory).config
        assert card.tasks == (Task.EMBED,)
        assert (card.vocab_size, card.hidden_size) == (VOCAB_SIZE, config.hidden_size)
        assert (card.dtype, card.limits.max_model_len) == ("float32", MAX_LENGTH)
        assert card.secret_fingerprint == SECRET.fingerprint
        assert card.embedding is not None
        assert card.embedding.size == len(reference.vector(directory, [5]))
        assert card.embedding.normalize
        assert len(card.weights_id) == 32
        assert Path(card.path) == directory
        before = engine.stats()
        took = await engine.probe()
        after = engine.stats()
        assert after.progress == before.progress + 1
        assert 0 < after.busy_seconds - before.busy_seconds <= took

    async def test_vectors_come_in_the_order_of_their_prompts_however_they_are_batched(
        self, engine: Engine, directory: Path
    ) -> None:
        steps = engine.stats().steps
        lengths = [random.Random(7).randrange(1, MAX_LENGTH + 1) for _ in range(60)]
        answer = await Waiting(engine, make_request("many", *lengths)).answer()
        assert answer.usage is not None
        assert (answer.request_id, answer.usage.prompt_tokens) == ("many", sum(lengths))
        found = vectors_of(answer)
        for seed, length in enumerate(lengths):
            expected = reference.vector(directory, ids(length, seed))
            assert found[seed].shape == expected.shape
            assert reference.cosine(found[seed], expected) > 0.99999
        assert engine.stats().steps >= steps + sum(lengths) // BUDGET

    async def test_vectors_have_the_length_the_card_says(
        self, engine: Engine, directory: Path
    ) -> None:
        (found,) = vectors_of(await Waiting(engine, make_request("one", 20)).answer())
        expected = reference.vector(directory, ids(20))
        assert engine.card.embedding is not None
        if engine.card.embedding.unit:
            expected /= np.linalg.norm(expected)
        assert np.allclose(found, expected, atol=1e-4)

    async def test_a_text_repeated_by_another_tenant_has_the_same_vector(
        self, engine: Engine
    ) -> None:
        asked = [make_request(salt, 60, salt=salt) for salt in "aabb"]
        found = [vectors_of(await Waiting(engine, one).answer())[0] for one in asked]
        for other in found[1:]:
            assert reference.cosine(found[0], other) > 0.999999

    async def test_rows_and_mixtures_have_the_vector_of_the_text_they_are_from(
        self, engine: Engine, directory: Path
    ) -> None:
        asks_rows(engine)
        tokens = ids(45)
        rows = reference.embedded(directory, tokens)
        expected = reference.vector(directory, tokens)
        forms = (
            Prompt.of(rows_from(rows)),
            Prompt.of(Tokens(tokens[:17]), rows_from(rows[17:30]), Tokens(tokens[30:])),
            Prompt.of(rows_from(rows[:16]), Tokens(tokens[16:])),
            Prompt.of(Tokens(tokens)),
        )
        alone = [await Waiting(engine, to_embed("one", form)).answer() for form in forms]
        together = await Waiting(engine, to_embed("all", *forms)).answer()
        for found in [*(vectors_of(answer)[0] for answer in alone), *vectors_of(together)]:
            assert reference.cosine(found, expected) > 0.99999

    async def test_rows_that_no_token_has_are_embedded_as_transformers_does(
        self, engine: Engine, directory: Path
    ) -> None:
        asks_rows(engine)
        noise = (
            np.random.default_rng(3)
            .standard_normal((20, engine.card.hidden_size))
            .astype(np.float32)
        )
        answer = await Waiting(engine, to_embed("x", Prompt.of(rows_from(noise)))).answer()
        assert reference.cosine(vectors_of(answer)[0], reference.vector(directory, noise)) > 0.99999

    async def test_a_vector_that_is_not_finite_is_an_error_and_its_neighbours_are_not(
        self, engine: Engine, directory: Path
    ) -> None:
        asks_rows(engine)
        poison = rows_from(np.full((9, engine.card.hidden_size), np.nan, np.float32))
        given = to_embed("bad", Prompt.of(Tokens([5])), Prompt.of(poison))
        bad = Waiting(engine, given)
        good = Waiting(engine, make_request("good", 8, 9, 10))
        answer = await bad.answer()
        assert answer.error is not None
        assert isinstance(answer.error.to_error(), EngineError)
        assert "input 1" in answer.error.message
        assert np.isfinite(vectors_of(await good.answer())).all()
        for number in range(12):
            (after,) = vectors_of(
                await Waiting(engine, make_request("after", 40, salt=str(number))).answer()
            )
            assert reference.cosine(after, reference.vector(directory, ids(40))) > 0.99999

    async def test_a_small_request_is_done_before_a_large_one_that_came_first(
        self, engine: Engine
    ) -> None:
        order: list[str] = []
        done = asyncio.Event()

        def note(vectors: Output) -> None:
            order.append(vectors.request_id)
            if len(order) == 2:
                done.set()

        engine.submit(make_request("large", *[40] * 45), note)
        engine.submit(make_request("small", 10, 30), note)
        await asyncio.wait_for(done.wait(), 120)
        assert order == ["small", "large"]

    async def test_an_aborted_request_is_answered_at_once_and_harms_nobody(
        self, engine: Engine
    ) -> None:
        leaving = Waiting(engine, make_request("leaving", *[60] * 30))
        staying = Waiting(engine, make_request("staying", 20))
        engine.abort("leaving")
        engine.abort("never seen")
        (answer,) = leaving.answers
        assert (answer.finish_reason, answer.payloads) == ("abort", ())
        vectors_of(await staying.answer())
        assert engine.stats().waiting == 0
        again = await Waiting(engine, make_request("leaving", 20)).answer()
        assert len(vectors_of(again)) == 1
        assert len(leaving.answers) == 1

    async def test_a_passed_deadline_is_an_error(self, engine: Engine) -> None:
        answer = await Waiting(engine, make_request("late", 10, deadline=-1.0)).answer()
        assert answer.error is not None
        assert isinstance(answer.error.to_error(), DeadlineExceededError)

    async def test_what_would_wait_too_long_is_refused_and_taken_later(
        self, engine: Engine
    ) -> None:
        first = Waiting(engine, make_request("first", *[60] * 60))
        with pytest.raises(OverloadedError, match="would pass the limit of 2000"):
            engine.submit(make_request("second", 10), lambda _: None)
        await first.answer()
        await Waiting(engine, make_request("second", 10)).answer()

    async def test_what_can_never_run_is_refused_before_it_waits(self, engine: Engine) -> None:
        wide = rows_from(np.zeros((1, engine.card.hidden_size + 1), np.float32))
        refused = (
            "takes no embeddings" if engine.card.prompt_embeds else "size of tensor must match"
        )
        cases = [
            (ContextLengthError, "maximum context length is 64", make_request("x", MAX_LENGTH + 1)),
            (InvalidRequestError, "at least one position", make_request("x", 0)),
            (
                InvalidRequestError,
                "not in the vocabulary",
                to_embed("x", Prompt.of(Tokens([10**6]))),
            ),
            (EmbeddingsError, refused, to_embed("x", Prompt.of(wide))),
            (InvalidRequestError, "does not exist", make_request("x", 5, adapter="missing")),
            (InvalidRequestError, "pairs", make_request("x", 5, 5, seconds=(2,))),
        ]
        for kind, message, given in cases:
            with pytest.raises(kind, match=message):
                engine.submit(given, lambda _: None)
        assert engine.stats().waiting == 0
        await Waiting(engine, make_request("x", 5)).answer()

    async def test_an_id_under_way_is_refused_and_free_again_afterwards(
        self, engine: Engine
    ) -> None:
        one = Waiting(engine, make_request("one", 20))
        with pytest.raises(InvalidRequestError, match="under way"):
            engine.submit(make_request("one", 20), lambda _: None)
        await one.answer()
        await Waiting(engine, make_request("one", 20)).answer()


class CloseConformance:
    """Tests to inherit beside `EmbedConformance` if a second engine may be started."""

    async def test_a_receiver_that_takes_nothing_harms_no_other(
        self, settings: EngineSettings
    ) -> None:
        def broken(_: Output) -> None:
            raise ValueError("takes nothing")

        engine = await started(settings)
        engine.submit(make_request("answered", 5), broken)
        assert (await Waiting(engine, make_request("beside it", 5)).answer()).error is None
        engine.submit(make_request("ended", *[60] * 10), broken)
        waiting = Waiting(engine, make_request("also ended", *[60] * 10))
        await engine.close()
        assert (await waiting.answer()).finish_reason == "abort"

    async def test_closing_answers_what_is_under_way(self, settings: EngineSettings) -> None:
        engine = await started(settings)
        waiting = Waiting(engine, make_request("one", *[60] * 50))
        await asyncio.sleep(0)
        await engine.close()
        assert (await waiting.answer()).finish_reason == "abort"
        with pytest.raises(OverloadedError, match="closing"):
            engine.submit(make_request("two", 5), lambda _: None)
        await engine.close()


class ScoreConformance:
    """Engine-independent tests of a cross-encoder."""

    @pytest_asyncio.fixture
    async def engine(self, settings: EngineSettings) -> AsyncIterator[Engine]:
        running = await started(settings)
        yield running
        await running.close()

    async def test_pairs_are_answered_with_the_models_logits(
        self, engine: Engine, directory: Path
    ) -> None:
        assert engine.card.tasks == (Task.SCORE,)
        assert engine.card.embedding is not None
        assert engine.card.embedding.activation == "sigmoid"
        assert await engine.probe() > 0
        pairs = [
            ("how many ships", "the harbour"),
            ("wind", "the book of numbers north"),
            ("hill", "hill"),
        ]
        prompts, seconds = [], []
        for first, second in pairs:
            encoding = reference.tokenizer_of(directory)(first, second)
            types = encoding["token_type_ids"]
            prompts.append(Prompt.of(Tokens(encoding["input_ids"])))
            seconds.append(types.index(1))
        given = to_embed("pairs", *prompts, task=Task.SCORE, seconds=seconds)
        answer = await Waiting(engine, given).answer()
        assert [payload.port for payload in answer.payloads] == ["logits"]
        found = vectors_of(answer)
        expected = [reference.logits(directory, first, second) for first, second in pairs]
        assert np.allclose(found, expected, atol=1e-4)
