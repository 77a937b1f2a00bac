"""A prompt that is handed over by a ticket: all of the output is made by the next worker."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from inlay.base.errors import DeadlineExceededError
from inlay.engine.settings import EngineSettings
from inlay.messages.card import Phase
from inlay.messages.prompt import Buffer, Prompt, Tokens
from inlay.messages.request import PORTS, Grammar, Output, Payload, Request, Sampling, Task
from inlay.router import Router, decide, resume
from inlay.router.settings import RouterSettings
from tests.router.sending import First
from tests.router.test_resume import Scripted, gives_up_after, read
from tests.transport.direct import DirectPlane

TICKET = b"the only one"
EAGER = RouterSettings(router_interference_weight=1000)


@pytest.fixture(autouse=True)
def short_prompts_are_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decide, "LEAST_HANDOVER", 4)


@pytest.fixture
def settings(tmp_path: Path) -> EngineSettings:
    config = {"vocab_size": 999, "hidden_size": 8, "max_position_embeddings": 100000}
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
    return EngineSettings.of(model=str(tmp_path), engine="echo", served_model_name=["m"])


def worker(settings: EngineSettings, phase: Phase, layout: str = "l", **changes: Any) -> Scripted:
    """An engine that gives the same ticket for every prompt."""

    def given(request: Request, output: Output) -> Output:
        if not request.gives_ticket:
            return output
        payload = Payload(PORTS[Task.GENERATE], "uint8", (len(TICKET),), Buffer(TICKET))
        return replace(output, payloads=(payload,))

    engine = Scripted(settings, phase=phase, kv_layout=layout, kv_tickets=True, **changes)
    engine.fail = given
    return engine


class Pair:
    """A prefill worker, a decode worker that is busy, and a frontend."""

    def __init__(self, prefill: Scripted, decode: Scripted) -> None:
        self.prefill, self.decode = prefill, decode

    async def __aenter__(self) -> "Pair":
        self.plane = await DirectPlane.around(self.prefill, self.decode)
        self.router = Router(self.plane, EAGER, random=First())
        (self.busy,) = await self.router.send("m", [request("busy", [7])])
        return self

    async def __aexit__(self, *_: object) -> None:
        self.busy.cancel()
        await self.plane.close()


def request(name: str, ids: list[int], **sampling: Any) -> Request:
    prompts = (Prompt.of(Tokens(ids)),)
    return Request(id=name, prompts=prompts, params=Sampling(max_tokens=12, **sampling))


async def test_the_next_worker_makes_all_of_the_output(settings: EngineSettings) -> None:
    # Nothing of this could go on in the middle of an answer.
    asked = request("r", [1, 2, 3, 4, 5], seed=3, temperature=1.0, stop_token_ids=(999,))
    async with Pair(worker(settings, "prefill"), worker(settings, "decode")) as pair:
        (stream,) = await pair.router.send("m", [asked])
        answer = await read(stream)
        assert answer.ids == [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2]
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 12)
        (first,), (_, second) = pair.prefill.seen, pair.decode.seen
        # No token of the first is of interest, so nothing of the request may end it early.
        assert first.params == Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)
        assert first.gives_ticket
        assert second == replace(asked, attempt=1, ticket=TICKET)
        assert pair.router.stats.handovers == {"m": 1}


async def test_what_an_engine_cannot_go_on_with_is_handed_over_by_ticket(
    settings: EngineSettings,
) -> None:
    grammar = Grammar("regex", "[a-z]+")
    async with Pair(
        worker(settings, "prefill", resuming={}), worker(settings, "decode", resuming={})
    ) as pair:
        (stream,) = await pair.router.send("m", [request("r", [1, 2, 3, 4, 5], grammar=grammar)])
        await read(stream)
        assert pair.router.stats.handovers == {"m": 1}


async def test_workers_of_other_layouts_are_no_pair(settings: EngineSettings) -> None:
    async with Pair(worker(settings, "prefill", "a"), worker(settings, "decode", "b")) as pair:
        (stream,) = await pair.router.send("m", [request("r", [1, 2, 3, 4, 5])])
        assert len((await read(stream)).ids) == 12
        assert pair.prefill.seen == []
        assert [one.ticket for one in pair.decode.seen] == [b"", b""]


async def test_a_ticket_is_used_once(settings: EngineSettings) -> None:
    prefill, decode = worker(settings, "prefill"), worker(settings, "decode")
    async with Pair(prefill, decode) as pair:
        decode.fail = gives_up_after(3)
        (stream,) = await pair.router.send("m", [request("r", [1, 2, 3, 4, 5], temperature=0.0)])
        assert (await read(stream)).ids == [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2]
        assert [one.ticket for one in decode.seen[1:]] == [TICKET]
        assert [one.ticket for one in prefill.seen] == [b"", b""]


async def test_a_ticket_that_nobody_takes_goes_back(
    settings: EngineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def over(stream: resume.ResumingStream) -> None:
        raise DeadlineExceededError("the request's deadline passed")

    async with Pair(worker(settings, "prefill"), worker(settings, "decode")) as pair:
        (stream,) = await pair.router.send("m", [request("r", [1, 2, 3, 4, 5])])
        monkeypatch.setattr(resume.ResumingStream, "_remaining", over)
        with pytest.raises(DeadlineExceededError):
            await read(stream)
        # What was sent before comes first.
        monkeypatch.undo()
        await read((await pair.router.send("m", [request("later", [1])]))[0])
        await read(await _direct(pair, request("last", [2])))
        assert [one.ticket for one in pair.prefill.seen] == [b"", TICKET, b""]
        assert len(pair.decode.seen) == 2


async def _direct(pair: Pair, asked: Request) -> Any:
    """Send to the prefill worker, which has then seen all that was sent before."""
    (found,) = [one for one in pair.plane.workers() if one.card.phase == "prefill"]
    return found.send(asked)
