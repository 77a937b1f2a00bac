"""A request whose worker is lost goes on elsewhere, and nobody can tell from the answer."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest

from inlay.base.errors import (
    DeadlineExceededError,
    EngineError,
    ErrorFrame,
    InlayError,
    InvalidRequestError,
    OverloadedError,
)
from inlay.engine.api import Engine
from inlay.engine.echo import EchoEngine
from inlay.engine.settings import EngineSettings
from inlay.engine.torch.engine import TorchEngine
from inlay.engine.torch.failures import memory_too_small
from inlay.messages.card import Exactness
from inlay.messages.digest import Secret, with_digests
from inlay.messages.hidden_states import HiddenStates
from inlay.messages.prompt import Buffer, Prompt, Rows, Tokens
from inlay.messages.request import (
    Emit,
    EngineUsage,
    Grammar,
    Output,
    PromptLogprobs,
    Request,
    Sampling,
    TokenLogprobs,
)
from inlay.router import Router, resume
from inlay.transport.api import Stream
from tests.models import tiny
from tests.router.sending import IDLE, First, send
from tests.transport.direct import DirectPlane

SECRET = Secret(bytes(32))


@dataclass
class Answer:
    """All that a client could see of a stream."""

    ids: list[int]
    logprobs: list[TokenLogprobs]
    finish: str | None
    stop: int | None
    usage: EngineUsage | None
    prompt_logprobs: list[PromptLogprobs]
    attempts: set[int]
    states: list[np.ndarray]

    @property
    def visible(self) -> tuple[Any, ...]:
        ranks = b"".join(scores.ranks for scores in self.prompt_logprobs)
        usage = self.usage
        counted = None if usage is None else (usage.prompt_tokens, usage.completion_tokens)
        return self.ids, self.finish, self.stop, counted, ranks


async def read(stream: Stream, each: Callable[[int], None] = lambda seen: None) -> Answer:
    """Read to the end; `each` is called with the number of ids so far whenever some came."""
    answer = Answer([], [], None, None, None, [], set(), [])
    async for outputs in stream:
        for output in outputs:
            assert output.offset == len(answer.ids) or not output.token_ids
            answer.ids += output.token_ids
            answer.logprobs += output.logprobs
            answer.finish = output.finish_reason or answer.finish
            answer.stop = output.stop_token_id if output.finish_reason else None
            answer.usage = output.usage or answer.usage
            answer.attempts.add(output.attempt)
            for payload in output.payloads:
                rows = np.frombuffer(payload.data.view, np.float32).reshape(payload.shape)
                answer.states += list(rows)
            if output.prompt_logprobs is not None:
                answer.prompt_logprobs.append(output.prompt_logprobs)
        each(len(answer.ids))
    return answer


class Killer:
    """Cuts the connection of whichever worker is at a request, at chosen numbers of ids.

    Nothing where the worker has ended it before its ids were read.
    """

    def __init__(self, plane: DirectPlane, at: Sequence[int]) -> None:
        self._plane = plane
        self._at = sorted(at)
        self.killed = 0

    def __call__(self, seen: int) -> None:
        if self._at and seen >= self._at[0]:
            self._at.pop(0)
            for link, end in zip(self._plane._links, self._plane.worker_ends, strict=True):
                if link._streams:
                    end.close()
                    self.killed += 1


GRAMMAR = Grammar("json_schema", json.dumps({"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}, "minItems": 4}}, "required": ["a"], "additionalProperties": False}))  # fmt: skip

SAMPLINGS = {
    "hidden_states": Sampling(
        max_tokens=24,
        temperature=0.0,
        ignore_eos=True,
        hidden_states=HiddenStates(layers=(1,), prompt=4, output=True),
    ),
    "greedy": Sampling(max_tokens=24, temperature=0.0, ignore_eos=True),
    "seeded": Sampling(
        max_tokens=24, temperature=0.9, top_p=0.95, top_k=40, seed=11, ignore_eos=True
    ),
    "penalties": Sampling(
        max_tokens=24,
        seed=3,
        repetition_penalty=1.2,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        min_tokens=9,
        bad_words=((5, 6), (7,)),
    ),
    "logprobs": Sampling(max_tokens=16, seed=5, logprobs=3, prompt_logprobs=2, ignore_eos=True),
    "grammar": Sampling(max_tokens=40, seed=8, grammar=GRAMMAR, frequency_penalty=0.2),
}


def prompt(kind: str) -> Prompt:
    tokens = Tokens([(7 * n) % 200 + 3 for n in range(21)])
    if kind == "tokens":
        return Prompt.of(tokens)
    rows = np.random.default_rng(4).standard_normal((9, 48)).astype(np.float32) * 0.3
    return with_digests(
        Prompt.of(tokens, Rows(Buffer(rows.tobytes()), "float32", (9, 48)), Tokens([9, 10])), SECRET
    )


@pytest.fixture(scope="module")
def torch_settings() -> EngineSettings:
    return EngineSettings.of(
        model=str(tiny("llama")), served_model_name=["m"], dtype="float32", num_threads=1
    )


@pytest.mark.parametrize("kind", ["tokens", "mixed"])
@pytest.mark.parametrize("name", list(SAMPLINGS))
async def test_an_answer_whose_workers_die_is_the_answer_of_an_undisturbed_one(
    torch_settings: EngineSettings, name: str, kind: str
) -> None:
    sampling = SAMPLINGS[name]
    if kind == "mixed":
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
    draw = random.Random(f"{name} {kind}")
    # On a busy machine a worker may have ended an answer before its first ids are read.
    for _ in range(30):
        plane = await DirectPlane.around(*(TorchEngine(torch_settings, SECRET) for _ in range(3)))
        router = Router(plane, random=First())
        whole = await read(
            await send(router, Request(id="whole", prompts=(prompt(kind),), params=sampling))
        )
        assert len(whole.ids) > 8
        killer = Killer(plane, draw.sample(range(1, len(whole.ids) - 1), 2))
        disturbed = await read(
            await send(router, Request(id="disturbed", prompts=(prompt(kind),), params=sampling)),
            killer,
        )
        await plane.close()
        if killer.killed == 2:
            break
    assert killer.killed == 2
    assert disturbed.attempts == {0, 1, 2}
    assert disturbed.visible == whole.visible
    assert bool(whole.states) == (sampling.hidden_states is not None)
    np.testing.assert_allclose(whole.states, disturbed.states, atol=1e-4)
    if sampling.logprobs is not None:
        # A prompt computed at once and one computed by and by differ in the last bits.
        one, other = ([one.logprob for one in answer.logprobs] for answer in (whole, disturbed))
        np.testing.assert_allclose(one, other, atol=1e-4)
        tops = [(a.top, b.top) for a, b in zip(whole.logprobs, disturbed.logprobs, strict=True)]
        assert [[id_ for id_, _ in a] for a, _ in tops] == [[id_ for id_, _ in b] for _, b in tops]


@pytest.fixture
def echo_settings(tmp_path: Any) -> EngineSettings:
    (tmp_path / "config.json").write_text(
        '{"vocab_size": 999, "hidden_size": 8, "max_position_embeddings": 100000}'
    )
    return EngineSettings.of(model=str(tmp_path), engine="echo", served_model_name=["m"])


class Scripted(EchoEngine):
    """An echo engine that notes what it is sent, and whose card and answers can be made others."""

    def __init__(self, settings: EngineSettings, **changes: object) -> None:
        super().__init__(settings, SECRET)
        self._changes = changes
        self.seen: list[Request] = []
        self.fail: Callable[[Request, Output], Output | None] = lambda request, output: output

    async def start(self) -> None:
        await super().start()
        self._card = msgspec.structs.replace(self.card, **self._changes)

    def submit(self, request: Request, emit: Emit) -> None:
        self.seen.append(request)

        def told(output: Output) -> None:
            changed = self.fail(request, output)
            if changed is not None:
                emit(changed)
                running = self._shell.get(request.id)
                if changed is not output and running is not None:
                    self._shell.leave(running)

        super().submit(request, told)


def gives_up_after(
    count: int, error: ErrorFrame | None = None
) -> Callable[[Request, Output], Output]:
    frame = error or ErrorFrame.of(OverloadedError("the engine is gone", retry_after=1))

    def told(request: Request, output: Output) -> Output:
        if output.offset - len(request.prior_output) < count:
            return output
        return Output(
            request.id, request.attempt, output.offset, finish_reason="error", error=frame
        )

    return told


Around = Callable[..., Any]


@pytest.fixture
async def around() -> AsyncIterator[Around]:
    planes: list[DirectPlane] = []

    async def make(*engines: Engine) -> tuple[Router, DirectPlane]:
        planes.append(await DirectPlane.around(*engines))
        return Router(planes[-1], random=First()), planes[-1]

    yield make
    for plane in planes:
        await plane.close()


def make_echo_request(max_tokens: int = 12, **fields: object) -> Request:
    sampling = Sampling(max_tokens=max_tokens, **fields.pop("sampling", {}))  # type: ignore[arg-type]
    return Request(id="w", prompts=(Prompt.of(Tokens([1, 2, 3, 4, 5])),), params=sampling, **fields)  # type: ignore[arg-type]


async def test_what_was_shown_goes_with_the_next_attempt_and_comes_once(
    echo_settings: EngineSettings, around: Around
) -> None:
    engines = [Scripted(echo_settings) for _ in range(3)]
    engines[0].fail = gives_up_after(3)
    engines[1].fail = gives_up_after(4)
    router, _ = await around(*engines)
    answer = await read(await send(router, make_echo_request()))
    assert answer.ids == [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2]
    assert answer.usage == EngineUsage(5, 12)
    sent = [engine.seen[0] for engine in engines]
    assert [(request.attempt, len(request.prior_output)) for request in sent] == [
        (0, 0),
        (1, 3),
        (2, 7),
    ]
    assert all(request.sampling == sent[0].sampling for request in sent)


@pytest.mark.parametrize("workers", [1, 2])
async def test_the_log_says_where_a_request_goes_on(
    echo_settings: EngineSettings, around: Around, caplog: pytest.LogCaptureFixture, workers: int
) -> None:
    engines = [Scripted(echo_settings) for _ in range(workers)]
    give_up = gives_up_after(3)
    engines[0].fail = lambda request, output: (
        output if request.attempt else give_up(request, output)
    )
    router, plane = await around(*engines)
    assert len((await read(await send(router, make_echo_request()))).ids) == 12
    ids = [worker.id for worker in plane.workers()]
    (said,) = [
        record.getMessage() for record in caplog.records if "continues at" in record.getMessage()
    ]
    assert f"continues at {ids[-1]}{' again' if workers == 1 else ''} after 3 tokens" in said


async def test_a_worker_that_gives_up_by_itself_is_as_good_as_lost(
    echo_settings: EngineSettings, around: Around
) -> None:
    engines = [Scripted(echo_settings) for _ in range(2)]
    router, _ = await around(*engines)
    stream = await send(router, make_echo_request(2000))
    aborting = iter([True])

    def abort(seen: int) -> None:
        if seen > 5 and next(aborting, False):
            engines[0].abort("w")

    answer = await read(stream, abort)
    assert len(answer.ids) == 2000
    assert answer.attempts == {0, 1}


async def test_a_cancelled_request_is_not_sent_again(
    echo_settings: EngineSettings, around: Around
) -> None:
    engines = [Scripted(echo_settings) for _ in range(2)]
    router, plane = await around(*engines)
    stream = await send(router, make_echo_request(50_000))

    def leave(seen: int) -> None:
        stream.cancel()
        plane.worker_ends[0].close()

    answer = await read(stream, leave)
    assert answer.finish == "abort"
    assert not engines[1].seen


async def test_a_bad_request_is_refused_by_the_first_worker_and_asked_of_no_other(
    echo_settings: EngineSettings, around: Around
) -> None:
    engines = [Scripted(echo_settings) for _ in range(3)]
    router, _ = await around(*engines)
    with pytest.raises(InvalidRequestError, match="maximum context length"):
        await read(await send(router, make_echo_request(1_000_000)))
    assert sum(len(engine.seen) for engine in engines) == 1


@pytest.mark.parametrize(
    ("error", "workers", "asked"),
    [
        (OverloadedError("the engine is gone"), 6, resume.MAX_EMPTY_ATTEMPTS),
        (memory_too_small("this"), 6, resume.MAX_EMPTY_ATTEMPTS),
        (memory_too_small("this"), 1, 1),
        (EngineError("the model failed"), 6, 1),
    ],
)
async def test_a_request_that_shows_nothing_is_not_tried_for_ever(
    echo_settings: EngineSettings, around: Around, error: InlayError, workers: int, asked: int
) -> None:
    engines = [Scripted(echo_settings) for _ in range(workers)]
    for engine in engines:
        engine.fail = gives_up_after(0, ErrorFrame.of(error))
    router, _ = await around(*engines)
    with pytest.raises(type(error), match=error.message):
        await read(await send(router, make_echo_request()))
    assert sum(len(engine.seen) for engine in engines) == asked


async def test_a_request_that_is_the_death_of_its_workers_is_not_that_of_the_fleet(
    echo_settings: EngineSettings, around: Around
) -> None:
    engines = [Scripted(echo_settings) for _ in range(resume.MAX_ATTEMPTS + 1)]
    for engine in engines:
        engine.fail = gives_up_after(1)
    router, _ = await around(*engines)
    with pytest.raises(OverloadedError, match="the engine is gone"):
        await read(await send(router, make_echo_request(100)))
    # Each attempt is at another worker, and one worker is spared.
    assert sorted(len(engine.seen) for engine in engines) == [0] + [1] * resume.MAX_ATTEMPTS


async def test_an_answer_that_cannot_go_on_exactly_ends_with_an_error_and_is_never_changed(
    echo_settings: EngineSettings, around: Around
) -> None:
    engines = [Scripted(echo_settings, resuming={"greedy": Exactness.SAMPLED}) for _ in range(2)]
    engines[0].fail = gives_up_after(3)
    router, _ = await around(*engines)
    seen: list[int] = []
    with pytest.raises(OverloadedError, match="does not continue greedy, logprobs exactly"):
        await read(
            await send(router, make_echo_request(sampling={"temperature": 0.0, "logprobs": 1})),
            seen.append,
        )
    assert seen[-1] == 3
    assert not engines[1].seen


@pytest.mark.parametrize("unseeded", [True, False])
async def test_what_is_drawn_goes_on_with_another_draw_only_where_the_client_gave_no_seed(
    echo_settings: EngineSettings, around: Around, unseeded: bool
) -> None:
    engines = [Scripted(echo_settings, resuming={"sampling": Exactness.SAMPLED}) for _ in range(2)]
    engines[0].fail = gives_up_after(3)
    router, _ = await around(*engines)
    answer = read(await send(router, make_echo_request(sampling={"unseeded": unseeded})))
    if unseeded:
        assert (await answer).ids[:5] == [1, 2, 3, 4, 5]
        assert engines[1].seen[0].prior_output == (1, 2, 3)
    else:
        with pytest.raises(OverloadedError, match="does not continue sampling exactly"):
            await answer


async def test_an_answer_not_begun_may_start_anew_on_any_engine_of_the_pool(
    echo_settings: EngineSettings, around: Around
) -> None:
    engines = [
        Scripted(echo_settings, resuming={}),
        Scripted(echo_settings, resuming={}, engine="other"),
    ]
    engines[0].fail = gives_up_after(0)
    router, _ = await around(*engines)
    assert (await read(await send(router, make_echo_request()))).ids[:3] == [1, 2, 3]


@pytest.mark.parametrize(
    "change",
    [{"engine": "other"}, {"engine_version": "2"}, {"weights_id": "f" * 32}, {"dtype": "bfloat16"}],
)
async def test_an_answer_goes_on_only_where_it_would_have_been_the_same(
    echo_settings: EngineSettings,
    around: Around,
    change: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resume, "WAIT_SECONDS", 0.3)
    engines = [Scripted(echo_settings), Scripted(echo_settings, **change)]
    router, plane = await around(*engines)
    first = await send(router, make_echo_request(50_000))
    (begun,) = [n for n, engine in enumerate(engines) if plane._links[n]._streams]
    with pytest.raises(OverloadedError, match="gone"):
        await read(first, lambda seen: plane.worker_ends[begun].close())
    assert not engines[1 - begun].seen


async def test_when_the_only_worker_is_gone_the_request_waits_for_the_next(
    echo_settings: EngineSettings, around: Around
) -> None:
    engines = [Scripted(echo_settings) for _ in range(2)]
    router, plane = await around(*engines)
    late = plane._links.pop()
    stream = await send(router, make_echo_request(15_000))
    loop = asyncio.get_running_loop()

    def kill(seen: int) -> None:
        if plane.worker_ends[0] is not None and not late_comes:
            plane.worker_ends[0].close()
            late_comes.append(loop.call_later(0.3, plane._links.append, late))

    late_comes: list[asyncio.TimerHandle] = []
    answer = await read(stream, kill)
    assert len(answer.ids) == 15_000
    assert engines[1].seen[0].prior_output


async def test_a_later_attempt_has_the_time_that_is_left(
    echo_settings: EngineSettings, around: Around
) -> None:
    engines = [Scripted(echo_settings) for _ in range(2)]
    engines[0].fail = gives_up_after(3)
    router, _ = await around(*engines)
    await read(await send(router, make_echo_request(deadline=60.0)))
    deadline = engines[1].seen[0].deadline
    assert deadline is not None
    assert 0 < deadline < 60.0


async def test_a_deadline_passes_while_nobody_is_there(
    echo_settings: EngineSettings, around: Around
) -> None:
    router, plane = await around(Scripted(echo_settings))
    stream = await send(router, make_echo_request(90_000, deadline=0.5))
    with pytest.raises(DeadlineExceededError):
        await read(stream, lambda seen: plane.worker_ends[0].close())


async def test_what_was_cached_is_what_the_first_worker_had(
    echo_settings: EngineSettings, around: Around
) -> None:
    engines = [Scripted(echo_settings) for _ in range(2)]
    for cached, engine in zip((4, 5), engines, strict=True):

        def counted(request: Request, output: Output, cached: int = cached) -> Output | None:
            if output.usage is not None:
                msgspec.structs.force_setattr(
                    output, "usage", msgspec.structs.replace(output.usage, cached_tokens=cached)
                )
            return gives_up_after(3)(request, output) if cached == 4 else output

        engine.fail = counted
    router, _ = await around(*engines)
    assert (await read(await send(router, make_echo_request()))).usage == EngineUsage(5, 12, 4)


async def test_a_prompt_is_told_of_once_however_often_it_is_computed(
    echo_settings: EngineSettings, around: Around
) -> None:
    engines = [Scripted(echo_settings) for _ in range(2)]

    def half(request: Request, output: Output) -> Output | None:
        scores = output.prompt_logprobs
        if scores is None:
            return gives_up_after(0)(request, output)
        told = PromptLogprobs(1, scores.ids[:8], scores.logprobs[:8], scores.ranks[:8])
        engines[0].fail = gives_up_after(0)
        msgspec.structs.force_setattr(output, "prompt_logprobs", told)
        msgspec.structs.force_setattr(output, "token_ids", ())
        return output

    engines[0].fail = half
    router, _ = await around(*engines)
    answer = await read(await send(router, make_echo_request(sampling={"prompt_logprobs": 0})))
    assert [(scores.start, len(scores)) for scores in answer.prompt_logprobs] == [(1, 2), (3, 2)]
    assert (
        b"".join(scores.ids for scores in answer.prompt_logprobs)
        == np.arange(2, 6, dtype="<i4").tobytes()
    )


async def test_nothing_counts_as_load_when_all_has_ended(
    echo_settings: EngineSettings, around: Around
) -> None:
    engines = [Scripted(echo_settings) for _ in range(3)]
    engines[0].fail = gives_up_after(2)
    router, _ = await around(*engines)
    await asyncio.gather(
        *[
            read(await send(router, msgspec.structs.replace(make_echo_request(50), id=str(n))))
            for n in range(9)
        ]
    )
    assert set(router.loads().values()) <= {IDLE}
