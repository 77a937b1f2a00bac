"""Conformance tests of generation engines, whatever runs the model.

An engine's own test module subclasses `EngineConformance` and gives it the fixtures `directory` (a
model of `tests.models`, float32) and `settings`; everything goes through `inlay.engine.create` and
the `GenerateEngine` protocol.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from inlay import engine as engines
from inlay.base.errors import (
    ContextLengthError,
    DeadlineExceededError,
    EmbeddingsError,
    InlayError,
    InvalidRequestError,
    NotFoundError,
)
from inlay.engine.api import GenerateEngine
from inlay.engine.settings import EngineSettings
from inlay.messages.card import Feature
from inlay.messages.digest import Secret
from inlay.messages.prompt import Prompt, Rows, Tokens
from inlay.messages.request import Output, Request, Sampling, Task
from tests.engine import reference
from tests.equality.reference import model_of

SECRET = Secret(bytes(range(32)))


class Receiver:
    """Takes the outputs of one request, holding the engine to the rules all of them must keep."""

    def __init__(self, request: Request, then: Callable[[], None] | None = None) -> None:
        """Takes the outputs of `request`; calls `then` at the first."""
        self.request = request
        self._then = then
        self._ended = asyncio.Event()
        self._first = asyncio.Event()
        self.deltas: list[Output] = []

    def __call__(self, output: Output) -> None:
        assert not self._ended.is_set()
        assert (output.request_id, output.attempt) == (self.request.id, self.request.attempt)
        assert output.offset == len(self.request.prior_output) + len(self.output)
        if self.request.sampling.logprobs is not None:
            assert len(output.logprobs) == len(output.token_ids)
        assert output.prompt_logprobs is None or not self.output
        self.deltas.append(output)
        if output.finish_reason is None:
            assert (output.usage is not None) == (len(self.deltas) == 1)
            assert output.token_ids or output.prompt_logprobs is not None
            self._first.set()
            if self._then is not None and len(self.deltas) == 1:
                self._then()
            return
        assert output.usage is not None
        assert output.usage.prompt_tokens == len(self.request.prompt)
        assert output.usage.completion_tokens == len(self.request.prior_output) + len(self.output)
        assert (output.finish_reason == "error") == (output.error is not None)
        self._first.set()
        self._ended.set()

    @property
    def output(self) -> list[int]:
        return [id_ for output in self.deltas for id_ in output.token_ids]

    @property
    def ended_already(self) -> bool:
        return self._ended.is_set()

    @property
    def last(self) -> Output:
        assert self._ended.is_set()
        return self.deltas[-1]

    @property
    def cached(self) -> int:
        assert self.last.usage is not None
        return self.last.usage.cached_tokens

    async def begun(self) -> None:
        await asyncio.wait_for(self._first.wait(), 60)

    async def ended(self) -> Output:
        await asyncio.wait_for(self._ended.wait(), 60)
        return self.deltas[-1]


def make_request(name: str, prompt: Prompt, max_tokens: int = 8, **options: Any) -> Request:
    """A greedy work that end tokens do not end; `options` are fields of `Request` or `Sampling`."""
    changes = {
        field: options.pop(field) for field in tuple(options) if field in Sampling.__struct_fields__
    }
    values: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        **changes,
    }
    return Request(id=name, prompts=(prompt,), params=Sampling(**values), **options)


def ids(seed: int, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    found: list[int] = torch.randint(3, 300, (count,), generator=generator).tolist()
    return found


async def run(engine: GenerateEngine, *requests: Request) -> list[Receiver]:
    receivers = [Receiver(one) for one in requests]
    for one, receiver in zip(requests, receivers, strict=True):
        engine.submit(one, receiver)
    for receiver in receivers:
        await receiver.ended()
    return receivers


def asks(engine: GenerateEngine, feature: Feature) -> None:
    """Skip a test of what the engine's card refuses."""
    for refusal in engine.card.refusals:
        if (refusal.feature, refusal.prompts) == (feature, "any"):
            pytest.skip(f"refused: {refusal.reason}")


class EngineConformance:
    """Engine-independent tests of `GenerateEngine`.

    `directory` and `settings` are fixtures of the subclass.
    """

    @pytest_asyncio.fixture
    async def engine(self, settings: EngineSettings) -> AsyncIterator[GenerateEngine]:
        engine = engines.create(settings, SECRET)
        await engine.start()
        assert isinstance(engine, GenerateEngine)
        yield engine
        await engine.close()

    def rows(self, directory: Path, tokens: Sequence[int]) -> Rows:
        return reference.rows_of(reference.look_up(directory, tokens))

    def noise(self, engine: GenerateEngine, count: int) -> Rows:
        generator = torch.Generator().manual_seed(count)
        return reference.rows_of(
            0.5 * torch.randn(count, engine.card.hidden_size, generator=generator)
        )

    async def test_the_card_says_what_is_served(
        self, engine: GenerateEngine, directory: Path
    ) -> None:
        card = engine.card
        assert Path(card.path) == directory
        assert Task.GENERATE in card.tasks
        assert card.dtype == "float32"
        config = model_of(directory).config
        assert (card.vocab_size, card.hidden_size) == (config.vocab_size, config.hidden_size)
        assert card.limits.max_model_len > 0
        assert len(card.weights_id) == len(card.embedding_table_id) == 32
        assert card.prompt_embeds is None
        assert card.secret_fingerprint == SECRET.fingerprint

    async def test_text_rows_and_mixtures_decode_as_transformers_does(
        self, engine: GenerateEngine, directory: Path
    ) -> None:
        tokens = ids(1, 45)
        expected = reference.greedy(directory, Prompt.of(Tokens(tokens)), 8)
        forms = (
            Prompt.of(Tokens(tokens)),
            Prompt.of(self.rows(directory, tokens)),
            Prompt.of(
                Tokens(tokens[:17]), self.rows(directory, tokens[17:30]), Tokens(tokens[30:])
            ),
            Prompt.of(self.rows(directory, tokens[:16]), Tokens(tokens[16:])),
        )
        for index, prompt in enumerate(forms):
            (alone,) = await run(engine, make_request(f"alone-{index}", prompt, salt=str(index)))
            assert alone.output == expected
        together = await run(
            engine,
            *(make_request(f"together-{index}", prompt) for index, prompt in enumerate(forms)),
        )
        assert [receiver.output for receiver in together] == [expected] * len(forms)

    async def test_rows_that_no_token_has_decode_as_transformers_does(
        self, engine: GenerateEngine, directory: Path
    ) -> None:
        prompt = Prompt.of(self.noise(engine, 20), Tokens(ids(2, 9)))
        (found,) = await run(engine, make_request("soft", prompt))
        assert found.output == reference.greedy(directory, prompt, 8)

    async def test_neighbours_change_nothing(self, engine: GenerateEngine, directory: Path) -> None:
        requests = [
            make_request(str(n), Prompt.of(Tokens(ids(n, 3 + 9 * n))), max_tokens=4 + n)
            for n in range(1, 8)
        ]
        for one, receiver in zip(requests, await run(engine, *requests), strict=True):
            assert receiver.output == reference.greedy(
                directory, one.prompt, one.sampling.max_tokens
            )

    async def test_a_resumed_request_goes_on_exactly(
        self, engine: GenerateEngine, directory: Path
    ) -> None:
        prompt = Prompt.of(Tokens(ids(3, 20)))
        whole = reference.greedy(directory, prompt, 8)
        (found,) = await run(
            engine, make_request("resumed", prompt, prior_output=tuple(whole[:3]), attempt=2)
        )
        assert found.output == whole[3:]

    async def test_stop_tokens_end_the_output(
        self, engine: GenerateEngine, directory: Path
    ) -> None:
        prompt = Prompt.of(Tokens(ids(4, 20)))
        whole = reference.greedy(directory, prompt, 8)
        (found,) = await run(engine, make_request("stops", prompt, stop_token_ids=(whole[4],)))
        assert found.output == whole[: whole.index(whole[4]) + 1]
        assert (found.last.finish_reason, found.last.stop_token_id) == ("stop", whole[4])

    async def test_a_seed_decides_the_output_whoever_else_is_there(
        self, engine: GenerateEngine
    ) -> None:
        if not engine.card.seeds:
            pytest.skip("the card says that seeds decide nothing")
        one: dict[str, Any] = {"temperature": 1.0, "seed": 5}
        prompt = Prompt.of(Tokens(ids(5, 20)))
        (alone,) = await run(engine, make_request("alone", prompt, **one))
        crowd = [
            make_request(str(n), Prompt.of(Tokens(ids(n, 30))), temperature=1.0)
            for n in range(10, 14)
        ]
        *_, crowded = await run(engine, *crowd, make_request("crowded", prompt, **one))
        (other,) = await run(engine, make_request("other", prompt, temperature=1.0, seed=6))
        assert crowded.output == alone.output != other.output

    async def test_logprobs_come_with_every_token(self, engine: GenerateEngine) -> None:
        (found,) = await run(
            engine, make_request("logprobs", Prompt.of(Tokens(ids(6, 20))), logprobs=2)
        )
        logprobs = [entry for output in found.deltas for entry in output.logprobs]
        assert [entry.top[0][0] for entry in logprobs] == found.output
        assert all(
            entry.top[0][1] == entry.logprob <= 0 and len(entry.top) == 2 for entry in logprobs
        )

    async def test_prompt_logprobs_come_for_every_position_but_the_first_and_before_the_output(
        self, engine: GenerateEngine, directory: Path
    ) -> None:
        asks(engine, "prompt_logprobs")
        tokens = ids(6, 40)
        prompt = Prompt.of(Tokens(tokens))
        with torch.no_grad():
            logits = model_of(directory)(torch.tensor([tokens])).logits[0, :-1]
        expected = logits.log_softmax(dim=-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        for name, max_tokens in (("scored", 4), ("again", 4), ("without output", 0)):
            (found,) = await run(engine, make_request(name, prompt, max_tokens, prompt_logprobs=2))
            told = [
                output.prompt_logprobs
                for output in found.deltas
                if output.prompt_logprobs is not None
            ]
            assert [piece.start for piece in told] == list(
                accumulate((len(piece) for piece in told[:-1]), initial=1)
            )
            ids_of = np.frombuffer(b"".join(piece.ids for piece in told), np.int32).reshape(-1, 3)
            logprobs = np.frombuffer(
                b"".join(piece.logprobs for piece in told), np.float32
            ).reshape(-1, 3)
            ranks = np.frombuffer(b"".join(piece.ranks for piece in told), np.int32)
            assert ids_of[:, 0].tolist() == tokens[1:]
            assert np.abs(logprobs[:, 0] - expected.numpy()).max() < 1e-4
            assert ((ranks == 1) == (ids_of[:, 0] == ids_of[:, 1])).all()
            assert found.output == (
                reference.greedy(directory, prompt, max_tokens) if max_tokens else []
            )
            assert found.last.finish_reason == "length"

    async def test_a_prefix_is_found_again_by_its_own_tenant_until_it_is_forgotten(
        self, engine: GenerateEngine
    ) -> None:
        prompt = Prompt.of(Tokens(ids(7, 70)))
        (first,) = await run(engine, make_request("first", prompt, salt="a"))
        (again,) = await run(engine, make_request("again", prompt, salt="a"))
        (other,) = await run(engine, make_request("other", prompt, salt="b"))
        assert first.output == again.output == other.output
        assert first.cached == other.cached == 0
        # Whole pages, of one to 32 positions; the last position is always computed.
        assert 64 <= again.cached < 70
        assert await engine.reset_prefix_cache() > 0
        (forgotten,) = await run(engine, make_request("forgotten", prompt, salt="a"))
        assert forgotten.cached == 0

    async def test_requests_under_way_go_on_exactly_when_the_prefix_cache_is_forgotten(
        self, engine: GenerateEngine, directory: Path
    ) -> None:
        text, rows = Tokens(ids(17, 40)), self.noise(engine, 24)
        prompts = (Prompt.of(text), Prompt.of(rows), Prompt.of(text, rows, Tokens(ids(18, 9))))
        requests = [
            make_request(f"under way {n}", prompt, max_tokens=64)
            for n, prompt in enumerate(prompts)
        ]
        receivers = [Receiver(one) for one in requests]
        for one, receiver in zip(requests, receivers, strict=True):
            engine.submit(one, receiver)
        for receiver in receivers:
            await receiver.begun()
        for _ in range(3):
            await engine.reset_prefix_cache()
        for one, receiver in zip(requests, receivers, strict=True):
            await receiver.ended()
            assert receiver.output == reference.greedy(directory, one.prompt, 64)
        (again,) = await run(engine, make_request("again", prompts[0]))
        assert again.output == receivers[0].output[:8]

    async def test_an_aborted_request_ends_with_abort_and_harms_nobody(
        self, engine: GenerateEngine, directory: Path
    ) -> None:
        long = make_request("long", Prompt.of(Tokens(ids(8, 20))), max_tokens=400)
        receiver = Receiver(long, then=lambda: engine.abort("long"))
        engine.submit(long, receiver)
        other = make_request("other", Prompt.of(Tokens(ids(9, 20))))
        staying = Receiver(other)
        engine.submit(other, staying)
        assert (await receiver.ended()).finish_reason == "abort"
        engine.abort("long")
        engine.abort("never seen")
        await staying.ended()
        assert staying.output == reference.greedy(directory, other.prompt, 8)
        assert engine.stats().blocks_used == 0

    async def test_a_request_aborted_at_once_ends_too(self, engine: GenerateEngine) -> None:
        one = make_request("one", Prompt.of(Tokens(ids(8, 20))), max_tokens=400)
        receiver = Receiver(one)
        engine.submit(one, receiver)
        engine.abort("one")
        assert (await receiver.ended()).finish_reason == "abort"

    async def test_a_passed_deadline_is_an_error(self, engine: GenerateEngine) -> None:
        (late,) = await run(
            engine,
            make_request("late", Prompt.of(Tokens(ids(8, 20))), max_tokens=400, deadline=0.0),
        )
        assert late.last.error is not None
        assert isinstance(late.last.error.to_error(), DeadlineExceededError)

    async def test_what_can_never_run_is_refused_before_it_starts(
        self, engine: GenerateEngine
    ) -> None:
        limit, hidden = engine.card.limits.max_model_len, engine.card.hidden_size
        text = Prompt.of(Tokens([5]))
        wide = Prompt.of(reference.rows_of(torch.zeros(2, hidden + 1)))
        cases: list[tuple[type[InlayError], str, Request]] = [
            (
                ContextLengthError,
                "maximum context length",
                make_request("x", text, max_tokens=limit),
            ),
            (
                ContextLengthError,
                "maximum context length",
                make_request("x", Prompt.of(Tokens([5] * (limit + 1)))),
            ),
            (EmbeddingsError, "size of tensor must match", make_request("x", wide)),
            (
                InvalidRequestError,
                "not in the vocabulary",
                make_request("x", Prompt.of(Tokens([10**6]))),
            ),
            (InvalidRequestError, "at least one position", make_request("x", Prompt.of())),
            (NotFoundError, "does not exist", make_request("x", text, adapter="missing")),
            (InvalidRequestError, "logprobs", make_request("x", text, logprobs=10**4)),
            (
                InvalidRequestError,
                "prompt_logprobs",
                make_request("x", text, prompt_logprobs=10**4),
            ),
            (
                InvalidRequestError,
                "rows have no token ids",
                make_request("x", Prompt.of(self.noise(engine, 3)), prompt_logprobs=1),
            ),
            (InvalidRequestError, "logit_bias", make_request("x", text, logit_bias={10**6: 1.0})),
        ]
        for kind, message, one in cases:
            with pytest.raises(kind, match=message):
                engine.submit(one, Receiver(one))
        await run(engine, make_request("x", text))

    async def test_an_id_under_way_is_refused_and_free_again_afterwards(
        self, engine: GenerateEngine
    ) -> None:
        one = make_request("one", Prompt.of(Tokens(ids(8, 20))))
        receiver = Receiver(one)
        engine.submit(one, receiver)
        with pytest.raises(InvalidRequestError, match="under way"):
            engine.submit(one, Receiver(one))
        await receiver.ended()
        await run(engine, one)

    async def test_a_probe_runs_the_model(self, engine: GenerateEngine) -> None:
        before = engine.stats().progress
        assert await engine.probe() > 0
        assert engine.stats().progress > before

    async def test_closing_ends_what_is_under_way(self, settings: EngineSettings) -> None:
        engine = engines.create(settings, SECRET)
        await engine.start()
        assert isinstance(engine, GenerateEngine)
        one = make_request("one", Prompt.of(Tokens(ids(8, 20))), max_tokens=400)
        receiver = Receiver(one)
        engine.submit(one, receiver)
        await receiver.begun()
        await engine.close()
        assert receiver.last.finish_reason == "abort"
        await engine.close()
