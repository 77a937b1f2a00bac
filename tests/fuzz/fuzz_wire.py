"""Fuzz what a connection reads from its peer: the handshake and the frames after it.

    python -m tests.fuzz.fuzz_wire --executions 1000000 [--seed 1]
    python -m tests.fuzz.fuzz_wire --atheris FOLDER -runs=10000000 -max_len=160

An input is a byte that says into which pieces the bytes are cut, one that says what they are, and
the bytes: what a peer sends from its first byte on, or after its proof; or messages that a
`FrameWriter` is given. The second form is guided by coverage, needs `atheris` and takes libFuzzer's
options; FOLDER receives what reaches something new.
"""

import argparse
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from struct import pack
from types import MappingProxyType, SimpleNamespace
from typing import Any

import msgspec

from tests.fuzz.guided import Mutation, instrumented, run
from tests.fuzz.mutation import mutated

CORPUS = Path(__file__).parent / "corpus" / "wire"
MAX_BYTES = 600
"""Of one large message."""
SHARED_BYTES = 1 << 14
LIMITS = {
    "WRITTEN_BYTES": 50,
    "CHUNK_BYTES": 40,
    "MAX_PARTS": 6,
    "MAX_OPEN": 3,
    "_MAX_BODY": 160,
    "_SCRATCH_BYTES": 32,
}
"""Lowered so that small inputs reach them."""
_SIZES = (1, 2, 3, 5, 7, 11, 12, 13, 16, 23, 29, 40, 61, 97, 160, 4096)
"""Bytes that one read brings, at most."""
_NONE: Mapping[int, int] = MappingProxyType({})
_FROM_THE_FIRST, _MESSAGES = 1, 2
"""What an input may be; else it is what comes after the proof."""


class _Note(msgspec.Struct, array_like=True):
    text: bytes
    data: tuple[Any, ...]


@cache
def _parts() -> Any:
    """What is fuzzed: imported late, so that it can be instrumented."""
    from inlay.messages.digest import Secret
    from inlay.messages.prompt import Buffer
    from inlay.transport import events, frames, handshake, wire

    return SimpleNamespace(
        Buffer=Buffer, decoder=frames.Decoder(_Note), handshake=handshake, secret=Secret(bytes(32)),
        wire=wire, events=events
    )  # fmt: skip


@contextmanager
def small_limits() -> Iterator[None]:
    """While it is entered the limits above hold, and nonces are no more random."""
    wire, handshake = _parts().wire, _parts().handshake
    before = {name: getattr(wire, name) for name in LIMITS}
    random_nonce = handshake.secrets
    try:
        _set(wire, LIMITS)
        handshake.secrets = SimpleNamespace(token_bytes=bytes)
        yield
    finally:
        handshake.secrets = random_nonce
        _set(wire, before)


def _set(owner: Any, values: Mapping[str, int]) -> None:
    for name, value in values.items():
        setattr(owner, name, value)


class _Receiver:
    """A reader of frames that takes what it is offered, as a connection does.

    Attributes:
        events: what was read, as plain values.
        grants: what the peer granted.
        taken: bytes of the large messages that have memory and are not whole.
        shared: memory that the peer can write to, where parts of every other message go.
    """

    def __init__(self) -> None:
        self.events: list[object] = []
        self.shared = memoryview(bytearray(SHARED_BYTES))
        self._used = 0
        self.grants: list[tuple[int, tuple[int, ...], dict[int, int]]] = []
        self.messages: list[Any] = []
        self.writer: Any = None
        self._taken: dict[int, int] = {}
        self._reader = _parts().wire.FrameReader(self._granted, MAX_BYTES)

    def read(self, data: bytes, size: int) -> None:
        """Read `data`, at most `size` bytes at a time."""
        rest = memoryview(data)
        while rest:
            place = self._reader.buffer()
            # Never nothing, or a connection would read for ever; and never much.
            assert 0 < len(place) <= MAX_BYTES
            count = min(len(place), len(rest), size)
            place[:count] = rest[:count]
            rest = rest[count:]
            for event in self._reader.advance(count):
                self._take(event)
        assert len(self._reader._scratch) <= LIMITS["_MAX_BODY"] + 12

    def _granted(self, number: int, present: Sequence[int], offsets: Mapping[int, int]) -> None:
        self.grants.append((number, tuple(present), dict(offsets)))
        if self.writer is not None:
            self.writer.on_grant(number, present, offsets)

    def _take(self, event: Any) -> None:
        assert len(self._reader._large) <= LIMITS["MAX_OPEN"]
        assert sum(self._taken.values()) <= LIMITS["MAX_OPEN"] * MAX_BYTES
        events = _parts().events
        match event:
            case events.WireMessage():
                self._whole(event)
            case events.Offered(number, offer, unasked):
                self.events.append(("offered", number, offer.sizes, offer.names, unasked))
                if unasked:
                    self._accept(number, offer, [memoryview(bytearray(s)) for s in offer.sizes])
                else:
                    self._offered(number, offer)
            case events.Withdrawn(number):
                self.events.append(("withdrawn", number))
                self._taken.pop(number, None)
            case events.Credited(num_bytes):
                self.events.append(("credited", num_bytes))
            case events.Returned():
                self.events.append("returned")

    def _offered(self, number: int, offer: Any) -> None:
        # What a connection does with an offer depends on its memory and on what it has; here its
        # number says what.
        if self.writer is None and number % 4 == 2:
            return
        parts: list[Any] = [memoryview(bytearray(size)) for size in offer.sizes]
        present = [index for index in range(1, len(parts)) if offer.names[index] == "here"]
        for index in present:
            parts[index] = _parts().Buffer(bytes(offer.sizes[index]), "here")
        offsets: dict[int, int] = {}
        for index, size in enumerate(offer.sizes):
            if number % 2 and index and index not in present and self._used + size <= SHARED_BYTES:
                offsets[index] = self._used
                parts[index] = self.shared[self._used : self._used + size]
                self._used += size
        if self.writer is not None:
            self.writer.on_grant(number, present, offsets)
        self._accept(number, offer, parts, offsets)

    def _accept(
        self, number: int, offer: Any, parts: list[Any], offsets: Mapping[int, int] = _NONE
    ) -> None:
        self._taken[number] = sum(offer.sizes)
        message = self._reader.accept(number, parts, offer.names, offsets)
        if message is not None:
            self._whole(message)

    def _whole(self, message: Any) -> None:
        content = [bytes(message.header), *(bytes(each.view) for each in message.buffers)]
        assert sum(map(len, content)) <= MAX_BYTES
        self.events.append(content)
        self.messages.append(message)
        waiting = self._reader._large
        self._taken = {number: size for number, size in self._taken.items() if number in waiting}


def _after_proof(data: bytes, size: int) -> tuple[Any, ...]:
    """All that comes of the bytes of a peer, and the error that ends them."""
    receiver = _Receiver()
    error = None
    try:
        receiver.read(data, size)
    except (ValueError, msgspec.MsgspecError) as raised:
        error = type(raised), str(raised)
    assert error is None or len(error[1]) < 1000
    return receiver.events, receiver.grants, error


def _proven(data: bytes, size: int, *, dials: bool) -> tuple[Any, ...]:
    """Both steps: nothing is read before the proof, of which there is one."""
    handshake = _parts().handshake
    proof = handshake.Handshake(_parts().secret, b"", dials=dials)
    begun, came, rest, answers = proof.begin(), b"", data, []
    while rest and proof.need:
        count = min(proof.need - len(came), len(rest), size)
        assert count > 0
        came, rest = came + rest[:count], rest[count:]
        if len(came) < proof.need:
            continue
        try:
            answers.append(proof.take(came))
        except handshake.HandshakeError as error:
            return "refused", str(error), len(data) - len(rest), answers
        came = b""
    if proof.need:
        return "unproven", proof.need, answers
    peer = handshake.Handshake(_parts().secret, b"", dials=not dials)
    peer._ours, peer._theirs = data[8:40], begun[8:]
    assert data[:72] == data[:40] + peer._proof(dials=not dials)
    return *_after_proof(rest, size), answers


def _round_trip(data: bytes, read_size: int) -> None:
    """What a `FrameWriter` was given is read as it was, whatever is withdrawn and granted when."""
    parts = _parts()
    receiver = _Receiver()
    receiver.writer = writer = parts.wire.FrameWriter(shared=receiver.shared)
    sent: list[tuple[int | None, _Note]] = []
    withdrawn: set[int] = set()
    for at in range(0, len(data), 3):
        what, length, more = data[at : at + 3].ljust(3, b"\0")
        if what % 8 == 7 and what < 128:
            number = sent[more % len(sent)][0] if sent else None
            if number is not None and writer.withdraw(number):
                withdrawn.add(number)
        elif what % 8 == 7:
            # A connection ends where credit is asked back twice.
            with suppress(ValueError):
                writer.on_credit(length * (more & 1))
        elif what % 8 == 6:
            receiver.read(b"".join(writer.take(1 + more)), read_size)
        else:
            buffers = []
            for each in range(what % 8 % LIMITS["MAX_PARTS"]):
                # What the receiver has is all zeros.
                here = what & 64 and not length >> each & 3
                size = length >> each & 63
                buffers.append(
                    parts.Buffer(bytes((0 if here else at & 255,)) * size, "here" if here else "")
                )
            note = _Note(bytes((at & 255,)) * (more & 63), tuple(buffers))
            sent.append((writer.put(note), note))
    while pieces := writer.take(MAX_BYTES):
        receiver.read(b"".join(pieces), read_size)
    assert writer.idle
    assert writer.queued_bytes == 0
    read = [parts.decoder.decode(message.header, message.buffers) for message in receiver.messages]
    wanted = [note for number, note in sent if number not in withdrawn]
    assert sorted(map(_shown, read)) == sorted(map(_shown, wanted))


def _shown(note: _Note) -> list[bytes]:
    return [note.text, *(bytes(each.view) for each in note.data)]


def check(data: bytes) -> bool:
    """Read an input in pieces, and in one where it is what a peer sends: both must end alike.

    Returns:
        Whether it ended without an error.

    Raises:
        AssertionError: they differ, memory passes a bound, or a message was read otherwise than
            it was sent.
        Exception: anything but a `HandshakeError`, a `ValueError` or msgspec's came out.
    """
    size, kind, data = (
        _SIZES[data[0] & 15 if data else 0],
        data[1] if len(data) > 1 else 0,
        data[2:],
    )
    if kind & 3 == _MESSAGES:
        # Byte by byte these take too long; frames of strangers are cut so.
        _round_trip(data[:36], max(size, 11))
        return True
    if kind & 3 == _FROM_THE_FIRST:
        dials = bool(kind & 4)
        outcome = _proven(data, size, dials=dials)
        assert outcome == _proven(data, 1 << 20, dials=dials)
        return outcome[0] not in ("refused", "unproven")
    outcome = _after_proof(data, size)
    assert outcome == _after_proof(data, 1 << 20)
    return outcome[-1] is None


def _frame(kind: int, number: int, body: bytes) -> bytes:
    return pack("<BxxxII", kind, number, len(body)) + body


def _offer(number: int, *sizes: int, names: Sequence[str] | None = None, kind: int = 2) -> bytes:
    named = ["" for _ in sizes] if names is None else names
    return _frame(kind, number, msgspec.msgpack.encode((sizes, named)))


def _message(header: bytes, *buffers: bytes) -> bytes:
    sizes = pack(f"<{len(buffers)}I", *map(len, buffers))
    return _frame(1, 0, pack("<II", len(header), len(buffers)) + sizes + header + b"".join(buffers))


def _proof(*, dials: bool) -> bytes:
    """What a peer with the secret sends first; `dials` says whether this side does."""
    handshake = _parts().handshake
    ours, peer = (
        handshake.Handshake(_parts().secret, b"", dials=here) for here in (dials, not dials)
    )
    peer._ours = b"\1" * 32
    hello = peer.begin()
    answer = peer.take(ours.begin())
    first = ours.take(hello)
    return bytes(hello + (answer or peer.take(first)))


@cache
def seeds() -> tuple[bytes, ...]:
    """Valid frames of every kind and some that are refused: where mutation starts."""
    large = _offer(1, 30, 50, 9) + _frame(3, 0, b"\x90") + b"".join(
        _frame(4, 1, bytes((part,)) * part) for part in (30, 40, 10, 9)
    )  # fmt: skip
    streams = [
        _frame(6, 0, b"") + _message(b"abc") + _message(b"", b"", b"a" * 20),
        large,
        _offer(1, 8, 20) + _offer(4, 3, 5) + _frame(4, 1, b"a" * 8) + _frame(4, 4, b"b" * 3)
        + _message(b"x")
        + _frame(4, 1, b"c" * 20) + _frame(4, 4, b"d" * 5),
        _offer(1, 8, 20, names=("", "here")) + _frame(4, 1, b"a" * 8),
        _offer(1, 0) + _offer(5, 0, 0) + _frame(4, 9, b"unknown"),
        _offer(1, 8) + _frame(5, 1, b"") + _frame(4, 1, b"a" * 8) + _frame(5, 7, b""),
        _offer(3, 50) + _frame(4, 3, b"a" * 50) + _frame(6, 0, b""),
        _offer(2, 8) + _frame(4, 2, b"a" * 8),
        _offer(1, 8) + _frame(4, 1, b"a" * 9),
        _offer(1, MAX_BYTES) + _offer(5, MAX_BYTES + 1),
        _offer(1, -1, 2), _offer(1, *[1] * 7), _offer(1), _offer(1, 1, names=()),
        b"".join(_offer(4 * number + 1, 5) for number in range(4)),
        _frame(3, 1, msgspec.msgpack.encode((1, 2))) + _frame(3, 1, b"\xc1"),
        _frame(7, 0, b""), _frame(1, 0, b"a" * 161), _frame(1, 0, b"a" * 7),
        _frame(1, 0, pack("<II", 9, 0)), _frame(1, 0, pack("<III", 0, 1, 9)), b"\1\0\0",
        _offer(2, 8, 3, kind=10) + _frame(4, 2, b"a" * 8) + _frame(4, 2, b"abc"),
        _frame(11, 50, b"") + _frame(11, 0, b"") + _frame(12, 0, b"") + _offer(2, 0, kind=10),
    ]  # fmt: skip
    made = [bytes((number % 16, 0)) + stream for number, stream in enumerate(streams)]
    for dials in (False, True):
        kind = _FROM_THE_FIRST + 4 * dials
        proof = _proof(dials=dials)
        made += [
            bytes((3 + kind, kind)) + proof + large,
            bytes((3, kind)) + proof[:-1] + b"\0",
            bytes((15, kind)) + proof[:50],
        ]
    made += [bytes((0, 1)) + b"inlay\0\3\0" + bytes(32), bytes((0, 1)) + b"HTTP/1.1" * 6]
    made += [
        bytes((5, _MESSAGES)) + b"\2\x3f\7\3\xff\x20\6\0\x40\1\4\2\7\0\0\5\xff\x3f",
        bytes((0, _MESSAGES)) + b"\4\xff\x3f" * 5 + b"\6\0\xff" + b"\7\0\1" * 3,
        bytes((11, _MESSAGES)) + b"\x44\xe0\x30\x43\xfc\3\6\0\1\6\0\1\7\0\0\0\0\0",
    ]
    return tuple(made)


def corpus() -> list[bytes]:
    """The inputs in the repository."""
    return [path.read_bytes() for path in sorted(CORPUS.iterdir())]


WORDS = (
    *(_frame(kind, number, b"") for kind in (3, 4, 5, 6) for number in (1, 5)), _offer(1, 8, 20),
    _offer(5, 8, names=("here",)), _offer(3, 9), _message(b"abc", b"de"),
    _frame(4, 1, b"a" * 8), _frame(4, 5, b"b" * 8), _frame(4, 3, b"c" * 9), _frame(3, 1, b"\x91\1"),
    _offer(5, 8, 20, kind=10), _frame(11, 90, b""), _frame(11, 0, b""), _frame(12, 0, b""),
    b"\7\0\0", b"\6\0\1", b"\4\xff\x3f", b"\xa4here",
)  # fmt: skip
_MUTATIONS: tuple[Mutation, ...] = (lambda data, rng: mutated(data, seeds(), WORDS, rng),)


def fuzz(executions: int, seed: int) -> int:
    """Check `executions` mutations of the corpus; how many ended without an error."""
    rng = random.Random(seed)
    inputs = corpus()
    ended_well = 0
    with small_limits():
        for _ in range(executions):
            data = mutated(rng.choice(inputs), inputs, WORDS, rng)[:160]
            try:
                ended_well += check(data)
            except BaseException:
                Path("crash.bin").write_bytes(data)
                raise
    return ended_well


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what the module's docstring says."""
    parser = argparse.ArgumentParser(description="Fuzz what a connection reads from its peer.")
    parser.add_argument("--executions", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--atheris", nargs=argparse.REMAINDER, help="libFuzzer's arguments")
    options = parser.parse_args(arguments)
    if options.atheris is None:
        ended_well = fuzz(options.executions, options.seed)
        print(f"{options.executions} executions, {ended_well} without an error")
        return
    with instrumented("inlay.transport.wire", "inlay.transport.handshake"):
        _parts()
    with small_limits():
        run(check, _MUTATIONS, options.atheris, [CORPUS])


if __name__ == "__main__":
    main()
