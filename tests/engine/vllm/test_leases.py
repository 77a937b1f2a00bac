"""Leases: blocks are taken only where the clock of the vLLM that keeps them says they were read in
time. `engines/vllm/test_pairs.py` asks vLLM itself."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
import zmq

from inlay.engine.vllm.leases import ANSWER_SECONDS, KvLease, Leases


@contextmanager
def keeper(clock: float, engine_id: str = "p", silent: bool = False) -> Iterator[str]:
    """The address of what answers as vLLM's NixlConnector does."""
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    agent = msgspec.msgpack.encode({"engine_id": engine_id, "num_blocks": 4})
    payload = {"compatibility_hash": "c", "agent_metadata_bytes": agent}

    def answer() -> None:
        try:
            while True:
                identity, _, question = socket.recv_multipart()
                assert msgspec.msgpack.decode(question) == [b"get_meta_msg", 0, 0]
                parts = [msgspec.msgpack.encode(each) for each in (payload, clock)]
                if not silent:
                    socket.send_multipart([identity, b"", *parts])
        except zmq.ContextTerminated:
            socket.close(linger=0)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield f"tcp://127.0.0.1:{port}"
    finally:
        context.term()
        thread.join()


@pytest.fixture
def leases() -> Iterator[Leases]:
    made = Leases()
    yield made
    made.close()


def settled(leases: Leases, *read: str) -> tuple[set[str], set[str]]:
    """What is known once something is: within 20 s."""
    found = leases.settled(read)
    until = time.monotonic() + 20
    while found == (set(), set()) and time.monotonic() < until:
        time.sleep(0.01)
        found = leases.settled(())
    assert found != (set(), set())
    return found


@pytest.mark.parametrize(("clock", "is_late"), [(99.9, False), (100.0, True), (1e6, True)])
def test_the_clock_of_what_keeps_the_blocks_decides(
    leases: Leases, clock: float, is_late: bool
) -> None:
    with keeper(clock) as address:
        leases.begin("r", KvLease("p", address, 100.0))
        assert leases.settled(()) == (set(), set())
        assert settled(leases, "r") == ((set(), {"r"}) if is_late else ({"r"}, set()))
        assert leases.settled(()) == (set(), set())


def test_each_request_has_an_answer_of_its_own(leases: Leases) -> None:
    with keeper(50.0) as address, keeper(50.0) as other:
        for name, lease in (
            ("in time", KvLease("p", address, 60.0)),
            ("late", KvLease("p", address, 40.0)),
            ("elsewhere", KvLease("p", other, 60.0)),
        ):
            leases.begin(name, lease)
        leases.begin("failed", KvLease("p", address, 60.0))
        leases.forget("failed")
        found = [settled(leases, "in time", "late", "elsewhere", "failed")]
        while len(set[str]().union(*(part for both in found for part in both))) < 4:
            found.append(settled(leases))
        in_time, late = (set[str]().union(*parts) for parts in zip(*found, strict=True))
        assert (in_time, late) == ({"in time", "elsewhere"}, {"late", "failed"})


def test_a_vllm_that_was_started_since_at_the_same_address_has_no_lease(leases: Leases) -> None:
    with keeper(1.0, engine_id="another") as address:
        leases.begin("r", KvLease("p", address, 100.0))
        assert settled(leases, "r") == (set(), {"r"})


def test_no_answer_is_waited_for_so_long_and_then_late() -> None:
    now = [0.0]
    leases = Leases(lambda: now[0])
    with keeper(1.0, silent=True) as address:
        leases.begin("r", KvLease("p", address, 100.0))
        assert leases.settled({"r"}) == (set(), set())
        now[0] = ANSWER_SECONDS - 0.1
        assert leases.settled(()) == (set(), set())
        now[0] = ANSWER_SECONDS
        assert leases.settled(()) == (set(), {"r"})
        leases.close()


@pytest.mark.parametrize("said", [[b"?"], [b"", b"\xc1", b"\xc1"], [b"", b"\x80", b"\x01"]])
def test_what_is_no_answer_is_late_and_harms_nothing(leases: Leases, said: list[bytes]) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        leases.begin("r", KvLease("p", f"tcp://127.0.0.1:{port}", 100.0))
        assert leases.settled({"r"}) == (set(), set())
        identity, *_ = socket.recv_multipart()
        socket.send_multipart([identity, *said])
        assert settled(leases) == (set(), {"r"})
