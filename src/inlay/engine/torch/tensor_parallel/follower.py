"""A rank but the first: runs the steps that it is told."""

import signal
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from inlay.engine.settings import EngineSettings
from inlay.engine.torch.attention.pages import Pages
from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.tensor_parallel.commands import (
    Allocate,
    Command,
    Forward,
    Logits,
    Scrub,
    decode,
)
from inlay.engine.torch.tensor_parallel.group import TensorParallelGroup
from inlay.errors import EngineError, InvalidRequestError
from inlay.parent import end_with_parent


def follow(
    settings: EngineSettings, rank: int, store: Path, commands: Connection, parent: int
) -> None:
    """Load this rank's share of the model and run commands until rank 0 is gone.

    Args:
        settings: of the engine.
        rank: of this process.
        store: where the ranks meet.
        commands: from rank 0, which gets an empty message when this process is there.
        parent: id of rank 0's process, with which this one ends.
    """
    # Ctrl-C in a terminal is for the server, which ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # One that waits for another in a sum reads no commands, and one that is stopped does nothing.
    end_with_parent(signal.SIGKILL, parent)
    commands.send_bytes(b"")
    group = TensorParallelGroup.connect(settings, rank, store)
    try:
        follower = _Follower(CausalModel.load(settings, group))
    except InvalidRequestError:
        # Rank 0 finds the same, and says so.
        return
    while True:
        try:
            data = commands.recv_bytes()
        except (EOFError, OSError):
            return
        follower.run(decode(data))


class _Follower:
    """A model and its pages, as rank 0 has them."""

    def __init__(self, model: CausalModel) -> None:
        self._model = model
        self._allocated: Pages | None = None

    def run(self, command: Command) -> None:
        model = self._model
        match command:
            case Allocate(num_pages, page_size):
                # Freed first: there may be no room for both.
                self._allocated = None
                self._allocated = model.new_pages(num_pages, page_size)
            case Scrub(page_ids):
                model.scrub(self._pages, page_ids)
            case Forward(batch):
                model.hidden(model.upload(batch), self._pages)
            case Logits(rows):
                model.logits(
                    torch.empty(rows, model.hidden_size, dtype=model.dtype, device=model.device)
                )

    @property
    def _pages(self) -> Pages:
        if self._allocated is None:
            raise EngineError("a rank has no pages yet")
        return self._allocated
