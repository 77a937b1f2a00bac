"""vLLM's events, its own and those it reads: real bytes on both ways."""

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import pytest_asyncio
import zmq

from inlay.base.errors import InvalidRequestError
from inlay.engine.api import GenerateEngine
from inlay.engine.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, encode
from inlay.engine.kv_events_config import KvEventsConfig
from inlay.engine.kv_publisher import KvPublisher
from inlay.engine.kv_subscriber import KvSubscriber
from inlay.engine.settings import EngineSettings
from inlay.messages.digest import with_digests
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.routing import (
    KEY_SIZE,
    Cleared,
    KvEvent,
    KvEvents,
    Removed,
    Stored,
    routing_chain,
)
from inlay.worker.host import EngineHost
from inlay.worker.sleeping import RunningRequests, SleepControl
from tests.engine.conformance import Receiver, ids, make_request, run
from tests.engine.reference import look_up, rows_of
from tests.engines.starting import SECRET, started
from tests.engines.vllm.serving import FLAGS


def test_vllm_reads_a_batch_as_it_was_written() -> None:
    from vllm.distributed import kv_events as theirs

    batch = EventBatch(
        1.5,
        [
            BlockStored([b"\1" * 16, b"\2" * 16], None, [], 16, None, "GPU", None, group_idx=0),
            BlockStored(
                [b"\3" * 16],
                b"\2" * 16,
                [5] * 16,
                16,
                None,
                "GPU",
                "lora",
                kv_cache_spec_kind="full_attention",
            ),
            BlockRemoved([b"\1" * 16], "GPU", group_idx=0),
            AllBlocksCleared(),
        ],
        0,
    )
    read = msgspec.msgpack.Decoder(theirs.KVEventBatch).decode(encode(batch))
    assert msgspec.msgpack.encode(read) == encode(batch)
    assert [type(event).__name__ for event in read.events] == [
        type(event).__name__ for event in batch.events
    ]


class Heard:
    """Takes what is told as a router does."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()
        self.cleared = 0

    def __call__(self, events: tuple[KvEvent, ...]) -> None:
        for event in events:
            match event:
                case Stored(keys):
                    self.keys |= cut(keys)
                case Removed(keys):
                    self.keys -= cut(keys)
                case Cleared():
                    self.keys.clear()
                    self.cleared += 1

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.02)


def stored(name: int, parent: int | None = None) -> BlockStored:
    return BlockStored([name], parent, [name % 300] * 32, 32, None, "GPU", None, group_idx=0)


class Told:
    """A host's cache as routers are told of it."""

    def __init__(self, host: EngineHost) -> None:
        self.host = host
        self.heard: list[KvEvents] = []
        host.watch_cache(self.heard.append)

    async def keys(self) -> set[bytes]:
        return cut(bytes((await self.host.kv_snapshot()).keys.view))

    async def until(self, condition: Callable[[set[bytes]], bool]) -> set[bytes]:
        async with asyncio.timeout(60):
            while not condition(keys := await self.keys()):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        return keys


def cut(keys: bytes) -> set[bytes]:
    return {keys[start : start + KEY_SIZE] for start in range(0, len(keys), KEY_SIZE)}


def whole_blocks(
    host: EngineHost, prompt: Prompt, found: Receiver, salt: str | None = None
) -> set[bytes]:
    """The routing keys of what a finished work leaves in the cache.

    Its last token's keys and values are never computed.
    """
    output, size = tuple(found.output[:-1]), host.card.block_size
    keys = routing_chain(prompt, host.card, SECRET, salt=salt, output=output)
    return cut(keys[: (len(prompt) + len(output)) // size * size // 16 * KEY_SIZE])


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def told(shared: GenerateEngine) -> Told:
    return Told(EngineHost(shared))


@pytest.mark.asyncio(loop_scope="session")
async def test_routers_hear_of_every_form_of_prompt_what_vllm_finds_again(
    shared: GenerateEngine, told: Told, directory: Path
) -> None:
    assert told.host.card.kv_events
    size = told.host.card.block_size
    rows = rows_of(look_up(directory, list(range(10, 60))))
    text = Prompt.of(Tokens(range(3, 103)))
    forms = {
        "text": (text, None),
        "a tenant's": (text, "mine"),
        "mixed": (
            with_digests(Prompt.of(Tokens(range(3, 43)), rows, Tokens(range(60, 70))), SECRET),
            None,
        ),
        "rows": (with_digests(Prompt.of(rows, rows), SECRET), "mine"),
    }
    await shared.reset_prefix_cache()
    await told.until(lambda keys: not keys)
    stored: set[bytes] = set()
    for name, (prompt, salt) in forms.items():
        (found,) = await run(shared, make_request(name, prompt, 40, salt=salt))
        assert found.cached == 0, name
        wanted = whole_blocks(told.host, prompt, found, salt)
        assert not wanted & stored, name
        stored |= wanted
        await told.until(lambda keys: keys == stored)  # noqa: B023
    for name, (prompt, salt) in forms.items():
        (again,) = await run(shared, make_request(name, prompt, 4, salt=salt))
        # vLLM computes the last position anew, and with it its block.
        assert again.cached == (len(prompt) - 1) // size * size, name
    assert [one.sequence for one in told.heard] == list(
        range(told.heard[0].sequence, told.heard[-1].sequence + 1)
    )


@pytest.mark.asyncio(loop_scope="session")
async def test_routers_hear_that_a_cache_was_cleared_before_anybody_asks_for_anything(
    shared: GenerateEngine, told: Told
) -> None:
    prompt = Prompt.of(Tokens(range(5, 90)))
    (found,) = await run(shared, make_request("a", prompt))
    wanted = whole_blocks(told.host, prompt, found)
    await told.until(wanted.issubset)
    await shared.reset_prefix_cache()
    await told.until(lambda keys: not keys)
    (again,) = await run(shared, make_request("a", prompt))
    assert again.cached == 0
    await told.until(wanted.issubset)


@pytest.mark.asyncio(loop_scope="session")
async def test_the_calls_that_put_vllm_to_sleep_are_its_own_and_routers_forget_what_it_had(
    shared: GenerateEngine, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU its core takes them all, but has no memory to give back."""
    from inlay.engine.vllm.engine import VllmEngine

    assert isinstance(shared, VllmEngine)
    with pytest.raises(InvalidRequestError, match="not started with --enable-sleep-mode"):
        await shared.sleep(1)
    prompt = Prompt.of(Tokens(range(7, 97)))
    (before,) = await run(shared, make_request("before", prompt))
    await told.until(whole_blocks(told.host, prompt, before).issubset)
    monkeypatch.setattr(shared, "_loaded", msgspec.structs.replace(shared._running, sleeps=True))
    with pytest.raises(
        InvalidRequestError, match="does not sleep at level 2: level 2 forgets the weights"
    ):
        await shared.sleep(2)
    for _ in range(2):
        await shared.sleep(1)
        await told.until(lambda keys: not keys)
        await shared.wake_up(["weights"])
        assert await shared.wake_up(["kv_cache"])
        (after,) = await run(shared, make_request("after", prompt))
        assert (after.output, after.cached) == (before.output, 0)
        await told.until(whole_blocks(told.host, prompt, after).issubset)


@pytest.mark.asyncio(loop_scope="session")
async def test_vllm_that_sleeps_in_whole_or_in_part_is_asked_for_no_step_when_it_is_told_to_sleep_or_forget(
    shared: GenerateEngine, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step would wait until it wakes."""
    from inlay.engine.vllm.engine import VllmEngine

    assert isinstance(shared, VllmEngine)
    prompt = Prompt.of(Tokens(range(9, 99)))
    (before,) = await run(shared, make_request("before", prompt))
    await told.until(whole_blocks(told.host, prompt, before).issubset)
    monkeypatch.setattr(shared, "_loaded", msgspec.structs.replace(shared._running, sleeps=True))
    async with asyncio.timeout(50):  # less than a step is waited for
        await shared.sleep(1)
        await shared.sleep(1)
        assert not await shared.wake_up(["weights"])
        await shared.reset_prefix_cache()
        await shared.sleep(1)
        assert await shared.wake_up([])
    (after,) = await run(shared, make_request("after", prompt))
    assert (after.output, after.cached) == (before.output, 0)


@pytest.mark.asyncio(loop_scope="session")
async def test_a_level_that_is_refused_ends_no_request(
    shared: GenerateEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from inlay.engine.vllm.engine import VllmEngine

    assert isinstance(shared, VllmEngine)
    monkeypatch.setattr(shared, "_loaded", msgspec.structs.replace(shared._running, sleeps=True))
    prompt, told = Prompt.of(Tokens(range(9, 99))), list[int]()
    sleeping = SleepControl(shared, RunningRequests(), enabled=True, tell=lambda: told.append(0))
    asked = make_request("goes on", prompt, 100)
    receiver = Receiver(asked)
    shared.submit(asked, receiver)
    await receiver.begun()
    with pytest.raises(InvalidRequestError, match="does not sleep at level 2"):
        await sleeping.sleep(2, "abort", 0.0)
    assert (sleeping.level, told) == (0, [])
    assert (await receiver.ended()).finish_reason == "length"


async def test_routers_hear_of_evictions_where_the_user_has_vllm_publish_its_events(
    directory: Path, tmp_path: Path
) -> None:
    endpoint = f"ipc://{tmp_path}/events"
    # Without a replay.
    config = {"enable_kv_cache_events": True, "endpoint": endpoint, "topic": "kv"}
    settings = EngineSettings.of(
        model=str(directory),
        kv_events_config=json.dumps(config),
        **(FLAGS | {"kv_cache_memory_bytes": 1 << 20}),
    )
    async with started(settings) as engine:
        told = Told(EngineHost(engine))
        assert told.host.card.kv_events
        blocks = told.host.card.num_blocks * told.host.card.block_size // 16
        seen = threading.Event()
        reader = KvSubscriber(endpoint, None, "kv", take=lambda _: seen.set(), lost=lambda: None)
        try:
            number = 0
            first: set[bytes] = set()
            # One to begin with, so that what follows is heard whole by whoever was late.
            while not (told.heard and seen.is_set()):
                await run(
                    engine, make_request(f"late-{number}", Prompt.of(Tokens([3 + number] * 70)))
                )
                number += 1
                assert number < 100
            await engine.reset_prefix_cache()
            await told.until(lambda keys: not keys)
            for number in range(blocks // 16 + 4):
                prompt = Prompt.of(Tokens(ids(number, 300)))
                (found,) = await run(engine, make_request(str(number), prompt))
                wanted = whole_blocks(told.host, prompt, found)
                keys = await told.until(wanted.issubset)
                first = first or wanted
                assert len(keys) <= blocks
            # The first are gone; vLLM evicts a prompt's end before its beginning.
            assert not first & keys
            (again,) = await run(engine, make_request("again", Prompt.of(Tokens(ids(0, 300)))))
            assert again.cached == 0
        finally:
            reader.close()
    # vLLM leaves its own open.
    zmq.Context.instance().destroy(linger=0)


async def test_where_batches_are_missing_for_good_routers_forget_and_learn_anew(
    shared: GenerateEngine,
) -> None:
    from vllm.config import KVEventsConfig

    from inlay.engine.vllm.cache_events import VllmCacheEvents

    class Source:
        """The address at which vLLM publishes.

        Here it is a publisher that a number can be taken from.
        """

        def get_kv_event_sources(self) -> dict[int, KVEventsConfig]:
            return {0: KVEventsConfig(enable_kv_cache_events=True, endpoint=publisher.endpoint)}

    publisher = KvPublisher(KvEventsConfig(enable_kv_cache_events=True, endpoint="tcp://*:0"))
    events, heard = VllmCacheEvents(SECRET), Heard()
    config = SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, endpoint="tcp://*:0"),
    )
    events.turn_on(config)
    try:
        assert events.follow(Source(), shared.card, heard)
        name = 0
        while not heard.keys:
            # Whoever subscribes hears nothing of what was published before.
            name += 1
            publisher.publish(0.0, [stored(name)])
            await asyncio.sleep(0.02)
        publisher._next += 1
        publisher.publish(0.0, [stored(name + 1, parent=name), stored(name + 2)])
        await heard.until(lambda: heard.cleared)
        await heard.until(lambda: len(heard.keys) == 2)
    finally:
        await events.close()
        await asyncio.to_thread(publisher.close)
