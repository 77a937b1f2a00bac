"""Pairs of SGLangs: one computes a prompt, the other makes the tokens, over NIXL and TCP.

Each runs in a worker's process. SGLang takes every KV cache for a GPU's: its word for the kind of
memory is changed when the environment is filled (`install.sh`), and nothing else of it.
"""

import argparse
import asyncio
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
import torch
from msgspec.structs import replace

from inlay.base.address import KvRoom
from inlay.base.errors import (
    KV_LOST,
    DeadlineExceededError,
    EngineError,
    InlayError,
    InvalidRequestError,
    OverloadedError,
)
from inlay.engine.settings import EngineSettings
from inlay.engine.sglang import rooms
from inlay.engine.sglang.request_tracker import SglangRequestTracker
from inlay.messages.card import Phase
from inlay.messages.commands import ReadStats, ResetPrefixCache
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import Output, Request
from inlay.messages.routing import WorkerLoad
from inlay.router import Router
from inlay.router.resume import ResumingStream
from inlay.transport.api import Stream, Worker
from inlay.transport.local import LocalPlane
from inlay.worker.process import WorkerProcess, spawn
from tests.engine import reference
from tests.engine.conformance import ids, make_request
from tests.engines.held import keep_reference, own_cache
from tests.engines.sglang.serving import FLAGS
from tests.engines.starting import SECRET
from tests.equality.reference import model_of
from tests.router.sending import First

pytestmark = pytest.mark.asyncio(loop_scope="session")

COUNT = 12


def settings_of(directory: Path, role: Phase, **changes: Any) -> EngineSettings:
    given: dict[str, Any] = {
        **FLAGS,
        "health_probe_interval": 0,
        "self_check_interval": 0,
        **changes,
    }
    return EngineSettings.of(model=str(directory), served_model_name=["m"], role=role, **given)


class Pair:
    """A prefill worker, a decode worker, and a frontend."""

    def __init__(self, processes: dict[Phase, WorkerProcess], plane: LocalPlane) -> None:
        self.processes, self.plane = processes, plane
        self.router = Router(plane, secret=SECRET, random=First())
        self._rooms = 0

    def worker(self, phase: Phase) -> Worker:
        (found,) = [one for one in self.plane.workers() if one.card.phase == phase]
        return found

    async def answer(self, request: Request) -> list[Output]:
        (stream,) = await self.router.send("m", [request])
        return await read(stream)

    def room(self) -> KvRoom:
        """A room at the prefill worker, to which nobody else comes."""
        host, port = self.worker("prefill").card.bootstrap or ("", 0)
        self._rooms += 1
        return KvRoom(host, port, self._rooms)

    async def is_idle(self, *phases: Phase) -> None:
        """Return once nothing runs at either, and SGLang has nothing in any of its queues."""
        async with asyncio.timeout(100):
            while any(load != WorkerLoad() for load in self.router.loads().values()):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            for phase in phases or ("prefill", "decode"):
                worker = self.worker(phase)
                while (await worker.call(ReadStats())).running:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
                # It fails while SGLang has a request in any of its queues.
                await worker.call(ResetPrefixCache(), 90)


async def read(stream: "Stream | ResumingStream") -> list[Output]:
    async with asyncio.timeout(240):
        return [output async for outputs in stream for output in outputs]


def tokens_of(answer: Sequence[Output]) -> list[int]:
    return [id_ for output in answer for id_ in output.token_ids]


@asynccontextmanager
async def started_pair(directory: Path, cache: Path) -> AsyncIterator[Pair]:
    processes: dict[Phase, WorkerProcess] = {}
    roles: tuple[Phase, ...] = ("prefill", "decode")
    # Imported here, SGLang sets uvloop's policy, by which this loop can start no process.
    policy = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(asyncio.DefaultEventLoopPolicy())
    try:
        for role in roles:
            processes[role] = await spawn(
                settings_of(directory, role), SECRET,
                environment={"HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(cache)},
            )  # fmt: skip
        plane = LocalPlane([process.channel for process in processes.values()])
        await plane.start()
        await plane.wait_ready()
        asyncio.set_event_loop_policy(policy)
        yield Pair(processes, plane)
        await plane.close()
    finally:
        await asyncio.gather(*(process.close() for process in processes.values()))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    cache = tmp_path_factory.mktemp("cache")
    with own_cache(cache / "inlay" / "self-check"):
        keep_reference(directory, "float32")
    async with started_pair(directory, cache) as found:
        yield found


def prompts(directory: Path) -> dict[str, Prompt]:
    """Ids alone, and rows with and without tokens."""
    tokens = ids(1, 150)
    rows = reference.rows_of(reference.look_up(directory, tokens[30:90]))
    return {
        "ids": Prompt.of(Tokens(tokens)),
        "one": Prompt.of(Tokens(ids(2, 1))),
        "mixed": Prompt.of(Tokens(tokens[:30]), rows, Tokens(tokens[90:])),
        "rows": Prompt.of(rows),
    }


# What inlay has of SGLang, held against it.


async def test_sglang_knows_the_words_and_fields_of_a_role(directory: Path) -> None:
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.server_args import ServerArgs

    assert rooms.FAKE_HOST == FAKE_BOOTSTRAP_HOST
    wanted = {"bootstrap_host", "bootstrap_port", "bootstrap_room"}
    assert wanted <= {field.name for field in fields(GenerateReqInput)}
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    for role in ("prefill", "decode"):
        for device in ("cpu", "cuda"):
            settings = settings_of(directory, role, device=device)
            words = list(rooms.words(settings, "127.0.0.1"))
            known, unknown = parser.parse_known_args(["--model-path", str(directory), *words])
            assert not unknown
            assert known.disaggregation_mode == role
            assert known.disaggregation_transfer_backend == "nixl"
    from inlay.engine.sglang.arguments import server_args

    forms = {
        rooms.form("1", resolved_view(server_args(settings, directory)), dtype)
        for dtype in ("float32", "bfloat16")
        for settings in (
            settings_of(directory, "decode"),
            settings_of(directory, "prefill"),
            settings_of(directory, "decode", engine_arguments=["--page-size", "16"]),
        )
    }
    # Both roles have one; another page size or dtype has another.
    assert len(forms) == 4


async def test_what_ends_a_request_before_its_first_token_may_be_done_elsewhere() -> None:
    from inlay.engine.sglang.engine import _error_of

    def error_of(error: Exception, **fields: Any) -> InlayError:
        asked = make_request("r", Prompt.of(Tokens([5])), 2, **fields)
        return _error_of(error, SglangRequestTracker(asked, lambda output: None, "id", ()))

    died, room = EngineError("SGLang's engine process died"), KvRoom("h", 1, 1)
    assert error_of(died) is died
    assert isinstance(error_of(died, kv_room=room), OverloadedError)
    assert isinstance(error_of(RuntimeError("x")), EngineError)
    lost = error_of(RuntimeError("KVTransferError"), kv_room=room)
    assert isinstance(lost, OverloadedError)
    assert (lost.reason, "KVTransferError" in lost.message) == (KV_LOST, True)
    assert isinstance(error_of(ValueError("x"), kv_room=room), InvalidRequestError)


# Pairs.


async def test_answers_of_a_pair_are_those_of_transformers(pair: Pair, directory: Path) -> None:
    for name, prompt in prompts(directory).items():
        for count in (1, COUNT):
            answer = await pair.answer(make_request(f"{name}-{count}", prompt, count))
            assert tokens_of(answer) == reference.greedy(directory, prompt, count), (name, count)
            last = answer[-1]
            assert last.finish_reason == "length"
            assert last.usage is not None
            assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (len(prompt), count)
    assert pair.router.stats.handovers == {"m": 8}
    await pair.is_idle()


async def test_the_half_that_computes_prompts_is_held_to_the_models_own_code(pair: Pair) -> None:
    found = pair.worker("prefill").card.self_check
    assert found is not None
    assert (found.result, set(found.distances)) == ("passed", {"random", "text"})
    assert 0 < found.distance <= found.bound
    other = pair.worker("decode").card.self_check
    assert other is not None
    assert other.result == "unchecked"
    assert "keys and values a prefill worker computes" in other.note


async def test_logprobs_of_the_first_token_come_from_the_prefill_worker(
    pair: Pair, directory: Path
) -> None:
    prompt = prompts(directory)["ids"]
    output = reference.greedy(directory, prompt, COUNT)
    whole = Prompt.of(Tokens([*prompt.token_ids(), *output[:-1]]))
    with torch.no_grad():
        logits = model_of(directory)(inputs_embeds=reference.embedded(directory, whole)).logits
    expected = logits[0, len(prompt) - 1 :].log_softmax(-1)
    # The second finds its prompt cached there.
    for name in ("a", "b"):
        answer = await pair.answer(make_request(name, prompt, COUNT, logprobs=3))
        assert tokens_of(answer) == output
        scores = [scored for piece in answer for scored in piece.logprobs]
        for id_, scored, row in zip(output, scores, expected, strict=True):
            assert scored.logprob == pytest.approx(float(row[id_]), abs=1e-4)
            assert [top for top, _ in scored.top] == row.topk(3).indices.tolist()
    usage = answer[-1].usage
    assert usage is not None
    assert usage.cached_tokens > 0


async def test_many_at_once_keep_to_their_own_rooms(pair: Pair, directory: Path) -> None:
    """More than either runs at a time, some of whose clients leave."""
    asked = [
        make_request(f"m{number}", Prompt.of(Tokens(ids(50 + number, 5 + 3 * number))), COUNT)
        for number in range(24)
    ]
    streams = [stream for one in asked for stream in await pair.router.send("m", [one])]
    for stream in streams[::5]:
        stream.cancel()
    answers = await asyncio.gather(*map(read, streams))
    for number, (one, answer) in enumerate(zip(asked, answers, strict=True)):
        if number % 5:
            assert tokens_of(answer) == reference.greedy(directory, one.prompt, COUNT), number
    await pair.is_idle()


async def test_a_half_refuses_what_names_no_room_of_its_own(pair: Pair) -> None:
    whole = make_request("w", Prompt.of(Tokens([5, 6])), 2)
    room = pair.room()
    fake = replace(room, host=rooms.FAKE_HOST)
    for phase in ("prefill", "decode"):
        for wrong in (None, fake, replace(room, number=0)):
            with pytest.raises(OverloadedError, match="names no room"):
                await read(pair.worker(phase).send(replace(whole, kv_room=wrong)))
    elsewhere = replace(whole, kv_room=replace(room, port=room.port + 1))
    with pytest.raises(OverloadedError, match="names no room"):
        await read(pair.worker("prefill").send(elsewhere))


async def test_who_waits_in_a_room_for_nobody_can_leave(pair: Pair) -> None:
    prompt = Prompt.of(Tokens(ids(60, 40)))
    for phase in ("prefill", "decode"):
        waits = make_request(f"alone-{phase}", prompt, COUNT, kv_room=pair.room())
        stream = pair.worker(phase).send(waits)
        while not (await pair.worker(phase).call(ReadStats())).running:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        await asyncio.sleep(0.5)
        stream.cancel()
        assert (await read(stream))[-1].finish_reason == "abort"
        late = make_request(f"late-{phase}", prompt, COUNT, kv_room=pair.room(), deadline=1.0)
        with pytest.raises(DeadlineExceededError):
            await read(pair.worker(phase).send(late))
    await pair.is_idle()
    assert tokens_of(await pair.answer(make_request("after", prompt, 2)))


async def test_a_prefill_worker_that_refuses_ends_the_wait_of_the_other(pair: Pair) -> None:
    vocabulary = pair.worker("decode").card.vocab_size
    with pytest.raises(InvalidRequestError, match="not in the vocabulary"):
        await pair.answer(make_request("bad", Prompt.of(Tokens([vocabulary])), 2))
    await pair.is_idle()


async def test_a_decode_worker_whose_prefill_worker_is_not_there_says_so(pair: Pair) -> None:
    room = pair.room()
    nowhere = replace(room, port=1)
    asked = make_request("nowhere", Prompt.of(Tokens(ids(61, 40))), 2, kv_room=nowhere)
    with pytest.raises(OverloadedError, match="keys and values did not come") as lost:
        await read(pair.worker("decode").send(asked))
    assert lost.value.reason == KV_LOST
    await pair.is_idle("decode")


async def test_an_sglang_that_is_killed_ends_the_wait_of_the_other(pair: Pair) -> None:
    """The last: it is not started again."""
    asked = make_request("killed", Prompt.of(Tokens(ids(62, 100))), 400)
    # Both have the request, and nothing of its prompt is computed.
    _signal(pair.processes["prefill"], signal.SIGSTOP)
    (stream,) = await pair.router.send("m", [asked])
    while not (await pair.worker("decode").call(ReadStats())).running:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    await asyncio.sleep(0.5)
    _signal(pair.processes["prefill"], signal.SIGKILL)
    # Its worker ends with it, and may or may not say so before.
    with pytest.raises(OverloadedError):
        await read(stream)
    await pair.is_idle("decode")
    with pytest.raises(OverloadedError, match="No worker of the model `m` is ready"):
        await pair.router.send("m", [replace(asked, id="after")])


def _signal(process: WorkerProcess, number: signal.Signals) -> None:
    """Send a signal to all of a worker's SGLang."""
    for one in psutil.Process(process.pid).children(recursive=True):
        one.send_signal(number)
