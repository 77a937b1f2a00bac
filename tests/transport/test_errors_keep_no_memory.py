"""Errors that end connections between neighbours, in processes that collect no garbage."""

import asyncio
import gc
import socket
import sys
from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest

from inlay.base.address import Address
from inlay.base.errors import OverloadedError
from inlay.messages.prompt import Buffer
from inlay.transport.listener import dial
from inlay.transport.local import same_host
from inlay.transport.memory import ReceiveMemory
from tests.transport.test_transport import SECRET, Ends, Note

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="sockets without a file are Linux's"
)


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    async with Ends.open(neighbours=True) as ends:
        yield ends


@pytest.fixture(autouse=True)
def _no_collection() -> Iterator[None]:
    """A process that has nothing to do collects nothing for hours."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def test_a_neighbour_that_is_frozen_while_it_is_dialled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("inlay.transport.listener.HANDSHAKE_SECONDS", 0.1)
    memory, fingerprint = ReceiveMemory(1 << 28), bytes(32)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        near = same_host.listening(port, fingerprint)
        assert near is not None
        with near:  # nobody accepts there
            with pytest.raises(OverloadedError) as refused:
                await dial(Address("127.0.0.1", port, fingerprint), SECRET, Note, memory)
            assert refused.value.__cause__ is not None
            assert not memory._arenas


async def test_a_neighbour_that_has_left_before_it_is_accepted(ends: Ends) -> None:
    """As have all that dialled a process while it was frozen."""
    address = Address("127.0.0.1", ends.port, ends.identity.fingerprint)
    found = same_host.dialled(address, ReceiveMemory(1 << 28))
    assert found is not None
    found[0].close()
    # They are accepted in order.
    _, theirs = await ends.pair()
    assert list(ends.memory._arenas) == [theirs._shared.ours]


class Strange(msgspec.Struct, frozen=True, tag="strange", array_like=True):
    data: tuple[Buffer, ...]


async def test_a_neighbour_that_sends_what_is_no_message(ends: Ends) -> None:
    ours, theirs = await ends.pair()
    ours.send(Strange((Buffer(bytes(1_000_000)),)))
    with pytest.raises(EOFError) as cut:
        await theirs.receive()
    assert isinstance(cut.value.__cause__, msgspec.MsgspecError)
    await asyncio.sleep(0)
    assert not ends.memory.used
