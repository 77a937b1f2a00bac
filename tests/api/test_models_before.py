"""The models before the one that answers, without workers that compute."""

import asyncio
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from inlay.api.generation.choices import ChoicePiece
from inlay.api.generation.messages import ReadMessages, read_messages
from inlay.api.openai.chat import route
from inlay.api.schema.chat import AudioOptions, ChatRequest
from inlay.base.errors import EngineError, OverloadedError, RateLimitedError
from inlay.http import FrontendSettings
from inlay.http.parsed_request import ParsedRequest
from inlay.http.server import Server
from inlay.messages.card import ModelCard
from inlay.messages.digest import Secret
from inlay.messages.prompt import Buffer, Rows, Tokens
from inlay.messages.request import Task
from inlay.render import ContentDelta, ReasoningPiece, Renderer
from inlay.router.router import Router
from inlay.router.settings import RouterSettings
from inlay_stages.cards import AudioCard, stage_card
from inlay_stages.chat import upstream_models
from inlay_stages.chat.upstream_models import run_upstream
from inlay_stages.graph import Graph, Stage
from tests.models import EOS_ID, add_thinking, make, tiny
from tests.router.scripted_stages import SEQS, ScriptedStage, World, card_of

pytestmark = pytest.mark.extensions("stages")


def call_of(server: Server, ending: ExitStack) -> Any:
    return SimpleNamespace(
        server=server,
        client="me",
        background=False,
        ending=ending,
        inflight=server.inflight,
        receive=asyncio.Event().wait,
        # The call's own clock goes on: nobody else has one before the text is prepared.
        take_clock=lambda: pytest.fail("the clock of the call is stopped"),
    )


ROW = Graph(
    name="pair",
    stages={name: Stage(kind="generate", model="m") for name in ("drafter", "editor")},
    edges=["drafter.text -> editor.prompt"],
    inputs={"prompt": "drafter.prompt"},
    outputs={"text": "editor.text"},
)


class Writer(ScriptedStage):
    """A language model of `ROW`."""

    def __init__(self, stage: str) -> None:
        super().__init__(stage)
        self.graph = ROW

    @property
    def card(self) -> ModelCard:
        return replace(card_of(self.graph.served_name(self.stage)), tasks=(Task.GENERATE,))


@pytest.mark.parametrize(("free", "n"), [(0, None), (1, 2)])
async def test_where_the_model_that_answers_is_full_none_before_it_works(
    free: int, n: int | None
) -> None:
    asked = 0

    async def prepare(*_: Any) -> Any:
        nonlocal asked
        asked += 1
        raise AssertionError("as the test says")

    queue = 2
    async with World.around(
        Writer("drafter"), Writer("editor"), settings=RouterSettings(router_queue_size=queue)
    ) as world:
        server = Server(world.router, FrontendSettings(port=0), Secret(bytes(32)))
        with ExitStack() as others, ExitStack() as ending:
            call = call_of(server, ending)
            unparsed: Any = SimpleNamespace()
            incoming: ParsedRequest[Any] = ParsedRequest(unparsed, 0, ())
            request = ChatRequest(messages=[{"role": "user", "content": "x"}], model="pair", n=n)

            def messages(*_: Any) -> ReadMessages:
                raise AssertionError("nothing is read")

            taken = 2 * SEQS + queue - free
            for number in range(taken):
                others.enter_context(world.router.admit({"pair": 1}, str(number)))
            stage = stage_card(server.model("pair", Task.GENERATE).card)
            assert stage is not None
            with pytest.raises(RateLimitedError, match=f"the stage `pair` has {taken}") as full:
                await run_upstream(
                    call, incoming, request, stage.graph, {}, "id", messages, prepare
                )
            assert full.value.retry_after
        assert asked == 0
        # Nothing was taken at the first for the one that was refused.
        with world.router.admit({"pair/drafter": 1}, "me"):
            pass
        server.close()


async def test_answers_of_the_same_id_are_requests_of_different_ids() -> None:
    asked: list[str] = []

    async def prepare(*given: Any) -> Any:
        asked.append(given[4])
        raise OverloadedError("as the test says")

    async with World.around(Writer("drafter"), Writer("editor")) as world:
        server = Server(world.router, FrontendSettings(port=0), Secret(bytes(32)))
        unparsed: Any = SimpleNamespace()
        request = ChatRequest(messages=[{"role": "user", "content": "x"}], model="pair")
        for _ in range(2):
            with ExitStack() as ending, pytest.raises(OverloadedError, match="as the test says"):
                await run_upstream(
                    call_of(server, ending),
                    ParsedRequest(unparsed, 0, ()),
                    request,
                    ROW,
                    {},
                    "chosen",
                    lambda *_: pytest.fail("nothing is read"),
                    prepare,
                )
        server.close()
    assert len(set(asked)) == 2


SPOKEN_ROW = Graph(
    name="pair",
    stages={
        name: Stage(kind=kind, model="m")
        for name, kind in (
            ("drafter", "generate"),
            ("editor", "generate"),
            ("talker", "talk"),
            ("vocoder", "vocode"),
        )
    },
    edges=[
        "drafter.text -> editor.prompt",
        "editor.states -> talker.states",
        "talker.codes -> vocoder.codes",
    ],
    inputs={"prompt": "drafter.prompt"},
    outputs={"text": "editor.text", "audio": "vocoder.audio"},
)


class Spoken(Writer):
    """A stage of `SPOKEN_ROW`."""

    def __init__(self, stage: str) -> None:
        super().__init__(stage)
        self.graph = SPOKEN_ROW

    @property
    def card(self) -> ModelCard:
        if self.graph.stages[self.stage].kind == "generate":
            return replace(super().card, hidden_layers=3)
        audio = AudioCard(voices=("Ethan",), sample_rate=24000, samples_per_code=480)
        return replace(super().card, tasks=(Task.STAGE,), audio=audio)


@pytest.mark.parametrize("waits", [False, True])
async def test_while_the_model_that_answers_sleeps_none_before_it_works(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asyncio.Event()
    # Scripted workers do not sleep.
    monkeypatch.setattr(Router, "_is_asleep", lambda _, name, task: name == "pair")

    async def prepare(*_: Any) -> Any:
        asked.set()
        raise AssertionError("as the test says")

    async with World.around(Writer("drafter"), Writer("editor")) as world:
        settings = FrontendSettings(port=0, asleep_requests="wait" if waits else "reject")
        server = Server(world.router, settings, Secret(bytes(32)))
        stage = stage_card(server.model("pair", Task.GENERATE).card)
        assert stage is not None
        with ExitStack() as ending:
            unparsed: Any = SimpleNamespace()
            request = ChatRequest(messages=[{"role": "user", "content": "x"}], model="pair")
            before = run_upstream(
                call_of(server, ending),
                ParsedRequest(unparsed, 0, ()),
                request,
                stage.graph,
                {},
                "id",
                lambda *_: pytest.fail("nothing is read"),
                prepare,
            )
            if waits:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(before, 0.1)
            else:
                with pytest.raises(OverloadedError, match="The model `pair` is asleep"):
                    await before
        assert not asked.is_set()
        server.close()


@pytest.mark.extensions("stages")
@pytest.mark.parametrize("full", ["pair", "pair/talker", "pair/vocoder"])
async def test_where_a_stage_that_speaks_is_full_no_model_of_the_row_works(
    full: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = ChatRequest(
        messages=[{"role": "user", "content": "x"}],
        model="pair",
        modalities=["text", "audio"],
        audio=AudioOptions(voice="Ethan", format="wav"),
    )
    unparsed: Any = SimpleNamespace(request=request)
    incoming: ParsedRequest[Any] = ParsedRequest(unparsed, 0, ())

    async def parsed(*_: Any) -> ParsedRequest[Any]:
        return incoming

    monkeypatch.setattr(route, "read_request", parsed)
    stages = [Spoken(stage) for stage in SPOKEN_ROW.stages]
    async with World.around(*stages, settings=RouterSettings(router_queue_size=2)) as world:
        server = Server(world.router, FrontendSettings(port=0), Secret(bytes(32)))
        with ExitStack() as others, ExitStack() as ending:
            call = call_of(server, ending)
            taken = 2 * SEQS + 2
            for number in range(taken):
                others.enter_context(world.router.admit({full: 1}, str(number)))
            with pytest.raises(RateLimitedError, match=f"the stage `{full}` has {taken}"):
                await route.chat_completions(call)
        assert not any(stage.most for stage in stages)
        server.close()


MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "count"},
    {"role": "user", "content": "what is the capital?"},
]


@given(
    ids=st.lists(st.integers(0, 40), max_size=12).map(tuple),
    cut=st.integers(0, 12),
    ended=st.booleans(),
)
def test_ids_of_one_model_are_read_by_the_next_as_they_were_made(
    ids: tuple[int, ...], cut: int, ended: bool
) -> None:
    # What it reads need not be what its tokenizer makes of the text: that joins what meets.
    renderer = Renderer.load(tiny("llama"))
    whole = (*ids, EOS_ID) if ended else ids
    pieces = [
        ChoicePiece("", (), part, (), None, None, 0, 0) for part in (whole[:cut], whole[cut:])
    ]
    pieces[-1] = pieces[-1]._replace(finish_reason="stop" if ended else "length")
    choice: Any = SimpleNamespace(pieces=pieces)
    chat = upstream_models._with_ids(partial(read_messages, MESSAGES), upstream_models._ids(choice))
    prompt = renderer.chat(chat.messages, rows=chat.rows).token_ids()
    mark = renderer.chat(
        [MESSAGES[0], {"role": "user", "content": [{"type": "prompt_embeds", "index": 0}]}],
        rows=[Rows(Buffer(b"\0" * 4), "float32", (1, 1))],
    )
    before, _, behind = mark.segments
    assert isinstance(before, Tokens)
    assert isinstance(behind, Tokens)
    assert prompt == (*before.ids, *ids, *behind.ids)


class Sharing(Writer):
    """A language model of a row that passes ids on, with a tokenizer of its own."""

    def __init__(self, stage: str, model: Path) -> None:
        super().__init__(stage)
        self.graph = replace(ROW, edges=["drafter.tokens -> editor.tokens"])
        self._model = model

    @property
    def card(self) -> ModelCard:
        return replace(super().card, path=str(self._model))


@pytest.mark.parametrize("equal", [True, False])
async def test_ids_go_to_a_model_of_an_equal_tokenizer_alone(tmp_path: Path, equal: bool) -> None:
    asked = 0

    async def prepare(*_: Any) -> Any:
        nonlocal asked
        asked += 1
        raise RateLimitedError("as the test says")

    other = tiny("llama") if equal else add_thinking(make("llama", tmp_path / "other"))
    stages = Sharing("drafter", tiny("llama")), Sharing("editor", other)
    async with World.around(*stages) as world:
        server = Server(world.router, FrontendSettings(port=0), Secret(bytes(32)))
        request = ChatRequest(messages=MESSAGES, model="pair")
        unparsed: Any = SimpleNamespace()
        incoming: ParsedRequest[Any] = ParsedRequest(unparsed, 0, ())
        messages = partial(read_messages, MESSAGES)
        graph = stages[0].graph
        error, said = (
            (RateLimitedError, "as the test says")
            if equal
            else (EngineError, "drafter.tokens -> editor.tokens: the tokenizers are not equal")
        )
        with ExitStack() as ending, pytest.raises(error, match=said):
            await run_upstream(
                call_of(server, ending), incoming, request, graph, {}, "id", messages, prepare
            )
        assert asked == equal
        server.close()


async def test_what_a_model_thinks_is_not_given_to_the_next() -> None:
    deltas = (
        ReasoningPiece("well, "),
        ContentDelta("four"),
        ReasoningPiece("no"),
        ContentDelta("."),
    )
    piece = ChoicePiece("", deltas, (), (), "stop", None, 4, 2)
    choice: Any = SimpleNamespace(pieces=[piece])
    assert upstream_models._text(choice) == "four."
