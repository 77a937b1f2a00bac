"""vLLM's events, its own and those it reads: real bytes on both ways."""

import asyncio
import json
import threading
from pathlib import Path

import msgspec
import zmq

from inlay.digest import with_digests
from inlay.engine.kv_subscriber import KvSubscriber
from inlay.engine.settings import EngineSettings
from inlay.prompt import Prompt, Tokens
from inlay.protocol.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, encode
from inlay.protocol.routing import KEY_SIZE, routing_chain
from inlay.protocol.work import Sampling, Work
from inlay.worker.kv_chain import KvChain
from inlay.worker.kv_feed import KvFeed
from tests.engine.conformance import run
from tests.engine.reference import look_up, rows_of
from tests.engines.vllm.serving import FLAGS, SECRET, started


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
    assert [type(event).__name__ for event in read.events] == [type(event).__name__ for event in batch.events]


async def test_the_routing_chain_of_prompts_is_found_in_vllms_own_events(
    directory: Path, tmp_path: Path
) -> None:
    endpoint, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    config = {"enable_kv_cache_events": True, "endpoint": endpoint, "replay_endpoint": replay}
    settings = EngineSettings(model=str(directory), kv_events_config=json.dumps(config), **FLAGS)
    text = Prompt.of(Tokens(range(3, 103)))
    rows = rows_of(look_up(directory, list(range(10, 60))))
    mixed = with_digests(Prompt.of(Tokens(range(3, 43)), rows, Tokens(range(60, 70))), SECRET)
    alone = with_digests(Prompt.of(rows, rows), SECRET)
    wanted: set[bytes] = set()
    feed, arrived = KvFeed(), threading.Event()
    async with started(settings) as engine:
        size = engine.card.block_size
        assert size == 32
        chain = KvChain(engine.card, SECRET)

        def take(batch: EventBatch) -> None:
            feed.take(chain.read(batch))
            if wanted and wanted <= held():
                arrived.set()

        def held() -> set[bytes]:
            keys = bytes(feed.snapshot().keys.view)
            return {keys[start : start + KEY_SIZE] for start in range(0, len(keys), KEY_SIZE)}

        subscriber = KvSubscriber(
            endpoint,
            replay,
            "",
            take=take,
            lost=lambda: None,
        )
        try:
            for number, (prompt, salt) in enumerate(
                ((text, None), (text, "mine"), (mixed, None), (alone, "mine"))
            ):
                chain.note(prompt, size)
                sampling = Sampling(max_tokens=40, temperature=0.0, ignore_eos=True)
                (found,) = await run(
                    engine, Work(id=str(number), prompt=prompt, sampling=sampling, salt=salt)
                )
                # The last token's keys and values are never computed.
                output = tuple(found.output[:-1])
                keys = routing_chain(prompt, engine.card, SECRET, salt=salt, output=output)
                whole = (len(prompt) + len(output)) // size * size // 16
                wanted |= {keys[start : start + KEY_SIZE] for start in range(0, whole * KEY_SIZE, KEY_SIZE)}
            # One more, so that a message comes after all that is wanted, whatever was missed before the subscription.
            await run(
                engine, Work(id="last", prompt=Prompt.of(Tokens([9] * 70)), sampling=Sampling(max_tokens=2))
            )
            await asyncio.to_thread(arrived.wait, 20)
            assert wanted <= held()
        finally:
            subscriber.close()
    # vLLM leaves its own open.
    zmq.Context.instance().destroy(linger=0)
