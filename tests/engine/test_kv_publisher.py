"""Events over real ZeroMQ sockets.

Numbered, sent again where asked for, never in the engine's way.
"""

import json
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import zmq

from inlay.base.errors import InvalidRequestError
from inlay.engine.kv_events import (
    END_OF_REPLAY,
    SEQUENCE_SIZE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    encode,
)
from inlay.engine.kv_events_config import KvEventsConfig, endpoint_of
from inlay.engine.kv_publisher import KvPublisher
from inlay.engine.kv_subscriber import KvSubscriber

LOCAL = "tcp://127.0.0.1:*"


def config(**fields: Any) -> KvEventsConfig:
    return KvEventsConfig(
        enable_kv_cache_events=True,
        **({"endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0"} | fields),
    )


@pytest.fixture
def publisher() -> Iterator[KvPublisher]:
    made = KvPublisher(config(buffer_steps=50))
    yield made
    made.close()


def removed(number: int) -> BlockRemoved:
    return BlockRemoved(block_hashes=[number], medium="GPU")


def reachable(endpoint: str | None) -> str:
    assert endpoint is not None
    return endpoint.replace("0.0.0.0", "127.0.0.1")


class Taken:
    """A subscriber, and what it has taken."""

    def __init__(self, publisher: KvPublisher, *, replay: bool = True) -> None:
        self.numbers: list[int] = []
        self.losses = 0
        self.changed = threading.Condition()
        again = reachable(publisher.replay_endpoint) if replay else None
        self.subscriber = KvSubscriber(
            reachable(publisher.endpoint), again, "", take=self.take, lost=self.lose
        )

    def take(self, batch: EventBatch) -> None:
        with self.changed:
            for event in batch.events:
                assert isinstance(event, BlockRemoved)
                self.numbers += [int(name) for name in event.block_hashes if isinstance(name, int)]
            self.changed.notify_all()

    def lose(self) -> None:
        with self.changed:
            self.losses += 1
            self.changed.notify_all()

    def until(
        self, condition: Callable[[], bool], meanwhile: Callable[[], None] | None = None
    ) -> None:
        """Wait for `condition`; publish meanwhile, as a new subscription takes a moment."""
        with self.changed:
            for _ in range(600):
                if condition():
                    return
                self.changed.wait(0.05)
                if meanwhile is not None:
                    meanwhile()
        raise AssertionError(f"waited in vain; taken {self.numbers}, lost {self.losses}")


def test_whoever_comes_late_is_sent_what_it_missed_and_gets_everything_in_order(
    publisher: KvPublisher,
) -> None:
    for number in range(20):
        publisher.publish(1.0, [removed(number)])
    sent = 20
    taken = Taken(publisher)

    def more() -> None:
        nonlocal sent
        publisher.publish(2.0, [removed(sent)])
        sent += 1

    try:
        taken.until(lambda: len(taken.numbers) >= 20, more)
        taken.until(lambda: len(taken.numbers) == sent)
    finally:
        taken.subscriber.close()
    assert taken.numbers == list(range(sent))
    assert taken.losses == 0


def until_kept(publisher: KvPublisher, number: int) -> None:
    """Wait until the message of this number can be replayed: its thread sends it in its own time."""
    deadline = time.monotonic() + 60
    while not publisher._kept or int.from_bytes(publisher._kept[-1][0], "big") < number:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("replay", [True, False])
def test_what_is_not_kept_any_more_is_told_as_lost(publisher: KvPublisher, replay: bool) -> None:
    sent = 200
    for number in range(sent):
        publisher.publish(1.0, [removed(number)])
    until_kept(publisher, sent - 1)
    taken = Taken(publisher, replay=replay)

    def more() -> None:
        nonlocal sent
        publisher.publish(2.0, [removed(sent)])
        sent += 1

    try:
        taken.until(lambda: bool(taken.numbers), more)
        taken.until(lambda: taken.numbers[-1] == sent - 1)
    finally:
        taken.subscriber.close()
    first = taken.numbers[0]
    assert taken.losses == 1
    assert taken.numbers == list(range(first, sent))
    # Fifty are kept; without a replay the first that is heard of is the first there is.
    assert (first < 200) == replay


def test_a_replay_answers_in_the_frames_that_vllm_answers_in(publisher: KvPublisher) -> None:
    for number in range(3):
        publisher.publish(float(number), [removed(number)])
    until_kept(publisher, 2)
    with zmq.Context() as context, context.socket(zmq.REQ) as asked:
        asked.setsockopt(zmq.LINGER, 0)
        asked.connect(reachable(publisher.replay_endpoint))
        asked.send((1).to_bytes(8, "big"))
        frames = [asked.recv_multipart()] if asked.poll(5000) else []
    # A REQ socket takes one answer; those that vLLM's own readers take are on a DEALER.
    assert frames == [[b"", (1).to_bytes(8, "big"), frames[0][2]]]
    with zmq.Context() as context, context.socket(zmq.DEALER) as asked:
        asked.setsockopt(zmq.LINGER, 0)
        asked.connect(reachable(publisher.replay_endpoint))
        asked.send_multipart((b"nonsense",))
        asked.send_multipart((b"", (1).to_bytes(8, "big")))
        answers = []
        while asked.poll(5000):
            answers.append(asked.recv_multipart())
            if answers[-1][2] == END_OF_REPLAY:
                break
    assert [int.from_bytes(answer[2], "big", signed=True) for answer in answers] == [1, 2, -1]
    assert all(answer[0] == b"" for answer in answers)


def test_a_reader_that_never_reads_holds_nobody_up_and_little_memory() -> None:
    publisher = KvPublisher(config(hwm=2, max_queue_size=4, buffer_steps=3))
    with zmq.Context() as context, context.socket(zmq.SUB) as silent:
        silent.setsockopt(zmq.RCVHWM, 1)
        silent.connect(reachable(publisher.endpoint))
        silent.setsockopt_string(zmq.SUBSCRIBE, "")
        big = [BlockStored([b"x" * 16] * 4000, None, [], 16, None, "GPU", None)]
        for _ in range(500):
            publisher.publish(1.0, big)
        assert len(publisher._kept) <= 3
    publisher.close()


def test_batches_that_nobody_can_take_in_time_leave_a_gap_in_the_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held, go = threading.Event(), threading.Event()
    replay = KvPublisher._replay

    def slow(self: KvPublisher, request: list[bytes]) -> None:
        held.set()
        assert go.wait(30)
        replay(self, request)

    monkeypatch.setattr(KvPublisher, "_replay", slow)
    publisher = KvPublisher(config(max_queue_size=8, buffer_steps=100))
    with zmq.Context() as context, context.socket(zmq.DEALER) as asked:
        asked.setsockopt(zmq.LINGER, 0)
        asked.connect(reachable(publisher.replay_endpoint))
        asked.send_multipart((b"", bytes(8)))
        assert held.wait(30)
        for number in range(100):
            publisher.publish(1.0, [removed(number)])
        go.set()
        assert publisher.dropped > 80
        while not publisher._kept:
            time.sleep(0.01)
        kept = [int.from_bytes(number, "big") for number, _ in publisher._kept]
        assert kept == sorted(kept)
    publisher.close()


def test_a_port_in_use_is_refused_by_its_endpoint(publisher: KvPublisher) -> None:
    with pytest.raises(
        InvalidRequestError, match=r"tcp://.* cannot be bound: Address already in use"
    ):
        KvPublisher(config(endpoint=publisher.endpoint.replace("0.0.0.0", "*")))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "must be a JSON object"),
        ("[]", "valid dictionary"),
        ('{"topics": "a"}', "topics: Extra inputs"),
        ('{"publisher": "kafka"}', "publisher: Input should be 'null' or 'zmq'"),
        ('{"buffer_steps": 0}', "buffer_steps: Input should be greater"),
        (
            '{"enable_kv_cache_events": true, "endpoint": "http://a:1"}',
            "an endpoint is tcp://HOST:PORT",
        ),
        (
            '{"enable_kv_cache_events": true, "endpoint": "tcp://*:65536"}',
            "port of rank 0 would be 65536",
        ),
        (
            '{"enable_kv_cache_events": true, "replay_endpoint": "tcp://*:5557"}',
            r"replay_endpoint of rank 0 is tcp://\*:5557, which is the endpoint of rank 0 already",
        ),
    ],
)
def test_a_configuration_that_cannot_be_used_is_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        KvEventsConfig.parse(text)


def test_ports_count_up_with_the_rank_and_must_not_meet() -> None:
    assert endpoint_of("tcp://*:5557", 3) == "tcp://*:5560"
    assert endpoint_of("tcp://[::1]:5557", 1) == "tcp://[::1]:5558"
    assert endpoint_of("tcp://*:0", 3) == "tcp://*:0"
    assert endpoint_of("inproc://cache", 2) == "inproc://cache_dp2"
    near = json.dumps({"enable_kv_cache_events": True, "replay_endpoint": "tcp://*:5558"})
    KvEventsConfig.parse(near)
    with pytest.raises(
        InvalidRequestError, match=r"endpoint of rank 1 is .*5558.* replay_endpoint of rank 0"
    ):
        KvEventsConfig.parse(near, ranks=2)
    last = json.dumps({"enable_kv_cache_events": True, "endpoint": "tcp://*:65535"})
    with pytest.raises(InvalidRequestError, match="port of rank 1 would be 65536"):
        KvEventsConfig.parse(last, ranks=2)


def test_nothing_is_published_unless_it_is_asked_for() -> None:
    assert not KvEventsConfig.parse(None).publishes
    assert not KvEventsConfig.parse('{"endpoint": "tcp://*:5557"}').publishes
    assert not KvEventsConfig.parse(
        '{"enable_kv_cache_events": true, "publisher": "null"}'
    ).publishes
    assert KvEventsConfig.parse('{"enable_kv_cache_events": true}').publishes


def test_a_batch_is_what_vllm_makes_of_the_same_events() -> None:
    """The bytes of vLLM 0.32's own `KVEventBatch`, with fields at their defaults left out."""
    batch = EventBatch(
        1.5,
        [
            BlockStored(
                [b"\1" * 4, 7],
                None,
                [1, 2],
                1,
                None,
                "GPU",
                "lora",
                extra_keys=[("lora", b"d"), None],
            ),
            BlockRemoved([b"\1" * 4], "GPU", group_idx=1),
            AllBlocksCleared(),
        ],
        0,
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(batch)) == [
        1.5,
        [
            {
                "type": "BlockStored",
                "block_hashes": [b"\1" * 4, 7],
                "parent_block_hash": None,
                "token_ids": [1, 2],
                "block_size": 1,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": "lora",
                "extra_keys": [["lora", b"d"], None],
            },
            {"type": "BlockRemoved", "block_hashes": [b"\1" * 4], "medium": "GPU", "group_idx": 1},
            {"type": "AllBlocksCleared"},
        ],
        0,
    ]


def test_events_of_a_publisher_that_waits_at_every_address_of_ipv6_are_heard() -> None:
    with zmq.Context() as context, context.socket(zmq.XPUB) as publisher:
        publisher.setsockopt(zmq.LINGER, 0)
        publisher.setsockopt(zmq.RCVTIMEO, 30_000)
        publisher.setsockopt(zmq.IPV6, 1)
        try:
            publisher.bind("tcp://[::1]:*")
        except zmq.ZMQError:
            pytest.skip("this machine has no IPv6")
        publisher.unbind(publisher.getsockopt_string(zmq.LAST_ENDPOINT))
        publisher.bind("tcp://[::]:*")
        heard, batch = queue.Queue[EventBatch](), EventBatch(1.0, [AllBlocksCleared()], 0)
        endpoint = publisher.getsockopt_string(zmq.LAST_ENDPOINT)
        assert endpoint.startswith("tcp://[::]:")
        subscriber = KvSubscriber(endpoint, None, "kv", take=heard.put, lost=lambda: None)
        try:
            assert publisher.recv() == b"\1kv"
            publisher.send_multipart((b"kv", bytes(SEQUENCE_SIZE), encode(batch)))
            assert heard.get(timeout=30) == batch
        finally:
            subscriber.close()
