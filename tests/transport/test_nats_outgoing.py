"""What a stream's worker keeps, sends and sends again."""

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inlay.prompt import Prompt, Tokens
from inlay.request import Output, Request, Sampling
from inlay.transport.nats.messages import EncodedPieces, Pieces, ToFrontend
from inlay.transport.nats.outgoing import WINDOW_PIECES, Outgoing
from inlay.transport.nats.stream import NatsStream

_decoder = msgspec.msgpack.Decoder[ToFrontend](ToFrontend)
WORK = Request(id="work", prompt=Prompt.of(Tokens([1])), sampling=Sampling(max_tokens=1_000_000))


class StreamMachine(RuleBasedStateMachine):
    """An engine speaks, pieces get lost, acknowledgements come late.

    The frontend still gets each piece once, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.outgoing = Outgoing(7, 200)
        self.stream = NatsStream(7, WORK, used=lambda: None, cancel=lambda: None)
        self.said = 0
        self.on_the_way: list[Pieces] = []
        self.acknowledgements: list[int] = []

    @rule(count=st.integers(1, 400))
    def speak(self, count: int) -> None:
        for _ in range(count):
            self.outgoing.add(Output("engine's", 0, self.said, (self.said,)))
            self.said += 1

    @rule(count=st.integers(2, 300))
    def speak_at_once(self, count: int) -> None:
        ids = tuple(range(self.said, self.said + count))
        self.outgoing.add(Output("engine's", 0, self.said, ids))
        self.said += count

    @rule()
    def send(self) -> None:
        pieces = self.outgoing.take()
        message = _decoder.decode(msgspec.msgpack.encode(EncodedPieces(tuple(pieces))))
        assert isinstance(message, Pieces)
        self.on_the_way.append(message)

    @precondition(lambda self: self.on_the_way)
    @rule()
    def arrive(self) -> None:
        for number, index, output in self.on_the_way.pop(0).pieces:
            assert number == 7
            if not self.stream.feed(index, output):
                self.outgoing.rewind(self.stream.received)
                return

    @precondition(lambda self: self.on_the_way)
    @rule()
    def get_lost(self) -> None:
        self.on_the_way.pop(0)

    @rule()
    def acknowledge(self) -> None:
        self.acknowledgements.append(self.stream.received)

    @precondition(lambda self: self.acknowledgements)
    @rule(data=st.data())
    def be_acknowledged(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.acknowledgements) - 1))
        self.outgoing.acknowledge(self.acknowledgements.pop(index))

    @rule()
    def notice_a_gap(self) -> None:
        if self.outgoing.sent > self.stream.received:
            self.outgoing.rewind(self.stream.received)

    @invariant()
    def what_arrived_is_what_was_said(self) -> None:
        ids = [id_ for output in self.stream._deltas.waiting for id_ in output.token_ids]
        assert ids == list(range(len(ids)))
        assert all(output.request_id == "work" for output in self.stream._deltas.waiting)

    @invariant()
    def no_more_is_on_the_way_than_the_window_holds(self) -> None:
        assert self.outgoing.sent - self.outgoing._acknowledged <= WINDOW_PIECES

    def teardown(self) -> None:
        self.outgoing.add(Output("engine's", 0, self.said, finish_reason="length"))
        while not self.outgoing.done:
            self.outgoing.rewind(self.stream.received)
            self.send()
            while self.on_the_way:
                self.arrive()
            self.outgoing.acknowledge(self.stream.received)
        ids = [id_ for output in self.stream._deltas.waiting for id_ in output.token_ids]
        assert ids == list(range(self.said))
        assert self.stream.ended


TestStream = StreamMachine.TestCase
TestStream.settings = settings(max_examples=20, stateful_step_count=30)
