"""Cache events over ZeroMQ, as vLLM publishes them.

A PUB socket, and a ROUTER socket that replays what a subscriber missed.

Publishing never blocks the engine: batches that overflow a queue or a socket are dropped, and
subscribers notice the missing sequence number.
"""

import logging
import threading
from collections import deque
from collections.abc import Sequence

import zmq

from inlay.base.errors import InvalidRequestError
from inlay.engine.kv_events import END_OF_REPLAY, SEQUENCE_SIZE, Event, EventBatch, encode
from inlay.engine.kv_events_config import PARAM, KvEventsConfig

log = logging.getLogger(__name__)


class KvPublisher:
    """Publishes batches that one thread hands over, on a thread of its own.

    Attributes:
        endpoint: bound or connected address, with the actual port for port 0.
        replay_endpoint: likewise, or None.
        dropped: number of batches dropped because the queue was full.
    """

    def __init__(self, config: KvEventsConfig, rank: int = 0) -> None:
        """Bind, or connect if the endpoint names a host, as vLLM does.

        Args:
            config: `publishes` must be true.
            rank: data-parallel rank.

        Raises:
            InvalidRequestError: an endpoint cannot be used.
        """
        self.dropped = 0
        self._rank = rank
        self._next = 0
        self._topic = config.topic.encode()
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._context = zmq.Context()
        self._publications = self._context.socket(zmq.PUB)
        self._publications.set_hwm(config.hwm)
        self._replays = self._context.socket(zmq.ROUTER)
        self._replays.set_hwm(config.hwm)
        self._taken = self._context.socket(zmq.PULL)
        self._given = self._context.socket(zmq.PUSH)
        # The limit is split between the two ends; each holds at least one message.
        for end in (self._taken, self._given):
            end.set_hwm(max(1, config.max_queue_size // 2))
            end.setsockopt(zmq.LINGER, 0)
        self._taken.bind("inproc://batches")
        self._given.connect("inproc://batches")
        endpoint, replay = config.endpoints(rank)
        try:
            binds = "*" in endpoint or "::" in endpoint or not endpoint.startswith("tcp:")
            self.endpoint = _bound(self._publications, endpoint) if binds else endpoint
            if not binds:
                self._publications.connect(endpoint)
            self.replay_endpoint = None if replay is None else _bound(self._replays, replay)
        except InvalidRequestError:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="inlay-kv-events", daemon=True)
        self._thread.start()

    def publish(self, ts: float, events: Sequence[Event]) -> None:
        """Queue the events of one step. Never blocks; call from one thread."""
        number = self._next.to_bytes(SEQUENCE_SIZE, "big")
        self._next += 1
        try:
            self._given.send_multipart(
                (number, encode(EventBatch(ts, list(events), self._rank))), zmq.NOBLOCK
            )
        except zmq.Again:
            if not self.dropped:
                log.warning(
                    "KV events are dropped: more than max_queue_size batches wait to be published"
                )
            self.dropped += 1

    def close(self) -> None:
        """Publish the queued batches and stop. Call from the thread that publishes."""
        self._given.setsockopt(zmq.LINGER, 1000)
        try:
            self._given.send_multipart((b"",), zmq.NOBLOCK)
            self._thread.join(timeout=2)
        except zmq.Again:
            log.warning("KV events that were waiting are not published")
        self._given.close()
        if not self._thread.is_alive():
            self._context.destroy(linger=100)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._taken, zmq.POLLIN)
        poller.register(self._replays, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._taken in ready:
                message = self._taken.recv_multipart()
                if len(message) == 1:
                    return
                number, payload = message
                self._kept.append((number, payload))
                self._publications.send_multipart((self._topic, number, payload))
            if self._replays in ready:
                self._replay(self._replays.recv_multipart())

    def _replay(self, request: Sequence[bytes]) -> None:
        """Send buffered batches again, from a given sequence number on.

        A subscriber that reads too slowly loses messages; nothing waits for it.
        """
        if len(request) != 3 or len(request[2]) != SEQUENCE_SIZE:
            log.warning(
                "a replay request has %d frames; expected an empty one and a sequence number",
                len(request) - 1,
            )
            return
        client, _, start = request
        for number, payload in self._kept:
            if number >= start:
                self._replays.send_multipart((client, b"", self._topic, number, payload))
        self._replays.send_multipart((client, b"", b"", END_OF_REPLAY, b""))


def _bound(socket: "zmq.Socket[bytes]", endpoint: str) -> str:
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise InvalidRequestError(
            f"{PARAM}: {endpoint} cannot be bound: {error}", param=PARAM
        ) from error
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)
