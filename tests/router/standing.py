"""Workers that are there and do nothing, for what only looks at who is there."""

from dataclasses import dataclass
from typing import Never

from inlay.base.errors import OverloadedError
from inlay.messages.card import Limits, ModelCard
from inlay.messages.commands import WorkerCommand
from inlay.messages.request import Request
from inlay.transport.api import Stream

CARD = ModelCard(
    name="m", path="m", weights_id="w", dtype="float32", vocab_size=9, hidden_size=4,
    limits=Limits(max_model_len=99_999, max_num_seqs=4), engine="echo", engine_version="1",
    block_size=16, num_blocks=1000,
)  # fmt: skip


@dataclass
class Standing:
    """A worker."""

    id: str
    card: ModelCard = CARD

    def send(self, request: Request) -> Stream:
        raise OverloadedError("it does nothing")

    async def call(self, command: WorkerCommand[object], within: float = 30.0) -> Never:
        raise OverloadedError("it does nothing")
